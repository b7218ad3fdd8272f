"""The graph of a run: its components in all loops, and the edges between them.

The order in which components write to the residual stream is read off the model's site map. A layer
whose stream can be read as nodes and edges has heads (``attn.hook_z``) and an MLP
(``hook_mlp_out``), and passes ``hook_attn_in`` and ``hook_mlp_in`` where they read. A norm between
the two is

- of the reader, if it comes before (``ln1``, ``ln2``);
- of the writer, if it comes before its addition (``ln1_post`` before ``hook_attn_out``);
- of the stream, if it comes after an addition, or between layers and loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.models.addresses import Sections, SiteMap, Sites

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig


HEADS, MLP = "heads", "mlp"
"""Parts of a layer that write to the stream; other parts are names of norms."""

SLOTS = ("q", "k", "v", "gate")
"""What a head reads the stream for; a gate, where it has one."""

StreamNorms = Literal["edges", "nodes"]
"""Whether edges lead through norms of the stream, or end at them."""

_NORMED = ".hook_normalized"


@dataclass(frozen=True, kw_only=True)
class GraphLayout(Sections):
    """The parts of each layer in the order of writing, and the sizes of a graph.

    ``n_neurons`` is None where MLPs cannot be taken apart.
    """

    d_model: int
    n_heads: int
    prelude: tuple[tuple[str, ...], ...] = ()
    block: tuple[tuple[str, ...], ...]
    coda: tuple[tuple[str, ...], ...] = ()
    slots: tuple[str, ...] = SLOTS[:3]
    n_neurons: int | None = None
    n_ctx: int | None = None


def layout_of(
    model: LoopedTransformerConfig | SiteMap, stream_norms: StreamNorms = "edges"
) -> GraphLayout:
    """The layout of a configuration or a site map.

    Raises:
        InputError: If a layer has no separate heads and MLP.
    """
    if not isinstance(model, SiteMap):
        return GraphLayout(
            d_model=model.d_model,
            n_heads=model.n_heads,
            prelude=((HEADS, MLP),) * model.n_prelude,
            block=((HEADS, MLP),) * model.n_layers,
            coda=((HEADS, MLP),) * model.n_coda,
            n_neurons=model.mlp_width,
            n_ctx=model.n_ctx,
        )
    sections = {"prelude": model.prelude, "block": model.block, "coda": model.coda}
    for section, layers in sections.items():
        for k, sites in enumerate(layers):
            for part, name in (("heads", "attn.hook_z"), ("an MLP", "hook_mlp_out")):
                if name not in sites:
                    raise _unplaced(f"{section}.{k} without {part} (no {name!r})")
            if sites.get("attn.hook_gate", "head") != "head":
                raise _unplaced(f"{section}.{k} with a gate that is not of each head")
    if not model.block:
        raise _unplaced("a loop without layers")
    prelude, block, coda = (
        [[*_written(sites)] if stream_norms == "nodes" else [HEADS, MLP] for sites in layers]
        for layers in sections.values()
    )
    if stream_norms == "nodes":
        block[0][:0] = norms_in(model.opening)
        block[-1] += norms_in(model.closing)
        if coda:  # else they belong to the readout
            coda[0][:0] = norms_in(model.entry)
    return GraphLayout(
        d_model=model.d_model,
        n_heads=model.n_heads,
        slots=SLOTS if "attn.hook_gate" in model.block[0] else SLOTS[:3],
        prelude=tuple(map(tuple, prelude)),
        block=tuple(map(tuple, block)),
        coda=tuple(map(tuple, coda)),
    )


def norms_in(sites: Iterable[str]) -> list[str]:
    return [name.removesuffix(_NORMED) for name in sites if name.endswith(_NORMED)]


def _written(sites: Sites) -> Iterator[str]:
    """Heads, MLP, and the norms that follow an addition, in their order."""
    added = False
    for name in sites:
        if name == "attn.hook_z":
            yield HEADS
        elif name == "hook_mlp_out":
            yield MLP
        if name.endswith(_NORMED) and added:
            yield name.removesuffix(_NORMED)
        # The stream has been added to until the next reading of it.
        added = name in ("hook_attn_out", "hook_mlp_out", "hook_resid_post") or (
            added and name.endswith(".hook_scale")
        )


def _unplaced(got: str) -> InputError:
    expected = "one whose layers write to the stream by separate heads and MLPs"
    fix = "Patch whole activations (patching_sweep), or write an adapter with these hooks."
    return InputError("model", expected=expected, given=got, fix=fix)


INPUT, READOUT = "input", "readout"
LATER = 2
"""The lag of edges that reach over two loops or more."""

LAGS = (0, 1, LATER)
TIED, UNROLLED = "tied", "unrolled"
"""The two graphs of a run."""

_WRITES = {
    "head": ("attn.hook_z", "attn.hook_result", "hook_attn_out"),
    "mlp": ("mlp.hook_post", "hook_mlp_out"),
    INPUT: ("hook_embed",),
}
"""The hooks at which a sender's output is seen, by its kind."""

