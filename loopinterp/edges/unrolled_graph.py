"""The graph of a run: its components loop by loop, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, check_integer, unknown_name
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig

INPUT, READOUT = "input", "readout"
SLOTS = ("q", "k", "v")
LATER = 2
"""The lag of edges that reach over two loops or more."""

LAGS = (0, 1, LATER)
TIED, UNROLLED = "tied", "unrolled"
"""The two graphs of a run."""

TiedEdge = tuple[str, str, int]
"""Sender, receiver and lag."""

_Groups = dict[str, "tuple[int, ...] | None"]


@dataclass(frozen=True)
class Component:
    """A part of the model that reads the stream and writes to it.

    Attributes:
        tied: Its name in the tied block: ``input``, ``block.0.head.1``, ``block.0.mlp``,
            ``coda.0.mlp``, ``readout``, or the name of a group of neurons.
        stage: Components of a smaller stage have written before it reads.
        section: ``prelude``, ``block`` or ``coda``; "" for the input and the readout.
        loop: Its loop; None outside the block.
        layer: Its layer in the section.
        head: Its head; None for all others.
        neurons: Its neurons, where it has only some of its MLP's.
    """

    tied: str
    stage: int
    section: str = ""
    loop: int | None = None
    layer: int | None = None
    head: int | None = None
    neurons: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Its name in the run, with the loop before it: ``3:block.0.head.1``."""
        return self.tied if self.loop is None else f"{self.loop}:{self.tied}"


class UnrolledGraph(ShortRepr):
    """Senders and receivers of a run of some loops, and the edges between them.

    Senders are the input, heads and MLPs (or groups of their neurons); receivers are heads (or the
    queries, keys and values of each), MLPs and the readout. There is an edge from each sender to
    each receiver that reads the stream after it, over loops as within one. A *tied* edge is all
    edges between the same two weights with one lag, 0 within a loop, 1 to the next one, 2 for all
    later ones; into coda and readout, the lag is counted from the last loop.

    Args:
        config: Configuration of the model.
        n_loops: Loops of the run.
        neurons: Groups of neurons that are components of their own: name -> their numbers, where
            the name begins with section and layer, as ``block.0.carry``. Neurons of that MLP that
            are in no group stay together, under its name.
        split: Whether queries, keys and values are receivers of their own, ``0:block.0.head.1.q``.

    Attributes:
        senders: In the order in which they write.
        readers: Components that read, in order; the readout is the last.
        receivers: (number of the reader, slot), where the slot is "" for all that it reads.
        edges: Whether there is one ``[sender, receiver]``.

    Raises:
        InputError: A group's name is not of that form, or its neurons are missing from the MLP or
            in two groups.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> graph = UnrolledGraph(config, 2)
        >>> [sender.name for sender in graph.senders][:4]
        ['input', '0:block.0.head.0', '0:block.0.head.1', '0:block.0.mlp']
        >>> int(graph.edges.sum()), len(graph.tied_edges)
        (26, 21)
    """

    def __init__(
        self,
        config: LoopedTransformerConfig,
        n_loops: int,
        *,
        neurons: Mapping[str, Sequence[int]] | None = None,
        split: bool = False,
    ) -> None:
        self.n_loops = check_integer("n_loops", n_loops, least=1)
        self.split = split
        self._config = config
        self._groups = _groups(config, neurons or {})
        self.senders = [Component(INPUT, 0), *self._components()]
        last = self.senders[-1].stage + 1
        self.readers = [*self.senders[1:], Component(READOUT, last)]
        self.receivers = [
            (k, slot)
            for k, reader in enumerate(self.readers)
            for slot in (SLOTS if split and reader.head is not None else ("",))
        ]
        write_stage = torch.tensor([sender.stage for sender in self.senders])
        # A receiver sees every sender of an earlier stage.
        self.edges: Bool[Tensor, "sender receiver"] = write_stage[:, None] < self.read_stages

    def __repr__(self) -> str:
        return (
            f"<UnrolledGraph: {self.n_loops} loops, {len(self.senders)} senders, "
            f"{len(self.receivers)} receivers, {int(self.edges.sum())} edges>"
        )

    @cached_property
    def read_stages(self) -> Int[Tensor, " receiver"]:
        """The stage at which each receiver reads."""
        return torch.tensor([self.readers[k].stage for k, _ in self.receivers])

    @property
    def sender_names(self) -> list[str]:
        """Names of the senders, in order."""
        return [sender.name for sender in self.senders]

    @property
    def receiver_names(self) -> list[str]:
        """Names of the receivers, in order."""
        return [_with_slot(self.readers[k].name, slot) for k, slot in self.receivers]

    def senders_named(self, names: str | Iterable[str], what: str = "senders") -> list[int]:
        """The numbers of senders; a name without a loop stands for all loops.

        Raises:
            InputError: There is no such sender, or no name is given.
        """
        return _numbers_of(what, names, [(s.name, s.tied) for s in self.senders])

    def receivers_named(self, names: str | Iterable[str], what: str = "receivers") -> list[int]:
        """The numbers of receivers; a name without a loop, or slot, stands for all of them.

        Raises:
            InputError: There is no such receiver, or no name is given.
        """
        known = []
        for k, slot in self.receivers:
            both = (self.readers[k].name, self.readers[k].tied)
            known.append((*both, *(_with_slot(name, slot) for name in both)))
        return _numbers_of(what, names, known)

    def stages(self) -> Iterator[list[int]]:
        """The readers that read at the same time, one stage after the other, the readout last."""
        for _, stage in groupby(range(len(self.readers)), lambda k: self.readers[k].stage):
            yield list(stage)

    @cached_property
    def tied_edges(self) -> list[TiedEdge]:
        """Sender, receiver and lag of each edge of the tied graph."""
        return self._tied[0]

    @cached_property
    def tied_index(self) -> Int[Tensor, "sender receiver"]:
        """The number of each edge's tied one; -1 where there is no edge."""
        return self._tied[1]

    @cached_property
    def _tied(self) -> tuple[list[TiedEdge], Tensor]:
        numbers: dict[TiedEdge, int] = {}
        index = torch.full(self.edges.shape, -1)
        for s, r in self.edges.nonzero().tolist():
            sender, (k, slot) = self.senders[s], self.receivers[r]
            reader, lag = self.readers[k], 0
            if sender.loop is not None:
                # Coda and readout read after the last loop.
                loop = self.n_loops - 1 if reader.loop is None else reader.loop
                lag = min(loop - sender.loop, LATER)
            key = (sender.tied, _with_slot(reader.tied, slot), lag)
            index[s, r] = numbers.setdefault(key, len(numbers))
        return list(numbers), index

    def _components(self) -> Iterator[Component]:
        """Heads and MLPs of the whole run, in the order in which they write."""
        config, stage = self._config, 0
        layers: list[tuple[str, int | None, int]] = [
            *(("prelude", None, k) for k in range(config.n_prelude)),
            *(("block", t, k) for t in range(self.n_loops) for k in range(config.n_layers)),
            *(("coda", None, k) for k in range(config.n_coda)),
        ]
        for section, loop, layer in layers:
            place: dict[str, Any] = {"section": section, "loop": loop, "layer": layer}
            stage += 1
            for head in range(config.n_heads):
                yield Component(f"{section}.{layer}.head.{head}", stage, head=head, **place)
            stage += 1
            for name, group in self._groups[f"{section}.{layer}"].items():
                yield Component(name, stage, neurons=group, **place)


