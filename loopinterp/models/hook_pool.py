"""The hook points that stand at the addresses of a model, for runs of any number of loops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformer_lens.hook_points import HookPoint

from loopinterp.models.sites import Address, AddressBook

if TYPE_CHECKING:
    from loopinterp.models.model_config import LoopedTransformerConfig


_Key = tuple[str, int | None, int | None, str]
"""Section, loop, layer, component: what a hook point keeps when the number of loops changes."""


class _WatchedHookPoint(HookPoint):
    """A hook point that tells its pool when a function is put on it."""

    def __init__(self, key: _Key, hooked: set[Any]) -> None:
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
        self._points: dict[_Key, _WatchedHookPoint] = {}
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
            addresses = self.book(n_loops).addresses
            self._dicts[n_loops] = {name: self._point(a) for name, a in addresses.items()}
        self.active(n_loops)  # which names them for this run
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

    def active(self, n_loops: int) -> list[tuple[Address, HookPoint]]:
        """The points that carry functions and lie within a run of ``n_loops`` loops."""
        if not self._maybe_hooked:
            return []
        book, active = self.book(n_loops), []
        for point in self.hooked():
            # Beyond the run, a loop's name may be that of a coda layer of this shorter run.
            address = book.at.get(point.key)
            if address is not None:
                point.name = address.name
                active.append((address, point))
        return active

    def _point(self, address: Address) -> HookPoint:
        key = (*address.place, address.component)
        if key not in self._points:
            self._points[key] = point = _WatchedHookPoint(key, self._maybe_hooked)
            point.name = address.name
        return self._points[key]
