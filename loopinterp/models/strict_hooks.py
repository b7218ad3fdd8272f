"""Strict hooks over all loops: as TransformerLens', but nothing fails in silence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from loopinterp.errors import MOST_LOOPS, HookError, check_integer
from loopinterp.models.sites import Address, AddressBook, Index, Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from typing_extensions import Self

    from loopinterp.models.model_config import LoopedTransformerConfig


class LoopHooks(HookedRootModule):
    """The hooks of a looped model: T * L views by name, made as runs need them.

    An unknown name, a filter that keeps nothing, and a hook that never fires are errors. Hooks on
    the first loops stay on when the number of loops changes; only the coda's names move.

    Args:
        config: The architecture, which decides what hooks there are.
    """

    def __init__(self, config: LoopedTransformerConfig) -> None:
        self._open_hooks: dict[str, int] = {}
        super().__init__()
        self.config = config
        self._n_loops = config.n_loops
        # Shared with the same model for other numbers of loops, as its weights are.
        self._points: dict[Key, HookPoint] = {}
        self._books: dict[int, AddressBook] = {}

    @property
    def n_loops(self) -> int:
        """Loops of a run that does not say how many it wants, and of the hook names shown."""
        return self._n_loops

    @n_loops.setter
    def n_loops(self, value: int) -> None:
        self._n_loops = check_integer("n_loops", value, least=1, far=MOST_LOOPS)

    @property
    def context_level(self) -> int:  # type: ignore[override]
        """How many ``hooks()`` are open now, for whatever number of loops."""
        return self._open_hooks["level"]

    @context_level.setter
    def context_level(self, value: int) -> None:
        self._open_hooks["level"] = value

    def _loops(self, n_loops: int | None) -> int:
        if n_loops is None:
            return self._n_loops
        return check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)

    @contextmanager
    def unrolled(self, n_loops: int | None) -> Iterator[None]:
        """Set the default number of loops for a while."""
        before, self._n_loops = self._n_loops, self._loops(n_loops)
        try:
            yield
        finally:
            self._n_loops = before

    def run_with_hooks(self, *args: Any, n_loops: int | None = None, **options: Any) -> Tensor:
        """Run with hooks that are taken off afterwards: ``fwd_hooks=[(name, function), …]``.

        ``function(activation, hook)`` returns the activation to go on with, or None to leave it.

        Raises:
            HookError: If a name matches nothing, or a hook never fired.
        """
        with self.unrolled(n_loops):
            return super().run_with_hooks(*args, **options)

    def cache_nbytes(
        self,
        batch: int,
        n_pos: int,
        *,
        n_loops: int | None = None,
        names_filter: Any = None,
        loops: Index = None,
        n_kept: int | None = None,
        dtype: torch.dtype | None = None,
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
        book = self.addresses(n_loops)
        names = book.select(names_filter, loops)
        shapes = (book.addresses[name].shape(self.config, batch, n_pos, n_kept) for name in names)
        itemsize = (dtype or next(self.parameters()).dtype).itemsize
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
        n_loops = self._loops(n_loops)
        if n_loops not in self._books:
            self._books[n_loops] = AddressBook(self.config, n_loops)
        return self._books[n_loops]

    def unroll(self, n_loops: int) -> Self:
        """The model with another default number of loops; weights and hooks are shared.

        That is what TransformerLens' tools are given, to which it has ``n_loops * n_layers``
        layers: ``patching.get_act_patch_resid_pre(model.unroll(8), corrupted, cache, metric)``.

        Set train and eval mode on the model it is made from: ``model.unroll(3).train()`` sets the
        layers, which are shared, and leaves ``model.training`` as it was.
        """
        unrolled = object.__new__(type(self))
        vars(unrolled).update(vars(self), _n_loops=self._loops(n_loops))
        return unrolled

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
        return self._points.values()

    def _point(self, address: Address) -> HookPoint:
        if address.key not in self._points:
            self._points[address.key] = HookPoint()
        point = self._points[address.key]
        point.name = address.name
        return point

    def _hooked(self) -> list[tuple[Address, HookPoint]]:
        """The points that carry functions and lie within a run of ``model.n_loops`` loops."""
        hooked = [
            key
            for key, point in self._points.items()
            if point._forward_hooks or point._backward_hooks or point._forward_pre_hooks
        ]
        # Beyond the run, a loop's name may be that of a coda layer of this shorter run.
        at = self.addresses().at if hooked else {}
        return [(at[key], self._point(at[key])) for key in hooked if key in at]

    def add_hook(self, name: Any, hook: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Add a hook that stays until ``reset_hooks``; ``name`` may be an alias or a predicate.

        It fires in every run that comes to its place; in one that does not, nothing is said.
        """
        for full, point in self._targets(name):
            self.check_and_add_hook(point, full, hook, *args, **options)

    def _enable_hook(self, name: Any, hook: Callable[..., Any], dir: Literal["fwd", "bwd"]) -> None:
        for _, point in self._targets(name):
            point.add_hook(hook, dir=dir, level=self.context_level)

    def _targets(self, name: Any) -> list[tuple[str, HookPoint]]:
        book = self.addresses()
        names = book.select(name) if callable(name) else [book.resolve(name)]
        return [(full, self._point(book.addresses[full])) for full in names]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Any = (),
        bwd_hooks: Any = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[LoopHooks]:
        """Hooks for a while.

        Raises:
            HookError: If a name matches nothing, or if a forward hook never fired.
        """
        watched = [(name, _Watched(hook)) for name, hook in fwd_hooks]
        with super().hooks(watched, list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self
        silent = [name for name, hook in watched if not hook.fired]
        if silent:
            raise HookError(
                f"hook {silent[0] if isinstance(silent[0], str) else 'predicate'!r}",
                expected="a hook that fires in the run",
                given="no firing",
                fix="Its place was not run: look at start_at_loop, stop_at_loop, n_loops and, for "
                "the readout, return_type.",
            )


class _Watched:
    """A hook function that remembers whether it fired."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.fired = function, False

    def __call__(self, activation: Tensor, hook: HookPoint) -> Any:
        self.fired = True
        return self.function(activation, hook=hook)
