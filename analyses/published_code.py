"""A published looped model's own code beside our adapter of it: the largest difference of logits.

    python -m analyses.published_code --kind ouro --file PATH/modeling_ouro.py
    python -m analyses.published_code --kind huginn --file PATH/raven_modeling_minimal.py
    python -m analyses.published_code --kind hrm --file PATH/models/hrm/hrm_act_v1.py
    python -m analyses.published_code --kind trm --file PATH/models/recursive_reasoning/trm.py
    python -m analyses.published_code --kind hrm_text

The file is a copy of your own, and is run: read it first; none is fetched. A tiny random model is
made of it, and run at several numbers of loops by its own forward and by ours. Where the file asks
for a library as it once was, a stand-in serves. HRM-Text is part of ``transformers``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopinterp import adapters

VOCAB, WIDTH, LENGTH = 64, 32, 6
LOOPS = (1, 2, 4, 7)


@dataclass(frozen=True)
class Kind:
    """How a published model is made, and run by its own forward.

    Attributes:
        build: From the module of its file to a tiny random model, or one of given sizes.
        native: Logits of its own forward after so many loops, from a given state or its own.
    """

    build: Callable[..., nn.Module]
    native: Callable[[Any, Tensor, int, Tensor | None], Tensor]


@dataclass(frozen=True)
class Difference:
    """How far our logits are from the native forward's, at most; and how large those are."""

    largest: float
    size: float


def compare(kind: str, file: Path | None, *, seed: int = 0) -> dict[int, Difference]:
    """Our logits beside those of the native forward, by number of loops."""
    published = KINDS[kind]
    with torch.no_grad():
        torch.manual_seed(seed)
        model = published.build(module_of(file)).eval()
        for weight in model.parameters():  # no norm or bias at its neutral initial value
            weight.copy_(torch.randn_like(weight) / 2 / weight.shape[-1] ** 0.5)
        tokens = torch.randint(VOCAB, (2, LENGTH))
        ours, differences = adapters.adapt(model), {}
        for n_loops in LOOPS:
            start = ours.initial_state(ours.embed(tokens))
            logits = ours(tokens, n_loops=n_loops, state=start)
            native = published.native(model, tokens, n_loops, start)
            largest = float((logits - native).abs().max())
            differences[n_loops] = Difference(largest, float(native.std()))
    return differences


# The published models


def _ouro(module: Any, **sizes: Any) -> nn.Module:
    if hasattr(module, "create_causal_mask"):
        _patched_ouro(module)
    tiny = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return module.OuroForCausalLM(module.OuroConfig(**tiny | sizes))


def _ouro_logits(model: Any, tokens: Tensor, n_loops: int, start: Tensor | None) -> Tensor:
    model.model.total_ut_steps = n_loops
    return model(tokens, use_cache=False).logits


def _huginn(module: Any, **sizes: Any) -> nn.Module:
    # A mapping is wanted now, where a list was.
    module.RavenForCausalLM._tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    tiny = {
        "n_embd": WIDTH,
        "n_heads": 2,
        "block_size": LENGTH,
        "vocab_size": VOCAB,
        "intermediate_size": 48,
        "mean_recurrence": 4,
    }
    return module.RavenForCausalLM(module.RavenConfig(**tiny | sizes))


def _huginn_logits(model: Any, tokens: Tensor, n_loops: int, start: Tensor | None) -> Tensor:
    return model(tokens, input_states=start, num_steps=n_loops).logits


def _hrm_text(module: Any, **sizes: Any) -> nn.Module:
    from transformers import HrmTextConfig, HrmTextForCausalLM

    tiny: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "prefix_lm": False,
    }
    settings: dict[str, Any] = tiny | sizes
    return HrmTextForCausalLM(HrmTextConfig(**settings))


def _hrm_text_logits(model: Any, tokens: Tensor, n_loops: int, start: Tensor | None) -> Tensor:
    with mock.patch.object(model.config, "H_cycles", n_loops):
        return model(tokens, use_cache=False).logits


