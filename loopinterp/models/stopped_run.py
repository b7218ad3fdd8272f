"""Runs of a looped model until each example meets a stopping rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from pydantic import NonNegativeInt, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.text import ShortRepr
from loopinterp.models.iteration import Iteration, bind, computing_dtype, is_coarse, rounding_of
from loopinterp.models.protocol import check_ends, check_logits, spell

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel

_REST_LOOPS = 8  # within one rounding: then a half-precision state has converged


@dataclass(frozen=True, repr=False)
class LoopView(ShortRepr):
    """The input of a stopping rule after ``loop`` loops: the examples that still run.

    Attributes:
        loop: Loops done; 0 is the initial state.
        n_loops: T(n) of each example, if known.
        read: The model's readout; :attr:`logits` calls it at most once.
        previous: The same examples one loop earlier; None at loop 0.
        past: Number of earlier loops kept.
        rounding: Relative change that rounding explains; 0 unless the run is in half precision.
        notes: A rule's values per example, readable in :attr:`previous` one loop later.
    """

    loop: int
    state: Float[Tensor, "batch pos d_model"]
    mask: Bool[Tensor, "batch pos"]
    n_loops: Int[Tensor, " batch"] | None
    read: Callable[[Tensor], Tensor]
    previous: LoopView | None
    past: int = 1
    rounding: float = 0.0
    notes: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def logits(self) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits of the state."""
        return self.read(self.state)

    @cached_property
    def answers(self) -> Int[Tensor, "batch pos"]:
        """The most probable class at each position."""
        return self.logits.argmax(-1)

    @cached_property
    def log_probs(self) -> Float[Tensor, "batch pos d_vocab_out"]:
        """In float32 at least."""
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        return self.logits.log_softmax(-1, dtype=dtype)

    def next(self, state: Float[Tensor, "batch pos d_model"]) -> LoopView:
        """The view one loop later, with this one and ``past - 1`` before it."""
        before = self._remembering(self.past)
        return replace(self, loop=self.loop + 1, state=state, previous=before, notes={})

    def _remembering(self, past: int) -> LoopView:
        before = self.previous._remembering(past - 1) if self.previous and past > 1 else None
        return self._copy(lambda readout: readout, previous=before)

    def select(self, rows: Bool[Tensor, " batch"]) -> LoopView:
        """The view of some examples, with the readouts computed so far."""
        return self._copy(
            lambda readout: readout[rows],
            state=self.state[rows],
            mask=self.mask[rows],
            n_loops=None if self.n_loops is None else self.n_loops[rows],
            previous=self.previous.select(rows) if self.previous and self.past > 1 else None,
        )

    def _copy(self, change: Callable[[Tensor], Tensor], **fields: Any) -> LoopView:
        notes = {rule: change(note) for rule, note in self.notes.items()}
        other = replace(self, **fields, notes=notes)
        for name in vars(self).keys() & {"logits", "answers", "log_probs"}:
            vars(other)[name] = change(vars(self)[name])
        return other

    def updates(self) -> Iterator[tuple[LoopView, Float[Tensor, "batch pos d_model"]]]:
        """The kept views with ``D_t = h_t - h_{t-1}``, the last loop first."""
        view = self
        while view.previous is not None:
            yield view, (view.state - view.previous.state).float()
            view = view.previous

    def at_rounding(self) -> Bool[Tensor, "batch pos"]:
        """Whether rounding explains all movement of a position over the last 8 loops.

        None of the last 8 states is then further away than one rounding; a drift leaves that
        distance. Always False in float32.
        """
        rests = torch.zeros_like(self.mask)
        if not self.rounding:
            return rests
        limit = self.rounding * self.state.float().norm(dim=-1)  # [batch, pos]
        view, rests = self, ~rests
        for _ in range(_REST_LOOPS):
            if view.previous is None:
                return torch.zeros_like(rests)
            view = view.previous
            away = (self.state.float() - view.state.float()).norm(dim=-1)
            rests = rests & (away <= limit)
        return rests

    def worst(self, per_position: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """The largest value over the positions that count."""
        return per_position.masked_fill(~self.mask, -math.inf).amax(-1)

    def constant(self, value: float) -> Float[Tensor, " batch"]:
        n_examples, device = len(self.state), self.state.device
        return torch.full((n_examples,), value, dtype=torch.float32, device=device)


@dataclass(frozen=True, repr=False)
class _TokenView(LoopView):
    """A view in which rules score each position by itself."""

    def worst(self, per_position: Float[Tensor, "batch pos"]) -> Float[Tensor, " token"]:
        return per_position.masked_fill(~self.mask, -math.inf).flatten()

    def constant(self, value: float) -> Float[Tensor, " token"]:
        return super().constant(value)[:, None].expand(self.mask.shape).flatten()

    def by_position(self, score: Tensor) -> Float[Tensor, "batch pos"]:
        """A rule's scores; those of whole examples hold for all positions."""
        if len(score) == self.mask.numel():
            return score.view(self.mask.shape)
        return score[:, None].expand(self.mask.shape)


@runtime_checkable
class StoppingRule(Protocol):
    """A score per example and loop, and the tolerance at which to stop.

    A rule may have an attribute ``past``: how many loops it looks back, if more than one. One that
    uses ``view.worst`` of values per position can also stop each token by itself.
    """

    @property
    def tolerance(self) -> float | None:
        """Stop at the first score at or below it; None for an offline rule."""
        ...

    def horizon(self, max_loops: int | None, n_loops: Int[Tensor, " batch"] | None) -> int:
        """The last loop to run, given the caller's limit and T(n)."""
        ...

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """Lower is readier to stop."""
        ...


@dataclass(frozen=True, repr=False)
class Stopped(ShortRepr):
    """The loop at which each example stopped, with its state and logits.

    Attributes:
        fired: Whether the rule chose the loop; else ``loop`` is the last one.
        scores: The rule's score after each loop from 0 on; NaN after an example has stopped.
    """

    loop: Int[Tensor, " batch"]
    fired: Bool[Tensor, " batch"]
    logits: Float[Tensor, "batch pos d_vocab_out"]
    state: Float[Tensor, "batch pos d_model"]
    scores: Float[Tensor, "loop batch"]


@torch.no_grad()
@checked
def run_until(
    model: LoopedModel | Any,
    inputs: Tensor,
    rule: StoppingRule,
    *,
    max_loops: NonNegativeInt | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
    n_loops: Int[Tensor, " batch"] | None = None,
) -> Stopped:
    """Run a looped model until a rule stops each example, without gradients.

    Args:
        max_loops: Loops after which every example stops; needed if the rule has no end.
        mask: Positions that count for the rule; all by default.
        n_loops: T(n) of each example, for :class:`Oracle`.

    Example:
        >>> from types import SimpleNamespace
        >>> from loopinterp.models import ResidualBelow
        >>> halve = SimpleNamespace(
        ...     embed=lambda x: x, initial_state=torch.ones_like, readout=lambda h: h,
        ...     step=lambda h, e: (h + e) / 2)   # h_t = e + (1 - e) / 2**t
        >>> run_until(halve, torch.full((1, 1, 2), 2.0), ResidualBelow(0.02), max_loops=20).loop
        tensor([5])
    """
    iteration, view = _first_view(model, inputs, [rule], mask, n_loops)
    horizon = rule.horizon(max_loops, n_loops)
    run = _choose_best if rule.tolerance is None else _stop_at_first
    stopped = run(iteration, view, rule, horizon)
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
    """The loop at which each rule stops each example, from one run of all loops."""
    scores = score_loops(model, inputs, rules, max_loops=max_loops, mask=mask, n_loops=n_loops)
    return torch.stack([first_ready(s, r.tolerance) for s, r in zip(scores, rules)])


@torch.no_grad()
@checked
def score_loops(
    model: LoopedModel | Any,
    inputs: Tensor,
    rules: Sequence[StoppingRule],
    *,
    max_loops: NonNegativeInt,
    mask: Bool[Tensor, "batch pos"] | None = None,
    n_loops: Int[Tensor, " batch"] | None = None,
    per_token: bool = False,
) -> list[Float[Tensor, "loop batch *pos"]]:
    """The scores of each rule after each loop up to its horizon.

    With ``per_token``, each position has its own: ``[loop, batch, pos]``.
    """
    if not rules:
        raise InputError("rules", expected="at least one", given="none", fix="Pass e.g. Fixed(4).")
    kind = _TokenView if per_token else LoopView
    iteration, view = _first_view(model, inputs, rules, mask, n_loops, kind)
    ends = [rule.horizon(max_loops, n_loops) for rule in rules]
    scores: list[list[Tensor]] = [[] for _ in rules]
    for loop in range(max(ends) + 1):
        view = view.next(iteration.step(view.state, view.loop)) if loop else view
        for per_loop, rule, end in zip(scores, rules, ends):
            if loop <= end:
                score = rule.score(view).float()
                per_loop.append(view.by_position(score) if isinstance(view, _TokenView) else score)
    return [torch.stack(per_loop) for per_loop in scores]


@torch.no_grad()
@checked
def run_frozen(
    model: LoopedModel | Any,
    inputs: Tensor,
    rule: StoppingRule,
    *,
    max_loops: PositiveInt,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch pos d_vocab_out"]]:
    """Run until an online rule stops each token, whose state then stays as it is.

    Later loops of other tokens read the frozen states. Tokens run at least one loop, positions
    outside the mask all.

    Returns:
        The loop at which each token stopped, and the logits of the last states.
    """
    if rule.tolerance is None:
        expected, fix = "an online rule", "Pass a rule with a tolerance."
        raise InputError("rule", expected=expected, given=repr(rule), fix=fix)
    iteration, view = _first_view(model, inputs, [rule], mask, None, _TokenView)
    loops = torch.full(view.mask.shape, max_loops, device=view.mask.device)
    running = torch.ones_like(view.mask)
    rule.score(view)  # a rule may keep notes of the initial state
    for loop in range(1, max_loops + 1):
        # [batch, pos, feature]: states of stopped tokens stay.
        moved = iteration.step(view.state, view.loop)
        view = view.next(torch.where(running[..., None], moved, view.state))
        assert isinstance(view, _TokenView)
        ready = view.by_position(rule.score(view).float()) <= rule.tolerance
        stops = running & view.mask & ready
        loops = torch.where(stops, loop, loops)
        running = running & ~stops
    return loops, view.logits


def first_ready(
    scores: Float[Tensor, "loop *batch"],  # noqa: F821, UP037
    tolerance: float | None,
) -> Int[Tensor, " *batch"]:
    """The first loop at or below the tolerance, else the last; without one, the least score's."""
    scores = torch.where(scores.isnan(), math.inf, scores)
    limit = scores.amin(0) if tolerance is None else tolerance  # [batch], or one for all
    # [loop, batch]; argmax gives the first True of each example.
    ready = (scores <= limit) & (scores < math.inf)
    return torch.where(ready.any(0), ready.int().argmax(0), len(scores) - 1)


def _first_view(
    model: Any,
    inputs: Tensor,
    rules: Sequence[StoppingRule],
    mask: Tensor | None,
    n_loops: Tensor | None,
    kind: type[LoopView] = LoopView,
) -> tuple[Iteration, LoopView]:
    iteration = bind(model, inputs)
    h0 = iteration.h0
    if n_loops is not None:
        check_ends(n_loops, h0)
    every = torch.ones(h0.shape[:2], dtype=torch.bool, device=h0.device)
    mask = every if mask is None else mask
    if spell(mask) != spell(every) or not mask.any(-1).all():
        fix = "Pass for instance batch.targets != IGNORE, and leave out examples without any."
        expected = f"{spell(every)}, a position or more of each example"
        raise InputError("mask", expected=expected, given=spell(mask), fix=fix)
    return iteration, first_view(h0, mask, n_loops, iteration.readout, rules, kind)


def first_view(
    h0: Float[Tensor, "batch pos d_model"],
    mask: Bool[Tensor, "batch pos"],
    n_loops: Tensor | None,
    read: Callable[[Tensor], Tensor],
    rules: Sequence[StoppingRule],
    kind: type[LoopView] = LoopView,
) -> LoopView:
    past = max(getattr(rule, "past", 1) for rule in rules)
    view = kind(0, h0, mask, n_loops, read, None, past)
    if is_coarse(dtype := computing_dtype(h0)):
        view = replace(view, past=max(past, _REST_LOOPS), rounding=rounding_of(dtype))
    return view


def _stop_at_first(
    iteration: Iteration, view: LoopView, rule: StoppingRule, horizon: int
) -> Stopped:
    tolerance = rule.tolerance
    assert tolerance is not None
    n_examples, device = view.state.shape[0], view.state.device
    rows = torch.arange(n_examples, device=device)
    loops = torch.full_like(rows, horizon)
    fired = torch.zeros(n_examples, dtype=torch.bool, device=device)
    scores = torch.full((horizon + 1, n_examples), math.nan, dtype=torch.float32, device=device)
    parts: list[tuple[Tensor, LoopView]] = []
    while True:
        score = rule.score(view).to(scores.dtype)
        scores[view.loop, rows] = score
        ready = score <= tolerance  # [running]: examples that stop here
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
    # Examples left in groups; this puts them back in their order.
    order = torch.cat([part_rows for part_rows, _ in parts]).argsort()
    logits = torch.cat([part.logits for _, part in parts])[order]
    state = torch.cat([part.state for _, part in parts])[order]
    return Stopped(loops, fired, logits, state, scores)


def _choose_best(iteration: Iteration, view: LoopView, rule: StoppingRule, horizon: int) -> Stopped:
    n_examples, device = view.state.shape[0], view.state.device
    best = torch.full((n_examples,), math.inf, dtype=torch.float32, device=device)
    loops = torch.full((n_examples,), horizon, device=device)
    logits, state = view.logits, view.state
    scores: list[Tensor] = []
    for loop in range(horizon + 1):
        view = view.next(iteration.step(view.state, view.loop)) if loop else view
        scores.append(rule.score(view).to(best.dtype))
        better = scores[-1] < best  # [batch]: examples whose best loop so far is this one
        best = torch.where(better, scores[-1], best)
        loops[better] = loop
        # Without any score that is a number the last loop is chosen.
        take = better | (best == math.inf) if loop == horizon else better
        if take.any():
            # [batch, 1, 1], against logits and states [batch, pos, feature].
            rows = take[:, None, None]
            logits, state = view.logits.where(rows, logits), view.state.where(rows, state)
    return Stopped(loops, best < math.inf, logits, state, torch.stack(scores))