def without_slot(receiver: str) -> str:
    """A receiver's component: queries, keys and values of a head are that head."""
    name, _, slot = receiver.rpartition(".")
    return name if name and slot in SLOTS else receiver


def _with_slot(name: str, slot: str) -> str:
    return f"{name}.{slot}" if slot else name


def _numbers_of(
    what: str, names: str | Iterable[str], known: Sequence[tuple[str, ...]]
) -> list[int]:
    """The numbers of everything that goes by one of the names, in order."""
    numbers: set[int] = set()
    for name in [names] if isinstance(names, str) else list(names):
        matches = [k for k, aliases in enumerate(known) if name in aliases]
        if not matches:
            raise unknown_name(what, name, dict.fromkeys(c for aliases in known for c in aliases))
        numbers.update(matches)
    if not numbers:
        raise InputError(
            what,
            expected="at least one component",
            given="none",
            fix="Name some, as '0:block.0.mlp' or, at all loops, 'block.0.mlp'.",
        )
    return sorted(numbers)


def _groups(
    config: LoopedTransformerConfig, named: Mapping[str, Sequence[int]]
) -> dict[str, _Groups]:
    """The groups of neurons of every MLP, by section and layer; None for all neurons."""
    sizes = {"prelude": config.n_prelude, "block": config.n_layers, "coda": config.n_coda}
    groups: dict[str, _Groups] = {f"{s}.{k}": {} for s, n in sizes.items() for k in range(n)}
    used: dict[str, set[int]] = {place: set() for place in groups}
    for name, neurons in named.items():
        place, rest = ".".join(name.split(".")[:2]), name.split(".")[2:]
        if place not in groups or not rest or rest[0] in ("head", "mlp"):
            raise InputError(
                f"name of a group of neurons, {name!r}",
                expected=f"section.layer.name, in one of {', '.join(groups)}",
                given="another one",
                fix="Call it for example 'block.0.carry'.",
            )
        group = tuple(check_integer(name, n, least=0, most=config.mlp_width - 1) for n in neurons)
        if used[place] & set(group) or len(set(group)) < len(group):
            raise InputError(
                f"neurons of {name!r}",
                expected="neurons that are in one group, once",
                given=f"some of {list(group)[:8]} that are in two",
                fix="Leave them out of one of the groups.",
            )
        used[place] |= set(group)
        if group:
            groups[place][name] = group
    for place, each in groups.items():
        # Neurons in no group stay together; None stands for a whole MLP.
        others = tuple(n for n in range(config.mlp_width) if n not in used[place])
        if others:
            each[f"{place}.mlp"] = others if used[place] else None
    return groups
