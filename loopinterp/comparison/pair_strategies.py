"""Programs, batches and pairs of a comparison: checks, strategies that choose pairs, strata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

import torch

from loopinterp.comparison.program_runs import Prediction, separations
from loopinterp.core.errors import InputError, check_integer, check_number, need
from loopinterp.interventions.pairs import (
    InterchangePairs,
    SecondInterchange,
    Stratum,
    draw_pairs,
    evenly_by_class,
    join,
)
from loopinterp.models.protocol import need_model
from loopinterp.models.study_examples import fit_to_model
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.sampling import as_batch, as_batches, check_tokens, need_asked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.programs.interpreter import Trace
    from loopinterp.tasks.task import Batch


def check_program_list(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    if isinstance(programs, (str, LoopProgram)) or not isinstance(programs, Sequence):
        raise InputError(
            "programs",
            expected="a list of programs or of their names",
            given=repr(programs) if isinstance(programs, str) else type(programs).__name__,
            fix=f"Pass [{programs!r}]." if isinstance(programs, str) else "Put it into a list.",
        )
    return [get_program(program) for program in programs]


def check_programs(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    candidates = check_program_list(programs)
    names = {p.name for p in candidates}
    fit = names and len(names) == len(candidates) and len({p.task for p in candidates}) == 1
    expected = "one program or more, all of one task, each with its own name"
    got = ", ".join(f"{p.name} ({p.task})" for p in candidates) or "none"
    fix = "Leave out the others: tokens of other tasks mean something else."
    need(fit, "programs", expected, got, fix)
    return candidates


def check_batches(
    model: LoopedModel | Any, data: object, programs: Iterable[LoopProgram], **drawn: Any
) -> list[Batch]:
    return [check_batch(model, batch, programs) for batch in as_batches(data, **drawn)]


def check_batch(
    model: LoopedModel | Any,
    data: object,
    programs: Iterable[LoopProgram],
    *,
    needs_loops: bool = True,
    needs_targets: bool = True,
    **drawn: Any,
) -> Batch:
    """A batch of at least two examples of one length, in tokens that all programs know.

    ``drawn`` goes to :func:`~loopinterp.tasks.as_batch`.

    Args:
        needs_loops: Whether the model is followed from loop to loop, up to T(n).
    """
    need_model(model)
    batch = as_batch(data, **drawn)
    if needs_targets:
        need_asked(batch)
    n_loops = batch.n_loops.unique().tolist()
    expected = "batches of at least two examples, all of one length"
    got = f"{len(batch)} examples with T(n) of {n_loops}"
    fix = "Draw them with task.sample(n, batch_size=..., generator=...), n an integer."
    need(len(batch) >= 2 and len(n_loops) == 1, "data", expected, got, fix)
    for program in programs:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    return fit_to_model(model, batch, needs_loops=needs_loops).to("cpu")


def need_inputs(enough: bool, expected: str, actual: str = "none", what: str = "data") -> None:
    need(enough, what, expected, actual, "Draw more, or longer, inputs.")


def named_models(
    models: LoopedModel | Any | Sequence[LoopedModel | Any], names: Sequence[str] | None
) -> dict[str, LoopedModel | Any]:
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    labels = [f"model {k}" for k in range(len(several))] if names is None else list(names)
    labelled = dict(zip(labels, several))
    fit = several and len(several) == len(labels) == len(labelled)
    expected = f"one name for each of {len(several)} models (at least one model)"
    need(fit, "names", expected, repr(labels), "Pass as many different names as models.")
    return labelled


KIND, OTHER_VALUE, SAME_VALUE = "kind", "other value", "same value"
"""The stratum of the same-value control."""

TOKEN, BOTH = "token", "token and left token"


class PairStrategy(Protocol):
    def __call__(
        self,
        model: Any,
        programs: Sequence[LoopProgram],
        batch: Batch,
        generator: torch.Generator,
    ) -> InterchangePairs: ...


@dataclass(frozen=True, kw_only=True)
class SpreadPairs:
    """Interchanges of one position's state, spread evenly over tokens, loops and positions.

    Base and source have the same token at the position, and differ there in some program's
    variable. Half of the pairs are drawn evenly by (token, left token), half so that every two
    programs disagree on equally many. Same-value sources differ in no variable. The model is not
    run.

    Attributes:
        pairs, same_value: Numbers of pairs whose source has other values, or the same.
        loops: Number of different loops: one from each of so many spans of 0 .. T(n) - 1. For the
            initial state every source comes from a later loop.
        sites: Positions whose states are put in at once.
        other_loops: Share of the sources that are states of another loop.
        repeated: Share of the runs of other values that get a second interchange later.
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
        last = int(batch.n_loops.max())
        # In the initial state nothing is computed yet: it receives the state of a later loop.
        first = 0 if self.other_loops and last > 1 else 1
        # One loop from each of some spans: even spacing could miss a period.
        every = torch.arange(first, max(last, first + 1))
        spans = every.tensor_split(min(self.loops, len(every)))
        loops = [int(s[torch.randint(len(s), (), generator=generator)]) for s in spans]
        runs = [p.trace(batch.inputs, n_loops=last) for p in programs]
        traces = [run.variables for run in runs]
        most = 6 * self.pairs // len(loops) + 1  # candidates of each loop, six for a pair
        differing, alike = [], []
        for loop in loops:
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
        other, alike = (_pairs(torch.cat(columns, 1), batch) for columns in (differing, alike))
        expected = "inputs that differ in a variable at a position with the same token"
        need_inputs(len(other) > 0, expected, f"{len(batch)} that do not", what="batch")
        other = self._repeat(other, traces, generator)
        other = other[self._choose(other, programs, runs, generator)]
        alike = alike[evenly_by_class(_token_classes(alike), self.same_value, generator)]
        return join([other, alike], KIND, (OTHER_VALUE, SAME_VALUE))

    def _source_loops(
        self, loop: Int[Tensor, "*shape"], last: int, generator: torch.Generator
    ) -> Int[Tensor, "*shape"]:
        """The source's loop: the same, or for some any other up to ``last``."""
        if last < 2 or not self.other_loops:
            return loop
        # Any loop but the same one.
        other = (loop + torch.randint(1, last + 1, loop.shape, generator=generator)) % (last + 1)
        luck = torch.rand(loop.shape, generator=generator, dtype=torch.float32)
        return torch.where((luck < self.other_loops) | (loop == 0), other, loop)

    def _other_sites(
        self, free: Bool[Tensor, "pair pos"], first: Tensor, generator: torch.Generator
    ) -> list[Int[Tensor, " pair"]]:
        free = free.scatter(1, first[:, None], False)
        sites = []
        for _ in range(self.sites - 1):
            draw = torch.rand(free.shape, generator=generator, dtype=torch.float32)
            site = torch.where(free.any(1), draw.masked_fill(~free, -1).argmax(1), first)
            free = free.scatter(1, site[:, None], False)
            sites.append(site)
        return sites

    def _repeat(
        self, pairs: InterchangePairs, traces: Sequence[Any], generator: torch.Generator
    ) -> InterchangePairs:
        """Give some pairs a second interchange, of another state than the base's."""
        last, (n_inputs, n_pos) = pairs.n_loops, pairs.inputs.shape
        second = SecondInterchange.none(len(pairs))
        luck = torch.rand(len(pairs), generator=generator, dtype=torch.float32)
        rows = (luck < self.repeated).nonzero().squeeze(1)
        if not len(rows) or last < 2:
            return pairs

        def draw(low: Any, high: Any) -> Int[Tensor, "candidate pair"]:
            share = torch.rand((8, len(rows)), generator=generator, dtype=torch.float32)
            return (low + share * (high - low)).long()

        # Half at the same position and a later loop; half at any other, perhaps at the same loop.
        # The first candidate of each pair that fits is taken.
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
        best, fitting = fits.int().argmax(0), fits.any(0)
        drawn = source, position, again, source_loop
        for values, column in zip(vars(second).values(), drawn):
            values[rows[fitting]] = column[best, torch.arange(len(rows))][fitting]
        return replace(pairs, second=second)

    def _choose(
        self,
        pairs: InterchangePairs,
        programs: Sequence[LoopProgram],
        runs: Sequence[Trace],
        generator: torch.Generator,
    ) -> Int[Tensor, " chosen"]:
        classes = _token_classes(pairs) * pairs.n_loops + pairs.loop
        classes = 2 * classes + (pairs.source_loop != pairs.loop)
        order = evenly_by_class(classes, min(len(pairs), 2 * self.pairs), generator)
        if len(programs) == 1 or len(order) <= self.pairs:
            return order[: self.pairs]
        most = self.pairs // 2
        spread, rest = order[: self.pairs - most], order[self.pairs - most :]
        # Whether two programs predict different answers, at some delay: [program, rival, pair].
        shape = (len(rest), pairs[rest].longest + 1, pairs.inputs.shape[1])
        # In place of the model's clean answers, equal for all programs.
        unchanged = torch.full(shape, -3, dtype=torch.int32, device=pairs.loop.device)
        predictions = [Prediction(p, pairs[rest], trace=run) for p, run in zip(programs, runs)]
        claims = [prediction.claims(unchanged) for prediction in predictions]
        separated = separations(claims).any(-1)
        # The pairs of programs take turns: each takes the next pair that separates it, so that
        # each has a queue of those that do, last first.
        rivals = combinations(range(len(programs)), 2)
        queues = [separated[a, b].nonzero().squeeze(1).tolist()[::-1] for a, b in rivals]
        taken: dict[int, None] = {}
        while len(taken) < most and any(queues):
            for queue in queues:
                while queue and queue[-1] in taken:
                    queue.pop()
                if queue and len(taken) < most:
                    taken[queue.pop()] = None
        chosen = torch.cat([spread, rest[torch.tensor(list(taken), dtype=torch.long)]])
        unused = order[~torch.isin(order, chosen)]
        return torch.cat([chosen, unused[: self.pairs - len(chosen)]])