def _reasoner(name: str) -> Callable[..., nn.Module]:
    settings = {
        "batch_size": 2,
        "seq_len": LENGTH,
        "num_puzzle_identifiers": 3,
        "puzzle_emb_ndim": 0,
        "vocab_size": VOCAB,
        "H_cycles": 2,
        "L_cycles": 3,
        "H_layers": 2,
        "L_layers": 2,
        "hidden_size": WIDTH,
        "expansion": 2,
        "num_heads": 2,
        "pos_encodings": "rope",
        "halt_max_steps": max(LOOPS),
        "halt_exploration_prob": 0.1,
        "forward_dtype": "float32",
    }
    trm = {"puzzle_emb_len": 0} if name.startswith("Tiny") else {}
    return lambda module, **sizes: getattr(module, name)({**settings, **trm, **sizes})


def _reasoner_logits(model: Any, tokens: Tensor, n_loops: int, start: Tensor | None) -> Tensor:
    puzzles = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    batch = {"inputs": tokens, "puzzle_identifiers": puzzles}
    cycles = 2 if n_loops % 2 == 0 else n_loops  # segments of two cycles, or one segment of all
    with tokens.device, mock.patch.object(model.inner.config, "H_cycles", cycles):
        carry, told = model.initial_carry(batch), {}
        for _ in range(n_loops // cycles):
            carry, told = model(carry, batch)
    return told["logits"]


KINDS = {
    "ouro": Kind(_ouro, _ouro_logits),
    "huginn": Kind(_huginn, _huginn_logits),
    "hrm_text": Kind(_hrm_text, _hrm_text_logits),
    "hrm": Kind(_reasoner("HierarchicalReasoningModel_ACTV1"), _reasoner_logits),
    "trm": Kind(_reasoner("TinyRecursiveReasoningModel_ACTV1"), _reasoner_logits),
}


# Their files, and what they ask of libraries as they were


def module_of(file: Path | None) -> Any:
    """The module of a file, whose imports are relative, or begin at a folder above it."""
    if file is None:
        return None
    file = file.resolve()
    above = [folder.parent for folder in file.parents if (folder / "layers.py").exists()]
    if above:  # HRM and TRM import models.layers
        return _imported(".".join(file.relative_to(above[0]).with_suffix("").parts), above[0])
    package = types.ModuleType("published_model")
    package.__path__ = [str(file.parent)]
    sys.modules[package.__name__] = package
    if not (file.parent / "configuration_ouro.py").exists():
        sys.modules[f"{package.__name__}.configuration_ouro"] = _ouro_configuration()
    return importlib.import_module(f"{package.__name__}.{file.stem}")


def _imported(name: str, folder: Path) -> Any:
    """A module below a folder, with flash attention's one function made of PyTorch's own."""
    flash: Any = types.ModuleType("flash_attn_interface")
    flash.flash_attn_func = _attention
    sys.modules[flash.__name__] = flash
    try:
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            return importlib.import_module(name)
    finally:
        del sys.modules[flash.__name__]
        top = name.partition(".")[0]  # another model's folder has the same name
        for loaded in [other for other in sys.modules if other.partition(".")[0] == top]:
            del sys.modules[loaded]


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).contiguous()


def _ouro_configuration() -> types.ModuleType:
    """The module of Ouro's configuration, where a copy of the model's lies alone."""
    from transformers import Qwen2Config

    module: Any = types.ModuleType("configuration_ouro")
    module.OuroConfig = type("OuroConfig", (Qwen2Config,), {"model_type": "ouro"})
    return module


def _patched_ouro(module: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ROPE_INIT_FUNCTIONS.setdefault("default", _inverse_frequencies)
    masks = importlib.import_module("transformers.masking_utils").create_causal_mask
    module.create_causal_mask = lambda input_embeds, cache_position, **given: masks(
        inputs_embeds=input_embeds, **given
    )
    module.OuroForCausalLM._tied_weights_keys = {}


def _inverse_frequencies(config: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
    width = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, device=device).float() / width
    return config.rope_parameters["rope_theta"] ** -exponents, 1.0


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--file", type=Path, help="your own copy of the modelling file")
    arguments = parser.parse_args()
    for n_loops, difference in compare(arguments.kind, arguments.file).items():
        print(
            f"{arguments.kind}, {n_loops} loops: logits differ by {difference.largest:.1e} at "
            f"most; their standard deviation is {difference.size:.2f}"
        )


if __name__ == "__main__":
    main()
