"""Addresses (loop, layer, component, head, position), and their names.

TransformerLens' ``blocks.{n_prelude + loop * L + layer}.…`` has the alias
``loops.{loop}.blocks.{layer}.…``. Other names are ``prelude.{layer}.…``, ``coda.{layer}.…``,
``loops.{loop}.hook_state_pre`` (once per loop), and ``loops.{loop}.inner.{k}.blocks.{layer}.…``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from loopinterp.core.errors import HookError, unknown_name

Index = int | slice | Sequence[int] | None
Sites = Mapping[str, str]  # component -> kind of its tensor, in the order they fire
Axes = tuple[int | str, ...]  # of an activation after the batch: sizes, or "pos" and "key"
LayerKey = tuple[str, int | None, int | None]  # section ("top" outside layers), loop, layer
Key = tuple[str, int | None, int | None, str]  # a LayerKey and a component


class Sections:
    """The layers of a model: before its loop, in it, and after it."""

    prelude: tuple[Any, ...]
    block: tuple[Any, ...]
    coda: tuple[Any, ...]

    @property
    def n_prelude(self) -> int:
        return len(self.prelude)

    @property
    def n_layers(self) -> int:
        return len(self.block)

    @property
    def n_coda(self) -> int:
        return len(self.coda)


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteMap(Sections):
    """The sites of a run, and the axes of each kind of activation."""

    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    n_kv_heads: int | None = None  # heads of keys and values; n_heads if None
    d_state: int | None = None  # width of a state of several parts; d_model if None
    embedding: Sites = field(default_factory=dict)  # once per run, before the first layer
    prelude: tuple[Sites, ...] = ()  # of each layer, as block and coda
    opening: Sites = field(default_factory=dict)  # once per loop, before its layers
    block: tuple[Sites, ...] = ()
    closing: Sites = field(default_factory=dict)  # once per loop, after its layers
    entry: Sites = field(default_factory=dict)  # once per readout, before the coda
    coda: tuple[Sites, ...] = ()
    final: Sites = field(default_factory=dict)  # once per readout, after the coda
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by their flag
    layer_names: tuple[str, ...] = ()  # of the block, in loops inside a loop: inner.0.blocks.1
    state_parts: Mapping[str, slice] = field(default_factory=dict)  # features of each part
    more_axes: Mapping[str, Axes] = field(default_factory=dict)  # of further kinds

    def layers_total(self, n_loops: int) -> int:
        return self.n_prelude + n_loops * self.n_layers + self.n_coda

    @property
    def state_width(self) -> int:
        return self.d_model if self.d_state is None else self.d_state

    def axes(self, kind: str) -> Axes:
        known: dict[str, Axes] = {
            "residual": ("pos", self.d_model),
            "state": ("pos", self.state_width),
            "scale": ("pos", 1),
            "gate": ("pos", 1),
            "neuron": ("pos", self.d_mlp),
            "head": ("pos", self.n_heads, self.d_head),
            "kv_head": ("pos", self.n_kv_heads or self.n_heads, self.d_head),
            "fork": ("pos", self.n_heads, self.d_model),
            "pattern": (self.n_heads, "pos", "key"),
            **self.more_axes,
        }
        return known[kind]

    def heads(self, kind: str) -> int | None:
        n_heads = dict.fromkeys(("head", "fork", "pattern"), self.n_heads)
        return (n_heads | {"kv_head": self.n_kv_heads or self.n_heads}).get(kind)


def norm_sites(name: str, *, present: bool = True) -> dict[str, str]:
    """Sites of a norm: its scale, and the vector before weight and bias."""
    return {f"{name}.hook_scale": "scale", f"{name}.hook_normalized": "residual"} if present else {}


@dataclass(frozen=True)
class Address:
    name: str
    component: str  # within its layer or loop: attn.hook_pattern
    kind: str  # of its tensor: residual, scale, head, fork, pattern, neuron …
    section: str  # prelude, block or coda; top for embedding and final norm
    loop: int | None = None  # None outside the block
    layer: int | None = None  # inside the section; None outside of layers
    axes: Axes = ()
    in_readout: bool = False  # fires only where logits are read

    @property
    def place(self) -> LayerKey:
        return self.section, self.loop, self.layer

    @property
    def key(self) -> Key:
        """Its identity in runs of any number of loops."""
        return (*self.place, self.component)

    @property
    def pos_axis(self) -> int | None:
        return self.axes.index("pos") - len(self.axes) if "pos" in self.axes else None

    def shape(self, batch: int, n_pos: int, n_kept: int | None = None) -> tuple[int, ...]:
        """Shape of the activation; ``n_kept`` positions remain after a position slice."""
        sizes = {"pos": n_pos if n_kept is None else n_kept, "key": n_pos}
        return (batch, *(sizes[x] if isinstance(x, str) else x for x in self.axes))


def nbytes(
    addresses: Sequence[Address], batch: int, n_pos: int, n_kept: int | None, itemsize: int
) -> int:
    """Bytes of activations; see :meth:`Address.shape`."""
    # Thousands of sites have few kinds of axes: the numbers in an activation of each.
    kinds = {address.axes: address for address in addresses}
    sizes = {axes: math.prod(x.shape(batch, n_pos, n_kept)) for axes, x in kinds.items()}
    return itemsize * sum(sizes[address.axes] for address in addresses)


class AddressBook:
    """All addresses of a run of ``n_loops`` loops, in the order they fire."""

    def __init__(self, site_map: SiteMap, n_loops: int) -> None:
        self.site_map, self.n_loops = site_map, n_loops
        layers = (site_map.prelude, site_map.block, site_map.coda)
        self._sizes = dict(zip(("prelude", "block", "coda"), map(len, layers)))
        opening, closing = site_map.opening, site_map.closing
        in_layer = {k: v for section in layers for sites in section for k, v in sites.items()}
        self.kinds = {**in_layer, **opening, **closing}
        self.components = list(self.kinds)
        self.per_loop = {*opening, *closing}
        # "q" is attn.hook_q, "post" is mlp.hook_post; sites of both ln1 and ln2 have no short name.
        inside = [name for name in in_layer if name.startswith(("attn.", "mlp."))]
        self._short = {name.rpartition("hook_")[2]: name for name in inside}
        self._selected: dict[tuple[object, object], list[str]] = {}
        entries = [
            Address(prefix + name, name, kind, *place, site_map.axes(kind), in_readout)
            for sites, prefix, place, in_readout in self._in_order()
            for name, kind in sites.items()
        ]
        self.addresses = {entry.name: entry for entry in entries}
        self.at = {entry.key: entry for entry in entries}

    def _in_order(self) -> Iterator[tuple[Sites, str, LayerKey, bool]]:
        """Sites that fire together, their prefix and place, and whether they are in a readout."""
        sites, numbers, top = self.site_map, count(), ("top", None, None)

        def layers(section: str, loop: int | None = None) -> Iterator[Any]:
            for layer, each in enumerate(getattr(sites, section)):
                place = (section, loop, layer)
                yield each, f"blocks.{next(numbers)}.", place, section == "coda"

        yield sites.embedding, "", top, False
        yield from layers("prelude")
        for loop in range(self.n_loops):
            yield sites.opening, f"loops.{loop}.", ("block", loop, None), False
            yield from layers("block", loop)
            yield sites.closing, f"loops.{loop}.", ("block", loop, None), False
        yield sites.entry, "", top, True
        yield from layers("coda")
        yield sites.final, "", top, True

    def component(self, name: str) -> str:
        """The full name of a TransformerLens short name ("pattern", "resid_post")."""
        component = self._full_component(name)
        if component is None:
            raise unknown_name("component", str(name), self.components, HookError)
        return component

    def has(self, component: str) -> bool:
        return self._full_component(component) is not None

    def at_indices(self, component: str, *indices: int) -> str:
        """The full name of a component of the block at ``(loop, layer)``, or at one index.

        One index is the loop of a component that fires once per loop, else the layer of the run.
        """
        component = self.component(component)
        if len(indices) == 2:
            loop, layer = indices
            return self.site(component, loop=loop, layer=layer)  # type: ignore[return-value]
        if component in self.per_loop:
            return self.site(component, loop=indices[0])  # type: ignore[return-value]
        total = self.site_map.layers_total(self.n_loops)
        return f"blocks.{resolve_index(indices[0], total, 'layer')[0][0]}.{component}"

    def short(self, component: str) -> str:
        """The short name of a component ("z", "resid_pre"), if any."""
        short = component.rpartition("hook_")[2]
        return short if self._full_component(short) == component else component

    def _full_component(self, name: str) -> str | None:
        if not isinstance(name, str):
            return None
        candidates = (name, f"hook_{name}", self._short.get(name.removeprefix("hook_")))
        return next((known for known in candidates if known in self.components), None)

    def site(
        self,
        component: str,
        *,
        loop: Index = None,
        layer: Index = None,
        section: str = "block",
    ) -> str | list[str]:
        component = self.component(component)
        if section not in self._sizes:
            raise unknown_name("section", section, self._sizes, HookError)
        per_loop, around = component in self.per_loop, section != "block"
        unused = ["loop"] * (around and loop is not None)
        unused += ["layer"] * (per_loop and layer is not None) + ["section"] * (per_loop and around)
        if unused:
            expected = f"no {unused[0]}: it fires once per {'loop' if per_loop else 'run'}"
            got, fix = f"{section=}, {loop=}, {layer=}", f"Leave {unused[0]} out."
            raise HookError(f"site {component!r}", expected=expected, given=got, fix=fix)
        loops, one_loop = ([None], True) if around else resolve_index(loop, self.n_loops, "loop")
        layers, one_layer = [None], True
        if not per_loop:
            size = self._sizes[section]
            layer = 0 if layer is None and size == 1 else layer
            layers, one_layer = resolve_index(layer, size, f"layer of the {section}")
        # Loop by loop, and layer by layer within each.
        keys = [(section, t, k, component) for t in loops for k in layers]
        if absent := [key[2] for key in keys if key not in self.at]:
            got, fix = f"layer {absent[0]} of the {section}", "Look at list(model.hook_dict)."
            expected = "a layer with it"
            raise HookError(f"site {component!r}", expected=expected, given=got, fix=fix)
        names = [self.at[key].name for key in keys]
        return names[0] if one_loop and one_layer else names

    def resolve_name(self, name: str) -> str:
        # Names of TransformerLens' bridge: blocks.3.hook_in, blocks.3.hook_out.
        if bridged := re.fullmatch(r"(blocks\.\d+)\.hook_(in|out)", name):
            end = "pre" if bridged[2] == "in" else "post"
            name = f"{bridged[1]}.hook_resid_{end}"
        if name in self.addresses:
            return name
        by_number = name
        if in_loop := re.match(r"^loops\.(-?\d+)\.(.+)$", name):
            # The name of a layer inside a loop, by its number instead.
            for layer, other in enumerate(self.site_map.layer_names):
                if in_loop[2].startswith(f"{other}."):
                    by_number = f"loops.{in_loop[1]}.blocks.{layer}.{in_loop[2][len(other) + 1 :]}"
        alias = re.match(
            r"^(?:loops\.(-?\d+)\.(?:blocks\.(-?\d+)\.)?|(prelude|coda)\.(-?\d+)\.)(.+)$", by_number
        )
        if alias:
            component, section = alias[5], alias[3] or "block"
            loop, layer = (None if i is None else int(i) for i in (alias[1], alias[2] or alias[4]))
            if (layer is None) == (component in self.per_loop):
                return self.site(component, loop=loop, layer=layer, section=section)  # type: ignore[return-value]
        # There is no such name: a number too large, a site whose flag is off, or another mistake.
        number, loops = re.match(r"^(blocks|loops)\.(\d+)\.", name), self.n_loops
        layers = self.site_map.layers_total(loops)
        total = layers if number and number[1] == "blocks" else loops
        if number and int(number[2]) >= total:
            expected = f"{number[1]}.0 to {number[1]}.{total - 1} of a run of {loops} loops"
            got = f"{number[1]}.{number[2]}"
            fix = f"Pass a larger n_loops, or name one of those {number[1]}."
            raise HookError(f"hook {name!r}", expected=expected, given=got, fix=fix)
        for flag, sites in self.site_map.optional.items():
            if name.endswith(sites):
                what, fix = f"hook {name!r}", f"Call model.set_{flag}(True) first."
                raise HookError(what, expected=f"{flag} turned on", given="it off", fix=fix)
        raise unknown_name("hook", name, self.addresses, HookError)

    def targets(self, name: object) -> list[Address]:
        if callable(name):
            return [self.addresses[full] for full in self.select(name)]
        names = list(flat_names(name, "name of a hook"))
        if not names:
            fix = "Name a layer and loop that exist."
            raise HookError("name of a hook", expected="one or more", given="none", fix=fix)
        return [self.addresses[full] for full in dict.fromkeys(map(self.resolve_name, names))]

    def select(self, names_filter: object, loops: Index = None) -> list[str]:
        """The names that a filter keeps, only of the given loops unless None.

        The filter is None (all), a name, alias or component, several of these, or a predicate.
        """
        plain = names_filter is None or isinstance(names_filter, str)
        # Cached, as short runs spend as long on names as on computing.
        cached = plain and (loops is None or isinstance(loops, int))
        if cached and (names_filter, loops) in self._selected:
            return list(self._selected[names_filter, loops])
        if names_filter is None:
            names_kept = list(self.addresses)
        elif callable(names_filter):
            names_kept = [name for name in self.addresses if names_filter(name)]
        else:
            chosen: set[str] = set()
            for name in flat_names(names_filter, "names_filter"):
                # A bare component name means that component everywhere: every loop and layer.
                component = self._full_component(name)
                if component is None:
                    chosen.add(self.resolve_name(name))
                else:
                    chosen |= {k for k, v in self.addresses.items() if v.component == component}
            names_kept = [name for name in self.addresses if name in chosen]
        if loops is not None:
            inside = set(resolve_index(loops, self.n_loops, "loop")[0])
            names_kept = [name for name in names_kept if self.addresses[name].loop in inside]
        if not names_kept:
            expected = f"a filter that keeps some of {len(self.addresses)} hooks"
            got, fix = f"{names_filter!r} with {loops=}", "Look at list(model.hook_dict)."
            raise HookError("names_filter", expected=expected, given=got, fix=fix)
        if cached:
            self._selected[names_filter, loops] = list(names_kept)
        return names_kept


def flat_names(names: object, what: str) -> Iterator[str]:
    if isinstance(names, str):
        yield names
    elif isinstance(names, Iterable) and not isinstance(names, bytes):
        for name in names:
            yield from flat_names(name, what)
    else:
        expected, got = "a name, names, or a predicate", type(names).__name__
        raise HookError(what, expected=expected, given=got, fix="Pass model.site(...).")


def resolve_index(index: Index, size: int, what: str) -> tuple[list[int], bool]:
    """Indices counted from 0, and whether the index is a single one."""
    if index is None:
        return list(range(size)), False
    if isinstance(index, slice):
        return list(range(size))[index], False
    indices, one = ([index], True) if isinstance(index, int) else (list(index), False)
    for value in indices:
        if not -size <= value < size:
            expected, fix = f"an index from {-size} to {size - 1}", "Pass a larger n_loops."
            raise HookError(what, expected=expected, given=str(value), fix=fix)
    return [value % size for value in indices], one
