"""Hooks of one run or one ``with`` block: seen by the thread that opened them, and by no other.

Hooks that stay (``add_hook``) belong to the model, as in TransformerLens. Those of ``hooks()`` and
``run_with_hooks`` belong to who opened them: two threads may study one model at a time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformer_lens.hook_points import HookPoint, LensHandle

from loopinterp.errors import HookError

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.sites import Address, Key

Direction = Literal["fwd", "bwd"]


class LoopHookPoint(HookPoint):
    """TransformerLens' hook point, at which what a hook returns is checked."""

    def add_hook(
        self, hook: Callable[..., Any], dir: Direction = "fwd", **options: Any
    ) -> LensHandle:  # type: ignore[override]
        """TransformerLens' ``add_hook``; a hook that returns the wrong thing fails by its name."""

        def checked(tensor: Tensor, *, hook: HookPoint) -> Any:
            returned = function(tensor, hook=hook)
            # PyTorch takes a gradient also as a tuple of one.
            alone = dir == "bwd" and isinstance(returned, tuple) and len(returned) == 1
            check_returned(returned[0] if alone else returned, tensor, str(hook.name))
            return returned

        function = hook
        handle = super().add_hook(checked, dir=dir, **options)
        handle.user_hook = function
        return handle


def check_returned(returned: Any, activation: Tensor, name: str) -> None:
    """Raise unless a hook gave None, or a tensor like the activation in shape, type and device."""
    if returned is None or returned is activation:
        return
    whole = isinstance(returned, torch.Tensor)
    if not whole or _looks(returned) != _looks(activation):
        raise HookError(
            f"hook {name!r}",
            expected=f"None, or a tensor in place of the activation: {_spelled(activation)}",
            given=_spelled(returned) if whole else f"a {type(returned).__name__}",
            fix="Return the changed activation, or nothing to leave it as it is.",
        )


def _looks(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


def _spelled(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}"


class HookScope:
    """Hook points beside those of the model, there for a while and for one thread.

    Args:
        shared: The model's own points, which say what model the scope is for, whatever its number
            of loops.
        n_loops: Loops of the run that the hooks were named for.
    """

    def __init__(self, shared: dict[Key, HookPoint], n_loops: int) -> None:
        self.shared, self.n_loops, self.closed = shared, n_loops, False
        self._opener: FrameType | None = None
        self.points: dict[Key, HookPoint] = {}

    def point(self, address: Address, context: dict[Any, Any]) -> HookPoint:
        """The point at an address; ``context`` is what TransformerLens' hooks share there."""
        if address.key not in self.points:
            point = self.points[address.key] = LoopHookPoint()
            point.name, point.ctx = address.name, context
        return self.points[address.key]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let runs of this thread see the hooks."""
        self._opener = _caller_of_block()
        _OPEN.set((*_OPEN.get(), self))
        try:
            yield
        finally:
            # A task that began here has a copy of the list, and another thread may end the block.
            self.closed, self._opener = True, None
            _OPEN.set(tuple(scope for scope in _OPEN.get() if not scope.closed))

    def need_here(self) -> None:
        """Raise where a run sees the hooks and whoever opened them does not mean it.

        Raises:
            HookError: In a generator that is suspended inside the block; or under
                ``torch.utils.checkpoint`` inside the block, where backward would run again
                without them.
        """
        opener = self._opener
        if opener is None:
            return
        if opener.f_code.co_flags & _SUSPENDS and opener.f_back is None:
            raise HookError(
                "hooks",
                expected="a with block that is being run",
                given=f"one in the suspended generator {opener.f_code.co_name!r}",
                fix="Finish or close the generator first, or make it a context manager "
                "(contextlib.contextmanager).",
            )
        frame = sys._getframe(1)
        while frame is not None and frame is not opener:
            if frame.f_code.co_filename.endswith(_CHECKPOINT):
                raise HookError(
                    "hooks",
                    expected="hooks that are there when backward runs the model again",
                    given="torch.utils.checkpoint inside a with block that opens them",
                    fix="Call model.add_hook, and model.reset_hooks() after backward; or open the "
                    "hooks inside the function that is checkpointed.",
                )
            frame = frame.f_back


_SUSPENDS = CO_GENERATOR | CO_ASYNC_GENERATOR
"""Flags of the code of functions that can be left inside a with block and come back to."""

_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def _caller_of_block() -> FrameType | None:
    """The frame whose ``with`` statement opens a scope, context managers around it left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) != "loopinterp.models.strict_hooks":
        frame = frame.f_back  # as far as hooks(), which opens all scopes
    while frame is not None and (_module(frame) == "contextlib" or frame.f_code.co_name == "hooks"):
        frame = frame.f_back
    # A context manager or a fixture is suspended there on purpose; who uses it may be left too.
    while frame is not None and frame.f_code.co_flags & _SUSPENDS:
        driver = "" if frame.f_back is None else _module(frame.f_back)
        if driver.startswith("_pytest"):
            return None
        if driver != "contextlib":
            return frame
        frame = frame.f_back
        while frame is not None and _module(frame) == "contextlib":
            frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


_OPEN: ContextVar[tuple[HookScope, ...]] = ContextVar("open hook scopes", default=())


def open_scopes(shared: dict[Key, HookPoint]) -> list[HookScope]:
    """The scopes of a model that this thread has open."""
    return [scope for scope in _OPEN.get() if scope.shared is shared and not scope.closed]


class Watched:
    """A hook function that remembers whether it fired."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.fired = function, False

    def __call__(self, tensor: Tensor, *, hook: HookPoint) -> Any:
        self.fired = True
        return self.function(tensor, hook=hook)


def need_fired(watched: list[tuple[Any, Watched]]) -> None:
    """Raise on the first hook that never fired."""
    silent = [name for name, hook in watched if not hook.fired]
    if silent:
        raise HookError(
            f"hook {'predicate' if callable(silent[0]) else silent[0]!r}",
            expected="a hook that fires in the run",
            given="no firing",
            fix="Its place was not run, or by another thread: look at start_at_loop, "
            "stop_at_loop, n_loops and, for the readout, return_type.",
        )
