"""Pairs on which the variables of programs differ, for any task, and the strata they count in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from loopinterp.comparison.program_runs import Prediction, separations
from loopinterp.core.errors import InputError, check_integer, check_number
from loopinterp.interventions.pairs import (
    InterchangePairs,
    SecondInterchange,
    Stratum,
    draw_pairs,
    evenly_by_class,
    join,
)
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch


KIND = "kind"
OTHER_VALUE, SAME_VALUE = "other value", "same value"
"""The stratum of the same-value control: pairs whose source has equal values of all variables."""

TOKEN, LEFT, WHEN, WHERE = "token", "left token", "loop", "position"
BOTH = "token and left token"
SOURCE_LOOP, SECOND = "loop of the source", "second interchange"
"""Strata of every task."""

_CANDIDATES = 6
"""Candidates per pair that is drawn."""

_SECOND_CANDIDATES = 8
"""Candidates per second interchange."""


class PairStrategy(Protocol):
    """A way to choose pairs for the comparison of programs with a model."""

    def __call__(
        self,
        model: Any,
        programs: Sequence[LoopProgram],
        batch: Batch,
        generator: torch.Generator,
    ) -> InterchangePairs:
        """Choose pairs among the inputs of a batch (all of one length)."""
        ...


@dataclass(frozen=True, kw_only=True)
class SpreadPairs:
    """Interchanges of one position's state, spread evenly over tokens, loops and positions.

    Base and source have the same token at the position, as the state may hold the token; some
    variable of some program has two values there. Half of the pairs are drawn evenly by (token,
    left token); the other half so that every two programs differ on equally many, at some delay.
    The same-value control adds pairs whose source has equal values of all variables in another
    context: they must change nothing.

    The source's state is one after the same number of loops, or for some of the pairs after
    another; and some of the runs get a second interchange later, at the same position or another.

    Attributes:
        pairs: Pairs of other values.
        same_value: Pairs of the same value.
        loops: Most different numbers of loops: 0 .. T(n) - 1 is divided evenly into so many spans,
            and one loop is drawn from each. In the initial state (0 loops) every source is of a
            later loop; without sources of other loops it is left out. Sources of other loops may
            be initial states.
        sites: Positions whose states are put in at once.
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
        """Choose pairs; the model is not run.

        Raises:
            InputError: no two inputs of the batch differ in a variable at a position at which
                they have the same token.
        """
        del model
        last = int(batch.n_loops.max())
        # In the initial state nothing is computed yet: it receives the state of a later loop.
        first = 0 if self.other_loops and last > 1 else 1
        loops = _drawn_loops(last, self.loops, generator, first=first)
        traces = [p.trace(batch.inputs, n_loops=last).variables for p in programs]
        differing, alike = [], []
        for loop in loops:
            most = _CANDIDATES * self.pairs // len(loops) + 1
            base, source = draw_pairs(len(batch), most, generator)
            # Positions with equal tokens, and with unequal values: [pair, pos].
            same = batch.inputs[base] == batch.inputs[source]
            source_loop = self._source_loops(torch.full_like(base, loop), last, generator)
            differs = _differ(traces, (loop, base), (source_loop, source))
            for columns, where, free in (
                (differing, same & differs, same),
                (alike, same & ~differs, same & ~differs),
            ):
                pair, position = where.nonzero(as_tuple=True)
                chosen = torch.randperm(len(pair), generator=generator)[: 2 * most]
                pair, position = pair[chosen], position[chosen]
                others = self._other_sites(free[pair], position, generator)
                each = base[pair], source[pair], torch.full_like(pair, loop), source_loop[pair]
                columns.append(torch.stack([*each, position, *others]))
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
        # Any loop but the same one.
        other = (loop + moved) % (last + 1)
        luck = torch.rand(loop.shape, generator=generator, dtype=torch.float32)
        across = (luck < self.other_loops) | (loop == 0)
        return torch.where(across, other, loop)

    def _repeat(
        self, pairs: InterchangePairs, traces: Sequence[Any], generator: torch.Generator
    ) -> InterchangePairs:
        """Pairs of which some get a second interchange, of a state that differs from the base's."""
        last, (n_inputs, n_pos) = pairs.n_loops, pairs.inputs.shape
        second = SecondInterchange.none(len(pairs))
        luck = torch.rand(len(pairs), generator=generator, dtype=torch.float32)
        rows = (luck < self.repeated).nonzero().squeeze(1)
        if not len(rows) or last < 2:
            return pairs

        def draw(low: Any, high: Any) -> Tensor:
            shape = (_SECOND_CANDIDATES, len(rows))
            share = torch.rand(shape, generator=generator, dtype=torch.float32)
            return (low + share * (high - low)).long()

        # Half at the same position and a later loop; half at any other, perhaps at the same loop.
        # Candidates are [candidate, pair]; the first of each pair that fits is taken.
        first, base, loop = (x[rows] for x in (pairs.positions[:, 0], pairs.base, pairs.loop))
        elsewhere = (first + draw(1, max(n_pos, 2))) % n_pos
        position = torch.where(draw(0, 2)[:1] == 0, first, elsewhere)
        source, again = draw(0, n_inputs), draw(loop + (position == first), last)
        again = again.clamp(max=last)
        source_loop = self._source_loops(again, last, generator)
        fits = (pairs.inputs[source, position] == pairs.inputs[base, position]) & (again >= loop)
        fits &= (position != first) | (again > loop)
        fits &= _differ(
            traces, (again, base.expand_as(again), position), (source_loop, source, position)
        )
        best, each = fits.int().argmax(0), torch.arange(len(rows))
        columns = (x[best, each] for x in (source, position, again, source_loop))
        fitting = fits.any(0)
        for values, column in zip(vars(second).values(), columns):
            values[rows[fitting]] = column[fitting]
        return replace(pairs, second=second)

    def _other_sites(
        self, free: Bool[Tensor, "pair pos"], first: Tensor, generator: torch.Generator
    ) -> list[Int[Tensor, " pair"]]:
        """Further positions of each pair, drawn from the free ones; the first again if none is."""
        free = free.scatter(1, first[:, None], False)
        sites = []
        for _ in range(self.sites - 1):
            draw = torch.rand(free.shape, generator=generator, dtype=torch.float32)
            site = torch.where(free.any(1), draw.masked_fill(~free, -1).argmax(1), first)
            free = free.scatter(1, site[:, None], False)
            sites.append(site)
        return sites

    def _choose(
        self, pairs: InterchangePairs, programs: Sequence[LoopProgram], generator: torch.Generator
    ) -> Int[Tensor, " chosen"]:
        """Half evenly over tokens, half evenly over the pairs of programs that they separate."""
        classes = _token_classes(pairs) * pairs.n_loops + pairs.loop
        classes = 2 * classes + (pairs.source_loop != pairs.loop)
        order = evenly_by_class(classes, min(len(pairs), 2 * self.pairs), generator)
        if len(programs) == 1 or len(order) <= self.pairs:
            return order[: self.pairs]
        n_spread = self.pairs - self.pairs // 2
        spread, rest = order[:n_spread], order[n_spread:]
        separating = rest[_evenly(_separated(programs, pairs[rest]), self.pairs - n_spread)]
        chosen = torch.cat([spread, separating])
        unused = order[~torch.isin(order, chosen)]
        return torch.cat([chosen, unused[: self.pairs - len(chosen)]])


