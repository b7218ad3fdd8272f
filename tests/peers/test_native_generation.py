"""Published models' own ``generate`` beside ours: the same tokens, greedy and sampled.

``make peers OURO=PATH/modeling_ouro.py`` runs a copy of your own, with the transformers that it
was written for: read it first. So do ``HUGINN=PATH/raven_modeling_minimal.py`` and
``RETROFITTED=PATH/raven_modeling_minimal_llama.py``. HRM-Text is part of ``transformers``: its
comparison is in ``tests/adapters/test_hrm_text.py``.

Two things of Huginn's have no equal here. Its own sampler leaves out the token that crosses
``top_p``. And where a token runs more loops than one before it, it reads no key of that one in
those loops, as they were not run; ours run them all. Exits that get no later are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from analyses.published_code import KINDS, module_of
from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]

N_PROMPT, N_NEW, WIDTH = 6, 12, 32
RAVEN = {"n_embd": WIDTH, "n_heads": 2, "block_size": 64, "vocab_size": 64, "mean_recurrence": 4}
RAVEN |= {"intermediate_size": 48}
LLAMA = {"max_position_embeddings": 64, "rope_theta": 1e4, "rope_scaling": None, "qk_bias": False}
OURO = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
OURO |= {"num_attention_heads": 2, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ouro": ("Ouro", OURO),
    "huginn": ("Raven", RAVEN),
    "retrofitted": ("Raven", RAVEN | LLAMA),
}
"""The names of their classes begin so; and sizes."""

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 9},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
}
EXITS = [8, 8, 7, 7, 6, 5, 5, 4, 3, 2, 2, 1]
"""Loops of each new token: no later than any before it."""


def cases(kind: str) -> Iterator[tuple[str, int, Any, str]]:
    """A method of the published model, its loops, an exit (threshold or loops), and a sampler."""
    for sampler in SAMPLERS:
        for n_loops in (1, 4, 8):
            yield "generate", n_loops, None, sampler
        for threshold in (0.3, 0.6, 0.9) if kind == "ouro" else ():
            yield "generate", 4, threshold, sampler
        if kind == "huginn" and sampler != "top_p":
            yield "generate_minimal", 4, None, sampler
            yield "generate_with_adaptive_compute", 8, EXITS, sampler


@torch.no_grad()
def answer(folder: Path, kind: str, file: str) -> dict[str, Any]:
    module, (name, sizes) = module_of(Path(file)), MODELS[kind]
    torch.manual_seed(0)
    model = getattr(module, f"{name}ForCausalLM")(getattr(module, f"{name}Config")(**sizes)).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    tokens = torch.randint(1, 64, (3, N_PROMPT))  # none is the padding
    start = torch.randn(N_PROMPT + N_NEW, WIDTH)
    written = [native(module, model, tokens, start, *case) for case in cases(kind)]
    return {"weights": model.state_dict(), "tokens": tokens, "start": start, "written": written}


def native(
    module: Any, model: Any, tokens: torch.Tensor, start: torch.Tensor,
    method: str, n_loops: int, leave: Any, sampler: str,
) -> torch.Tensor:  # fmt: skip
    """What the published model writes, from our initial states and our seed."""
    from transformers import GenerationConfig

    how: dict[str, Any] = {"do_sample": False}
    if SAMPLERS[sampler]:
        how = {"do_sample": True, "top_k": 0, "top_p": None, **SAMPLERS[sampler]}
    more: dict[str, Any] = {"num_steps": n_loops}
    if hasattr(module, "UniversalTransformerCache"):  # Ouro
        model.model.total_ut_steps = model.config.total_ut_steps = n_loops
        model.early_exit_threshold = leave
        more = {"past_key_values": module.UniversalTransformerCache(2 * n_loops)}
    else:
        rest = [start]

        def initialize_state(e: torch.Tensor, **_: Any) -> torch.Tensor:
            here, rest[0] = rest[0][: e.shape[1]], rest[0][e.shape[1] :]
            return here.expand_as(e)

        model.initialize_state = initialize_state
    if isinstance(leave, list):
        more["exit_evaluator"] = module.NumStepsGenerator(lambda token: leave[token])
    config = GenerationConfig(max_length=N_PROMPT + N_NEW, pad_token_id=0, **how)
    torch.manual_seed(5)
    return getattr(model, method)(tokens, generation_config=config, **more)[:, N_PROMPT:]


@torch.no_grad()
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.filterwarnings("ignore")
def test_it_writes_the_tokens_that_ours_writes(kind: str, tmp_path: Path) -> None:
    from loopinterp.adapters import adapt
    from loopinterp.models import GateAbove, generate, generate_by_rule

    file = os.environ.get(kind.upper(), "")
    if not file:
        pytest.skip(f"no copy of the published file; run: make peers {kind.upper()}=PATH")
    told = ask("older", __name__, tmp_path, kind, file)
    sizes = dict(MODELS[kind][1])
    if kind == "retrofitted":
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    published = KINDS["ouro" if kind == "ouro" else "huginn"].build(module_of(Path(file)), **sizes)
    published.load_state_dict(told["weights"])
    model: Any = adapt(published.eval())
    if kind != "ouro":
        model.initial_state = lambda e: told["start"][: e.shape[1]].expand_as(e)
    assert len(torch.stack(told["written"]).unique()) > 20
    for (method, n_loops, leave, sampler), expected in zip(
        cases(kind), told["written"], strict=True
    ):
        how = {"n_loops": n_loops, "max_new_tokens": N_NEW, "seed": 5, **SAMPLERS[sampler]}
        rule = leave
        if isinstance(leave, float):
            rule = GateAbove(model.exit_probability, leave, cumulated=True)
        if rule is None:
            new = generate(model, told["tokens"], **how)
        else:
            new, _ = generate_by_rule(model, told["tokens"], rule, **how)
        assert torch.equal(new, expected), (method, n_loops, leave, sampler)
