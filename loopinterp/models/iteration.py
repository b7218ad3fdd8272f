"""Steps of a looped model bound to its input, their precision, and a check of repeatability."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import nn

from loopinterp.core.boundary import checked
from loopinterp.core.errors import MOST_LOOPS, InputError, check_integer
from loopinterp.core.text import ShortRepr, track
from loopinterp.models.protocol import CheckedModel, declared, need_examples, need_model

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel


def rounding_of(dtype: torch.dtype) -> float:
    """Largest relative change of a state in a loop from the rounding of the state alone."""
    # At fixed points states move by .5 to .7 rounding errors in half precision, to 2.1 in float32.
    return 2 * torch.finfo(dtype).eps


def is_coarse(dtype: torch.dtype) -> bool:
    """Whether rounding in this dtype hides what studies of dynamics measure."""
    return rounding_of(dtype) > 1e-4  # float16, bfloat16 and narrower


def computing_dtype(state: Tensor) -> torch.dtype:
    """The coarser one of a state's dtype and, if it is on, autocast's."""
    kind = state.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return state.dtype
    both = (state.dtype, torch.get_autocast_dtype(kind))
    return max(both, key=lambda dtype: torch.finfo(dtype).eps)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context that computes in the dtypes of weights and states."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


@torch.no_grad()
def in_float32(model: Any, inputs: Tensor) -> Any | None:
    """The model with its weights in float32: itself if they are, else a copy.

    None if its step still computes in a coarse dtype.
    """
    with no_autocast(inputs.device):
        if _computes_fine(model, inputs):
            return model
        copy = deepcopy(model).float() if isinstance(model, nn.Module) else None
        return copy if copy is not None and _computes_fine(copy, inputs) else None


def _computes_fine(model: Any, inputs: Tensor) -> bool:
    try:
        only = bind(model, inputs[:1]).at(0)
        states = only.h0, only.step(only.h0)
    except RuntimeError:  # weights of two dtypes do not multiply
        return False
    return not any(is_coarse(state.dtype) for state in states)


@dataclass(frozen=True, repr=False)
class Iteration(ShortRepr):
    """A looped model bound to one input.

    Attributes:
        advance: One loop, ``(h, e, context) -> h``.
        context: Input of a loop beyond ``e``, if any; ``context.select(rows)`` selects examples.
        takes_loop: Whether ``advance`` takes the loop's index, as ``loop=``.
    """

    e: Float[Tensor, "batch pos d_model"]
    h0: Float[Tensor, "batch pos d_model"]
    advance: Callable[..., Tensor]
    readout: Callable[[Tensor], Tensor]
    context: Any = None
    takes_loop: bool = False

    def step(
        self, h: Float[Tensor, "batch pos d_model"], loop: int | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop; its index, from 0 on, is needed if the step takes it."""
        return self.advance(h, self.e, self.context, **self.loop_argument(loop))

    def step_each(
        self, h: Float[Tensor, "batch pos d_model"], loop: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop of examples at different loops."""
        if not self.takes_loop:
            return self.step(h)
        # The examples of each loop are stepped together, and put back in their order.
        rows = [(loop == t).nonzero().flatten() for t in loop.unique()]
        parts = [self.select(some).step(h[some], int(loop[some[0]])) for some in rows]
        return torch.cat(parts)[torch.cat(rows).argsort()]

    def loop_argument(self, loop: int | None) -> dict[str, int]:
        return {"loop": loop} if self.takes_loop and loop is not None else {}

    def at(self, loop: int) -> Iteration:
        """The iteration that repeats the map of one loop."""
        check_integer("loop", loop, least=0)
        if not self.takes_loop:
            return self
        return replace(self, advance=partial(self.advance, loop=loop), takes_loop=False)

    def select(self, rows: Tensor | slice) -> Iteration:
        context = None if self.context is None else self.context.select(rows)
        return replace(self, e=self.e[rows], h0=self.h0[rows], context=context)

    @checked
    def run(
        self,
        n_loops: Annotated[int, Field(ge=0, le=MOST_LOOPS)],
        *,
        state: Float[Tensor, "batch pos d_model"] | None = None,
        start_at_loop: NonNegativeInt | None = None,
        may_diverge: bool = False,
    ) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"]]]:
        """The states after 0, 1, … ``n_loops`` loops; see :func:`~loopinterp.models.iterate`.

        With ``may_diverge``, states after the first loop may be infinite or NaN.
        """
        if start_at_loop is None and state is not None and self.takes_loop:
            expected = "the index of the first loop, as the model's step depends on it"
            fix = "Pass start_at_loop=t with the state after t loops."
            raise InputError("start_at_loop", expected=expected, given="a state alone", fix=fix)
        h, first = self.h0 if state is None else state, start_at_loop or 0
        for loop in range(n_loops + 1):
            h = self.step(h, first + loop - 1) if loop else h
            if loop < 2 or not may_diverge:
                check_finite(h, "state", loop)
            yield loop, h

    def read(
        self, h: Float[Tensor, "batch pos d_model"], loop: int
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The readout of a state, checked to be finite."""
        logits = self.readout(h)
        check_finite(logits, "logits", loop, state=h)
        return logits


def check_finite(values: Tensor, what: str, loop: int, *, state: Tensor | None = None) -> None:
    """Raise if an example's values are not finite though its state is."""
    # One sum shows that all are finite; where gradients are wanted, training looks at the loss.
    if values.requires_grad or values.sum().isfinite():
        return
    bad = ~values.isfinite().flatten(1).all(1)  # [batch]: examples with a value that is not finite
    if state is not None:
        bad &= state.isfinite().flatten(1).all(1)
    if bad.any():
        first = int(bad.nonzero()[0])
        got = (
            f"NaN or infinity in {int(bad.sum())} of {len(bad)} examples, first in example {first}"
        )
        fix = "Check weights and inputs; mask logits with a large negative number, not -inf."
        name = f"{what} after loop {loop}"
        raise InputError(name, expected="finite numbers", given=got, fix=fix)


def bind(model: LoopedModel | Any, inputs: Tensor) -> Iteration:
    """Bind a model to its input, by its own ``bind`` if it has one.

    Raises:
        InputError: If a method, now or later, breaks the protocol.
        HookError: If hooks are on, which the steps would skip.
    """
    need_model(model)
    need_examples(inputs)
    own_bind = getattr(model, "bind", None)
    if own_bind is not None:
        return own_bind(inputs)
    checked = CheckedModel(model)
    e = checked.embed(inputs)
    return Iteration(
        e,
        checked.initial_state(e),
        advance=lambda h, e, _, loop=None: checked.step(h, e, loop),
        readout=checked.readout,
        takes_loop=checked.takes_loop,
    )


def iterate(
    model: LoopedModel | Any,
    inputs: Tensor,
    n_loops: int,
    *,
    state: Float[Tensor, "batch pos d_model"] | None = None,
    start_at_loop: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"]]]:
    """The states of a run, one at a time: ``(0, h_0)``, ``(1, h_1)``, … ``(n_loops, h_T)``.

    Each loop runs when its state is requested, with gradients if they are on. States must be
    finite.

    Args:
        state: Starting state instead of the initial one; loops are counted from it.
        start_at_loop: Index of the first loop; needed with a state if the step takes it.

    Example:
        >>> from types import SimpleNamespace
        >>> double = SimpleNamespace(
        ...     embed=lambda x: x, initial_state=torch.clone, readout=torch.clone,
        ...     step=lambda h, e: h + e)
        >>> [(loop, h.item()) for loop, h in iterate(double, torch.ones(1, 1, 1), 2)]
        [(0, 1.0), (1, 2.0), (2, 3.0)]
    """
    return bind(model, inputs).run(n_loops, state=state, start_at_loop=start_at_loop)


@torch.no_grad()
@checked
def states_at(
    model: LoopedModel | Any,
    inputs: Tensor,
    row: Int[Tensor, "*place"],
    pos: Int[Tensor, "*place"],
    *,
    loops: Sequence[int],
    batch_size: PositiveInt = 256,
    may_diverge: bool = False,
) -> tuple[Float[Tensor, "loop *place d_model"], Float[Tensor, "*place d_model"]]:
    """States [loop, *place, d_model] and embeddings [*place, d_model] at given places only.

    Args:
        row: Row of ``inputs`` of each place.
        pos: Position of each place.
        loops: Increasing numbers of loops; 0 is the initial state.
        may_diverge: States that overflow become 0, from which nothing is read.
    """
    index_of = {loop: index for index, loop in enumerate(check_increasing(loops))}
    need_examples(inputs)
    for end in row.aminmax() if row.numel() else ():
        check_integer("row", int(end), least=0, most=len(inputs) - 1)
    bound = bind(model, inputs[:1])
    states = bound.h0.new_empty(len(index_of), *row.shape, bound.h0.shape[-1])
    embedding = bound.e.new_empty(*row.shape, bound.e.shape[-1])
    for start in track(range(0, len(inputs), batch_size), "run"):
        # The places of this batch of inputs, by row and position within it: [place] of each.
        here = (row >= start) & (row < start + batch_size)
        r, p = row[here] - start, pos[here]
        bound = bind(model, inputs[start : start + batch_size])
        embedding[here] = bound.e[r, p]
        for loop, h in bound.run(max(index_of), may_diverge=may_diverge):
            if loop in index_of:
                here_now = h[r, p]  # [place, d_model]
                states[index_of[loop], here] = finite_or_zero(here_now) if may_diverge else here_now
    return states, embedding


def finite_or_zero(states: Float[Tensor, "*place width"]) -> Float[Tensor, "*place width"]:
    """States, with 0 in place of those that overflowed: nothing is read from them."""
    return torch.where(states.isfinite().all(-1, keepdim=True), states, 0)


def check_increasing(loops: Sequence[int], *, most: int | None = None) -> list[int]:
    """Numbers of loops, checked to increase from 0 or more up to ``most``."""
    fix = f"Pass e.g. loops=range(0, {37 if most is None else most + 1})."
    steps = [check_integer("loops", loop, least=0, most=most, fix=fix) for loop in loops]
    if not steps or any(b <= a for a, b in pairwise(steps)):
        got = reprlib.repr(steps)
        raise InputError("loops", expected="increasing numbers", given=got, fix=fix)
    return steps


# Repeatability


@torch.no_grad()
def need_repeatable(model: Any, inputs: Tensor) -> None:
    """Raise if some method of a model is not a function of its arguments alone.

    Eight loops are repeated from their states in reverse order, after the model was bound to
    another input; then one example is run alone and beside another. Models declared ``repeatable``
    are not tried.
    """
    if declared(model, "repeatable") or not len(inputs):
        return
    one = inputs[:1]
    # The example that differs from the first one at the most positions.
    unlike = int((inputs != one).flatten(1).sum(1).argmax())
    other = inputs[unlike : unlike + 1] if unlike else inputs.flip(1)
    first, again = (bind(model, one) for _ in range(2))
    only = first.at(0)  # a table of timing signals may hold one loop alone
    states = [first.h0]
    for _ in range(8):
        states.append(only.step(states[-1]))
    logits = first.readout(states[1])
    first.readout(states[-1])
    bound_other = bind(model, other)
    other_state = bound_other.at(0).step(bound_other.h0)
    other_logits = bound_other.readout(other_state)
    repeated = [
        ("embed", first.e, again.e),
        ("initial_state", first.h0, again.h0),
        *(("step", after, only.step(before)) for before, after in reversed([*pairwise(states)])),
        ("readout", logits, first.readout(states[1])),
    ]
    both = bind(model, torch.cat([one, other]))
    state_of_both = both.at(0).step(both.h0)
    alongside = [
        ("embed", torch.cat([first.e, bound_other.e]), both.e),
        ("initial_state", torch.cat([first.h0, bound_other.h0]), both.h0),
        ("step", torch.cat([states[1], other_state]), state_of_both),
        ("readout", torch.cat([logits, other_logits]), both.readout(state_of_both)),
    ]
    # Other examples in the batch may change the rounding, by eight times as much.
    for times, pairs in ((1, repeated), (8, alongside)):
        for name, once, twice in pairs:
            if not _same(once, twice, times):
                expected = "the same for the same arguments, beside any other example"
                got = "other values " + ("beside another" if times > 1 else "at a repeated call")
                fix = "Call .eval(), seed noise by example, or declare step(self, h, e, loop)."
                while (wrapped := declared(model, "wrapped")) is not None:
                    model = wrapped  # the model inside vocabulary wrappers
                what = f"{name} of {type(model).__name__}"
                raise InputError(what, expected=expected, given=got, fix=fix)


def _same(first: Tensor, again: Tensor, times: int) -> bool:
    if first.shape != again.shape:
        return False
    # Units of rounding by which two runs of one computation may differ, as on GPUs.
    units = 64 if first.dtype in (torch.float32, torch.float64) else 4
    # Rounding goes with the size of a channel, at least a thousandth of the largest one's.
    size = first.abs().masked_fill(~first.isfinite(), 0).flatten(0, -2).amax(0)
    limit = times * units * torch.finfo(first.dtype).eps * size.clamp(min=1e-3 * float(size.max()))
    same = (first == again) | (first.isnan() & again.isnan())
    return bool((((first - again).abs() <= limit) | same).all())
