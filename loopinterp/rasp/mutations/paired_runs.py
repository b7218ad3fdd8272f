"""Two programs on the same inputs, and the same interchange interventions in both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.trace import Intervention
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.program_alignment import Alignment
    from loopinterp.rasp.trace import Trace
    from loopinterp.tasks.task import Batch

AT_A_TIME = 2**15
"""Interventions that are run together."""

NO_LOOP = -1
"""The loop of a second interchange where there is none."""

_REPEATED = 10
"""One of so many drawn interventions has a second interchange."""


@dataclass(frozen=True, eq=False)
class Interventions:
    """Whose run is changed, whose values it is given, where, and after how many loops of each.

    The ``second_`` columns are those of a second interchange in the same run, at the loop of the
    first or later; ``second_loop`` is :data:`NO_LOOP` where there is none.
    """

    base: Int[Tensor, " row"]
    source: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    loop: Int[Tensor, " row"]
    source_loop: Int[Tensor, " row"]
    second_source: Int[Tensor, " row"]
    second_position: Int[Tensor, " row"]
    second_loop: Int[Tensor, " row"]
    second_source_loop: Int[Tensor, " row"]

    def split(self, at_a_time: int) -> Iterator[Interventions]:
        """Parts that fit memory."""
        parts = zip(*(column.split(at_a_time) for column in vars(self).values()))
        return (Interventions(*part) for part in parts)


class PairedRuns:
    """A program laid over another: their clean runs on some inputs, and interventions in both.

    Args:
        program: The program, its answers already late by the lag of the alignment.
        other: The other.
        laid: How the program lies over the other.
        batch: Inputs of one length.
        n_loops: Loops of the other.
    """

    def __init__(
        self,
        program: LoopProgram,
        other: LoopProgram,
        laid: Alignment,
        batch: Batch,
        n_loops: int,
    ) -> None:
        self.batch, self.n_loops = batch, n_loops
        self.program = OneRun(program, batch, n_loops + 1, laid.shift, laid.offset)
        self.other = OneRun(other, batch, n_loops + 1)
        self.positions = range(laid.offset, batch.inputs.shape[1])
        self.loops = range(max(-laid.shift, 0), n_loops + 1)

    def clean_answers(self) -> tuple[Int[Tensor, "loop input pos"], Int[Tensor, "loop input pos"]]:
        """Answers of both, without an intervention, at the loops that both have."""
        loops = torch.tensor(self.loops)
        return self.program.answers(loops), self.other.answers(loops)

    def local_states(self, position: int) -> Int[Tensor, "value loop input"]:
        """What an interchange at a position moves: token, both programs' variables."""
        loops = torch.tensor(self.loops)
        token = self.batch.inputs[:, position].expand(len(loops), -1)
        local = [run.local_state(position, loops) for run in (self.program, self.other)]
        return torch.cat([token[None], *local])

    def every_single(self) -> Interventions:
        """All that change a state: of runs that come to one state of both, one is the source."""
        made = []
        for position in self.positions:
            state = self.local_states(position)
            kinds, kind = state.flatten(1).unique(dim=1, return_inverse=True)
            one = torch.empty(kinds.shape[1], dtype=torch.long)
            one[kind] = torch.arange(len(kind))
            at = torch.arange(len(kinds[0]))
            base, source = ((kinds[0] == kinds[0, kind, None]) & (kind[:, None] != at)).nonzero().T
            (loop, base), (source_loop, source) = (
                torch.unravel_index(x, state.shape[1:]) for x in (base, one[source])
            )
            first = self.loops.start
            position = torch.full_like(base, position)
            made.append((base, source, position, loop + first, source_loop + first))
        base, source, position, loop, source_loop = map(torch.cat, zip(*made))
        none = torch.full_like(base, NO_LOOP)
        return Interventions(base, source, position, loop, source_loop, none, none, none, none)

    def drawn(self, most: int, generator: torch.Generator) -> Interventions:
        """Inputs, positions and loops, all different, each with another input of the same token.

        Half of the sources are of another loop; a tenth of the runs get a second interchange.
        """
        inputs, positions, loops = self.batch.inputs, self.positions, self.loops
        source_of = torch.stack([_other_of_token(column, generator) for column in inputs.T], dim=1)
        sizes = (len(inputs), len(positions), len(loops))
        chosen = torch.randperm(math.prod(sizes), generator=generator)[:most]
        base, place, time = torch.unravel_index(chosen, sizes)
        position, loop = place + positions.start, time + loops.start
        source, source_loop = source_of[base, position], self._source_loops(loop, generator)

        def draw(below: Int[Tensor, " row"] | int) -> Int[Tensor, " row"]:
            return (torch.rand(len(base), generator=generator, dtype=torch.float32) * below).long()

        other_place = draw(2) == 1
        second_position = torch.where(other_place, draw(len(positions)) + positions.start, position)
        again = (second_position == position).long()  # twice at one position takes another loop
        second_loop = loop + again + draw(self.n_loops - loop - again + 1)
        has_second = (draw(_REPEATED) == 0) & (second_loop <= self.n_loops)
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
            self._source_loops(second_loop.clamp(max=self.n_loops), generator),
        )

    def _source_loops(
        self, loop: Int[Tensor, " row"], generator: torch.Generator
    ) -> Int[Tensor, " row"]:
        """The same loop for half of the rows, any other for the rest."""
        count, first = len(self.loops), self.loops.start
        moved = (
            1
            + (torch.rand(len(loop), generator=generator, dtype=torch.float32) * (count - 1)).long()
        )
        other = (loop - first + moved) % count + first
        return torch.where(
            torch.rand(len(loop), generator=generator, dtype=torch.float32) < 0.5, loop, other
        )

    def intervened(self, made: Interventions) -> dict[str, Tensor]:
        """The interventions, whether each changes an answer, and whether the programs differ."""
        if not len(made.base):
            none = torch.zeros(0, dtype=torch.bool)
            return {**vars(made), "changes": none, "differ": none}
        delays = torch.arange(self.n_loops + 1)[:, None]
        within = made.loop + delays <= self.n_loops
        counts = (self.batch.targets != IGNORE)[made.base] & within[..., None]
        expected, undisturbed = self.program.intervened(made, self.n_loops)
        answers, clean = self.other.intervened(made, self.n_loops)

        def anywhere(x: Tensor) -> Tensor:
            return (x & counts).any(-1).any(0)

        changes = decided_difference(expected, undisturbed) | decided_difference(answers, clean)
        return {
            **vars(made),
            "changes": anywhere(changes),
            "differ": anywhere(decided_difference(expected, answers)),
        }


