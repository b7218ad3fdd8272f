"""Somebody's looped model, held to what the four methods promise."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.run_inputs import spell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def takes_loop(model: Any) -> bool:
    """Whether a model's step differs from loop to loop: whether it declares ``loop``.

    A model round another says so itself, by an attribute ``takes_loop``.

    Example:
        >>> from types import SimpleNamespace
        >>> steps = lambda h, e: h, lambda h, e, loop: h + loop
        >>> [takes_loop(SimpleNamespace(step=step)) for step in steps]
        [False, True]
    """
    declared = getattr(model, "takes_loop", None)
    if declared is not None:
        return bool(declared)
    try:
        return "loop" in inspect.signature(model.step).parameters
    except (AttributeError, TypeError, ValueError):  # no step, or one that shows no signature
        return False


class ForeignModel:
    """The four methods of a model, each of which raises where it breaks the protocol.

    What comes back has the axes by which every study reads it, and what was handed in stays as it
    was: studies keep states, and a step that writes into one changes those that were kept. That is
    seen from shapes and version counters, at no cost and with no run.

    Args:
        model: A model that has them.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.takes_loop = model, takes_loop(model)

    def embed(self, inputs: Tensor) -> Tensor:
        """The injected input."""
        if not isinstance(inputs, torch.Tensor):
            return self._checked("embed", self._model.embed(inputs), ("batch", "pos"))
        return self._checked("embed", self._call("embed", inputs=inputs), inputs.shape[:2])

    def initial_state(self, e: Tensor) -> Tensor:
        """The state before the first loop."""
        return self._checked("initial_state", self._call("initial_state", e=e), e.shape[:-1])

    def step(self, h: Tensor, e: Tensor, loop: int | None = None) -> Tensor:
        """One loop, of that index."""
        index = {}
        if self.takes_loop:
            if loop is None:
                raise InputError(
                    "loop",
                    expected=f"the index of the loop, as {self._spelled('step')} takes it",
                    given="none",
                    fix="Pass it to step; or take the map of one loop, "
                    "bind(model, inputs).at(loop).step.",
                )
            index = {"loop": loop}
        stepped = self._call("step", index, h=h, e=e)
        return self._checked("step", stepped, h.shape[:-1], width=h.shape[-1])

    def readout(self, h: Tensor) -> Tensor:
        """Logits."""
        return self._checked("readout", self._call("readout", h=h), h.shape[:-1])

    def _call(self, name: str, index: dict[str, int] | None = None, /, **given: Tensor) -> Any:
        """What a method returns; raise if it has written into what it was given."""
        method = getattr(self._model, name)
        if index:
            method = partial(method, **index)
        if any(x.is_inference() for x in given.values()):  # these count no versions
            return method(*(x.clone() for x in given.values()))
        before = [x._version for x in given.values()]
        found = method(*given.values())
        for version, (argument, x) in zip(before, given.items()):
            if x._version != version:
                raise InputError(
                    self._spelled(name),
                    expected=f"a new tensor, and {argument} left as it was",
                    given=f"{argument} written in place",
                    fix=f"Write {argument} = {argument} + x instead of {argument} += x, or begin "
                    f"with {argument} = {argument}.clone().",
                )
        return found

    def _checked(
        self,
        name: str,
        found: Any,
        places: Sequence[int | str],
        *,
        width: int | None = None,
    ) -> Tensor:
        """What a method returned, if it is floats of some width at every place."""
        a_tensor = isinstance(found, torch.Tensor) and found.is_floating_point()
        if a_tensor and found.ndim == len(places) + 1:
            sizes = zip(found.shape, places)
            there = all(n == place or isinstance(place, str) for n, place in sizes)
            if there and found.shape[-1] >= 1 and width in (None, found.shape[-1]):
                return found
        last = width or ("classes" if name == "readout" else "d_model")
        raise InputError(
            self._spelled(name),
            expected=f"floats [{', '.join(map(str, (*places, last)))}]",
            given=spell(found) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}",
            fix=_fitting(name, found, places),
        )

    def _spelled(self, name: str) -> str:
        return f"{name} of {type(self._model).__name__}"


def _fitting(name: str, found: Any, places: Sequence[int | str]) -> str:
    """What to do about a return of the wrong shape."""
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) else ()
    if name in ("step", "initial_state") and len(shape) == 3 and shape[:2] != tuple(places):
        return (
            "Keep a state for each position of the input and no others: as many positions, of as "
            "many examples, as embed returns. A model with states of its own beside them (memory "
            "or register tokens) makes room for them in embed, and reads none of them in readout."
        )
    return (
        "Return one tensor with the axes batch, pos and features; parts of a state lie side by "
        "side on the last one."
    )