def _pairs(columns: Int[Tensor, "column pair"], batch: Batch) -> InterchangePairs:
    """Pairs of their columns: base, source, their loops, and the positions."""
    base, source, loop, source_loop, *positions = columns
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


def _drawn_loops(
    n_loops: int, most: int, generator: torch.Generator, *, first: int = 1
) -> list[int]:
    """One loop from each of so many spans of first .. T - 1; even spacing could miss a period.

    Example:
        >>> _drawn_loops(25, 5, torch.Generator().manual_seed(0))
        [5, 10, 14, 16, 24]
    """
    every = torch.arange(first, max(n_loops, first + 1))
    spans = every.tensor_split(min(most, len(every)))
    return [int(s[torch.randint(len(s), (), generator=generator)]) for s in spans]


def _differ(
    traces: Sequence[Any], base: tuple[Any, ...], source: tuple[Any, ...]
) -> Bool[Tensor, ...]:
    """Where some variable of some program has two values, at indices (loop, input, ...)."""
    differs = torch.zeros(1, dtype=torch.bool)
    for trace in traces:
        for values in trace.values():
            differs = differs | (values[base] != values[source])
    return differs


def _token_classes(pairs: InterchangePairs) -> Int[Tensor, " pair"]:
    token, left = pairs.tokens
    return token * (int(pairs.inputs.max()) + 1) + left