def _pairs(columns: Int[Tensor, "column pair"], batch: Batch) -> InterchangePairs:
    base, source, loop, source_loop, *positions = columns
    sites = torch.stack(positions, 1)
    return InterchangePairs.of(
        batch, base=base, source=source, positions=sites, loop=loop, source_loop=source_loop
    )


def _differ(
    traces: Sequence[Any], base: tuple[Any, ...], source: tuple[Any, ...]
) -> Bool[Tensor, ...]:
    differs = torch.zeros(1, dtype=torch.bool)
    for trace in traces:
        for values in trace.values():
            differs = differs | (values[base] != values[source])
    return differs


def _token_classes(pairs: InterchangePairs) -> Int[Tensor, " pair"]:
    token, left = pairs.tokens
    return token * (int(pairs.inputs.max()) + 1) + left


def strata_of(pairs: InterchangePairs, program: LoopProgram) -> dict[str, Stratum]:
    """Strata of pairs of a program's inputs, by the first of several positions.

    For additions also the carry chains.
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
        "left token": Stratum(tuple(tokens), left.masked_fill(first, -1)),
        BOTH: Stratum(tuple(names), torch.searchsorted(kinds, both).masked_fill(first, -1)),
        "loop": Stratum(thirds, 3 * loop // max(pairs.n_loops - 1, 1)),
        "position": Stratum(thirds, 3 * place // max(pairs.inputs.shape[1] - 1, 1)),
    }
    later = (pairs.source_loop - pairs.loop).sign()
    if bool(later.any()):
        labels = ("the same", "an earlier one", "a later one")
        strata["loop of the source"] = Stratum(labels, torch.tensor([0, 2, 1])[later])
    if pairs.second is not None and bool(pairs.second.made.any()):
        elsewhere = pairs.second.position != position
        codes = torch.where(pairs.second.made, 1 + elsewhere.long(), 0)
        labels = ("none", "at the same position", "at another position")
        strata["second interchange"] = Stratum(labels, codes)
    if program.task != "addition":
        return strata
    # Lengths of the chains of propagating bits before and behind the first position, [pair].
    task = Addition()
    before = task.chain_length_in(pairs.inputs)[pairs.base, position]
    ends = ~task.propagate(pairs.inputs)[pairs.base]
    places = torch.arange(ends.shape[1])
    at_end = torch.where(ends & (places >= position[:, None]), places, len(places)).amin(1)
    lengths, least = ("0", "1", "2 or 3", "4 to 7", "8 or more"), torch.tensor([1, 2, 4, 8])
    for name, length in (("chain before", before), ("chain behind", at_end - position)):
        strata[name] = Stratum(lengths, torch.bucketize(length, least, right=True))
    return strata
