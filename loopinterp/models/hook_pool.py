"""The hook points that stand at the addresses of a model, for runs of any number of loops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformer_lens.hook_points import HookPoint

from loopinterp.models.sites import Address, AddressBook

if TYPE_CHECKING:
    from loopinterp.models.config import LoopedTransformerConfig


class _WatchedHookPoint(HookPoint):
    """A hook point that tells its pool when a function is put on it."""

    def __init__(self, key: tuple[str, int | None, int | None, str], hooked: set[Any]) -> None:
        super().__init__()
        self.key, self._hooked = key, hooked

    @property
    def is_hooked(self) -> bool:
        return bool(self._forward_hooks or self._backward_hooks or self._forward_pre_hooks)

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        self._hooked.add(self)
        return super().register_forward_hook(*args, **options)

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        self._hooked.add(self)
        return super().register_forward_pre_hook(*args, **options)

    def register_full_backward_hook(self, *args: Any, **options: Any) -> Any:
        self._hooked.add(self)
        return super().register_full_backward_hook(*args, **options)


class HookPool:
    """The hook points of a model, made as runs need them and kept for good.

    Hooks on the first loops stay on when the number of loops changes; only the coda's names move.
    A run asks for the points that carry functions, so that it costs nothing where there are none.
    """

    def __init__(self, config: LoopedTransformerConfig) -> None:
        self._config = config
        self._points: dict[tuple[str, int | None, int | None, str], _WatchedHookPoint] = {}
        self._maybe_hooked: set[_WatchedHookPoint] = set()
        self._books: dict[int, AddressBook] = {}
        self._dicts: dict[int, dict[str, HookPoint]] = {}

    def book(self, n_loops: int) -> AddressBook:
        """The addresses of a run of ``n_loops`` loops."""
        if n_loops not in self._books:
            self._books[n_loops] = AddressBook(self._config, n_loops)
        return self._books[n_loops]

    def points(self, n_loops: int) -> dict[str, HookPoint]:
        """Hook points by name for a run of ``n_loops`` loops."""
        if n_loops not in self._dicts:
            self._dicts[n_loops] = {
                name: self._point(address) for name, address in self.book(n_loops).addresses.items()
            }
        for point in self.hooked():
            point.name = self._name(point, n_loops)
        return self._dicts[n_loops]

    def point(self, name: str, n_loops: int) -> HookPoint:
        """One hook point, without making all the others."""
        return self._point(self.book(n_loops).addresses[name])

    def all(self) -> Iterable[HookPoint]:
        """Every hook point ever made."""
        return self._points.values()

    def hooked(self) -> list[_WatchedHookPoint]:
        """The points that carry functions."""
        gone = {point for point in self._maybe_hooked if not point.is_hooked}
        self._maybe_hooked -= gone
        return list(self._maybe_hooked)

    def active(self, n_loops: int) -> dict[str, HookPoint]:
        """The points that carry functions and lie within a run of ``n_loops`` loops, by name."""
        if not self._maybe_hooked:
            return {}
        active: dict[str, HookPoint] = {}
        for point in self.hooked():
            loop = point.key[1]
            # Beyond the run, a loop's name may be that of a coda layer of this shorter run.
            if loop is None or loop < n_loops:
                point.name = self._name(point, n_loops)
                active[point.name] = point
        return active

    def _name(self, point: _WatchedHookPoint, n_loops: int) -> str:
        part, _, layer, component = point.key
        if part != "coda" or layer is None:
            return str(point.name)
        first = self._config.n_prelude + n_loops * self._config.n_layers
        return f"blocks.{first + layer}.{component}"

    def _point(self, address: Address) -> HookPoint:
        part = address.name.split(".")[0] if address.loop is None else "loop"
        if part == "blocks":
            in_prelude = int(address.name.split(".")[1]) < self._config.n_prelude
            part = "prelude" if in_prelude else "coda"
        key = (part, address.loop, address.layer, address.component)
        if key not in self._points:
            point = _WatchedHookPoint(key, self._maybe_hooked)
            point.name = address.name
            self._points[key] = point
        return self._points[key]