class OneRun:
    """A program's clean run on all inputs, and runs that go on from a changed state.

    Loops and positions are the other program's: this one is ``shift`` loops ahead of it, with its
    variables ``offset`` positions to the left.
    """

    def __init__(
        self, program: LoopProgram, batch: Batch, n_loops: int, shift: int = 0, offset: int = 0
    ) -> None:
        self.program, self.inputs = program, batch.inputs
        self.shift, self.offset = shift, offset
        self.trace: Trace = program.trace(batch.inputs, n_loops)

    def answers(self, loops: Int[Tensor, " loop"]) -> Int[Tensor, "loop input pos"]:
        """Clean answers after those loops."""
        return self.trace.outputs[loops + self.shift]

    def local_state(
        self, position: int, loops: Int[Tensor, " loop"]
    ) -> Int[Tensor, "variable loop input"]:
        """The variables that stand for the state at a position."""
        variables = self.trace.variables.values()
        return torch.stack([x[loops + self.shift, :, position - self.offset] for x in variables])

    def intervened(
        self, made: Interventions, n_loops: int
    ) -> tuple[Int[Tensor, "delay row pos"], Int[Tensor, "delay row pos"]]:
        """What is answered with the sources' variables put in; and without."""
        variables, loop = self.trace.variables, made.loop + self.shift
        position, rows = made.position - self.offset, torch.arange(len(loop))
        state = {name: x[loop, made.base] for name, x in variables.items()}
        for name, x in variables.items():
            state[name][rows, position] = x[made.source_loop + self.shift, made.source, position]
        # A step knows no loop number, so interventions at different loops go on together.
        run = self.program.run(
            self.inputs[made.base],
            n_loops=n_loops,
            variables=state,
            interventions=self._second(made),
        )
        reads = loop + torch.arange(n_loops + 1)[:, None]
        return run.outputs, self.trace.outputs[
            reads.clamp(max=len(self.trace.outputs) - 1), made.base
        ]

    def _second(self, made: Interventions) -> list[Intervention]:
        """The second interchanges, those of each delay together."""
        has_second = made.second_loop != NO_LOOP
        delay, position = made.second_loop - made.loop, made.second_position - self.offset
        every, found = torch.arange(self.inputs.shape[1]), []
        for after in delay[has_second].unique().tolist():
            mask = (has_second & (delay == after))[:, None] & (position[:, None] == every)
            for name, x in self.trace.variables.items():
                given = x[made.second_source_loop + self.shift, made.second_source, position]
                values = given[:, None].expand(-1, len(every)).contiguous()
                found.append(Intervention(name, after, values, mask))
        return found


def _other_of_token(
    tokens: Int[Tensor, " input"], generator: torch.Generator
) -> Int[Tensor, " input"]:
    """For each input another one with the same token: the next of a circle in random order."""
    shuffled = torch.randperm(len(tokens), generator=generator)
    by_token = shuffled[tokens[shuffled].argsort(stable=True)]
    other = torch.empty_like(by_token)
    for same in by_token.split(tokens.unique(return_counts=True)[1].tolist()):
        other[same] = same.roll(1)
    return other


def decided_difference(x: Int[Tensor, ...], y: Int[Tensor, ...]) -> Bool[Tensor, ...]:
    """Where two answers differ; one that is undecided says nothing."""
    return (x != y) & (x != UNKNOWN) & (y != UNKNOWN)
