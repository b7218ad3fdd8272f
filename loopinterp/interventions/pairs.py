"""Pairs of base and source for interchange interventions, with positions, loops and strata.

After ``loop`` loops of the base's run, the state at some positions becomes the source's after
``source_loop`` loops, and the run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loopinterp.core.boundary import resolve_device
from loopinterp.core.text import ShortRepr
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor
    from typing_extensions import Self

    from loopinterp.tasks.task import Batch


_PER_PAIR = ("base", "source", "positions", "loop", "source_loop")

NO_LOOP = -1
"""The loop of a second interchange if there is none."""


@dataclass(frozen=True, eq=False, repr=False)
class Stratum(ShortRepr):
    """A partition of pairs into labelled classes; code -1 is a pair in none."""

    labels: tuple[str, ...]
    codes: Int[Tensor, " pair"]


@dataclass(frozen=True, eq=False, repr=False)
class SecondInterchange(ShortRepr):
    """A second interchange at the loop of the first one or later; :data:`NO_LOOP` if none."""

    source: Int[Tensor, " pair"]
    position: Int[Tensor, " pair"]
    loop: Int[Tensor, " pair"]
    source_loop: Int[Tensor, " pair"]

    @classmethod
    def none(cls, count: int) -> Self:
        """No second interchange, for ``count`` pairs."""
        source, position, source_loop = torch.zeros(3, count, dtype=torch.long)
        return cls(source, position, torch.full_like(source, NO_LOOP), source_loop)

    @property
    def made(self) -> Bool[Tensor, " pair"]:
        """Which pairs have one."""
        return self.loop != NO_LOOP

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(change(column) for column in vars(self).values()))


class Sites(NamedTuple):
    """Every state that is put in, the second interchange's last; ``made`` says if there is one."""

    position: Int[Tensor, "pair site"]
    loop: Int[Tensor, "pair site"]
    source: Int[Tensor, "pair site"]
    source_loop: Int[Tensor, "pair site"]
    made: Bool[Tensor, "pair site"]


