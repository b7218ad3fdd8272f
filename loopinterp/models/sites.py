"""Addresses: (loop, layer, component, head, position), and the ways to name them.

A run of T loops over a block of L layers is numbered as TransformerLens numbers layers:
``n_prelude`` layers first, then ``loop * L + layer``, then the coda. So
``blocks.{n_prelude + loop * L + layer}.attn.hook_pattern`` is the pattern of one layer at one
loop, and ``loops.{loop}.blocks.{layer}.attn.hook_pattern`` is the same place said plainly.
What happens once per loop is ``loops.{loop}.hook_state_pre`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopinterp.errors import HookError, unknown_name

if TYPE_CHECKING:
    from loopinterp.models.config import LoopedTransformerConfig

Index = int | slice | Sequence[int] | None

_ALIAS = re.compile(r"^loops\.(-?\d+)\.(?:blocks\.(-?\d+)\.)?(.+)$")
_SHORT = {
    "pattern": "attn.hook_pattern",
    "attn_scores": "attn.hook_attn_scores",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "pre": "mlp.hook_pre",
    "post": "mlp.hook_post",
}


def _norm_sites(name: str) -> dict[str, str]:
    return {f"{name}.hook_scale": "scale", f"{name}.hook_normalized": "residual"}


def layer_sites(config: LoopedTransformerConfig) -> dict[str, str]:
    """Component names of one layer, in the order they fire, with the kind of tensor each holds."""
    normed, sandwich = config.norm != "none", config.norm == "sandwich"
    post = config.norm == "post"
    sites = {"hook_resid_pre": "residual"}
    if normed and not post:
        sites |= _norm_sites("ln1")
    sites |= {f"attn.hook_{name}": "head" for name in "qkv"}
    if config.positions == "rotary":
        sites |= {"attn.hook_rot_q": "head", "attn.hook_rot_k": "head"}
    sites |= {"attn.hook_attn_scores": "pattern", "attn.hook_pattern": "pattern"}
    sites |= {"attn.hook_z": "head"}
    sites |= _norm_sites("ln1_post") if sandwich else {}
    sites |= {"hook_attn_out": "residual"}
    sites |= _norm_sites("ln1") if post else {}
    sites |= {"hook_resid_mid": "residual"}
    if normed and not post:
        sites |= _norm_sites("ln2")
    sites |= {"mlp.hook_pre": "neuron", "mlp.hook_post": "neuron"}
    sites |= _norm_sites("ln2_post") if sandwich else {}
    sites |= {"hook_mlp_out": "residual"}
    sites |= _norm_sites("ln2") if post else {}
    return sites | {"hook_resid_post": "residual"}


def loop_sites(config: LoopedTransformerConfig) -> dict[str, str]:
    """What happens once per loop: state in, injected input, loop norm, state out."""
    sites = {"hook_state_pre": "residual"}
    if config.injection != "none":
        sites["hook_injection"] = "residual"
    if config.loop_norm:
        sites |= _norm_sites("ln_loop")
    return sites | {"hook_state_post": "residual"}


def top_sites(config: LoopedTransformerConfig) -> dict[str, str]:
    """What happens once per run: embedding, positions, final norm."""
    sites = {"hook_embed": "residual"}
    if config.positions == "absolute" or (
        config.positions == "abacus" and config.abacus_target == "input"
    ):
        sites["hook_pos_embed"] = "residual"
    if config.final_norm:
        sites |= _norm_sites("ln_final")
    return sites


@dataclass(frozen=True)
class Address:
    """Where one hook stands.

    Attributes:
        name: The hook's full name.
        component: Name within its layer or loop ("attn.hook_pattern").
        kind: residual, scale, head, pattern or neuron: which axes its tensor has.
        loop: Index of the loop; None in the surround.
        layer: Index inside the tied block (or inside the prelude or coda); None per loop.
    """

    name: str
    component: str
    kind: str
    loop: int | None
    layer: int | None

    def shape(
        self, config: LoopedTransformerConfig, batch: int, n_pos: int, n_kept: int | None = None
    ) -> tuple[int, ...]:
        """Shape of the activation; ``n_kept`` positions remain after a position slice."""
        pos = n_pos if n_kept is None else n_kept
        if self.kind == "pattern":
            return (batch, config.n_heads, pos, n_pos)
        if self.kind == "head":
            return (batch, pos, config.n_heads, config.head_width)
        width = {"residual": config.d_model, "scale": 1, "neuron": config.mlp_width}[self.kind]
        return (batch, pos, width)


class AddressBook:
    """All addresses of a run of ``n_loops`` loops, and the ways to name them."""

    def __init__(self, config: LoopedTransformerConfig, n_loops: int) -> None:
        self.config, self.n_loops = config, n_loops
        layers, loops, top = layer_sites(config), loop_sites(config), top_sites(config)
        entries: list[Address] = []
        entries += [self._top(n, k) for n, k in top.items() if not n.startswith("ln_final")]
        for k in range(config.n_prelude):
            entries += self._layer(k, layers, None, k)
        for loop in range(n_loops):
            entering, leaving = self._loop(loop, loops)
            entries += entering
            for layer in range(config.n_layers):
                entries += self._layer(self.block(loop, layer), layers, loop, layer)
            entries += leaving
        for k in range(config.n_coda):
            number = config.n_prelude + n_loops * config.n_layers + k
            entries += self._layer(number, layers, None, k)
        entries += [self._top(n, k) for n, k in top.items() if n.startswith("ln_final")]
        self.addresses = {entry.name: entry for entry in entries}
        self.components = [*layers, *loops]
        self._per_loop = set(loops)
        self._selected: dict[tuple[str, int | None], list[str]] = {}

    @staticmethod
    def _layer(
        number: int, sites: dict[str, str], loop: int | None, layer: int
    ) -> Iterator[Address]:
        for name, kind in sites.items():
            yield Address(f"blocks.{number}.{name}", name, kind, loop, layer)

    @staticmethod
    def _top(name: str, kind: str) -> Address:
        return Address(name, name, kind, None, None)

    def _loop(self, loop: int, sites: dict[str, str]) -> tuple[list[Address], list[Address]]:
        """What fires before the layers of a loop, and what fires after them."""
        first = {"hook_state_pre"}
        if self.config.injection != "gated_output":
            first.add("hook_injection")
        both = [
            Address(f"loops.{loop}.{name}", name, kind, loop, None) for name, kind in sites.items()
        ]
        return (
            [a for a in both if a.component in first],
            [a for a in both if a.component not in first],
        )

    def block(self, loop: int, layer: int) -> int:
        """TransformerLens' number of a layer at a loop."""
        return self.config.n_prelude + loop * self.config.n_layers + layer

    def component(self, name: str) -> str:
        """The full component name for a TransformerLens short name ("pattern", "resid_post").

        Raises:
            HookError: If there is no such component.
        """
        for candidate in (name, f"hook_{name}", _SHORT.get(name, "")):
            if candidate in self.components:
                return candidate
        raise unknown_name("component", name, self.components, HookError)

    def site(self, component: str, *, loop: Index = None, layer: Index = None) -> str | list[str]:
        """The hook name at one address, or the list of names where an index is a slice or list.

        Raises:
            HookError: If the component is unknown or an index is out of range.
        """
        component = self.component(component)
        loops, one_loop = resolve_index(loop, self.n_loops, "loop")
        if component in self._per_loop:
            if layer is not None:
                raise HookError(
                    f"site {component!r}",
                    expected="no layer: it happens once per loop",
                    given=f"layer={layer}",
                    fix="Leave layer out.",
                )
            names = [f"loops.{t}.{component}" for t in loops]
            return names[0] if one_loop else names
        if layer is None and self.config.n_layers == 1:
            layer = 0
        layers, one_layer = resolve_index(layer, self.config.n_layers, "layer")
        names = [f"blocks.{self.block(t, n)}.{component}" for t in loops for n in layers]
        return names[0] if one_loop and one_layer else names

    def resolve(self, name: str) -> str:
        """The full name for a hook name or its ``loops.{t}.blocks.{l}.…`` alias.

        Raises:
            HookError: If the name does not exist in a run of this many loops.
        """
        if name in self.addresses:
            return name
        alias = _ALIAS.match(name)
        if alias:
            loop, component = int(alias[1]), alias[3]
            layer = None if alias[2] is None else int(alias[2])
            if (layer is None) == (component in self._per_loop):
                return self.site(component, loop=loop, layer=layer)  # type: ignore[return-value]
        number = re.match(r"^(blocks|loops)\.(\d+)\.", name)
        if number:
            total = (
                self.config.layers_total(self.n_loops) if number[1] == "blocks" else self.n_loops
            )
            if int(number[2]) >= total:
                raise HookError(
                    f"hook {name!r}",
                    expected=f"{number[1]}.0 to {number[1]}.{total - 1}: the run has "
                    f"{self.n_loops} loops of {self.config.n_layers} layers",
                    given=f"{number[1]}.{number[2]}",
                    fix=f"Pass a larger n_loops, or name one of those {number[1]}.",
                )
        raise unknown_name("hook", name, self.addresses, HookError)

    def select(self, names_filter: object, loops: Index = None) -> list[str]:
        """The names that a filter keeps.

        Args:
            names_filter: None for all; a hook name, alias or component name, or several of
                them; or a predicate on full names.
            loops: Keep only what lies inside these loops; None keeps the surround as well.

        Raises:
            HookError: If a name, or the whole filter, matches nothing.
        """
        if not isinstance(names_filter, str):
            return self._select(names_filter, loops)
        if loops is None or isinstance(loops, int):
            # Short runs spend as long on finding names as on computing: remember the plain cases.
            if (names_filter, loops) not in self._selected:
                self._selected[names_filter, loops] = self._select([names_filter], loops)
            return list(self._selected[names_filter, loops])
        return self._select([names_filter], loops)

    def _select(self, names_filter: object, loops: Index) -> list[str]:
        if names_filter is None:
            kept = list(self.addresses)
        elif callable(names_filter):
            kept = [name for name in self.addresses if names_filter(name)]
        else:
            if not isinstance(names_filter, Iterable):
                raise HookError(
                    "names_filter",
                    expected="None, a name, a list of names, or a predicate",
                    given=type(names_filter).__name__,
                    fix="Pass for example names_filter='hook_resid_post'.",
                )
            chosen: set[str] = set()
            for name in names_filter:
                chosen.update(self._named(name))
            kept = [name for name in self.addresses if name in chosen]
        if loops is not None:
            inside = set(resolve_index(loops, self.n_loops, "loop")[0])
            kept = [name for name in kept if self.addresses[name].loop in inside]
        if not kept:
            raise HookError(
                "names_filter",
                expected=f"a filter that keeps some of {len(self.addresses)} hooks",
                given=f"{names_filter!r} with loops={loops!r}, which keeps none",
                fix="List the hooks with list(model.hook_dict).",
            )
        return kept

    def _named(self, name: str) -> list[str]:
        # A bare component name means that component everywhere: every loop and layer.
        for candidate in (name, f"hook_{name}", _SHORT.get(name, "")):
            if candidate in self.components:
                return [n for n, a in self.addresses.items() if a.component == candidate]
        return [self.resolve(name)]


def resolve_index(index: Index, size: int, what: str) -> tuple[list[int], bool]:
    """Indices along an axis as a list, negative ones counted from the end; and whether it is one.

    Raises:
        HookError: If an index is out of range.

    Example:
        >>> resolve_index(-1, 4, "loop"), resolve_index(slice(1, 3), 4, "loop")
        (([3], True), ([1, 2], False))
    """
    if index is None:
        return list(range(size)), False
    if isinstance(index, slice):
        return list(range(size))[index], False
    indices, one = ([index], True) if isinstance(index, int) else (list(index), False)
    for value in indices:
        if not -size <= value < size:
            raise HookError(
                what,
                expected=f"an index from {-size} to {size - 1}",
                given=str(value),
                fix=f"The run has {size} of them; pass a larger n_loops or a smaller {what}.",
            )
    return [value % size for value in indices], one
