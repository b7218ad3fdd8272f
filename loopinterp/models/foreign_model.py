"""Somebody's looped model, held to what the four methods promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.run_inputs import spell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ForeignModel:
    """The four methods of a model, each of which raises where it breaks the protocol.

    What comes back has the axes by which every study reads it, and what was handed in stays as it
    was: studies keep states, and a step that writes into one changes those that were kept. That is
    seen from shapes and version counters, at no cost and with no run.

    Args:
        model: A model that has them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def embed(self, inputs: Tensor) -> Tensor:
        """The injected input."""
        if not isinstance(inputs, torch.Tensor):
            return self._checked("embed", self._model.embed(inputs), ("batch", "pos"))
        return self._checked("embed", self._call("embed", inputs=inputs), inputs.shape[:2])

    def initial_state(self, e: Tensor) -> Tensor:
        """The state before the first loop."""
        return self._checked("initial_state", self._call("initial_state", e=e), e.shape[:-1])

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        """One loop."""
        return self._checked("step", self._call("step", h=h, e=e), h.shape[:-1], width=h.shape[-1])

    def readout(self, h: Tensor) -> Tensor:
        """Logits."""
        return self._checked("readout", self._call("readout", h=h), h.shape[:-1], least=2)

    def _call(self, name: str, **given: Tensor) -> Any:
        """What a method returns; raise if it has written into what it was given."""
        method = getattr(self._model, name)
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
        least: int = 1,
    ) -> Tensor:
        """What a method returned, if it is floats of some width at every place."""
        a_tensor = isinstance(found, torch.Tensor) and found.is_floating_point()
        if a_tensor and found.ndim == len(places) + 1:
            sizes = zip(found.shape, places)
            there = all(n == place or isinstance(place, str) for n, place in sizes)
            if there and found.shape[-1] >= least and width in (None, found.shape[-1]):
                return found
        last = width or ("classes" if name == "readout" else "d_model")
        raise InputError(
            self._spelled(name),
            expected=f"floats [{', '.join(map(str, (*places, last)))}]"
            + (f", of {least} classes or more" if least > 1 else ""),
            given=spell(found) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}",
            fix="Return one tensor with the axes batch, pos and features; parts of a state lie "
            "side by side on the last one.",
        )

    def _spelled(self, name: str) -> str:
        return f"{name} of {type(self._model).__name__}"
