"""The loss of our training at the published setting, beside that of plain PyTorch, step by step.

    python -m analyses.published_loss --task parity --out runs/published
    python -m analyses.published_loss --task copy --out runs/published

Both begin with the same weights and see the same examples; the model, the loss, the schedule and
the step of the other are a few lines of PyTorch in the tests (arXiv 2409.15647, system B). What is
left is rounding, which training makes grow. 2,000 steps take some minutes on one core; the
curriculum has come to length 4 (parity) or 2 (copy) by then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.published_settings import PAPER, paper_config
from loopinterp.core.text import bar
from loopinterp.training import Trainer, TrainingConfig, apply_settings
from tests.training.plain_published import train_plainly

NUMBERS = ("loss", "grad_norm", "lr")
LIMIT = 1e-3


@dataclass
class Curves:
    """What both say of each step.

    Attributes:
        ours: Loss, norm of the gradient, learning rate ``[step, 3]``.
        plain: The same of plain PyTorch.
        longest_n: Greatest length drawn at each step.
        seconds: What each took, ours first.
    """

    ours: list[list[float]] = field(default_factory=list)
    plain: list[list[float]] = field(default_factory=list)
    longest_n: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def differences(self) -> np.ndarray:
        """``|ours - plain| / |plain|``, [step, 3]."""
        ours, plain = np.array(self.ours), np.array(self.plain)
        return np.abs(ours - plain) / np.abs(plain)


def both(config: TrainingConfig, n_steps: int) -> Curves:
    """Train both for so many steps of the run that a configuration of system B describes."""
    trainer, feed, curves = Trainer(config), Trainer(config), Curves()
    plain = train_plainly(
        dict(feed.model.named_parameters()),
        _batches(feed),
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        n_steps=config.steps,
        grown_at=config.curriculum.interval * (config.curriculum.max_n - 1),
    )
    with bar(f"{config.task}, twice", total=n_steps) as shown:
        for _ in range(n_steps):
            started = time.perf_counter()
            metrics = trainer.step()
            between = time.perf_counter()
            curves.plain.append(list(next(plain)))
            curves.ours.append([float(metrics[name]) for name in NUMBERS])
            curves.longest_n.append(int(metrics["longest_n"]))
            curves.seconds[0] += between - started
            curves.seconds[1] += time.perf_counter() - between
            shown.update()
    return curves


def _batches(feed: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What a trainer with this seed draws; it is never trained itself."""
    while True:
        drawn = feed.draw()
        yield drawn.inputs, drawn.questions.targets[0], drawn.questions.loops[0]
        feed.curriculum.update(0.0)


def stretches(curves: Curves) -> pd.DataFrame:
    """A row a stretch of steps: its last losses, and its greatest relative differences."""
    n_steps, differences = len(curves.ours), curves.differences()
    ends = sorted({e for e in (1, 10, 100, 200, 500, *range(1000, n_steps, 1000)) if e < n_steps})
    rows = []
    for start, end in zip([0, *ends], [*ends, n_steps]):
        loss, grad, _ = differences[start:end].max(0)
        rows.append(
            {
                "from_step": start + 1,
                "to_step": end,
                "longest_n": curves.longest_n[end - 1],
                "ours": curves.ours[end - 1][0],
                "plain": curves.plain[end - 1][0],
                "loss_most_off": loss,
                "grad_norm_most_off": grad,
                "steps_over": int((differences[start:end, 0] > LIMIT).sum()),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", choices=list(PAPER), default="parity")
    parser.add_argument("--steps", type=int, default=2000, help="Steps to compare.")
    parser.add_argument("--out", type=Path, default=Path("runs/published"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = apply_settings(paper_config(args.task, device="cpu"), args.set)
    curves = both(config, args.steps)
    print(f"{args.task}, a looped block of {config.model.n_layers} x {config.model.d_model}")
    found = stretches(curves)
    print(found.to_string(index=False, float_format="%.3g"))
    print(f"steps_over: those whose losses differ by more than {LIMIT:g}")
    print("seconds: ours {:.0f}, plain {:.0f}".format(*curves.seconds))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.task}-loss.json"
    document = {"config": config.to_dict(), "torch": torch.__version__, **vars(curves)}
    path.write_text(json.dumps(document) + "\n")
    found.to_csv(path.with_suffix(".csv"), index=False, float_format="%.4g")
    print(path.with_suffix(".csv"))


if __name__ == "__main__":
    main()
