"""Loop extrapolation: what becomes of the answer when the loop runs on past T(n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.dynamics.checks import asked_positions, check_count, check_positive, check_states
from loopinterp.dynamics.measures import relative_residual
from loopinterp.dynamics.readouts import correctness, exact_match
from loopinterp.dynamics.trajectories import describe
from loopinterp.models.protocol import bind
from loopinterp.results import Finding, Result, study

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.results import Figure
    from loopinterp.tasks.task import Batch

AT_ONCE = 2**22
"""Numbers of a state that is stepped at once."""


@dataclass(frozen=True, kw_only=True)
class ExtrapolationResult(Result):
    """Exact match against loops, far past the loop at which the answer is asked for.

    Entry ``t`` of the loop axis is after ``t`` loops.

    Attributes:
        exact: 1 where every asked position of an example is right.
        accuracy: Share of its asked positions that are right.
        residual: Mean relative residual of its asked positions; NaN before the first loop.
        n_loops: Loops of the run.
        lengths: Problem length of each example.
        answer_loops: T(n) of each example.
        trained_loops: Most loops of a training run, marked in the figure (None if unknown).
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "exact": ("loop", "batch"),
        "accuracy": ("loop", "batch"),
        "residual": ("loop", "batch"),
    }

    exact: np.ndarray
    accuracy: np.ndarray
    residual: np.ndarray
    n_loops: int
    lengths: list[int]
    answer_loops: list[int]
    trained_loops: int | None = None

    def at_answer(self) -> np.ndarray:
        """Exact match of each example after its own T(n) loops."""
        return self.exact[np.array(self.answer_loops), np.arange(self.exact.shape[1])]

    def fates(self) -> dict[str, int]:
        """Examples by whether they are right at T(n) and right after the last loop."""
        first, last = self.at_answer() == 1, self.exact[-1] == 1
        return {
            "right and stays right": int((first & last).sum()),
            "right, then lost": int((first & ~last).sum()),
            "wrong, then found": int((~first & last).sum()),
            "wrong at both": int((~first & ~last).sum()),
        }

    def summary(self) -> list[Finding]:
        """What the study found, in plain words."""
        from loopinterp.dynamics.summaries import extrapolation_findings

        return extrapolation_findings(self)

    def figures(self) -> list[Figure]:
        """Exact match against loops, with the residual below it."""
        from loopinterp.dynamics.figures import extrapolation_figures

        return extrapolation_figures(self)


def extrapolation_study(
    model: LoopedModel,
    batch: Batch,
    *,
    factor: float = 10.0,
    n_loops: int | None = None,
    trained_loops: int | None = None,
) -> ExtrapolationResult:
    """Run far past T(n) and score the readout after every loop.

    Only the present state is held, so the number of loops costs time but no memory.

    Args:
        model: Any looped model.
        batch: Examples with targets, of one length or several.
        factor: Loops to run, in multiples of the longest T(n) of the batch.
        n_loops: Loops to run, instead of ``factor``; at least the longest T(n).
        trained_loops: Most loops of a training run, to be marked in the figure.

    Raises:
        InputError: If the loops do not reach T(n), an example asks nothing, or the initial state
            is not finite.
    """
    asked = asked_positions(batch, "asked")
    longest = int(batch.n_loops.max())
    if n_loops is None:
        check_positive("factor", factor)
        n_loops = round(factor * longest)
    check_count("n_loops", n_loops, least=max(1, longest))
    if trained_loops is not None:
        check_count("trained_loops", trained_loops)
    with study(0, model=describe(model), n_loops=n_loops, n_examples=len(batch)) as watch:
        size = bind(model, batch.inputs[:1]).h0.numel()
        at_once = max(1, AT_ONCE // size)
        parts = [
            _follow(model, batch[rows], asked[rows], n_loops)
            for rows in torch.arange(len(batch), device=batch.targets.device).split(at_once)
        ]
        exact, accuracy, residual = (torch.cat(p, dim=1).cpu().numpy() for p in zip(*parts))
        return ExtrapolationResult(
            exact=exact,
            accuracy=accuracy,
            residual=residual,
            n_loops=n_loops,
            lengths=batch.n.tolist(),
            answer_loops=batch.n_loops.tolist(),
            trained_loops=trained_loops,
            provenance=watch.provenance(),
        )


@torch.no_grad()
def _follow(
    model: LoopedModel, batch: Batch, asked: Tensor, n_loops: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact match, accuracy and residual of some examples after 0..n_loops loops."""
    iteration = bind(model, batch.inputs)
    h, share = iteration.h0, asked / asked.sum(dim=1, keepdim=True)
    check_states(h[None], at_least=1, name="initial state")
    exact, accuracy, residual = [], [], [h.new_full((len(batch),), float("nan"))]
    for loop in range(n_loops + 1):
        if loop:
            before, h = h, iteration.step(h)
            moved = relative_residual(torch.stack([before, h]), allow_nonfinite=True)[0]
            residual.append((moved * share).sum(dim=1))
        right = correctness(iteration.readout(h).argmax(dim=-1), batch.targets)
        exact.append(exact_match(right))
        accuracy.append(((right == 1) * share).sum(dim=1))
    return (
        torch.stack(exact).to(torch.int8),
        torch.stack(accuracy).float(),
        torch.stack(residual).float(),
    )
