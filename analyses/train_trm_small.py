"""Small TRM and HRM, trained with deep supervision and halting on 4 x 4 sudokus and on mazes.

    python -m analyses.train_trm_small                # all models, some ten minutes each
    python -m analyses.train_trm_small --only trm-sudoku

A run that was killed goes on from its last checkpoint with the same numbers; weights that ``--out``
holds already are not trained again.

The models are the plain TRM and HRM of ``loopinterp.adapters.plain``. A training step is a segment
of each example: ``H_cycles`` slow cycles, with gradients through the last one (HRM: through the
last step of each stack). The loss is cross-entropy at the asked cells, plus half the binary
cross-entropy of the halting head against "the whole answer is right"; HRM's head also learns the
value of going on. States are carried on, without gradients, until the head halts or after
``halt_max_steps`` segments (arXiv 2506.21734 and 2510.04871). Unlike there: a plain softmax, AdamW
with a linear cool-down in place of averaged weights, no puzzle embedding.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopinterp.adapters import PublishedModel, adapt, keep_outputs
from loopinterp.adapters.plain.hrm import ACTWrapper, InnerCarry
from loopinterp.adapters.plain.hrm import HierarchicalReasoningModel_ACTV1 as HRM
from loopinterp.adapters.plain.hrm import TinyRecursiveReasoningModel_ACTV1 as TRM
from loopinterp.core.storage import read_tensors, write_tensors
from loopinterp.tasks import IGNORE, Batch, Maze, Sudoku

OUT = Path("runs/trm-small")
TASKS, CELLS = {"sudoku": Sudoku(box=2), "maze": Maze()}, {"sudoku": 16, "maze": 16}
LENGTHS = {"sudoku": (6, 12), "maze": (4, 4)}
"""Blanks of a sudoku, and width of a maze: fewest and most."""
POSITIONS = {"sudoku": "learned", "maze": "rope"}
KINDS = ("trm", "hrm", "unlooped")
N_TRAIN, BATCH, RATE = 2**15, 64, 1e-3


def build(kind: str, task: str, seed: int) -> ACTWrapper:
    """Two layers, 133,000 weights (sudoku) or 141,000 (maze).

    Of ``unlooped``, an HRM of one cycle, each layer is run once.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"seq_len": CELLS[task], "vocab_size": TASKS[task].d_vocab}
    sizes |= {"hidden_size": 64, "num_heads": 4, "pos_encodings": POSITIONS[task]}
    loops = {"H_cycles": 2, "L_cycles": 2, "halt_max_steps": 8}
    if kind == "trm":
        model: ACTWrapper = TRM(sizes | loops | {"L_layers": 2})
    else:
        loops = dict.fromkeys(loops, 1) if kind == "unlooped" else loops
        model = HRM(sizes | loops | {"H_layers": 1, "L_layers": 1})
    torch.nn.init.zeros_(model.inner.q_head.weight)
    torch.nn.init.constant_(model.inner.q_head.bias, -5.0)
    return model


def draw(task: str, n: int, seed: int) -> Batch:
    """Puzzles of all lengths."""
    generator = torch.Generator().manual_seed(seed)
    low, high = LENGTHS[task]
    lengths = torch.randint(low, high + 1, (n,), generator=generator)
    return TASKS[task].sample(lengths, generator=generator)


def fresh(task: str, n: int, seed: int = 10**6) -> Batch:
    """Puzzles that are not in the training set, each once."""
    known = {tuple(row) for row in draw(task, N_TRAIN, 0).inputs.tolist()}
    batch, kept = draw(task, 4 * n, seed), []
    for k, row in enumerate(map(tuple, batch.inputs.tolist())):
        if row not in known and len(kept) < n:
            known.add(row)
            kept.append(k)
    return batch[torch.tensor(kept)]


