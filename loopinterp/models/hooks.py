"""Strict hooks over all loops: TransformerLens' hooks, with errors for mistakes.

Hooks of ``add_hook`` belong to the model; those of ``hooks()`` and ``run_with_hooks`` to the
thread that opened them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint, LensHandle
from transformer_lens.HookedRootModule import HookedRootModule

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import HookError
from loopinterp.models.addresses import Address, AddressBook, Index, Key, flat_names, nbytes
from loopinterp.models.protocol import LoopRule, check_dtype, check_ends, check_loops, spell

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor
    from typing_extensions import Self

    from loopinterp.models.addresses import SiteMap


P = ParamSpec("P")
R = TypeVar("R")


class _LoopHookPoint(HookPoint):
    """A hook point that raises on a hook's wrong tensor."""

    def add_hook(
        self, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd", **options: Any
    ) -> LensHandle:  # type: ignore[override]
        function = hook

        def checked(tensor: Tensor, *, hook: HookPoint) -> Any:
            returned = function(tensor, hook=hook)
            # PyTorch takes a gradient also as a tuple of one.
            in_tuple = dir == "bwd" and isinstance(returned, tuple) and len(returned) == 1
            x = returned[0] if in_tuple else returned
            check_returned(x, tensor, hook)
            return returned

        handle = super().add_hook(checked, dir=dir, **options)
        handle.user_hook = function
        return handle


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in Python even where its caller is compiled.

    ``torch.compile`` does not look again which hooks are on, so that they would be silent.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            plain: Any = torch.compiler.disable(function)
            return plain(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def check_returned(returned: Any, tensor: Tensor, hook: HookPoint) -> None:
    """Raise unless a hook returned nothing, or a tensor like its activation."""
    if returned is not None and returned is not tensor and spell(returned) != spell(tensor):
        fix = "Return the changed activation, or nothing to leave it as it is."
        what, expected = f"hook {str(hook.name)!r}", f"None, or a tensor {spell(tensor)}"
        raise HookError(what, expected=expected, given=spell(returned), fix=fix)


@dataclass(eq=False)
class _HookScope:
    """Additional hook points, for one thread and a limited time."""

    shared: dict[Key, HookPoint]  # the model's own, which its unrolled copies share
    n_loops: int  # of the run that the hooks were named for
    checkpointed: bool  # whether backward runs again what opened it
    generator: FrameType | None  # that opened it, and may be suspended in its block
    points: dict[Key, HookPoint] = field(default_factory=dict)
    closed: bool = False

    def need_here(self) -> None:
        """Raise outside the block, or if backward would repeat the run without hooks."""
        if self.generator is not None and self.generator.f_back is None:  # it is suspended
            expected = "a with block that is being run"
            got = f"one in the suspended generator {self.generator.f_code.co_name!r}"
            fix = "Finish or close it first, or decorate it with contextlib.contextmanager."
            raise HookError("hooks", expected=expected, given=got, fix=fix)
        if self.points and not self.checkpointed and _is_checkpointed():
            expected = "hooks that are there when backward runs the model again"
            got = "torch.utils.checkpoint inside a with block that opens them"
            fix = "Open them inside the checkpointed function, or use add_hook and reset_hooks."
            raise HookError("hooks", expected=expected, given=got, fix=fix)


def _is_checkpointed() -> bool:
    """Whether a function runs that ``torch.utils.checkpoint`` repeats in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(os.path.join("torch", "utils", "checkpoint.py")):
            return True
        frame = frame.f_back
    return False


def _generator_around() -> FrameType | None:
    """The generator that opens ``hooks()``, unless a context manager itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "hooks" or _is_of(frame, "contextlib")):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return None
    # Context managers and fixtures of pytest are suspended in their block on purpose.
    driver = frame.f_back
    return None if driver is None or _is_of(driver, "contextlib", "_pytest") else frame


def _is_of(frame: FrameType, *packages: str) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(packages)


_OPEN: ContextVar[tuple[_HookScope, ...]] = ContextVar("open hook scopes", default=())


def _open_scopes(shared: dict[Key, HookPoint]) -> list[_HookScope]:
    return [scope for scope in _OPEN.get() if scope.shared is shared and not scope.closed]


