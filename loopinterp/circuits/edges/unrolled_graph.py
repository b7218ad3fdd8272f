"""The graph of a run: its components, loop by loop, and which of them reads what another writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer, unknown_name
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig

INPUT, READOUT = "input", "readout"
SLOTS = ("q", "k", "v")
LATER = 2
"""The lag of edges that reach over two loops or more."""

LAGS = (0, 1, LATER)


@dataclass(frozen=True)
class Component:
    """What reads the stream and writes to it.

    Attributes:
        tied: Its name in the tied block: ``input``, ``block.0.head.1``, ``block.0.mlp``,
            ``coda.0.mlp``, ``readout``, or the name of a group of neurons.
        stage: Components of a smaller stage have written before it reads.
        section: ``prelude``, ``block`` or ``coda``; "" for the input and the readout.
        loop: Its loop; None outside the block.
        layer: Its layer in the section.
        head: Its head, where it is one.
        neurons: Its neurons, where it has not all of its MLP's.
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
        readers: What reads, in order; the readout is the last.
        receivers: (number of the reader, slot), where the slot is "" for all that it reads.
        edges: Whether there is one ``[sender, receiver]``.

    Raises:
        InputError: A name of a group that is not of that form, or neurons that the MLP lacks, or
            that are in two groups.

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
        written = torch.tensor([sender.stage for sender in self.senders])
        read = torch.tensor([self.readers[k].stage for k, _ in self.receivers])
        self.edges: Bool[Tensor, "sender receiver"] = written[:, None] < read

    def __repr__(self) -> str:
        return (
            f"<UnrolledGraph: {self.n_loops} loops, {len(self.senders)} senders, "
            f"{len(self.receivers)} receivers, {int(self.edges.sum())} edges>"
        )

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
            InputError: There is no such sender, or none is named.
        """
        return _found(what, names, [(s.name, s.tied) for s in self.senders])

    def receivers_named(self, names: str | Iterable[str], what: str = "receivers") -> list[int]:
        """The numbers of receivers; a name without a loop, or slot, stands for all of them.

        Raises:
            InputError: There is no such receiver, or none is named.
        """
        known = []
        for k, slot in self.receivers:
            called = (self.readers[k].name, self.readers[k].tied)
            known.append((*called, *(_with_slot(name, slot) for name in called)))
        return _found(what, names, known)

    def stages(self) -> Iterator[list[int]]:
        """The readers that read at the same time, one stage after the other, the readout last."""
        for _, stage in groupby(range(len(self.readers)), lambda k: self.readers[k].stage):
            yield list(stage)

    @cached_property
    def tied_edges(self) -> list[tuple[str, str, int]]:
        """Sender, receiver and lag of each edge of the tied graph."""
        return self._tied[0]

    @cached_property
    def tied_index(self) -> Int[Tensor, "sender receiver"]:
        """The number of each edge's tied one; -1 where there is no edge."""
        return self._tied[1]

    @cached_property
    def _tied(self) -> tuple[list[tuple[str, str, int]], Tensor]:
        numbers: dict[tuple[str, str, int], int] = {}
        index = torch.full(self.edges.shape, -1)
        for s, r in self.edges.nonzero().tolist():
            sender, (k, slot) = self.senders[s], self.receivers[r]
            reader, lag = self.readers[k], 0
            if sender.loop is not None:
                loop = self.n_loops - 1 if reader.loop is None else reader.loop
                lag = min(loop - sender.loop, LATER)
            key = (sender.tied, _with_slot(reader.tied, slot), lag)
            index[s, r] = numbers.setdefault(key, len(numbers))
        return list(numbers), index

    def _components(self) -> Iterator[Component]:
        """Heads and MLPs of the whole run, in the order in which they write."""
        config, stage = self._config, 0
        places: list[tuple[str, int | None, int]] = [
            *(("prelude", None, k) for k in range(config.n_prelude)),
            *(("block", t, k) for t in range(self.n_loops) for k in range(config.n_layers)),
            *(("coda", None, k) for k in range(config.n_coda)),
        ]
        for section, loop, layer in places:
            place: dict[str, Any] = {"section": section, "loop": loop, "layer": layer}
            stage += 1
            for head in range(config.n_heads):
                yield Component(f"{section}.{layer}.head.{head}", stage, head=head, **place)
            stage += 1
            for name, group in self._groups[section, layer].items():
                yield Component(name, stage, neurons=group, **place)


def _with_slot(name: str, slot: str) -> str:
    return f"{name}.{slot}" if slot else name


def _found(what: str, names: str | Iterable[str], known: Sequence[tuple[str, ...]]) -> list[int]:
    """The numbers of what goes by one of some names."""
    wanted = [names] if isinstance(names, str) else list(names)
    found: dict[int, None] = {}
    for name in wanted:
        here = [k for k, called in enumerate(known) if name in called]
        if not here:
            raise unknown_name(what, name, dict.fromkeys(c for called in known for c in called))
        found.update(dict.fromkeys(here))
    if not found:
        raise InputError(
            what,
            expected="at least one component",
            given="none",
            fix="Name some, as '0:block.0.mlp' or, at all loops, 'block.0.mlp'.",
        )
    return sorted(found)


def _groups(
    config: LoopedTransformerConfig, named: Mapping[str, Sequence[int]]
) -> dict[tuple[str, int], dict[str, tuple[int, ...] | None]]:
    """The groups of neurons of every MLP; None for all of them."""
    sizes = {"prelude": config.n_prelude, "block": config.n_layers, "coda": config.n_coda}
    places = {f"{section}.{k}": (section, k) for section, n in sizes.items() for k in range(n)}
    found: dict[tuple[str, int], dict[str, tuple[int, ...] | None]]
    found = {place: {} for place in places.values()}
    taken: dict[tuple[str, int], set[int]] = {place: set() for place in found}
    for name, neurons in named.items():
        section_and_layer, dot, rest = ".".join(name.split(".")[:2]), ".", name.split(".")[2:]
        if section_and_layer not in places or not rest or rest[0] in ("head", "mlp"):
            raise InputError(
                f"name of a group of neurons, {name!r}",
                expected=f"section{dot}layer{dot}name, in one of {', '.join(places)}",
                given="another one",
                fix="Call it for example 'block.0.carry'.",
            )
        place = places[section_and_layer]
        group = tuple(check_integer(name, n, least=0, most=config.mlp_width - 1) for n in neurons)
        if taken[place] & set(group) or len(set(group)) < len(group):
            raise InputError(
                f"neurons of {name!r}",
                expected="neurons that are in one group, once",
                given=f"some of {list(group)[:8]} that are in two",
                fix="Leave them out of one of the groups.",
            )
        taken[place] |= set(group)
        if group:
            found[place][name] = group
    for (section, layer), groups in found.items():
        used = taken[section, layer]
        rest_of_it = tuple(n for n in range(config.mlp_width) if n not in used)
        if rest_of_it:
            groups[f"{section}.{layer}.mlp"] = rest_of_it if used else None
    return found
