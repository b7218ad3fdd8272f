"""A stopping rule that is learned from training lengths: loops as a line of the input's length."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.ndimage import minimum_filter1d

from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import device_of
from loopinterp.models.stopping_rules import LengthLine
from loopinterp.progress import track
from loopinterp.study_examples import need_model_of
from loopinterp.tasks.sampling import check_size, pick_distribution
from loopinterp.tasks.study_data import need_task
from loopinterp.training.answer_scores import scores_at
from loopinterp.training.seeding import stream
from loopinterp.training.unseen_answers import need_unseen_answers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.task import Task

SLACK = 2
"""Loops more or fewer with which the answers should be as right, if there is such a line."""

TOLERANCE = 0.01
"""Exact match that may be given up for slack."""


@torch.no_grad()
def calibrate_stopping(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    *,
    distributions: Sequence[str] | None = None,
    max_loops: int | None = None,
    n_samples: int = 100,
    seed: int = 0,
) -> LengthLine:
    """Learn on lengths of training after how many loops to stop, as a line to be extrapolated.

    Exact match after every number of loops is measured at each length. Of all lines
    ``T = slope * n_pos + offset`` that do not fall, :func:`best_line` takes the one with the
    highest, for each distribution and for the worst of them at each length. Of these lines, those
    that do best on the worst are kept, and of them the steepest: on random inputs alone a few
    loops do for any length, which extrapolates to too few for long chains.

    It sees right answers of training lengths, but never the task's T(n), and nothing of the
    lengths that it is used on.

    Args:
        model: Any looped model.
        task: What to ask it.
        lengths: At least two problem lengths, of those that it was trained on.
        distributions: Input distributions; all of the task if None.
        max_loops: Loops that are tried; twice the positions of the longest input if None.
        n_samples: Examples for each length and distribution.
        seed: Seed of the examples, which are neither those of training nor of evaluation.

    Raises:
        InputError: If there are fewer than two lengths, one is out of range, or the model is of
            another task or sees the answers.
    """
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    cells = sorted(set(lengths))
    names = list(distributions or task.distributions)
    for name in names:
        pick_distribution(task, name)
    check_integer("n_samples", n_samples, least=1)
    if len(cells) < 2:
        fix = "Pass e.g. range(1, run.cutoff + 1)."
        raise InputError("lengths", expected="at least two", given=str(cells), fix=fix)
    check_size(task, cells[-1], n_samples, "lengths, n_samples")
    need_unseen_answers(task, model, cells[0])
    n_positions = [task.n_positions(n) for n in cells]
    last = (
        2 * n_positions[-1] if max_loops is None else check_integer("max_loops", max_loops, least=1)
    )
    exact = np.zeros((len(names), len(cells), last + 1))
    for (d, name), (k, n) in track(list(product(enumerate(names), enumerate(cells))), "calibrate"):
        generator = stream(seed, f"calibration {name} {n}")
        batch = task.sample(n, batch_size=n_samples, generator=generator, distribution=name)
        batch = batch.to(device_of(model))
        n_positions[k] = batch.inputs.shape[1]
        for loop, found in scores_at(model, batch, range(last + 1), may_diverge=True).items():
            exact[d, k, loop] = found.exact.double().mean()
    worst = exact.min(0)
    lines = [best_line(table, n_positions) for table in (*exact, worst)]
    reached = [_read_off(worst, line, n_positions) for line in lines]
    good = [line for line, share in zip(lines, reached) if share >= max(reached) - TOLERANCE]
    return max(good, key=lambda line: (line.slope, line.offset))


def _read_off(exact: np.ndarray, line: LengthLine, n_positions: Sequence[int]) -> float:
    """Mean exact match where a line stops."""
    loops = np.minimum([line.loops(n) for n in n_positions], exact.shape[1] - 1)
    return float(exact[np.arange(len(n_positions)), loops].mean())


def best_line(exact: np.ndarray, n_positions: Sequence[int]) -> LengthLine:
    """The line of loops against positions that reads the best exact match off a table.

    Where lines do as well with up to two loops more or fewer, as of a model that holds its answer,
    they come before those that do not; of equals the one with the fewest loops is taken.

    Args:
        exact: Exact match ``[length, loop]``, from loop 0 on.
        n_positions: Positions of the inputs of each length, increasing.

    Example:
        >>> right_at_n = np.eye(8)[[2, 4, 6]]
        >>> best_line(right_at_n, [2, 4, 6])
        LengthLine(slope=1.0, offset=0.0)
    """
    first, final = n_positions[0], n_positions[-1]
    n_loops = exact.shape[1]
    # Every line that does not fall, by the loops at its two ends.
    low, high = np.triu_indices(n_loops)
    at = (np.asarray(n_positions) - first) / (final - first)
    loops = np.rint(low[:, None] + (high - low)[:, None] * at).astype(int)
    chosen, reached = None, -np.inf
    for slack in range(SLACK, -1, -1):
        # Beyond the last loop nothing is known: it counts as the last does.
        held = minimum_filter1d(exact, 2 * slack + 1, axis=1, mode="nearest")
        score = held[np.arange(len(n_positions)), loops].mean(1)
        best = score.max()
        fewest = np.where(score >= best - 1e-9, loops.sum(1), np.inf).argmin()
        if chosen is None or best > reached + TOLERANCE:
            chosen, reached = int(fewest), best
    assert chosen is not None
    slope = float(high[chosen] - low[chosen]) / (final - first)
    return LengthLine(slope, float(low[chosen]) - slope * first)