class Training:
    """A model, its optimiser, and the examples on which it is working."""

    def __init__(self, kind: str, task: str, seed: int, n_steps: int) -> None:
        self.model, self.kind, self.n_steps = build(kind, task, seed), kind, n_steps
        self.pool, n = draw(task, N_TRAIN, 0), BATCH
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.generator = torch.Generator().manual_seed(seed)
        shape = (n, CELLS[task], 64)  # [batch, pos, d_model]
        self.now = {
            "step": torch.tensor(0),
            "example": torch.zeros(n, dtype=torch.long),  # its number in the training set
            "segments": torch.zeros(n, dtype=torch.long),  # how many it has had
            "halted": torch.ones(n, dtype=torch.bool),
            "z_H": torch.zeros(shape),
            "z_L": torch.zeros(shape),
        }

    def step(self) -> dict[str, float]:
        now, inner, config = self.now, self.model.inner, self.model.inner.config
        done, anew, n = int(now["step"]), now["halted"], len(now["halted"])
        drawn = torch.randint(len(self.pool), (n,), generator=self.generator)
        example = torch.where(anew, drawn, now["example"])
        segments = torch.where(anew, 0, now["segments"]) + 1
        z_H, z_L = (
            torch.where(anew[:, None, None], start, now[name])
            for name, start in (("z_H", inner.H_init), ("z_L", inner.L_init))
        )
        inputs, targets = self.pool.inputs[example], self.pool.targets[example]
        batch = {"inputs": inputs, "puzzle_identifiers": torch.zeros(n, dtype=torch.int32)}
        carry, logits, (stop, go_on) = inner(InnerCarry(z_H, z_L), batch)
        asked, last = targets != IGNORE, segments >= config.halt_max_steps
        right = ((logits.argmax(-1) == targets) | ~asked).all(1)  # [batch]
        ce = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
        loss = (ce.sum(1) / asked.sum(1)).mean()
        loss = loss + 0.5 * F.binary_cross_entropy_with_logits(stop, right.float())
        halts = stop > (go_on if self.kind == "hrm" else 0)
        if self.kind == "hrm":
            with torch.no_grad():  # the value of going on is that of the next segment
                *_, (next_stop, next_on) = inner(carry, batch)
                value = torch.where(last, next_stop, torch.maximum(next_stop, next_on)).sigmoid()
            loss = loss + 0.5 * F.binary_cross_entropy_with_logits(go_on, value)
        # One example in ten has to work on for a random number of segments.
        least = torch.randint(2, max(config.halt_max_steps, 2) + 1, (n,), generator=self.generator)
        works_on = (torch.rand(n, generator=self.generator) < 0.1) & (segments < least)
        warm, cool = (done + 1) / 100, (self.n_steps - done) / (0.25 * self.n_steps)
        self.optimiser.param_groups[0]["lr"] = RATE * min(1.0, warm, cool)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.now = {"step": now["step"] + 1, "example": example, "segments": segments}
        self.now |= {"halted": last | (halts & ~works_on), "z_H": carry.z_H, "z_L": carry.z_L}
        shares = {"right": right, "halted": self.now["halted"], "segments": segments}
        return {
            "loss": float(loss.detach()),
            **{k: float(v.float().mean()) for k, v in shares.items()},
        }

    def save(self, file: Path) -> None:
        """Everything that the next step depends on."""
        tensors: dict[str, Tensor] = {"random": self.generator.get_state()}
        tensors |= {f"now/{k}": v for k, v in self.now.items()}
        tensors |= {f"model/{k}": v for k, v in self.model.state_dict().items()}
        for k, moments in self.optimiser.state_dict()["state"].items():
            tensors |= {f"adam/{k}/{name}": v for name, v in moments.items()}
        write_tensors(file, tensors)

    def load(self, file: Path) -> None:
        tensors, state = read_tensors(file), self.optimiser.state_dict()
        self.generator.set_state(tensors["random"])
        self.now = {k: tensors[f"now/{k}"] for k in self.now}
        self.model.load_state_dict({k: tensors[f"model/{k}"] for k in self.model.state_dict()})
        for name in (name for name in tensors if name.startswith("adam/")):
            _, k, moment = name.split("/")
            state["state"].setdefault(int(k), {})[moment] = tensors[name]
        self.optimiser.load_state_dict(state)


def trained(folder: Path, kind: str, task: str, seed: int, n_steps: int = 0) -> ACTWrapper:
    """A model: its weights from the folder, or trained into it; a checkpoint every 200 steps."""
    file, model = folder / f"{kind}-{task}-seed-{seed}.safetensors", build(kind, task, seed)
    if not file.exists():
        training, checkpoint = Training(kind, task, seed, n_steps), file.with_suffix(".checkpoint")
        if checkpoint.exists():
            training.load(checkpoint)
        for step in range(int(training.now["step"]), n_steps):
            shown = training.step()
            if (step + 1) % 200 == 0:
                training.save(checkpoint)
                each = " ".join(f"{name} {value:.3f}" for name, value in shown.items())
                print(f"{file.stem} {step + 1} {each}", flush=True)
        write_tensors(file, training.model.state_dict())
        checkpoint.unlink(missing_ok=True)
    model.load_state_dict(read_tensors(file))
    return model.eval()


def opened(model: ACTWrapper, task: str) -> PublishedModel:
    """The model behind its adapter, with the classes of the task."""
    keep_outputs(model, TASKS[task].d_vocab_out)
    return adapt(model.eval())


def zoo_entry(out: Path, name: str) -> dict[str, Any]:
    """The sudoku model of seed 0 for the zoo, beside its baselines."""
    kind, task = name.removesuffix("-small"), "sudoku"
    models = {"untrained": build(kind, task, 0)}
    models |= {x: trained(out / "trm-small-weights", x, task, 0, 2000) for x in ("unlooped", kind)}
    adapted = {label: opened(model, task) for label, model in models.items()}
    return {
        "model": adapted.pop(kind),
        "task": TASKS[task],
        "max_n": LENGTHS[task][1],
        "origin": f"trained on sudokus as a small {kind.upper()}, in plain PyTorch",
        "note": f"A small {kind.upper()}: deep supervision and a halting head.",
        "baselines": adapted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Small TRM and HRM on sudokus and mazes.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=2000)
    every = [f"{kind}-{task}" for task in TASKS for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seed:
        for name in args.only:
            kind, task = name.split("-")
            trained(args.out, kind, task, seed, args.steps)


if __name__ == "__main__":
    main()
