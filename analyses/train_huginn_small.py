"""Small Huginns trained on p-hop induction and on the characters of Shakespeare, beside controls.

    python -m analyses.train_huginn_small hops                      # two seeds
    python -m analyses.train_huginn_small text --texts FOLDER       # the unpacked package, one seed

Weights go into ``--out``; those that it holds already are kept, and a stopped training resumes.
``analyses/huginn_small_results.py`` measures them. The model is the Huginn of
``loopinterp.adapters.plain``: one layer of prelude, a core of two, one of coda. It is trained as in
arXiv 2502.05171: each step draws its number of loops, the state starts as noise, the loss is that
of the last loop, and gradients pass through the last ``LIVE`` loops alone. The unlooped baseline
has as many weights and always makes one loop. ``text`` also trains Ouros as in
``train_ouro_small.py``: one of its size, one of six layers, and such six layers without a loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from analyses.small_language_models import (
    LENGTH,
    OTHER,
    TASK,
    WINDOW,
    Data,
    Hops,
    Windows,
    fit,
    read_texts,
)
from analyses.train_ouro_small import N_LOOPS as OURO_LOOPS
from analyses.train_ouro_small import stage_one
from loopinterp.adapters import adapt, keep_outputs
from loopinterp.adapters.plain.language_models import (
    OuroConfig,
    OuroForCausalLM,
    RavenConfig,
    RavenForCausalLM,
)
from loopinterp.tasks import IGNORE, Batch

MEAN_LOOPS, SPREAD, LIVE = 8, 0.5, 4
"""Mean of the drawn loops, standard deviation of the logarithm of their rate, loops with gradients.

Mean and gradients are 32 and 8 in arXiv 2502.05171."""
STEPS = {"hops": 2000, "text": 1500}
VOCABULARY = {"hops": TASK.d_vocab, "text": OTHER + 1}
OUROS = {"ouro": (2, OURO_LOOPS), "ouro-6": (6, OURO_LOOPS), "feedforward-6": (6, 1)}
"""Layers and loops of the Ouros that read text."""
OUT = Path("runs/huginn-small")


def build(part: str, seed: int) -> RavenForCausalLM:
    """One layer of prelude, two of core, one of coda, of width 64; weights as published."""
    torch.manual_seed(seed)
    config = RavenConfig(
        n_embd=64,
        intermediate_size=128,
        block_size=WINDOW,
        vocab_size=VOCABULARY[part],
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=2,
        n_layers_in_coda=1,
        mean_recurrence=MEAN_LOOPS,
        tie_embeddings=False,
    )
    model, std = RavenForCausalLM(config), config.init_values["std"]
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # What a layer adds to its stream starts smaller, by the number of additions.
            added = 2 * (2 + 2 * MEAN_LOOPS) if name.endswith("proj.weight") else 1
            nn.init.normal_(weight, std=std / added**0.5)
    return model


def draw_loops(generator: torch.Generator) -> int:
    """``1 + Poisson(exp(tau))``, with tau normal: the law of arXiv 2502.05171, section 3.3."""
    normal = torch.randn((), generator=generator)
    rate = MEAN_LOOPS * (SPREAD * normal - SPREAD**2 / 2).exp()
    return 1 + int(torch.poisson(rate, generator=generator))


def run(model: RavenForCausalLM, batch: Batch, n_loops: int) -> tuple[Tensor, Tensor]:
    """The loss after so many loops from noise, and which answers are right, [batch, pos]."""
    e = model.embed_inputs(batch.inputs)
    with torch.no_grad():
        h = model.initialize_state(e)
        for _ in range(n_loops - LIVE):
            h = model.core_block_forward(h, e)
    for _ in range(min(n_loops, LIVE)):
        h = model.core_block_forward(h, e)
    logits = model.predict_from_latents(h)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    return loss, (logits.argmax(-1) == batch.targets)[:, 1:]


def build_ouro(name: str, seed: int) -> OuroForCausalLM:
    """The model of ``train_ouro_small.py`` for characters, with the layers of :data:`OUROS`."""
    torch.manual_seed(seed)
    n_layers, n_loops = OUROS[name]
    config = OuroConfig(vocab_size=OTHER + 1, rope_theta=1e4, total_ut_steps=n_loops)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": WINDOW}
    return OuroForCausalLM(replace(config, num_hidden_layers=n_layers, **sizes))


def untrained(part: str, name: str, seed: int) -> RavenForCausalLM | OuroForCausalLM:
    return build_ouro(name, seed) if name in OUROS else build(part, seed)


def names(part: str) -> tuple[str, ...]:
    return ("looped", "unlooped", *(OUROS if part == "text" else ()))


def file_of(out: Path, part: str, name: str, seed: int) -> Path:
    return out / f"{part}-{name}-seed-{seed}.safetensors"


def trained(out: Path, part: str, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """The models whose weights a folder holds, in the order of :func:`names`."""
    for name in names(part):
        if (file := file_of(out, part, name, seed)).exists():
            model = untrained(part, name, seed)
            model.load_state_dict(load_file(file))
            yield name, model.eval()


def train(part: str, name: str, seed: int, out: Path, texts: Tensor | None, n_steps: int) -> None:
    """Train one model into its file."""
    model, file = untrained(part, name, seed), file_of(out, part, name, seed)
    data: Data = Hops(seed) if texts is None else Windows(texts, seed)

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(model, OuroForCausalLM):
            return stage_one(model, batch)
        return run(model, batch, draw_loops(data.generator) if name == "looped" else 1)

    started = time.monotonic()
    fit(model, data, loss_of, n_steps, file.with_suffix(".part"))
    save_file(model.state_dict(), file)
    print(f"{file.name}: {time.monotonic() - started:.0f} s", flush=True)


def zoo_entry(out: Path, name: str) -> dict[str, Any]:
    """The p-hop model of seed 0 for the zoo, with the task's classes, beside its baselines."""
    folder = out / f"{name}-weights"
    folder.mkdir(parents=True, exist_ok=True)
    for label in names("hops"):
        if not file_of(folder, "hops", label, 0).exists():
            train("hops", label, 0, folder, None, STEPS["hops"])
    models = {"untrained": build("hops", 0).eval(), **dict(trained(folder, "hops", 0))}
    for model in models.values():
        keep_outputs(model, TASK.d_vocab_out)
    adapted = {label: adapt(model) for label, model in models.items()}
    origin = "trained on p-hop induction as a small Huginn, in plain PyTorch"
    note = "Up to 8 hops of induction, after a random number of loops from a random state."
    model = {"model": adapted.pop("looped"), "task": TASK, "max_n": LENGTH, "origin": origin}
    return {**model, "note": note, "baselines": adapted}


def main() -> None:
    parser = argparse.ArgumentParser(description="Small Huginns, and their baselines.")
    parser.add_argument("part", choices=sorted(STEPS))
    parser.add_argument("--texts", type=Path, help="Folder of the unpacked package shakespeare.")
    parser.add_argument("--only", choices=names("text"), nargs="+", help="Default: all.")
    parser.add_argument("--seed", type=int, nargs="+", help="Default: 0 1, of text 0.")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "text" and args.texts is None:
        parser.error("text needs --texts, the folder of the unpacked package shakespeare")
    texts = read_texts(args.texts)[0] if args.part == "text" else None
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seed or ([0] if args.part == "text" else [0, 1]):
        for name in args.only or names(args.part):
            if not file_of(args.out, args.part, name, seed).exists():
                n_steps = args.steps or STEPS[args.part]
                train(args.part, name, seed, args.out, texts, n_steps)


if __name__ == "__main__":
    main()
