"""A small Ouro with its exit gate, trained on p-hop induction, beside controls.

    python -m analyses.train_ouro_small    # some twelve minutes on one core

Weights that ``--out`` holds already are measured, not trained again.

The model is the Ouro of ``loopinterp.adapters.plain``; studies reach its weights
through ``adapt``. Stage I minimises ``sum_t p(t) CE(y_t) - beta H(p)`` at each position, p being
the gate's distribution over exits. Stage II trains the gate alone, to go on where the last loop
lowered the loss (arXiv 2510.25741); "stage II ahead" is a variant, where the next loop does. The
task is that of arXiv 2502.17416 and 2402.09268; a curriculum raises p from 1 to 8. Results are
kept in analyses/results/ouro_small*.csv, the tables go into
docs/results/trained-language-models.md, the weights into ``--out``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from analyses.ouro_small_results import FILES, PAGE, STAGES, as_tables, measure
from analyses.small_language_models import LENGTH, TASK, Hops, fit
from analyses.tables_in_pages import PAGES, RESULTS, rewrite
from loopinterp.adapters import adapt, keep_outputs
from loopinterp.adapters.plain.language_models import OuroConfig, OuroForCausalLM
from loopinterp.tasks import Batch

N_LOOPS = 4
BETA, SLOPE, LEAST_GAIN = 0.05, 50.0, 0.005
"""Weight of the entropy; of stage II, the slope and middle of its sigmoid."""
ZOO = {
    "ouro-small": (STAGES[0], "Up to 8 hops of induction in 4 loops, with an exit gate."),
    "ouro-small-ahead": (STAGES[2], "The same; its gate was trained to stop where no loop helps."),
}
"""Models of the zoo: their stage of training, and what they are examples of."""


def build(n_loops: int, seed: int) -> OuroForCausalLM:
    """Two layers, 84,000 weights."""
    torch.manual_seed(seed)
    config = OuroConfig(vocab_size=TASK.d_vocab, rope_theta=1e4, total_ut_steps=n_loops)
    return OuroForCausalLM(replace(config, hidden_size=64, intermediate_size=128))


def run(model: OuroForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gate logits, both [loop, batch, pos] without position 0, and answers right."""
    states, gates = model.model(batch.inputs)
    logits, targets = model.lm_head(torch.stack(states))[:, :, 1:], batch.targets[:, 1:]
    wanted = targets.expand(len(states), -1, -1)
    loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
    gate = torch.stack(gates)[:, :, 1:, 0]
    return loss.view_as(wanted), gate, logits.argmax(-1) == wanted


def log_exits(gate: Tensor) -> Tensor:
    """``log p(t) = log lambda_t + sum_{s<t} log(1 - lambda_s)``; the last loop takes what is left.

    From gate logits [loop, batch, pos].
    """
    going = F.pad(F.logsigmoid(-gate).cumsum(0), (0, 0, 0, 0, 1, 0))[:-1]
    return going + F.pad(F.logsigmoid(gate[:-1]), (0, 0, 0, 0, 0, 1))


def stage_one(model: OuroForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of stage I, and which answers of the last loop are right."""
    loss, gate, right = run(model, batch)
    log_p = log_exits(gate)
    return (log_p.exp() * (loss + BETA * log_p)).sum(0).mean(), right[-1]


def train_gate(model: OuroForCausalLM, n_steps: int, seed: int, ahead: bool = False) -> None:
    """Stage II: the gate goes on after a loop that lowered the loss; ``ahead``: before one."""
    generator = torch.Generator().manual_seed(seed + 1000)
    weights = [*model.model.early_exit_gate.parameters()]
    optimiser = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(n_steps):
        batch = TASK.sample(LENGTH, batch_size=32, generator=generator)
        loss, gate, _ = run(model, batch)
        gain = (loss[:-1] - loss[1:]).clamp(min=0).detach()
        go_on = (SLOPE * (gain - LEAST_GAIN)).sigmoid()
        optimiser.zero_grad()
        labelled = gate[:-1] if ahead else gate[1:]  # [loop - 1, batch, pos]
        F.binary_cross_entropy_with_logits(labelled, 1 - go_on).backward(inputs=weights)
        optimiser.step()


def trained(folder: Path, seed: int, n_steps: int) -> dict[str, OuroForCausalLM]:
    """The models: their weights from the folder, or trained into it."""
    models = {"untrained": build(N_LOOPS, seed), "unlooped": build(1, seed)}
    models |= {name: build(N_LOOPS, seed) for name in STAGES}
    for name in ("unlooped", *STAGES):
        file = folder / f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}.safetensors"
        if file.exists():
            models[name].load_state_dict(load_file(file))
            continue
        if name in STAGES[1:]:
            models[name].load_state_dict(models[STAGES[0]].state_dict())
            train_gate(models[name], n_steps // 10, seed, ahead=name == STAGES[2])
        else:
            loss_of = partial(stage_one, models[name])
            fit(models[name], Hops(seed), loss_of, n_steps, file.with_suffix(".part"))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(models[name].state_dict(), file)
    return models


def zoo_entry(out: Path, name: str) -> dict[str, Any]:
    """The model of seed 1 for the zoo, with the task's classes, beside its baselines."""
    stage, note = ZOO[name]
    models = trained(out / "ouro-small-weights", seed=1, n_steps=2500)
    adapted = {}
    for label in ("untrained", "unlooped", stage):
        keep_outputs(models[label], TASK.d_vocab_out)
        adapted[label] = adapt(models[label].eval())
    origin = (
        f"trained on p-hop induction as a small Ouro ({stage.split(', ')[1]}), in plain PyTorch"
    )
    model = {"model": adapted.pop(stage), "task": TASK, "max_n": LENGTH, "origin": origin}
    return {**model, "note": note, "baselines": adapted}


def main() -> None:
    parser = argparse.ArgumentParser(description="A small Ouro on p-hop induction, and its gate.")
    parser.add_argument("--out", type=Path, default=Path("runs/ouro-small"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    for seed in args.seed:
        models = trained(args.out, seed, args.steps)
        tables += [measure(name, seed, model, args.samples) for name, model in models.items()]
    known = [pd.concat(parts) for parts in zip(*tables)]
    for file, rows in zip(FILES, known):
        rows.to_csv(args.results / file, index=False, float_format="%.4f")
    rewrite(args.page, as_tables(*(pd.read_csv(args.results / file) for file in FILES)))
    print(args.page)


if __name__ == "__main__":
    main()
