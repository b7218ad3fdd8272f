"""Strict hooks over all loops: as TransformerLens', but nothing fails in silence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from transformer_lens.HookedRootModule import HookedRootModule

from loopinterp.errors import HookError
from loopinterp.models.hook_scopes import (
    Direction,
    HookScope,
    LoopHookPoint,
    Watched,
    need_fired,
    open_scopes,
)
from loopinterp.models.run_inputs import check_dtype
from loopinterp.models.run_length import LoopCount
from loopinterp.models.sites import Address, AddressBook, Index, Key

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint
    from typing_extensions import Self

    from loopinterp.models.site_map import SiteMap


class LoopHooks(LoopCount, HookedRootModule):
    """The hooks of a looped model: T * L views by name, made as runs need them.

    An unknown name, a filter that keeps nothing, a hook that never fires, and one that returns
    what cannot stand in the activation's place are errors. Hooks on the first loops stay on when
    the number of loops changes; only the coda's names move.
    """

    def __init__(self, n_loops: int) -> None:
        super().__init__()
        self._n_loops = n_loops
        self._flags: frozenset[str] = frozenset()  # of TransformerLens, for sites that cost
        # Shared with the same model for other numbers of loops, as its weights are.
        self._points: dict[Key, HookPoint] = {}
        self._books: dict[tuple[int, frozenset[str]], AddressBook] = {}

    config: Any
    """What describes the model: its ``to_dict()`` goes to results and caches."""

    @property
    def site_map(self) -> SiteMap:
        """The sites of the model, and their sizes."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
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
        """Run with hooks that are taken off afterwards: ``fwd_hooks=[(name, function), …]``.

        ``function(activation, hook)`` returns the activation to go on with, or None to leave it.

        Args:
            inputs: As :meth:`forward` takes them.
            n_loops: As :meth:`forward` takes them.
            fwd_hooks: Names, each with a function. A name may be an alias, a list of names such
                as :meth:`site` gives, or a predicate.
            bwd_hooks: The same for gradients, which come when ``backward()`` is called.
            reset_hooks_end: False leaves the hooks on, as :meth:`add_hook` does.
            clear_contexts: Empty every ``hook.ctx`` afterwards.
            options: As :meth:`forward` takes them.

        Raises:
            HookError: If a name matches nothing, a hook never fired, or one returned something
                else than an activation of the same shape, type and device.
        """
        loops = self._loops_of(n_loops, inputs)
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
        """Bytes that the cache of a run would hold, without running it.

        Args:
            batch: Examples.
            n_pos: Positions of the input.
            n_loops: Loops of the run.
            names_filter: As in :meth:`run_with_cache`.
            loops: As in :meth:`run_with_cache`.
            n_kept: Positions that a position slice keeps; all if None.
            dtype: Type of the cache; the model's if None.

        Example:
            >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
            >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
            >>> model = LoopedTransformer(config)
            >>> model.cache_nbytes(2, 3, n_loops=4, names_filter="resid_post")  # 4 * 2 * 3 * 8 * 4
            768
        """
        book = self.addresses(self._loops_at(n_loops, n_pos))
        names = book.select(names_filter, loops)
        shapes = (book.addresses[name].shape(batch, n_pos, n_kept) for name in names)
        itemsize = (check_dtype(dtype) or self.dtype).itemsize
        return sum(math.prod(shape) for shape in shapes) * itemsize

    def site(
        self,
        component: str,
        *,
        loop: Index = None,
        layer: Index = None,
        section: str = "block",
        n_loops: int | None = None,
    ) -> str | list[str]:
        """Hook name of one address, or names where an index is a slice, a list or None.

        See :meth:`loopinterp.models.sites.AddressBook.site`.

        Example:
            >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
            >>> config = LoopedTransformerConfig(
            ...     d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, n_layers=2, n_loops=4
            ... )
            >>> model = LoopedTransformer(config)
            >>> model.site("attn.hook_pattern", loop=-1, layer=0)
            'blocks.6.attn.hook_pattern'
            >>> model.site("hook_resid_post", section="prelude")
            []
        """
        return self.addresses(n_loops).site(component, loop=loop, layer=layer, section=section)

    def addresses(self, n_loops: int | None = None) -> AddressBook:
        """All addresses of a run, and the ways to name them."""
        key = self._loops(n_loops), self._flags
        if key not in self._books:
            self._books[key] = AddressBook(self.site_map, key[0])
        return self._books[key]

    def unroll(self, n_loops: int) -> Self:
        """The model with another default number of loops; weights and hooks are shared.

        That is what TransformerLens' tools are given, to which it has ``n_loops * n_layers``
        layers: ``patching.get_act_patch_resid_pre(model.unroll(8), corrupted, cache, metric)``.

        Set train and eval mode on the model it is made from: ``model.unroll(3).train()`` sets the
        layers, which are shared, and leaves ``model.training`` as it was.
        """
        unrolled = object.__new__(type(self))
        vars(unrolled).update(vars(self), _n_loops=self._loops(n_loops), _rule=None)
        return unrolled

    def flag_for(self, names: Iterable[str]) -> None:
        """Turn on the flags of TransformerLens that hooks of these names need."""
        optional = self.site_map.optional
        for name in names:
            site = name.removesuffix("_grad")
            self._flags |= {flag for flag, ends in optional.items() if site.endswith(ends)}

    @property
    def hook_dict(self) -> dict[str, HookPoint]:  # type: ignore[override]
        """Hook points by name, for a run of ``model.n_loops`` loops."""
        addresses = self.addresses().addresses
        return {name: self._point(address) for name, address in addresses.items()}

    @property
    def mod_dict(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """Modules and hook points by name."""
        modules = {name: module for name, module in self.named_modules() if name}
        return {**modules, **self.hook_dict}

    def hook_points(self) -> Iterable[HookPoint]:
        """Every hook point, those of loops beyond ``model.n_loops`` included."""
        opened = (scope.points.values() for scope in open_scopes(self._points))
        return [*self._points.values(), *(point for points in opened for point in points)]

    def _point(self, address: Address) -> HookPoint:
        point = self._points.get(address.key)
        if point is None:  # another thread may be here too: the first point stays
            point = self._points.setdefault(address.key, LoopHookPoint())
        point.name = address.name
        return point

    def _hooked(self, n_loops: int, *, told: bool) -> list[tuple[Address, HookPoint]]:
        """The points that carry functions and lie within a run of so many loops."""
        scopes = open_scopes(self._points)
        for scope in scopes:
            scope.need_here()
            if not told and scope.points and scope.n_loops != n_loops:
                raise HookError(
                    "n_loops",
                    expected=f"{scope.n_loops} loops, for which the hooks that are on were named",
                    given=f"none, and an input that takes {n_loops}",
                    fix=f"Open the hooks on model.unroll({n_loops}), or pass n_loops.",
                )
        # A copy, as another thread may add points meanwhile.
        points = [*self._points.copy().items(), *(p for s in scopes for p in s.points.items())]
        hooked = [(key, point) for key, point in points if _carries(point)]
        # Beyond the run, a loop's name may be that of a coda layer of this shorter run.
        at = self.addresses(n_loops).at if hooked else {}
        for key, point in hooked:
            if key in at:
                point.name = at[key].name
        return [(at[key], point) for key, point in hooked if key in at]

    def need_no_hooks(self) -> None:
        """Raise if a hook is on, as studies would pass it by, and their results not tell of it.

        Raises:
            HookError: If one is, among those that stay or those that this thread has opened.
        """
        on = next((str(point.name) for point in self.hook_points() if _carries(point)), None)
        if on is not None:
            raise HookError(
                "model",
                expected="no hooks on a model that is studied or stepped, which goes past them",
                given=f"one on {on!r}",
                fix="Take them off (model.reset_hooks(), or leave the with block), or run the "
                "model itself: model(inputs, return_type='states').",
            )

    def add_hook(self, name: Any, hook: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Add a hook that stays until ``reset_hooks``, for every thread.

        It fires in every run that comes to its place; in one that does not, nothing is said.

        Args:
            name: A hook name or alias, a list of them as :meth:`site` gives, or a predicate.
            hook: ``function(activation, hook)``.
            args: As TransformerLens' ``add_hook`` takes them.
            options: As TransformerLens' ``add_hook`` takes them.
        """
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
        """Hooks for a while, in the runs of this thread, given as to :meth:`run_with_hooks`.

        Args:
            n_loops: Loops of the runs that the names are of; ``model.n_loops`` if None.

        Raises:
            HookError: If a name matches nothing, or if a forward hook never fired.
        """
        loops = self._loops(n_loops)
        book, scope = self.addresses(loops), HookScope(self._points, loops)
        watched = [(name, Watched(hook)) for name, hook in _pairs("fwd_hooks", fwd_hooks)]
        backward = _pairs("bwd_hooks", bwd_hooks)
        ways: dict[Direction, list[tuple[Any, Any]]] = {"fwd": watched, "bwd": backward}
        # All names are looked up before the first hook is on.
        targets: list[tuple[Address, Any, Direction]] = [
            (address, hook, way)
            for way, hooks in ways.items()
            for name, hook in hooks
            for address in book.targets(name)
        ]
        for address, hook, way in targets:
            point = self._point(address)
            place = scope.point(address, point.ctx) if reset_hooks_end else point
            place.add_hook(hook, dir=way)
        try:
            with scope.opened():
                yield self
        finally:
            if reset_hooks_end and clear_contexts:
                self.clear_contexts()
        need_fired(watched)


def _carries(point: HookPoint) -> bool:
    """Whether a hook point carries functions."""
    return bool(point._forward_hooks or point._backward_hooks or point._forward_pre_hooks)


def _pairs(what: str, hooks: Any) -> list[tuple[Any, Any]]:
    """The hooks, if each is a name with a function.

    Raises:
        HookError: If one is not.
    """
    listed = list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str) else [hooks]
    for one in listed:
        if not (isinstance(one, (tuple, list)) and len(one) == 2 and callable(one[1])):
            raise HookError(
                what,
                expected="pairs of a name and a function",
                given=f"a {type(one).__name__}, {one!r}",
                fix="Write [(name, function), ...].",
            )
    return [(name, function) for name, function in listed]
