"""Pairs for any task: those on which variables differ, spread over what they may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.interchange_pairs import (
    KIND,
    OTHER_VALUE,
    SAME_VALUE,
    InterchangePairs,
    SecondInterchange,
    draw_pairs,
    evenly_by_class,
    join,
)
from loopinterp.circuits.program_counterfactuals import Prediction, each_apart
from loopinterp.errors import InputError, check_integer, check_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_TRIED = 6
"""So many times as many exchanges are looked at as are wanted."""

_SECOND_TRIES = 8
"""So many states are looked at for each second interchange."""


@dataclass(frozen=True, kw_only=True)
class SpreadPairs:
    """Exchanges of one position's state, spread evenly over tokens, loops and positions.

    Base and source have the same token at the position, as the state may hold what it was given
    of it; some variable of some program has two values there. Half of the pairs are drawn evenly
    by (token, left token); the other half so that every two programs are told apart by as many as
    there are, at some delay. Some more pairs are donors with the SAME value of every variable in
    another context: they must change nothing.

    The source's state is one after the same number of loops, or for some of the pairs after
    another; and some of the runs get a second interchange later, at the same position or another.

    Attributes:
        pairs: How many.
        same_value: How many of the same value.
        loops: After at most so many different numbers of loops: 0 .. T(n) - 1 is parted evenly
            into so many spans, and one is drawn from each. At the start, after 0 loops, every
            source is of a later loop; without sources of other loops it is left out. Sources of
            other loops are of the start too.
        sites: Positions whose states are exchanged at once.
        other_loops: Share of the sources that are states of another loop.
        repeated: Share of the runs of other values that get a second interchange.
    """

    pairs: int = 768
    same_value: int = 96
    loops: int = 10
    sites: int = 1
    other_loops: float = 0.5
    repeated: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("pairs", 2), ("same_value", 0), ("loops", 1), ("sites", 1)):
            check_integer(name, getattr(self, name), least=least)
        for name in ("other_loops", "repeated"):
            check_number(name, getattr(self, name), least=0, most=1)

    def __call__(
        self,
        model: Any,
        programs: Sequence[LoopProgram],
        batch: Batch,
        generator: torch.Generator,
    ) -> InterchangePairs:
        """Choose pairs; the model is not asked.

        Raises:
            InputError: no two inputs of the batch differ in a variable at a position at which
                they have the same token.
        """
        del model
        last = int(batch.n_loops.max())
        # Into the start goes the state of a later loop: in it nothing is computed yet.
        first = 0 if self.other_loops and last > 1 else 1
        loops = drawn_loops(last, self.loops, generator, first=first)
        traces = [p.trace(batch.inputs, n_loops=last).variables for p in programs]
        differing, alike = [], []
        for loop in loops:
            most = _TRIED * self.pairs // len(loops) + 1
            base, source = draw_pairs(len(batch), most, generator)
            same = batch.inputs[base] == batch.inputs[source]
            source_loop = self._source_loops(torch.full_like(base, loop), last, generator)
            differs = _differ(traces, (loop, base), (source_loop, source))
            for found, where, more in (
                (differing, same & differs, same),
                (alike, same & ~differs, same & ~differs),
            ):
                pair, position = where.nonzero(as_tuple=True)
                chosen = torch.randperm(len(pair), generator=generator)[: 2 * most]
                pair, position = pair[chosen], position[chosen]
                others = self._other_sites(more[pair], position, generator)
                loop_of = torch.full_like(pair, loop)
                columns = base[pair], source[pair], loop_of, source_loop[pair], position, *others
                found.append(torch.stack(columns))
        other = _pairs(torch.cat(differing, 1), batch)
        if not len(other):
            raise InputError(
                "batch",
                expected="inputs that differ in a variable of the programs, with the same token "
                "at that position",
                given=f"{len(batch)} inputs that do not",
                fix="Draw more or longer inputs.",
            )
        other = self._repeat(other, traces, generator)
        other = other[self._choose(other, programs, generator)]
        alike_pairs = _pairs(torch.cat(alike, 1), batch)
        some = evenly_by_class(_token_classes(alike_pairs), self.same_value, generator)
        return join([other, alike_pairs[some]], KIND, (OTHER_VALUE, SAME_VALUE))

    def _source_loops(
        self, loop: Int[Tensor, "*shape"], last: int, generator: torch.Generator
    ) -> Int[Tensor, "*shape"]:
        """The loop of each source: the same, or for some of them any other from 0 to the last."""
        if last < 2 or not self.other_loops:
            return loop
        moved = torch.randint(1, last + 1, loop.shape, generator=generator)
        other = (loop + moved) % (last + 1)
        luck = torch.rand(loop.shape, generator=generator, dtype=torch.float32)
        across = (luck < self.other_loops) | (loop == 0)
        return torch.where(across, other, loop)

    def _repeat(
        self, found: InterchangePairs, traces: Sequence[Any], generator: torch.Generator
    ) -> InterchangePairs:
        """Some of the pairs with a second interchange, of a state that differs from the base's."""
        last, (n_inputs, n_pos) = found.n_loops, found.inputs.shape
        second = SecondInterchange.none(len(found))
        luck = torch.rand(len(found), generator=generator, dtype=torch.float32)
        rows = (luck < self.repeated).nonzero().squeeze(1)
        if not len(rows) or last < 2:
            return found

        def draw(low: Any, high: Any) -> Tensor:
            shape = (_SECOND_TRIES, len(rows))
            share = torch.rand(shape, generator=generator, dtype=torch.float32)
            return (low + share * (high - low)).long()

        # Half at the same position and a later loop; half at any other, perhaps at the same loop.
        first, base, loop = (x[rows] for x in (found.positions[:, 0], found.base, found.loop))
        elsewhere = (first + draw(1, max(n_pos, 2))) % n_pos
        position = torch.where(draw(0, 2)[:1] == 0, first, elsewhere)
        source, again = draw(0, n_inputs), draw(loop + (position == first), last)
        again = again.clamp(max=last)
        source_loop = self._source_loops(again, last, generator)
        fits = (found.inputs[source, position] == found.inputs[base, position]) & (again >= loop)
        fits &= (position != first) | (again > loop)
        fits &= _differ(
            traces, (again, base.expand_as(again), position), (source_loop, source, position)
        )
        best, each = fits.int().argmax(0), torch.arange(len(rows))
        columns = (x[best, each] for x in (source, position, again, source_loop))
        columns = [column[fits.any(0)] for column in columns]
        for own, column in zip(vars(second).values(), columns):
            own[rows[fits.any(0)]] = column
        return replace(found, second=second)

    def _other_sites(
        self, free: Bool[Tensor, "pair pos"], first: Tensor, generator: torch.Generator
    ) -> list[Int[Tensor, " pair"]]:
        """More positions of each pair, among those that are free; the first again if none is."""
        free = free.scatter(1, first[:, None], False)
        sites = []
        for _ in range(self.sites - 1):
            draw = torch.rand(free.shape, generator=generator, dtype=torch.float32).masked_fill(
                ~free, -1
            )
            site = torch.where(free.any(1), draw.argmax(1), first)
            free = free.scatter(1, site[:, None], False)
            sites.append(site)
        return sites

    def _choose(
        self, found: InterchangePairs, programs: Sequence[LoopProgram], generator: torch.Generator
    ) -> Int[Tensor, " chosen"]:
        """Half evenly over tokens, half evenly over what tells two programs apart."""
        classes = _token_classes(found) * found.n_loops + found.loop
        classes = 2 * classes + (found.source_loop != found.loop)
        looked = evenly_by_class(classes, min(len(found), 2 * self.pairs), generator)
        spread = looked[: self.pairs - self.pairs // 2 * (len(programs) > 1)]
        if len(programs) == 1 or len(looked) <= self.pairs:
            return looked[: self.pairs]
        rest = looked[len(spread) :]
        telling = _evenly(_apart(programs, found[rest]), self.pairs - len(spread))
        chosen = torch.cat([spread, rest[telling]])
        left = looked[~torch.isin(looked, chosen)]
        return torch.cat([chosen, left[: self.pairs - len(chosen)]])


def _pairs(found: Int[Tensor, "row pair"], batch: Batch) -> InterchangePairs:
    """Pairs out of rows: base, source, their loops, and the positions."""
    base, source, loop, source_loop, *positions = found
    return InterchangePairs.of(
        batch,
        base=base,
        source=source,
        positions=torch.stack(positions, 1),
        loop=loop,
        source_loop=source_loop,
    )


def spread_loops(n_loops: int, most: int) -> list[int]:
    """Numbers of loops from 1 to T - 1 (to 1 if T is 1), evenly.

    Example:
        >>> spread_loops(25, 5)
        [1, 7, 12, 18, 24]
    """
    last = max(n_loops - 1, 1)
    count = min(most, last)
    return sorted({round(1 + k * (last - 1) / max(count - 1, 1)) for k in range(count)})


def drawn_loops(
    n_loops: int, most: int, generator: torch.Generator, *, first: int = 1
) -> list[int]:
    """One of each of so many spans of first .. T - 1: even spaces would miss what has a period.

    Example:
        >>> drawn_loops(25, 5, torch.Generator().manual_seed(0))
        [5, 10, 14, 16, 24]
    """
    every = torch.arange(first, max(n_loops, first + 1))
    spans = every.tensor_split(min(most, len(every)))
    return [int(s[torch.randint(len(s), (), generator=generator)]) for s in spans]


def _differ(
    traces: Sequence[Any], base: tuple[Any, ...], source: tuple[Any, ...]
) -> Bool[Tensor, ...]:
    """Where some variable of some program has two values; each is (loop, input) or so."""
    differs = torch.zeros(1, dtype=torch.bool)
    for trace in traces:
        for values in trace.values():
            differs = differs | (values[base] != values[source])
    return differs


def _token_classes(pairs: InterchangePairs) -> Int[Tensor, " pair"]:
    own, left = pairs.tokens
    return own * (int(pairs.inputs.max()) + 1) + left


def _apart(
    programs: Sequence[LoopProgram], pairs: InterchangePairs
) -> Bool[Tensor, "pair rival rival"]:
    """Whether two programs say different things of the whole answer, at some delay."""
    said = [Prediction(p, pairs).claims(_unchanged(pairs)) for p in programs]
    return each_apart(said).any(-1).movedim(2, 0)


def _unchanged(pairs: InterchangePairs) -> Tensor:
    """A stand-in for the model's answers without the exchange, equal for all programs."""
    shape = (len(pairs), pairs.longest + 1, pairs.inputs.shape[1])
    return torch.full(shape, -3, dtype=torch.int16, device=pairs.loop.device)


def _evenly(apart: Bool[Tensor, "pair rival rival"], most: int) -> Int[Tensor, " chosen"]:
    """Some of the pairs, so that every two rivals are told apart by as many as there are.

    Going round the pairs of rivals, each takes the next pair that tells it apart.
    """
    rivals = torch.triu_indices(apart.shape[1], apart.shape[1], offset=1).T.tolist()
    waiting = {(a, b): apart[:, a, b].nonzero().squeeze(1).tolist()[::-1] for a, b in rivals}
    chosen: dict[int, None] = {}
    while len(chosen) < most and any(waiting.values()):
        for queue in waiting.values():
            while queue and queue[-1] in chosen:
                queue.pop()
            if queue and len(chosen) < most:
                chosen[queue.pop()] = None
    return torch.tensor(list(chosen), dtype=torch.long)