def _separated(
    programs: Sequence[LoopProgram], pairs: InterchangePairs
) -> Bool[Tensor, "pair program rival"]:
    """Whether two programs predict different whole answers, at some delay."""
    # In place of the model's clean answers, equal for all programs.
    shape = (len(pairs), pairs.longest + 1, pairs.inputs.shape[1])
    unchanged = torch.full(shape, -3, dtype=torch.int16, device=pairs.loop.device)
    claims = [Prediction(program, pairs).claims(unchanged) for program in programs]
    return separations(claims).any(-1).movedim(2, 0)


def _evenly(separated: Bool[Tensor, "pair program rival"], most: int) -> Int[Tensor, " chosen"]:
    """Some of the pairs, so that equally many separate every two rivals.

    The pairs of rivals take turns: each takes the next pair that separates it.
    """
    n = separated.shape[1]
    rivals = torch.triu_indices(n, n, offset=1).T.tolist()
    # Of every two rivals, the pairs that separate them, last first.
    waiting = {(a, b): separated[:, a, b].nonzero().squeeze(1).tolist()[::-1] for a, b in rivals}
    chosen: dict[int, None] = {}
    while len(chosen) < most and any(waiting.values()):
        for queue in waiting.values():
            while queue and queue[-1] in chosen:
                queue.pop()
            if queue and len(chosen) < most:
                chosen[queue.pop()] = None
    return torch.tensor(list(chosen), dtype=torch.long)


def strata_of(pairs: InterchangePairs, program: LoopProgram) -> dict[str, Stratum]:
    """Strata of pairs of a program's inputs.

    For every task: token, left token, both, loop, position, whether the source is of the same
    loop, and whether there is a second interchange; for additions also the carry chains. Pairs of
    several positions count by the first.
    """
    tokens, position = program.inputs, pairs.positions[:, 0]
    token, left = pairs.tokens
    both = token * len(tokens) + left
    kinds = both.unique()
    first = position == 0  # nothing is to its left
    names = [f"{tokens[k // len(tokens)]} after {tokens[k % len(tokens)]}" for k in kinds.tolist()]
    thirds = ("first third", "second third", "last third")
    loop, place = ((x - 1).clamp(min=0) for x in (pairs.loop, position))
    strata = {
        TOKEN: Stratum(tuple(tokens), token),
        LEFT: Stratum(tuple(tokens), left.masked_fill(first, -1)),
        BOTH: Stratum(tuple(names), torch.searchsorted(kinds, both).masked_fill(first, -1)),
        WHEN: Stratum(thirds, 3 * loop // max(pairs.n_loops - 1, 1)),
        WHERE: Stratum(thirds, 3 * place // max(pairs.inputs.shape[1] - 1, 1)),
    }
    later = pairs.source_loop - pairs.loop
    if bool(later.any()):
        codes = torch.where(later < 0, 1, torch.where(later > 0, 2, 0))
        labels = ("the same", "an earlier one", "a later one")
        strata[SOURCE_LOOP] = Stratum(labels, codes)
    if pairs.second is not None and bool(pairs.second.made.any()):
        elsewhere = pairs.second.position != position
        codes = torch.where(pairs.second.made, 1 + elsewhere.long(), 0)
        labels = ("none", "at the same position", "at another position")
        strata[SECOND] = Stratum(labels, codes)
    return strata | (_chains(pairs) if program.task == "addition" else {})


def _chains(pairs: InterchangePairs) -> dict[str, Stratum]:
    """Lengths of the chains of propagating bits before and behind the first position."""
    task, position = Addition(), pairs.positions[:, 0]
    before = task.chain_length_in(pairs.inputs)[pairs.base, position]
    ends = ~task.propagate(pairs.inputs)
    # The first bit from the position on that does not propagate, [pair].
    place = torch.arange(ends.shape[1])
    here = ends[pairs.base] & (place >= position[:, None])
    behind = torch.where(here, place, ends.shape[1]).amin(1) - position
    labels, least = ("0", "1", "2 or 3", "4 to 7", "8 or more"), torch.tensor([1, 2, 4, 8])
    return {
        name: Stratum(labels, torch.bucketize(length, least, right=True))
        for name, length in (("chain before", before), ("chain behind", behind))
    }