@dataclass(eq=False, repr=False)
class _Watched:
    function: Callable[..., Any]
    fired: bool = False

    def __call__(self, tensor: Tensor, *, hook: HookPoint) -> Any:
        self.fired = True
        return self.function(tensor, hook=hook)


class LoopHooks(HookedRootModule):
    """The hooks of a looped model: T * L named views, made when runs need them.

    Mistakes raise: an unknown name, a filter that keeps nothing, a hook that never fires or returns
    another shape. Hooks stay when the number of loops changes.
    """

    config: Any  # with to_dict(), for results and caches
    _rule: LoopRule | None = None

    def __init__(self, n_loops: int) -> None:
        super().__init__()
        self._n_loops = n_loops
        self._flags: frozenset[str] = frozenset()  # TransformerLens' flags for optional sites
        # Shared with the same model for other numbers of loops, as its weights are.
        self._points: dict[Key, HookPoint] = {}
        self._books: dict[tuple[int, frozenset[str]], AddressBook] = {}

    @property
    def n_loops(self) -> int:
        """Loops of the shown hook names and layers, and of a run without :attr:`loop_rule`.

        Setting it removes the rule.
        """
        return self._n_loops

    @n_loops.setter
    def n_loops(self, value: int) -> None:
        self._n_loops, self._rule = check_loops(value), None

    @property
    def loop_rule(self) -> LoopRule | None:
        return self._rule

    @loop_rule.setter
    def loop_rule(self, rule: LoopRule | None) -> None:
        if rule is not None:
            self._n_loops = check_loops(rule.shown)
        self._rule = rule

    def _loops(self, n_loops: int | None, n_pos: int | None = None) -> int:
        if n_loops is not None:
            return check_loops(n_loops)
        if self._rule is not None and n_pos is not None:
            return check_loops(self._rule(n_pos))
        return self.n_loops

    def _run_loops(self, n_loops: int | Tensor | None, inputs: Any) -> int:
        if isinstance(n_loops, torch.Tensor):
            return max(1, int(check_ends(n_loops, inputs).max()))
        return self._loops(n_loops, inputs.shape[1] if getattr(inputs, "ndim", 0) > 1 else None)

    def _is_set(self, n_loops: object) -> bool:
        return n_loops is not None or self._rule is None

    def _need_number(self, n_loops: object, loops: int, names: Any) -> None:
        """Raise on layer numbers if the rule gives this run other loops."""
        if n_loops is not None or loops == self.n_loops or names is None or callable(names):
            return
        for name in flat_names(names, "name of a hook"):
            if name.startswith("blocks."):
                expected = f"a run of {self.n_loops} loops, in which layers have that number"
                fix = f"Pass n_loops={loops}, or write loops.{{t}}.blocks.{{layer}}.… instead."
                raise HookError(f"hook {name!r}", expected=expected, given=str(loops), fix=fix)

    @property
    @abstractmethod
    def site_map(self) -> SiteMap:
        """The model's sites and sizes."""

    def to(self, *args: Any, **options: Any) -> Self:  # type: ignore[override]
        """As in PyTorch; a missing device is an ``InputError``."""
        for place in (*args, *options.values()):
            if isinstance(place, (str, torch.device)) and str(place) != "meta":
                resolve_device(place)
        return super().to(*args, **options)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def run_with_hooks(
        self,
        inputs: Tensor,
        *,
        n_loops: int | Int[Tensor, " batch"] | None = None,
        fwd_hooks: Iterable[tuple[Any, Callable[..., Any]]] = (),
        bwd_hooks: Iterable[tuple[Any, Callable[..., Any]]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **options: Any,
    ) -> Tensor:
        """Run with temporary hooks: ``fwd_hooks=[(name, function), …]``.

        ``function(activation, hook)`` returns a new activation, or None for no change.

        Args:
            inputs: As in :meth:`forward`, with its ``n_loops`` and ``options``.
            fwd_hooks: Names, aliases, lists of names or predicates, each with a function.
            bwd_hooks: The same for gradients; they fire in ``backward()``.
            reset_hooks_end: False leaves the hooks on, as :meth:`add_hook` does.
            clear_contexts: Empty every ``hook.ctx`` afterwards.

        Raises:
            HookError: If a name matches nothing, or a hook never fires or returns another shape,
                type or device.
        """
        loops = self._run_loops(n_loops, inputs)
        hooks = _pairs("fwd_hooks", fwd_hooks), _pairs("bwd_hooks", bwd_hooks)
        for name, _ in (*hooks[0], *hooks[1]):
            self._need_number(n_loops, loops, name)
        with self.hooks(*hooks, reset_hooks_end, clear_contexts, n_loops=loops):
            return self(inputs, n_loops=loops if n_loops is None else n_loops, **options)

    def cache_nbytes(
        self,
        batch: int,
        n_pos: int,
        *,
        n_loops: int | None = None,
        names_filter: Any = None,
        loops: Index = None,
        n_kept: int | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> int:
        """Bytes of the cache of :meth:`run_with_cache`, without running.

        ``n_kept`` positions remain after ``pos_slice``.

        Example:
            >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
            >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
            >>> model = LoopedTransformer(config)
            >>> model.cache_nbytes(2, 3, n_loops=4, names_filter="resid_post")  # 4 * 2 * 3 * 8 * 4
            768
        """
        book = self.addresses(self._loops(n_loops, n_pos))
        names = book.select(names_filter, loops)
        itemsize = (check_dtype(dtype) or self.dtype).itemsize
        chosen = [book.addresses[name] for name in names]
        return nbytes(chosen, batch, n_pos, n_kept, itemsize)

    def site(
        self,
        component: str,
        *,
        loop: Index = None,
        layer: Index = None,
        section: str = "block",
        n_loops: int | None = None,
    ) -> str | list[str]:
        """The hook name at one address; several names if an index is a slice, a list or None.

        Args:
            component: "pattern", "attn.hook_pattern", "hook_state_pre", …
            loop: Index of the loop, inside the block.
            layer: Index inside the section; optional if it has one layer.
            section: The tied "block", the "prelude" or the "coda".
            n_loops: Loops of the run; ``model.n_loops`` if None.

        Example:
            >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
            >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
            >>> model = LoopedTransformer(config.replace(n_layers=2, n_loops=4))
            >>> model.site("attn.hook_pattern", loop=-1, layer=0)
            'blocks.6.attn.hook_pattern'
        """
        return self.addresses(n_loops).site(component, loop=loop, layer=layer, section=section)

    def addresses(self, n_loops: int | None = None) -> AddressBook:
        key = self._loops(n_loops), self._flags
        if key not in self._books:
            self._books[key] = AddressBook(self.site_map, key[0])
        return self._books[key]

    def unroll(self, n_loops: int) -> Self:
        """The model with another default number of loops; weights and hooks are shared.

        For TransformerLens' tools:
        ``patching.get_act_patch_resid_pre(model.unroll(8), corrupted, cache, metric)``. Set train
        and eval mode on the original.
        """
        unrolled = object.__new__(type(self))
        vars(unrolled).update(vars(self), _n_loops=self._loops(n_loops), _rule=None)
        return unrolled

    @property
    def hook_dict(self) -> dict[str, HookPoint]:  # type: ignore[override]
        addresses = self.addresses().addresses
        return {name: self._point(address) for name, address in addresses.items()}

    @property
    def mod_dict(self) -> dict[str, nn.Module]:  # type: ignore[override]
        modules = {name: module for name, module in self.named_modules() if name}
        return {**modules, **self.hook_dict}

    def hook_points(self) -> Iterable[HookPoint]:
        """Every hook point, including loops beyond ``model.n_loops``."""
        opened = (scope.points.values() for scope in _open_scopes(self._points))
        return [*self._points.values(), *(point for points in opened for point in points)]

    def _point(self, address: Address) -> HookPoint:
        point = self._points.get(address.key)
        if point is None:  # another thread may be here too: the first point stays
            point = self._points.setdefault(address.key, _LoopHookPoint())
        point.name = address.name
        return point

    @as_written
    def _hooked(self, n_loops: int, *, is_set: bool) -> list[tuple[Address, HookPoint]]:
        """The hook points of a run that carry hooks; ``is_set``: its loops are not by the rule."""
        scopes = _open_scopes(self._points)
        for scope in scopes:
            scope.need_here()
            if not is_set and scope.points and scope.n_loops != n_loops:
                expected = f"{scope.n_loops}, for which the hooks were named"
                got = f"none, and an input that takes {n_loops}"
                fix = f"Open the hooks on model.unroll({n_loops}), or pass n_loops."
                raise HookError("n_loops", expected=expected, given=got, fix=fix)
        # A copy, as another thread may add points meanwhile.
        points = [*self._points.copy().items(), *(p for s in scopes for p in s.points.items())]
        hooked = [(key, point) for key, point in points if _carries(point)]
        # The name of a loop beyond this run may be that of a coda layer here.
        at = self.addresses(n_loops).at if hooked else {}
        for key, point in hooked:
            if key in at:
                point.name = at[key].name
        return [(at[key], point) for key, point in hooked if key in at]

    def need_no_hooks(self) -> None:
        """Raise if a hook is on: studies would step past it."""
        on = next((str(point.name) for point in self.hook_points() if _carries(point)), None)
        if on is not None:
            expected = "no hooks on a model that is studied or stepped"
            fix = "Take them off (model.reset_hooks(), or leave the with block)."
            raise HookError("model", expected=expected, given=f"one on {on!r}", fix=fix)

    def add_hook(self, name: Any, hook: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Add a hook for all threads until ``reset_hooks``; see :meth:`run_with_hooks`."""
        _need_hook_function(hook)
        for address in self.addresses().targets(name):
            point = self._point(address)
            self.check_and_add_hook(point, address.name, hook, *args, **options)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Any = (),
        bwd_hooks: Any = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        *,
        n_loops: int | None = None,
    ) -> Iterator[Self]:
        """Temporary hooks in the runs of this thread, given as to :meth:`run_with_hooks`.

        Names are those of runs of ``n_loops`` loops. A forward hook that never fires is a
        ``HookError``.
        """
        loops = self._loops(n_loops)
        book = self.addresses(loops)
        scope = _HookScope(self._points, loops, _is_checkpointed(), _generator_around())
        watched = [(name, _Watched(hook)) for name, hook in _pairs("fwd_hooks", fwd_hooks)]
        forward = [("fwd", *pair) for pair in watched]
        backward = [("bwd", *pair) for pair in _pairs("bwd_hooks", bwd_hooks)]
        # All names are looked up before the first hook is on.
        targets: list[tuple[Address, Any, Any]] = [
            (address, hook, direction)
            for direction, name, hook in forward + backward
            for address in book.targets(name)
        ]
        for address, hook, direction in targets:
            point = self._point(address)
            if reset_hooks_end:
                own = scope.points.setdefault(address.key, _LoopHookPoint())
                own.name, own.ctx = point.name, point.ctx
                point = own
            point.add_hook(hook, dir=direction)
        _OPEN.set((*_OPEN.get(), scope))
        try:
            yield self
        finally:
            # A task that began here has a copy of the list, and another thread may end the block.
            scope.closed, scope.generator = True, None
            _OPEN.set(tuple(each for each in _OPEN.get() if not each.closed))
            if reset_hooks_end and clear_contexts:
                self.clear_contexts()
        silent = [name for name, hook in watched if not hook.fired]
        if silent:
            name = "predicate" if callable(silent[0]) else repr(silent[0])
            expected, got = "a hook that fires in the run", "no firing"
            fix = "Look at start_at_loop, stop_at_loop, n_loops and return_type."
            raise HookError(f"hook {name}", expected=expected, given=got, fix=fix)


def _carries(point: HookPoint) -> bool:
    return bool(point._forward_hooks or point._backward_hooks or point._forward_pre_hooks)


def _need_hook_function(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin, which tells nothing
        return
    try:
        signature.bind(None, hook=None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        expected, fix = "a function of (activation, hook)", "Give it an argument called hook."
        got = f"{name}{signature}"
        raise HookError("hook function", expected=expected, given=got, fix=fix) from None


def _pairs(what: str, hooks: Any) -> list[tuple[Any, Any]]:
    listed = list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str) else [hooks]
    for one in listed:
        if not (isinstance(one, (tuple, list)) and len(one) == 2 and callable(one[1])):
            got, fix = f"a {type(one).__name__}, {one!r}", "Write [(name, function), ...]."
            raise HookError(what, expected="pairs of name and function", given=got, fix=fix)
        _need_hook_function(one[1])
    return [(name, function) for name, function in listed]
