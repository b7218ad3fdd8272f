"""The protocol of every looped model, and a model bound to one input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from loopinterp.errors import MOST_LOOPS, InputError, check_integer
from loopinterp.models.foreign_model import ForeignModel, takes_loop
from loopinterp.models.run_inputs import need_examples
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@runtime_checkable
class LoopedModel(Protocol):
    """A discrete dynamical system on the residual stream; all that studies of dynamics need.

    ::

        e       = model.embed(inputs)         the injected input
        h_0     = model.initial_state(e)
        h_{t+1} = model.step(h_t, e)          one loop: the weight-tied block
        y_t     = model.readout(h_t)          logits, at any loop

    Beside what it is given, no method depends on anything: not on earlier calls, and not on chance.
    A step that differs from loop to loop (a timing signal, weights of each loop) declares a
    parameter ``loop``, ``step(h, e, loop)``. It is then called with ``loop=t`` by everything that
    steps, t being the index, from 0 on, of the loop that is made.
    """

    def embed(self, inputs: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The input that is injected into every loop."""
        ...

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The state before the first loop."""
        ...

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop."""
        ...

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits read from a state."""
        ...


@dataclass(frozen=True, repr=False)
class Iteration(ShortRepr):
    """A looped model bound to one input: ``h -> step(h)``, and the state it starts from.

    Attributes:
        e: The injected input.
        h0: The state before the first loop.
        advance: One loop, ``(h, e, context) -> h``; that of a ``LoopedTransformer`` takes taps too.
        readout: Logits read from a state.
        context: What a loop knows of the input beyond ``e``; its ``select`` gives that of some
            examples. None if there is nothing.
        takes_loop: Whether ``advance`` takes the index of the loop too, as ``loop=``.
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
        """One loop.

        Args:
            h: The state before it.
            loop: Its index, from 0 on. Needed where the model's step takes it.

        Raises:
            InputError: If the model's step takes the index, and none is given.
        """
        return self.advance(h, self.e, self.context, **self.index(loop))

    def step_each(
        self, h: Float[Tensor, "batch pos d_model"], loop: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop of examples that are not all at the same one."""
        if not self.takes_loop:
            return self.step(h)
        rows = [(loop == t).nonzero().flatten() for t in loop.unique()]
        parts = [self.select(some).step(h[some], int(loop[some[0]])) for some in rows]
        return torch.cat(parts)[torch.cat(rows).argsort()]

    def index(self, loop: int | None) -> dict[str, int]:
        """What ``advance`` is told of the loop's index: nothing, where it does not take it."""
        return {"loop": loop} if self.takes_loop and loop is not None else {}

    def at(self, loop: int) -> Iteration:
        """The iteration of the map that the model applies at one loop, whatever its index later.

        Fixed points, spectra and exponents are those of one map, so of a step that takes the loop's
        index they are asked of ``bind(model, inputs).at(loop)``.
        """
        check_integer("loop", loop, least=0)
        if not self.takes_loop:
            return self
        return replace(self, advance=partial(self.advance, loop=loop), takes_loop=False)

    def select(self, rows: Tensor | slice) -> Iteration:
        """The iteration of some examples of the batch."""
        context = None if self.context is None else self.context.select(rows)
        return replace(self, e=self.e[rows], h0=self.h0[rows], context=context)

    def run(
        self,
        n_loops: int,
        *,
        state: Float[Tensor, "batch pos d_model"] | None = None,
        start_at_loop: int | None = None,
        may_diverge: bool = False,
    ) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"]]]:
        """The states after 0, 1, … ``n_loops`` loops; see :func:`~loopinterp.models.iterate`.

        With ``may_diverge``, states may leave the finite numbers after the first loop.
        """
        check_integer("n_loops", n_loops, least=0, far=MOST_LOOPS)
        if start_at_loop is None and state is not None and self.takes_loop:
            raise InputError(
                "start_at_loop",
                expected="the index of the first loop to make, as the model's step depends on it",
                given="a state alone",
                fix="Pass start_at_loop=t with the state after t loops.",
            )
        first = check_integer("start_at_loop", start_at_loop or 0, least=0)
        return self._states(n_loops, self.h0 if state is None else state, first, may_diverge)

    def _states(
        self, n_loops: int, h: Tensor, first: int, may_diverge: bool
    ) -> Iterator[tuple[int, Tensor]]:
        for loop in range(n_loops + 1):
            h = self.step(h, first + loop - 1) if loop else h
            if loop < 2 or not may_diverge:
                _check_finite(h, "state", loop)
            yield loop, h

    def read(
        self, h: Float[Tensor, "batch pos d_model"], loop: int
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The readout of the state after some loop.

        Raises:
            InputError: If the logits of a finite state are not finite.
        """
        logits = self.readout(h)
        _check_finite(logits, "logits", loop, given=h)
        return logits


def _check_finite(values: Tensor, what: str, loop: int, *, given: Tensor | None = None) -> None:
    """Raise at the first example whose values are not finite, though what was given is."""
    # One sum says that all is well; where gradients are wanted, training looks at the loss.
    if values.requires_grad or values.sum().isfinite():
        return
    bad = ~values.isfinite().flatten(1).all(1)
    if given is not None:
        bad &= given.isfinite().flatten(1).all(1)
    if bad.any():
        raise InputError(
            f"{what} after loop {loop}",
            expected="finite numbers",
            given=f"NaN or infinity in {int(bad.sum())} of {len(bad)} examples, "
            f"first in example {int(bad.nonzero()[0])}",
            fix="Check the model's weights and its inputs; mask logits with a large negative "
            "number, not with -inf.",
        )


def bind(model: LoopedModel | Any, inputs: Tensor) -> Iteration:
    """Bind a model to its input, so that a solver sees a plain map ``h -> h'``.

    Models whose step depends on the tokens beyond ``e`` (abacus positions on queries and
    keys) offer ``bind`` themselves, and it is used.

    Raises:
        InputError: If the model is none, or there is no example; if one of its methods, now or
            later, returns something else than floats ``[batch, pos, …]``, or writes into what it
            was given.
        HookError: If hooks are on, which the steps would go past.
    """
    need_model(model)
    need_examples(inputs)
    own = getattr(model, "bind", None)
    if own is not None:
        return own(inputs)
    held = ForeignModel(model)
    e = held.embed(inputs)
    h0 = held.initial_state(e)
    return Iteration(
        e,
        h0,
        advance=lambda h, e, _, loop=None: held.step(h, e, loop),
        readout=held.readout,
        takes_loop=held.takes_loop,
    )


def need_one_map(model: LoopedModel | Any) -> None:
    """Raise on a step that takes the loop's index, where a study is of one map for all loops."""
    if takes_loop(model):
        raise InputError(
            "model",
            expected="one map for all loops, as fixed points, basins, spectra and transition "
            "tables are those of a map",
            given=f"{type(model).__name__}, whose step depends on the loop's index",
            fix="Wrap it in a model whose step calls model.step(h, e, loop=t) with one t, to "
            "study that loop's map; patching, lenses and comparisons take the model as it is.",
        )


def need_model(model: object) -> None:
    """Raise unless a model has the protocol's methods."""
    a_class = isinstance(model, type)
    if not a_class and (hasattr(model, "bind") or isinstance(model, LoopedModel)):
        return
    inside = getattr(model, "model", None)
    fix = "Pass a LoopedTransformer, or wrap your own model in these four methods."
    if isinstance(inside, LoopedModel):
        fix = "Pass its .model."
    elif callable(inside) and not a_class:  # a run
        fix = "Pass its .model()."
    elif isinstance(model, (str, PathLike)):
        fix = f"Pass loopinterp.load({str(model)!r})."
    raise InputError(
        "model",
        expected="a looped model, with embed, initial_state, step and readout",
        given=f"the class {model.__name__} itself" if a_class else type(model).__name__,
        fix=fix,
    )


def need_hooks(model: object) -> None:
    """Raise unless the activations inside a model's loops have addresses, and can be changed."""
    need_model(model)
    if not hasattr(model, "run_with_cache") or not hasattr(model, "site"):
        raise InputError(
            "model",
            expected="a LoopedTransformer or an adapter, as this study looks inside a loop, where "
            "heads and layers need hooks",
            given=f"{type(model).__name__}, which shows its states between loops only",
            fix="Use studies of states (convergence_study, compare_programs, patching_sweep of "
            "component='state'), convert its weights with loopinterp.models.convert_model, or pass "
            "loopinterp.adapters.adapt(model) of a published one.",
        )
