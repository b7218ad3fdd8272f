"""One distribution and length of an evaluation: what is measured there, and how it is put away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.intervals import wilson_estimate
from loopinterp.models.stopped_run import run_rules
from loopinterp.tasks.task import IGNORE
from loopinterp.training.answer_scores import Scores, perplexity_estimate, scores_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.models.stopping_rules import StoppingRule
    from loopinterp.tasks.task import Batch


class Cell(NamedTuple):
    """What one distribution and length gave."""

    by_extra: list[Scores]
    by_loop: dict[int, Scores]
    stopped: list[tuple[float, float]]
    constant: tuple[float, float] = (0.0, 0.0)


def measure_cell(
    model: LoopedModel | Any,
    batch: Batch,
    extra: list[int],
    loops: Sequence[int],
    rules: list[StoppingRule],
    margin: int,
) -> Cell:
    """All scores of a batch, and where each rule stops its examples."""
    own, last = batch.n_loops, int(batch.n_loops.max()) + margin
    _need_loops_left(batch, min(extra))
    absolute = {*loops, *range(last + 1 if rules else 0)}
    ends = {loop + k for loop in own.unique().tolist() for k in extra}
    # A rule may be asked long after the model has left the numbers that are finite.
    found = scores_at(model, batch, ends | absolute, may_diverge=bool(rules))
    by_loop = {loop: found[loop] for loop in sorted(absolute)}
    stopped = _stopped(model, batch, rules, by_loop, last) if rules else []
    return Cell([_at_own(found, own + k) for k in extra], by_loop, stopped)


def _need_loops_left(batch: Batch, extra: int) -> None:
    """Raise if an example would be read before the first loop."""
    least = int(batch.n_loops.min())
    if least + extra < 0:
        raise InputError(
            "extra_loops",
            expected=f"at least -{least}, as length {int(batch.n.min())} has {least} loops",
            given=str(extra),
            fix="Take away fewer loops, or drop the short lengths.",
        )


def _at_own(found: Mapping[int, Scores], ends: Int[Tensor, " batch"]) -> Scores:
    """The scores of each example after its own number of loops."""
    loops, which = ends.unique(return_inverse=True)
    parts = zip(*(found[loop] for loop in loops.tolist()))
    return Scores(*(torch.stack(part).gather(0, which[None])[0] for part in parts))


def _stopped(
    model: LoopedModel | Any,
    batch: Batch,
    rules: list[StoppingRule],
    scores: Mapping[int, Scores],
    last: int,
) -> list[tuple[float, float]]:
    """Exact match and mean number of loops where each rule stops, and in hindsight."""
    asked, n_loops = batch.targets != IGNORE, batch.n_loops
    stops = run_rules(model, batch.inputs, rules, max_loops=last, mask=asked, n_loops=n_loops)
    right = torch.stack([scores[loop].exact for loop in range(last + 1)])
    best = right.double().mean(1).argmax().expand(1, len(asked))
    first = torch.where(right.any(0), right.int().argmax(0), last)[None]
    stops = torch.cat([stops, best, first])
    exact = right.gather(0, stops).double().mean(1)
    return list(zip(exact.tolist(), stops.double().mean(1).tolist()))


def arrays_of(
    found: Mapping[tuple[int, int], Cell],
    shape: tuple[int, int],
    extra: list[int],
    by_loop: list[int],
    n_samples: int,
) -> dict[str, np.ndarray | None]:
    """The arrays of a result, from its cells."""
    constant = np.zeros((2, *shape))
    shares = {name: np.zeros((len(extra), *shape)) for name in ("exact_match", "bit_accuracy")}
    perplexity = np.zeros((len(extra), *shape, 3))
    loop_exact = np.full((len(by_loop), *shape), np.nan)
    loop_perplexity = np.full((len(by_loop), *shape, 3), np.nan)
    stopped = np.zeros((2, len(next(iter(found.values())).stopped), *shape))
    for (d, k), cell in found.items():
        constant[:, d, k] = cell.constant
        for e, scores in enumerate(cell.by_extra):
            shares["exact_match"][e, d, k] = scores.exact.double().mean()
            shares["bit_accuracy"][e, d, k] = scores.share.mean()
            perplexity[e, d, k] = perplexity_estimate(scores.cross_entropy)
        for t, loop in enumerate(by_loop):
            if loop in cell.by_loop:
                loop_exact[t, d, k] = cell.by_loop[loop].exact.double().mean()
                loop_perplexity[t, d, k] = perplexity_estimate(cell.by_loop[loop].cross_entropy)
        for r, (exact, loops) in enumerate(cell.stopped):
            stopped[:, r, d, k] = exact, loops
    return {
        **{name: wilson_estimate(x * n_samples, n_samples) for name, x in shares.items()},
        "perplexity": perplexity,
        "constant_exact_match": constant[0],
        "constant_bit_accuracy": constant[1],
        "loop_exact_match": wilson_estimate(loop_exact * n_samples, n_samples) if by_loop else None,
        "loop_perplexity": loop_perplexity if by_loop else None,
        "stopped_exact_match": wilson_estimate(stopped[0] * n_samples, n_samples)
        if stopped.size
        else None,
        "stopped_at": stopped[1] if stopped.size else None,
    }
