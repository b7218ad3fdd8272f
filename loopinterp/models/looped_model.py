"""The protocol of every looped model, and a model bound to one input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from loopinterp.errors import MOST_LOOPS, InputError, check_integer
from loopinterp.models.foreign_model import ForeignModel
from loopinterp.models.run_inputs import need_examples
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@runtime_checkable
class LoopedModel(Protocol):
    """A discrete dynamical system on the residual stream; all that studies of dynamics need.

    ::

        e       = model.embed(inputs)         the injected input
        h_0     = model.initial_state(e)
        h_{t+1} = model.step(h_t, e)          one loop: the weight-tied block
        y_t     = model.readout(h_t)          logits, at any loop
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
    """

    e: Float[Tensor, "batch pos d_model"]
    h0: Float[Tensor, "batch pos d_model"]
    advance: Callable[..., Tensor]
    readout: Callable[[Tensor], Tensor]
    context: Any = None

    def step(self, h: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """One loop."""
        return self.advance(h, self.e, self.context)

    def select(self, rows: Tensor | slice) -> Iteration:
        """The iteration of some examples of the batch."""
        context = None if self.context is None else self.context.select(rows)
        return replace(self, e=self.e[rows], h0=self.h0[rows], context=context)

    def run(
        self,
        n_loops: int,
        *,
        state: Float[Tensor, "batch pos d_model"] | None = None,
        may_diverge: bool = False,
    ) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"]]]:
        """The states after 0, 1, … ``n_loops`` loops; see :func:`~loopinterp.models.iterate`.

        With ``may_diverge``, states may leave the finite numbers after the first loop.
        """
        check_integer("n_loops", n_loops, least=0, far=MOST_LOOPS)
        return self._states(n_loops, self.h0 if state is None else state, may_diverge)

    def _states(self, n_loops: int, h: Tensor, may_diverge: bool) -> Iterator[tuple[int, Tensor]]:
        for loop in range(n_loops + 1):
            h = self.step(h) if loop else h
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
    return Iteration(e, h0, advance=lambda h, e, _: held.step(h, e), readout=held.readout)


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