_READS = {"head": ("hook_attn_in", "attn.hook_z"), "mlp": ("hook_mlp_in", "mlp.hook_pre")}
_SLOT_HOOKS = {slot: (f"attn.hook_{slot}", f"hook_{slot}_input") for slot in SLOTS[:3]}
"""The hooks at which a receiver's input is seen."""

TiedEdge = tuple[str, str, int]
"""Sender, receiver and lag."""


@dataclass(frozen=True)
class Component:
    """A head, an MLP, a group of neurons, a norm of the stream, the input or the readout."""

    tied: str  # name in the tied block, as "block.0.head.1"
    stage: int  # components of smaller stages write before it reads
    section: str = ""  # "" for the input and the readout
    loop: int | None = None  # None outside the block
    layer: int | None = None  # of the section
    head: int | None = None
    neurons: tuple[int, ...] | None = None  # of a group; None for a whole MLP
    number: int = -1  # of its layer in the run
    norm: str | None = None  # name of a norm's hooks

    @property
    def name(self) -> str:
        """Its name in the run, prefixed by the loop: ``3:block.0.head.1``."""
        return self.tied if self.loop is None else f"{self.loop}:{self.tied}"

    @property
    def place(self) -> str:
        """What the names of its hooks begin with: ``loops.3.blocks.0.``"""
        where = f"{self.section}.{self.layer}."
        return f"loops.{self.loop}.blocks.{self.layer}." if self.section == "block" else where

    def hooks(self, of_kinds: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Names of the activations that it stands for: here, and (bare) in every layer."""
        if not self.section:
            yield from of_kinds.get(self.tied, ())
            return
        hooks = of_kinds["mlp" if self.head is None else "head"]
        for hook in hooks if self.norm is None else [f"{self.norm}.hook_normalized"]:
            yield from (f"blocks.{self.number}.{hook}", f"{self.place}{hook}", hook)


class UnrolledGraph(ShortRepr):
    """Senders and receivers of a run, and the edges between them.

    Every sender (input, head, MLP) has an edge to every receiver (head, MLP, readout) that reads
    the stream after it. A *tied* edge is all edges between two components with one lag: 0 within a
    loop, 1 to the next one, 2 for all later ones; into coda and readout, counted from the last
    loop.

    Norms of the stream may be components too (``1:block.0.ln2_post``).

    Args:
        config: Of a ``LoopedTransformer``; of another model its ``site_map``, or the
            :class:`GraphLayout` made from it.
        neurons: Groups of neurons that are components, named like ``block.0.carry``; the other
            neurons of that MLP form one component.
        split: Whether queries, keys and values are separate receivers, ``0:block.0.head.1.q``.

    Raises:
        InputError: If a group's name has another form, or neurons are in two groups; if a site map
            has no separate heads and MLPs.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> graph = UnrolledGraph(config, 2)
        >>> [sender.name for sender in graph.senders][:4]
        ['input', '0:block.0.head.0', '0:block.0.head.1', '0:block.0.mlp']
        >>> int(graph.edges.sum()), len(graph.tied_edges)
        (26, 21)
    """

    @checked
    def __init__(
        self,
        config: LoopedTransformerConfig | SiteMap | GraphLayout,
        n_loops: Loops,
        *,
        neurons: Mapping[str, Sequence[int]] | None = None,
        split: bool = False,
    ) -> None:
        self.n_loops = n_loops
        self.layout = config if isinstance(config, GraphLayout) else layout_of(config)
        groups = _neuron_groups(self.layout, neurons or {})
        self.senders = [Component(INPUT, 0), *_components(self.layout, n_loops, groups)]
        last = self.senders[-1].stage + 1
        self.readers = [*self.senders[1:], Component(READOUT, last)]
        # (number of the reader, slot), with slot "" for its whole input
        self.receivers = [
            (k, slot)
            for k, reader in enumerate(self.readers)
            for slot in (self.layout.slots if split and reader.head is not None else ("",))
        ]
        self.sender_names = [sender.name for sender in self.senders]
        self.receiver_names = [_with_slot(self.readers[k].name, slot) for k, slot in self.receivers]
        self.read_stages: Int[Tensor, " receiver"]
        self.read_stages = torch.tensor([self.readers[k].stage for k, _ in self.receivers])
        write_stage = torch.tensor([sender.stage for sender in self.senders])
        # A receiver sees every sender of an earlier stage.
        self.edges: Bool[Tensor, "sender receiver"] = write_stage[:, None] < self.read_stages
        self.groups: Int[Tensor, " receiver"] | None = None
        """Receivers that may share a stream, as no sender has edges to two of a group."""

    def __repr__(self) -> str:
        return (
            f"<UnrolledGraph: {self.n_loops} loops, {len(self.senders)} senders, "
            f"{len(self.receivers)} receivers, {int(self.edges.sum())} edges>"
        )

    def restrict(self, edges: Bool[Tensor, "sender receiver"]) -> None:
        """Keep these edges alone, and group the receivers: each joins the first group it can."""
        self.edges = self.edges & edges
        heard = torch.zeros(len(self.senders), 0, dtype=torch.bool)  # senders of each group
        numbers = []
        for column in self.edges.T:
            free = (~(heard & column[:, None]).any(0)).nonzero()
            numbers.append(int(free[0]) if len(free) else heard.shape[1])
            if not len(free):
                heard = torch.cat([heard, torch.zeros_like(column)[:, None]], 1)
            heard[:, numbers[-1]] |= column
        # In the order of their last reading, as streams are dropped.
        order = {number: k for k, number in enumerate(dict.fromkeys(reversed(numbers)))}
        self.groups = torch.tensor([len(order) - 1 - order[number] for number in numbers])

    def senders_named(self, names: str | Iterable[str], what: str = "senders") -> list[int]:
        """Numbers of senders; a name without a loop stands for all loops.

        Hook names count too: ``loops.1.blocks.0.attn.hook_z`` is all heads of that layer.
        """
        return _numbers_of(what, names, [(s.name, s.tied, *s.hooks(_WRITES)) for s in self.senders])

    def receivers_named(self, names: str | Iterable[str], what: str = "receivers") -> list[int]:
        """Numbers of receivers; a name without loop or slot stands for all of them."""
        aliases = []
        for k, slot in self.receivers:
            reader = self.readers[k]
            both = (reader.name, reader.tied)
            hooks = {**_READS, "head": (*_READS["head"], *_SLOT_HOOKS.get(slot, ()))}
            aliases.append((*both, *(_with_slot(n, slot) for n in both), *reader.hooks(hooks)))
        return _numbers_of(what, names, aliases)

    def stages(self) -> Iterator[list[int]]:
        """The readers of each stage, in order."""
        for _, stage in groupby(range(len(self.readers)), lambda k: self.readers[k].stage):
            yield list(stage)

    @cached_property
    def edge_names(self) -> list[tuple[str, str]]:
        """Sender and receiver of each edge, in the order of ``edges.nonzero()``."""
        edges = self.edges.nonzero().tolist()
        return [(self.sender_names[s], self.receiver_names[r]) for s, r in edges]

    @cached_property
    def tied_edges(self) -> list[TiedEdge]:
        """Sender, receiver and lag of each edge of the tied graph."""
        return self._tied[0]

    @cached_property
    def tied_index(self) -> Int[Tensor, "sender receiver"]:
        """The number of each edge's tied edge; -1 where there is no edge."""
        return self._tied[1]

    @cached_property
    def _tied(self) -> tuple[list[TiedEdge], Tensor]:
        numbers: dict[TiedEdge, int] = {}
        index = torch.full(self.edges.shape, -1)
        for s, r in self.edges.nonzero().tolist():
            sender, (k, slot) = self.senders[s], self.receivers[r]
            reader = self.readers[k]
            # Coda and readout read after the last loop.
            loop = self.n_loops - 1 if reader.loop is None else reader.loop
            lag = 0 if sender.loop is None else min(loop - sender.loop, LATER)
            key = (sender.tied, _with_slot(reader.tied, slot), lag)
            index[s, r] = numbers.setdefault(key, len(numbers))
        return list(numbers), index


def without_slot(receiver: str) -> str:
    name, _, slot = receiver.rpartition(".")
    return name if name and slot in SLOTS else receiver


def _with_slot(name: str, slot: str) -> str:
    return f"{name}.{slot}" if slot else name


def _numbers_of(
    what: str, names: str | Iterable[str], aliases: Sequence[tuple[str, ...]]
) -> list[int]:
    """The numbers of everything with one of these names; an InputError if there is none."""
    numbers: set[int] = set()
    for name in [names] if isinstance(names, str) else names:
        matches = {k for k, known in enumerate(aliases) if name in known}
        if not matches:
            raise unknown_name(what, name, {alias for known in aliases for alias in known})
        numbers |= matches
    return sorted(numbers)


def _components(
    layout: GraphLayout, n_loops: int, groups: Mapping[str, Mapping[str, tuple[int, ...] | None]]
) -> Iterator[Component]:
    """Heads, groups of neurons and norms of the whole run, in the order of writing."""
    layers: list[tuple[str, int | None, int, Sequence[str]]] = [
        *(("prelude", None, k, parts) for k, parts in enumerate(layout.prelude)),
        *(("block", t, k, parts) for t in range(n_loops) for k, parts in enumerate(layout.block)),
        *(("coda", None, k, parts) for k, parts in enumerate(layout.coda)),
    ]
    stage = 0
    for number, (section, loop, layer, parts) in enumerate(layers):
        place: dict[str, Any] = {"section": section, "loop": loop, "layer": layer}
        place["number"] = number
        for part in parts:
            stage += 1
            name = f"{section}.{layer}"
            if part == HEADS:
                for head in range(layout.n_heads):
                    yield Component(f"{name}.head.{head}", stage, head=head, **place)
            elif part == MLP:
                for group, neurons in groups[name].items():
                    yield Component(group, stage, neurons=neurons, **place)
            else:
                yield Component(f"{name}.{part}", stage, norm=part, **place)


def _neuron_groups(
    layout: GraphLayout, named: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, tuple[int, ...] | None]]:
    """The groups of neurons of every MLP, by section and layer; None for all neurons."""
    if named and layout.n_neurons is None:
        expected, fix = "none, except for a LoopedTransformer", "Leave neurons= out."
        raise InputError("neurons", expected=expected, given=repr([*named]), fix=fix)
    sections = {"prelude": layout.n_prelude, "block": layout.n_layers, "coda": layout.n_coda}
    groups: dict[str, dict[str, tuple[int, ...] | None]]
    groups = {f"{name}.{k}": {} for name, n_layers in sections.items() for k in range(n_layers)}
    width = layout.n_neurons or 1
    free = {mlp: set(range(width)) for mlp in groups}
    for name, neurons in named.items():
        mlp, rest = ".".join(name.split(".")[:2]), name.split(".")[2:]
        if mlp not in groups or not rest or rest[0] in ("head", "mlp"):
            raise InputError(
                "name of a group of neurons",
                expected=f"section.layer.name, in one of {', '.join(sorted(groups))}",
                given=repr(name),
                fix="Call it for example 'block.0.carry'.",
            )
        group = tuple(check_integer(name, n, least=0, most=width - 1) for n in neurons)
        if not set(group) <= free[mlp] or len(set(group)) < len(group):
            raise InputError(
                f"neurons of {name!r}",
                expected="neurons in one group, once",
                given=f"some of {list(group)[:8]} twice",
                fix="Leave them out of one of the groups.",
            )
        free[mlp] -= set(group)
        if group:
            groups[mlp][name] = group
    for mlp, each in groups.items():
        # Neurons in no group stay together; None stands for a whole MLP.
        if free[mlp]:
            each[f"{mlp}.mlp"] = tuple(sorted(free[mlp])) if len(free[mlp]) < width else None
    return groups
