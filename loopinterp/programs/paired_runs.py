"""Two programs on the same inputs, with the same interchange interventions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from loopinterp.programs.interpreter import Intervention
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram, ProgramOffset
from loopinterp.tasks.task import IGNORE, Batch

AT_A_TIME = 2**15  # interventions that are run together
NO_LOOP = -1
"""The loop of a second interchange if there is none."""


@dataclass(frozen=True, eq=False)
class Interventions:
    """Base and source runs, position, and loops of each interchange."""

    base: Int[Tensor, " row"]
    source: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    loop: Int[Tensor, " row"]
    source_loop: Int[Tensor, " row"]
    # Of a second interchange in the same run, at the same loop or later.
    second_source: Int[Tensor, " row"]
    second_position: Int[Tensor, " row"]
    second_loop: Int[Tensor, " row"]  # NO_LOOP where there is none
    second_source_loop: Int[Tensor, " row"]

    def split(self, at_a_time: int) -> Iterator[Interventions]:
        parts = zip(*(column.split(at_a_time) for column in vars(self).values()))
        return (Interventions(*part) for part in parts)


class PairedRuns:
    """Two programs, their clean runs on inputs of one length, and interventions in both.

    ``program`` already has the lag of the offset; loops are those of ``other``.
    """

    def __init__(
        self,
        program: LoopProgram,
        other: LoopProgram,
        offset: ProgramOffset,
        batch: Batch,
        n_loops: int,
    ) -> None:
        self.batch, self.n_loops = batch, n_loops
        self.program = _OneRun(program, batch, n_loops + 1, offset.shift, offset.offset)
        self.other = _OneRun(other, batch, n_loops + 1)
        self.positions = range(offset.offset, batch.inputs.shape[1])
        self.loops = range(max(-offset.shift, 0), n_loops + 1)

    def clean_answers(self) -> tuple[Int[Tensor, "loop input pos"], Int[Tensor, "loop input pos"]]:
        """Clean answers at the loops that both have."""
        loops = torch.tensor(self.loops)
        first = self.program.trace.outputs[loops + self.program.shift]
        return first, self.other.trace.outputs[loops]

    def local_states(self, position: int) -> Int[Tensor, "value loop input"]:
        """The state at a position: its token and both programs' variables."""
        loops = torch.tensor(self.loops)
        token = self.batch.inputs[:, position].expand(len(loops), -1)
        # [loop, input] for each variable of both programs
        variables = [
            x[loops + run.shift, :, position - run.offset]
            for run in (self.program, self.other)
            for x in run.trace.variables.values()
        ]
        return torch.stack([token, *variables])

    def every_single(self) -> Interventions:
        """Every interchange that changes a state, with one source for each joint state."""
        columns = []
        for position in self.positions:
            state = self.local_states(position)
            # kind of each (loop, input), and kinds: [value, kind] distinct local states
            kind, one = numbered(state.flatten(1))
            kinds, at = state.flatten(1)[:, one], torch.arange(len(one))
            # A base at (loop, input), and each other kind that has the same token.
            base, source = ((kinds[0] == kinds[0, kind, None]) & (kind[:, None] != at)).nonzero().T
            (loop, base), (source_loop, source) = (
                torch.unravel_index(x, state.shape[1:]) for x in (base, one[source])
            )
            first = self.loops.start
            position = torch.full_like(base, position)
            columns.append((base, source, position, loop + first, source_loop + first))
        base, source, position, loop, source_loop = map(torch.cat, zip(*columns))
        none = torch.full_like(base, NO_LOOP)
        return Interventions(base, source, position, loop, source_loop, none, none, none, none)

    def drawn(self, most: int, generator: torch.Generator) -> Interventions:
        """Random inputs, positions and loops, each with a source input of the same token.

        Half of the sources are of another loop; a tenth of the runs have a second interchange.
        """
        inputs, positions, loops = self.batch.inputs, self.positions, self.loops
        source_of = torch.stack([_other_of_token(column, generator) for column in inputs.T], dim=1)
        sizes = (len(inputs), len(positions), len(loops))
        chosen = torch.randperm(math.prod(sizes), generator=generator)[:most]
        base, place, time = torch.unravel_index(chosen, sizes)  # [row] each
        position, loop = place + positions.start, time + loops.start

        def draw(below: Int[Tensor, " row"] | int) -> Int[Tensor, " row"]:
            return (torch.rand(len(base), generator=generator, dtype=torch.float32) * below).long()

        def source_loops(loop: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
            other = (loop - loops.start + 1 + draw(len(loops) - 1)) % len(loops) + loops.start
            same = torch.rand(len(base), generator=generator, dtype=torch.float32) < 0.5
            return torch.where(same, loop, other)

        source, source_loop = source_of[base, position], source_loops(loop)
        other_place = draw(2) == 1
        second_position = torch.where(other_place, draw(len(positions)) + positions.start, position)
        again = (second_position == position).long()  # twice at one position takes another loop
        second_loop = loop + again + draw(self.n_loops - loop - again + 1)
        has_second = (draw(10) == 0) & (second_loop <= self.n_loops)
        return Interventions(
            base,
            source,
            position,
            loop,
            source_loop,
            source_of[source, second_position].where(
                inputs[source, second_position] == inputs[base, second_position],
                source_of[base, second_position],
            ),
            second_position,
            second_loop.where(has_second, torch.tensor(NO_LOOP)),
            source_loops(second_loop.clamp(max=self.n_loops)),
        )

    def intervened(self, interchanges: Interventions) -> dict[str, Tensor]:
        """The interventions, whether each changes an answer, and whether the programs differ."""
        if not len(interchanges.base):
            none = torch.zeros(0, dtype=torch.bool)
            return {**vars(interchanges), "changes": none, "differ": none}
        delays = torch.arange(self.n_loops + 1)[:, None]
        within = interchanges.loop + delays <= self.n_loops
        # [delay, row, pos]: the answers that count
        counts = (self.batch.targets != IGNORE)[interchanges.base] & within[..., None]
        expected, first_clean = self.program.intervened(interchanges, self.n_loops)
        answers, clean = self.other.intervened(interchanges, self.n_loops)
        changes = decided_difference(expected, first_clean) | decided_difference(answers, clean)
        differ = decided_difference(expected, answers)
        return {
            **vars(interchanges),
            "changes": (changes & counts).any(-1).any(0),
            "differ": (differ & counts).any(-1).any(0),
        }


class _OneRun:
    """A program's clean run, and runs that continue from a changed state; loops are the other
    program's.
    """

    def __init__(
        self, program: LoopProgram, batch: Batch, n_loops: int, shift: int = 0, offset: int = 0
    ) -> None:
        self.program, self.inputs = program, batch.inputs
        self.shift, self.offset = shift, offset
        self.trace = program.trace(batch.inputs, n_loops)

    def intervened(
        self, interchanges: Interventions, n_loops: int
    ) -> tuple[Int[Tensor, "delay row pos"], Int[Tensor, "delay row pos"]]:
        variables, loop = self.trace.variables, interchanges.loop + self.shift
        position, rows = interchanges.position - self.offset, torch.arange(len(loop))
        # [row, pos]: the base run's variables, those of one position from the source run
        state = {name: x[loop, interchanges.base] for name, x in variables.items()}
        for name, x in variables.items():
            state[name][rows, position] = x[
                interchanges.source_loop + self.shift, interchanges.source, position
            ]
        place, second = interchanges.second_position - self.offset, interchanges.second_loop
        at = interchanges.second_source_loop + self.shift, interchanges.second_source, place
        values, delay = {name: x[at] for name, x in variables.items()}, second - interchanges.loop
        n_pos = self.inputs.shape[1]
        # A step knows no loop number, so interventions at different loops go on together.
        run = self.program.run(
            self.inputs[interchanges.base],
            n_loops=n_loops,
            variables=state,
            interventions=Intervention.of_rows(values, place, delay, second != NO_LOOP, n_pos),
        )
        reads = loop + torch.arange(n_loops + 1)[:, None]  # [delay, row]
        clean = self.trace.outputs[reads.clamp(max=len(self.trace.outputs) - 1), interchanges.base]
        return run.outputs, clean


def _other_of_token(
    tokens: Int[Tensor, " input"], generator: torch.Generator
) -> Int[Tensor, " input"]:
    """For each input another one with the same token: the next in a random cycle."""
    shuffled = torch.randperm(len(tokens), generator=generator)
    by_token = shuffled[tokens[shuffled].argsort(stable=True)]  # inputs of one token together
    other = torch.empty_like(by_token)
    for same in by_token.split(tokens.unique(return_counts=True)[1].tolist()):
        other[same] = same.roll(1)
    return other


def numbered(
    columns: Int[Tensor, "value column"],
) -> tuple[Int[Tensor, " column"], Int[Tensor, " number"]]:
    """Equal columns have equal numbers, in lexicographic order; and the last column of each.

    As ``unique(dim=1)``, in a twentieth of its time.
    """
    number = torch.zeros_like(columns[0])
    for row in columns:
        kind = row.unique(return_inverse=True)[1]
        number = (number * (kind.max() + 1) + kind).unique(return_inverse=True)[1]
    last = torch.empty(int(number.max()) + 1, dtype=torch.long)
    last[number] = torch.arange(len(number))
    return number, last


def decided_difference(x: Int[Tensor, ...], y: Int[Tensor, ...]) -> Bool[Tensor, ...]:
    return (x != y) & (x != UNKNOWN) & (y != UNKNOWN)


@dataclass(frozen=True)
class RepeatedStates:
    """Counts of states after at most two interchanges, one entry for each state and loop."""

    number: int = 0  # how many
    changes: int = 0  # those at which the other program's answer is not that of the clean run
    differ: int = 0  # those at which the two programs answer differently

    def __add__(self, more: RepeatedStates) -> RepeatedStates:
        return RepeatedStates(
            self.number + more.number, self.changes + more.changes, self.differ + more.differ
        )

    @property
    def share(self) -> float:
        """Share of states at which the programs differ, among those with any change."""
        return self.differ / max(self.changes, self.differ, 1)


def repeated_states(runs: PairedRuns, generator: torch.Generator) -> tuple[RepeatedStates, bool]:
    """Follow two programs through the states after two interchanges; whether through all of them.

    If there are too many, a sample is followed.
    """
    joint = _JointStates(runs, generator)
    once = twice = joint.none
    total = RepeatedStates()
    for loop in runs.loops:
        once = joint.limited(torch.cat([once, joint.interchanged(joint.clean(loop))]))
        twice = joint.limited(torch.cat([twice, joint.interchanged(once)]))
        counts, twice = joint.read_and_step(twice, loop)
        total += counts
        once = joint.read_and_step(once, loop)[1]
    return total, joint.complete


class _JointStates:
    """States of two programs on one input, a row each: input, then variables by position."""

    most_numbers = 2**20
    """Most numbers in the states followed at one loop."""

    def __init__(self, runs: PairedRuns, generator: torch.Generator) -> None:
        self.runs, self.inputs, self.generator = runs, runs.batch.inputs, generator
        self.complete = True  # whether no state was left out so far
        self.each = (runs.program, runs.other)
        self.none = self.clean(runs.loops.start)[:0]
        states = {p: runs.local_states(p).flatten(1) for p in runs.positions}
        self.kinds = {p: x[:, numbered(x)[1]].T for p, x in states.items()}

    def clean(self, loop: int) -> Int[Tensor, "state value"]:
        values = [x[loop + run.shift] for run in self.each for x in run.trace.variables.values()]
        return torch.cat([torch.arange(len(self.inputs))[:, None], *values], dim=1)

    def limited(self, rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
        return self._some(_distinct(rows), self.most_numbers // rows.shape[1])

    def interchanged(self, rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
        n_kinds = sum(map(len, self.kinds.values()))
        # 16 times as many as are followed may be examined to find those that differ.
        rows = self._some(rows, max(16 * self.most_numbers // (rows.shape[1] * n_kinds), 1))
        n_pos, states = self.inputs.shape[1], [self.none]
        for position, kinds in self.kinds.items():
            # The columns of the variables at this position, of each program with its offset.
            columns = torch.tensor([
                1 + n_pos * k + position - run.offset
                for k, run in enumerate(r for r in self.each for _ in r.trace.variables)
            ])  # fmt: skip
            token, local = self.inputs[rows[:, 0], position], rows[:, columns]
            for kind in kinds:
                some = rows[(token == kind[0]) & (local != kind[1:]).any(1)]
                some[:, columns] = kind[1:]
                states.append(some)
        return _distinct(torch.cat(states))

    def _some(self, rows: Int[Tensor, "row value"], most: int) -> Int[Tensor, "state value"]:
        if len(rows) <= most:
            return rows
        self.complete = False
        return rows[torch.randperm(len(rows), generator=self.generator)[:most]]

    def read_and_step(
        self, rows: Int[Tensor, "row value"], loop: int
    ) -> tuple[RepeatedStates, Int[Tensor, "state value"]]:
        counts, stepped = RepeatedStates(), [self.none]
        n_loops = int(loop + 1 < self.runs.loops.stop)
        is_asked = self.runs.batch.targets != IGNORE
        for some in rows.split(AT_A_TIME) if len(rows) else ():
            base, after, answers = some[:, 0], [some[:, :1]], []
            states = some[:, 1:].unflatten(1, (-1, self.inputs.shape[1]))  # [state, variable, pos]
            begin = 0
            for run in self.each:
                names = run.program.variables
                state = {v: states[:, begin + k].contiguous() for k, v in enumerate(names)}
                begin += len(names)
                continued = run.program.run(self.inputs[base], n_loops=n_loops, variables=state)
                answers.append(continued.outputs[0])
                after += [continued.variables[v][-1] for v in names]
            clean = self.each[1].trace.outputs[loop, base]
            differ, changes = (
                (decided_difference(answers[1], x) & is_asked[base]).any(1)
                for x in (answers[0], clean)
            )
            counts += RepeatedStates(len(some), int(changes.sum()), int(differ.sum()))
            stepped.append(torch.cat(after, dim=1))
        return counts, torch.cat(stepped)


def _distinct(rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
    """Distinct rows, compared by a random linear hash of 63 bits."""
    generator = torch.Generator().manual_seed(0)
    # Odd multipliers lose no bit of a single column.
    odd = torch.randint(2**62, (rows.shape[1],), generator=generator) * 2 + 1
    _, inverse = (rows * odd).sum(1).unique(return_inverse=True)
    first = torch.empty(int(inverse.max()) + 1 if len(rows) else 0, dtype=torch.long)
    first[inverse.flip(0)] = torch.arange(len(rows)).flip(0)
    return rows[first]
