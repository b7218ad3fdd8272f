"""Taps: where a run lets hooks at its activations, and where nobody listens.

The forward pass is written once and passes every activation that has a name through the tap of
its place. Where nobody listens the tap hands it back. Nothing that it has seen is written in
place afterwards, so a cache need not clone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from loopinterp.models.sites import Address, Place


class Tap:
    """The hooks of one layer, one loop, or the top of the model: here, none."""

    def __call__(self, component: str, x: Tensor) -> Tensor:
        """The activation, as the hooks there leave it."""
        return x

    def listens(self, *components: str) -> bool:
        """Whether any of the components has a hook or is recorded."""
        return False

    def edits(self, *components: str) -> bool:
        """Whether any of the components has a hook, which may change it, or needs a gradient."""
        return False


SILENT = Tap()
"""The tap of a place where nobody listens."""


class _OpenTap(Tap):
    """A tap at which activations pass through hook points, and are recorded where wanted."""

    def __init__(self, record: Callable[[str, Tensor], None], *, gradients: bool) -> None:
        self._record, self._gradients = record, gradients
        self.points: dict[str, HookPoint] = {}
        self.wanted: dict[str, str] = {}  # component -> name

    def __call__(self, component: str, x: Tensor) -> Tensor:
        point = self.points.get(component)
        if point is not None:
            # Hooks of TransformerLens write in place; what they get must be nobody else's.
            x = point(x.clone())
        name = self.wanted.get(component)
        if name is not None:
            self._record(name, x)
        return x

    def listens(self, *components: str) -> bool:
        return any(c in self.points or c in self.wanted for c in components)

    def edits(self, *components: str) -> bool:
        return any(c in self.points or (self._gradients and c in self.wanted) for c in components)


class Taps:
    """The taps of a run, by place.

    Args:
        points: The hook points of the run that carry functions, with their addresses.
        wanted: Addresses to record.
        record: Called with name and activation for each address wanted.
        gradients: Whether gradients of what is recorded will be asked for.
    """

    def __init__(
        self,
        points: Iterable[tuple[Address, HookPoint]] = (),
        wanted: Iterable[Address] = (),
        record: Callable[[str, Tensor], None] = lambda name, x: None,
        *,
        gradients: bool = False,
    ) -> None:
        self._taps: dict[Place, _OpenTap] = {}

        def tap(address: Address) -> _OpenTap:
            place = address.place
            if place not in self._taps:
                self._taps[place] = _OpenTap(record, gradients=gradients)
            return self._taps[place]

        for address, point in points:
            tap(address).points[address.component] = point
        for address in wanted:
            tap(address).wanted[address.component] = address.name

    def at(self, section: str, loop: int | None = None, layer: int | None = None) -> Tap:
        """The tap at a place."""
        return self._taps.get((section, loop, layer), SILENT)

    def listen(self, *components: str) -> bool:
        """Whether anybody listens to one of the components, at any place."""
        return any(tap.listens(*components) for tap in self._taps.values())


NO_TAPS = Taps()
