"""Run a looped model until a stopping rule is content with each example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import bind
from loopinterp.models.run_inputs import check_ends, check_logits
from loopinterp.models.stopping_rules import LoopView
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration, LoopedModel
    from loopinterp.models.stopping_rules import StoppingRule


@dataclass(frozen=True, repr=False)
class Stopped(ShortRepr):
    """Where each example stopped, and what the model held and said there.

    Attributes:
        loop: Loops run when it stopped.
        fired: Whether the rule chose the loop; where not, ``loop`` is the last one run.
        logits: Readout at that loop.
        state: h at that loop.
        scores: The rule's score after each loop, 0 first; NaN once an example has left.
    """

    loop: Int[Tensor, " batch"]
    fired: Bool[Tensor, " batch"]
    logits: Float[Tensor, "batch pos d_vocab_out"]
    state: Float[Tensor, "batch pos d_model"]
    scores: Float[Tensor, "loop batch"]


@torch.no_grad()
def run_until(
    model: LoopedModel | Any,
    inputs: Tensor,
    rule: StoppingRule,
    *,
    max_loops: int | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
    n_loops: Int[Tensor, " batch"] | None = None,
) -> Stopped:
    """Run a looped model until a rule stops each example. Without gradients.

    ``mask`` and ``n_loops`` describe the batch and may be given with any rule.

    Args:
        model: Any looped model.
        inputs: Its input, ``[batch, pos]`` or ``[batch, pos, d_features]``.
        rule: When to stop.
        max_loops: Loops after which an example is stopped even if the rule did not fire.
            Needed where the rule itself has no end.
        mask: Positions that count for the rule; all by default.
        n_loops: T(n) of each example, for :class:`Oracle`.

    Raises:
        InputError: If there is no limit to the loops, a shape or dtype is wrong, or what an
            example answers where it stops is NaN.

    Example:
        >>> from types import SimpleNamespace
        >>> from loopinterp.models.settling_rules import ResidualBelow
        >>> halve = SimpleNamespace(
        ...     embed=lambda x: x, initial_state=torch.ones_like, readout=lambda h: h,
        ...     step=lambda h, e: (h + e) / 2)   # h_t = e + (1 - e) / 2**t
        >>> run_until(halve, torch.full((1, 1, 2), 2.0), ResidualBelow(0.02), max_loops=20).loop
        tensor([5])
    """
    if max_loops is not None:
        check_integer("max_loops", max_loops, least=0)
    iteration = bind(model, inputs)
    mask = _check_mask(mask, iteration.h0)
    if n_loops is not None:
        check_ends(n_loops, iteration.h0)
    horizon = rule.horizon(max_loops, n_loops)
    past = getattr(rule, "past", 1)
    view = LoopView(0, iteration.h0, mask, n_loops, iteration.readout, None, past)
    if rule.tolerance is None:
        stopped = _choose_best(iteration, view, rule, horizon)
    else:
        stopped = _stop_at_first(iteration, view, rule, horizon, tolerance=rule.tolerance)
    check_logits(stopped.logits, "at the loop of the answer")
    return stopped


def run_rules(
    model: LoopedModel | Any,
    inputs: Tensor,
    rules: Sequence[StoppingRule],
    *,
    max_loops: int,
    mask: Bool[Tensor, "batch pos"] | None = None,
    n_loops: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "rule batch"]:
    """Where each of several rules stops each example, from one run of all loops.

    Args:
        model: Any looped model.
        inputs: Its input.
        rules: When to stop; each stops where :func:`run_until` would.
        max_loops: Loops after which an example is stopped in any case.
        mask: Positions that count for the rules; all by default.
        n_loops: T(n) of each example, for :class:`Oracle`.

    Raises:
        InputError: If there is no rule, and as :func:`run_until`.
    """
    scores = score_loops(model, inputs, rules, max_loops=max_loops, mask=mask, n_loops=n_loops)
    return torch.stack([first_ready(s, r.tolerance) for s, r in zip(scores, rules)])


@torch.no_grad()
def score_loops(
    model: LoopedModel | Any,
    inputs: Tensor,
    rules: Sequence[StoppingRule],
    *,
    max_loops: int,
    mask: Bool[Tensor, "batch pos"] | None = None,
    n_loops: Int[Tensor, " batch"] | None = None,
) -> list[Float[Tensor, "loop batch"]]:
    """What each of several rules scores after each loop, from one run; see :func:`run_rules`.

    Returns:
        The scores of each rule, 0 loops first, up to its own horizon.
    """
    check_integer("max_loops", max_loops, least=0)
    if not rules:
        raise InputError("rules", expected="at least one", given="none", fix="Pass e.g. Fixed(4).")
    iteration = bind(model, inputs)
    mask = _check_mask(mask, iteration.h0)
    if n_loops is not None:
        check_ends(n_loops, iteration.h0)
    ends = [rule.horizon(max_loops, n_loops) for rule in rules]
    past = max(getattr(rule, "past", 1) for rule in rules)
    view = LoopView(0, iteration.h0, mask, n_loops, iteration.readout, None, past)
    scores: list[list[Tensor]] = [[] for _ in rules]
    for loop in range(max(ends) + 1):
        view = view.next(iteration.step(view.state, view.loop)) if loop else view
        for found, rule, end in zip(scores, rules, ends):
            if loop <= end:
                found.append(rule.score(view).float())
    return [torch.stack(found) for found in scores]


def first_ready(
    scores: Float[Tensor, "loop batch"], tolerance: float | None
) -> Int[Tensor, " batch"]:
    """The first score at or below the tolerance, or the least; the last loop where none is."""
    scores = torch.where(scores.isnan(), math.inf, scores)
    wanted = scores.amin(0) if tolerance is None else tolerance
    ready = (scores <= wanted) & (scores < math.inf)
    return torch.where(ready.any(0), ready.int().argmax(0), len(scores) - 1)


def _stop_at_first(
    iteration: Iteration, view: LoopView, rule: StoppingRule, horizon: int, *, tolerance: float
) -> Stopped:
    """Online: an example leaves at the first score at or below the tolerance."""
    n_examples, device = view.state.shape[0], view.state.device
    rows = torch.arange(n_examples, device=device)
    loops = torch.full_like(rows, horizon)
    fired = torch.zeros(n_examples, dtype=torch.bool, device=device)
    scores = torch.full((horizon + 1, n_examples), math.nan, dtype=torch.float32, device=device)
    parts: list[tuple[Tensor, LoopView]] = []
    while True:
        score = rule.score(view).to(scores.dtype)
        scores[view.loop, rows] = score
        ready = score <= tolerance
        leaving = torch.ones_like(ready) if view.loop == horizon else ready
        loops[rows[ready]], fired[rows[ready]] = view.loop, True
        if leaving.all():
            parts.append((rows, view))
            break
        if leaving.any():
            parts.append((rows[leaving], view.select(leaving)))
            rows, view = rows[~leaving], view.select(~leaving)
            iteration = iteration.select(~leaving)
        view = view.next(iteration.step(view.state, view.loop))
    order = torch.cat([part_rows for part_rows, _ in parts]).argsort()
    logits = torch.cat([part.logits for _, part in parts])[order]
    state = torch.cat([part.state for _, part in parts])[order]
    return Stopped(loops, fired, logits, state, scores)


def _choose_best(iteration: Iteration, view: LoopView, rule: StoppingRule, horizon: int) -> Stopped:
    """Offline: the loop of least score, the earliest of equals; the best so far is kept."""
    n_examples, device = view.state.shape[0], view.state.device
    best = torch.full((n_examples,), math.inf, dtype=torch.float32, device=device)
    loops = torch.full((n_examples,), horizon, device=device)
    logits, state = view.logits, view.state
    scores: list[Tensor] = []
    for loop in range(horizon + 1):
        view = view.next(iteration.step(view.state, view.loop)) if loop else view
        scores.append(rule.score(view).to(best.dtype))
        better = scores[-1] < best
        best = torch.where(better, scores[-1], best)
        loops[better] = loop
        # At the end the last loop stands in wherever no score was a number.
        take = better | (best == math.inf) if loop == horizon else better
        if take.any():
            rows = take[:, None, None]
            logits, state = view.logits.where(rows, logits), view.state.where(rows, state)
    return Stopped(loops, best < math.inf, logits, state, torch.stack(scores))


def _check_mask(mask: Tensor | None, h0: Tensor) -> Tensor:
    shape = tuple(h0.shape[:2])
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=h0.device)
    if mask.dtype != torch.bool or tuple(mask.shape) != shape or mask.device != h0.device:
        raise InputError(
            "mask",
            expected=f"a bool tensor {list(shape)} on {h0.device}",
            given=f"{mask.dtype} {list(mask.shape)} on {mask.device}",
            fix="Pass for instance batch.targets != IGNORE.",
        )
    if not mask.any(-1).all():
        raise InputError(
            "mask",
            expected="at least one position in each example",
            given=f"none in {int((~mask.any(-1)).sum())} of {shape[0]} examples",
            fix="Leave those examples out, or mark the positions that count.",
        )
    return mask