@dataclass(frozen=True, eq=False, repr=False)
class InterchangePairs(ShortRepr):
    """Pairs of runs (base, source), with the positions and loops of their interchanges.

    Attributes:
        asked: Positions with a target.
        n_loops: Loops of every run.
        base: Rows of the inputs whose runs are changed.
        source: Rows of the inputs whose states are put in.
        positions: The positions interchanged together; one may occur twice.
        loop, source_loop: Loops of the two runs before the interchange.
        strata: Partitions of the pairs, by name.
    """

    inputs: Int[Tensor, "input pos"]
    asked: Bool[Tensor, "input pos"]
    n_loops: int
    base: Int[Tensor, " pair"]
    source: Int[Tensor, " pair"]
    positions: Int[Tensor, "pair site"]
    loop: Int[Tensor, " pair"]
    source_loop: Int[Tensor, " pair"]
    strata: Mapping[str, Stratum] = field(default_factory=dict)
    second: SecondInterchange | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        *,
        base: Int[Tensor, " pair"],
        source: Int[Tensor, " pair"],
        positions: Int[Tensor, "pair site"],
        loop: Int[Tensor, " pair"],
        source_loop: Int[Tensor, " pair"] | None = None,
        n_loops: int | None = None,
        strata: Mapping[str, Stratum] | None = None,
    ) -> Self:
        """Interchanges among the inputs of a batch, by default at equal loops."""
        return cls(
            inputs=batch.inputs,
            asked=batch.targets != IGNORE,
            n_loops=int(batch.n_loops.max()) if n_loops is None else n_loops,
            base=base,
            source=source,
            positions=positions,
            loop=loop,
            source_loop=loop if source_loop is None else source_loop,
            strata=strata or {},
        )

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, rows: Any) -> Self:
        return self._map(lambda column: column[rows])

    def to(self, device: torch.device | str) -> Self:
        """The same pairs on another device."""
        device = resolve_device(device)
        moved = self._map(lambda column: column.to(device))
        return replace(moved, inputs=self.inputs.to(device), asked=self.asked.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        columns = {name: change(getattr(self, name)) for name in _PER_PAIR}
        strata = {k: Stratum(one.labels, change(one.codes)) for k, one in self.strata.items()}
        second = self.second and self.second.map(change)
        return replace(self, **columns, strata=strata, second=second)

    @property
    def sites(self) -> Sites:
        """Every state that is put in, with its loop and source."""
        n_sites = self.positions.shape[1]
        loop, source, source_loop = (
            x[:, None].expand(-1, n_sites) for x in (self.loop, self.source, self.source_loop)
        )
        every = torch.ones_like(self.positions, dtype=torch.bool)
        first = Sites(self.positions, loop, source, source_loop, every)
        if self.second is None:
            return first
        # A pair without a second interchange repeats its base's clean state.
        has_second = self.second.made
        later = (
            self.second.position.where(has_second, self.positions[:, 0]),
            self.second.loop.where(has_second, self.loop),
            self.second.source.where(has_second, self.base),
            self.second.source_loop.where(has_second, self.loop),
            has_second,
        )
        return Sites(*(torch.cat([x, y[:, None]], dim=1) for x, y in zip(first, later)))

    @property
    def horizon(self) -> Int[Tensor, " pair"]:
        """Loops from the interchange to the end of the run."""
        return self.n_loops - self.loop

    @property
    def longest(self) -> int:
        """The longest horizon."""
        return int(self.horizon.max()) if len(self) else 0

    @property
    def scored(self) -> Bool[Tensor, "pair pos"]:
        """Positions of each base with a target."""
        return self.asked[self.base]

    @property
    def tokens(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """The base's tokens at the first position of the interchange, and to its left."""
        position = self.positions[:, 0]
        left = (position - 1).clamp(min=0)
        return self.inputs[self.base, position], self.inputs[self.base, left]


def join(
    parts: Sequence[InterchangePairs], stratum: str, labels: tuple[str, ...]
) -> InterchangePairs:
    """Pairs of the same inputs, concatenated; ``stratum`` names the part of each."""
    merged: dict[str, Any] = {n: torch.cat([getattr(p, n) for p in parts]) for n in _PER_PAIR}
    if any(p.second for p in parts):
        seconds = [vars(p.second or SecondInterchange.none(len(p))).values() for p in parts]
        merged["second"] = SecondInterchange(*map(torch.cat, zip(*seconds)))
    sizes = torch.tensor([len(p) for p in parts])
    codes = torch.arange(len(parts)).repeat_interleave(sizes)
    return replace(parts[0], **merged, strata={stratum: Stratum(labels, codes)})


def draw_pairs(
    n_inputs: int, most: int, generator: torch.Generator
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """Distinct pairs (base, source) of different inputs, from a random order and its rolls.

    If there are enough pairs, their numbers per base differ by at most one.
    """
    order = torch.randperm(n_inputs, generator=generator)
    rounds = min(-(-most // n_inputs), n_inputs - 1)
    sources = torch.cat([order.roll(k) for k in range(1, rounds + 1)])
    return order.repeat(rounds)[:most], sources[:most]


def evenly_by_class(
    codes: Int[Tensor, " pair"], most: int, generator: torch.Generator
) -> Int[Tensor, " chosen"]:
    """Some of the pairs, as even over the classes as their sizes permit."""
    shuffled = torch.randperm(len(codes), generator=generator)
    ordered, by_class = codes[shuffled].sort(stable=True)
    # Each pair's number within its class: classes take turns.
    turn = torch.arange(len(codes)) - torch.searchsorted(ordered, ordered)
    n_classes = int(ordered[-1]) + 1 if len(codes) else 1
    return shuffled[by_class[(turn * n_classes + ordered).argsort()]][:most]


_TRIES = 8  # draws for each pair that is taken


def drawn_pairs(
    batch: Batch,
    n_loops: int,
    number: int,
    generator: torch.Generator,
    *,
    across_loops: bool = False,
) -> InterchangePairs:
    """Interchanges at one loop; fewer than ``number`` if too few inputs share tokens.

    With ``across_loops``, half of the source states are from any loop.
    """
    tries, (size, n_pos) = _TRIES * number, batch.inputs.shape
    base, source = torch.randint(size, (2, tries), generator=generator)
    position = torch.randint(n_pos, (tries,), generator=generator)
    loop = torch.randint(n_loops + 1, (tries,), generator=generator)
    same_token = batch.inputs[base, position] == batch.inputs[source, position]
    rows = (same_token & (base != source)).nonzero().squeeze(1)[:number]
    pairs = InterchangePairs.of(
        batch,
        base=base[rows],
        source=source[rows],
        positions=position[rows, None],
        loop=loop[rows],
        n_loops=n_loops,
    )
    if not across_loops:
        return pairs
    any_loop = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    same = torch.rand(pairs.loop.shape, generator=generator, dtype=torch.float32) < 0.5
    return replace(pairs, source_loop=pairs.loop.where(same, any_loop))


def balanced_pairs(
    batch: Batch,
    values: Int[Tensor, "loops input pos"],
    number: int,
    generator: torch.Generator,
) -> InterchangePairs:
    """Interchanges across loops, with rare kinds as frequent as common ones.

    A kind is the injected value, the one it replaces, and the one to its left, each with its token.
    ``values`` are those of all clean states.
    """
    n_loops = len(values) - 1
    pairs = drawn_pairs(batch, n_loops, _TRIES * number, generator)
    any_loop = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    pairs = replace(pairs, source_loop=any_loop)
    if not len(pairs):
        return pairs
    position = pairs.positions[:, 0]
    left, (token, left_token) = (position - 1).clamp(min=0), pairs.tokens
    kinds = torch.stack([  # [part of the kind, pair]
        position == 0, left_token, values[pairs.loop, pairs.base, left], token,
        values[pairs.loop, pairs.base, position],
        values[pairs.source_loop, pairs.source, position],
    ])  # fmt: skip
    _, kind, counts = kinds.unique(dim=1, return_inverse=True, return_counts=True)
    rare = 1 / counts[kind].double()
    return pairs[rare.multinomial(min(number, len(pairs)), generator=generator)]


def repeated_pairs(
    batch: Batch, n_loops: int, number: int, generator: torch.Generator
) -> InterchangePairs:
    """Two interchanges in a run, with states of any loop; half of them at one position."""
    pairs = drawn_pairs(batch, n_loops, _TRIES * number, generator)
    count, (size, n_pos) = len(pairs), batch.inputs.shape
    source = torch.randint(size, (count,), generator=generator)
    any_position = torch.randint(n_pos, (count,), generator=generator)
    same = torch.rand(count, generator=generator, dtype=torch.float32) < 0.5
    position = pairs.positions[:, 0].where(same, any_position)
    later = torch.rand(count, generator=generator, dtype=torch.float32) * (pairs.horizon + 1)
    first_loop, second_loop = torch.randint(n_loops + 1, (2, count), generator=generator)
    second = SecondInterchange(source, position, pairs.loop + later.long(), second_loop)
    same_token = batch.inputs[pairs.base, position] == batch.inputs[source, position]
    rows = (same_token & (source != pairs.base)).nonzero().squeeze(1)[:number]
    return replace(pairs, source_loop=first_loop, second=second)[rows]
