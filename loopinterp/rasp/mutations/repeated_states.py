"""Every state that two programs come to after two interchange interventions in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.mutations.paired_runs import AT_A_TIME, decided_difference
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.mutations.paired_runs import PairedRuns

_MOST_NUMBERS = 2**20
"""The most numbers in the states that are followed at one loop."""

_BRANCHES = 16
"""So many times as many may be looked at to find those that differ."""


@dataclass(frozen=True)
class RepeatedStates:
    """States of a whole run after at most two interchanges, one entry for each state and loop.

    Attributes:
        number: How many.
        changes: Those at which the other program's answer is not that of the clean run.
        differ: Those at which the two programs answer differently.
    """

    number: int = 0
    changes: int = 0
    differ: int = 0

    def __add__(self, more: RepeatedStates) -> RepeatedStates:
        return RepeatedStates(
            self.number + more.number, self.changes + more.changes, self.differ + more.differ
        )

    @property
    def share(self) -> float:
        """Share of states at which the programs differ, among those at which anything changes."""
        return self.differ / max(self.changes, self.differ, 1)


def repeated_states(runs: PairedRuns, generator: torch.Generator) -> tuple[RepeatedStates, bool]:
    """Follow two programs through every state that two interchanges lead to.

    States are followed loop by loop: those after one interchange are the clean states with one
    position replaced, and what becomes of earlier ones; those after two come from these in the
    same way. Each is followed once, however it came about.

    Args:
        runs: The two programs; their inputs should be all of one length.
        generator: Draws states where there are too many to follow all.

    Returns:
        The counts, and whether all were followed.
    """
    joint = _JointStates(runs, generator)
    once = twice = joint.none
    found = RepeatedStates()
    for loop in runs.loops:
        once = joint.limited(torch.cat([once, joint.interchanged(joint.clean(loop))]))
        twice = joint.limited(torch.cat([twice, joint.interchanged(once)]))
        counts, twice = joint.read_and_step(twice, loop)
        found += counts
        once = joint.read_and_step(once, loop)[1]
    return found, joint.complete


class _JointStates:
    """States of two programs on one input, a row each: input, then variables by position.

    Attributes:
        complete: Whether none was left out so far.
    """

    def __init__(self, runs: PairedRuns, generator: torch.Generator) -> None:
        self.runs, self.inputs, self.generator = runs, runs.batch.inputs, generator
        self.complete = True
        self.each = (runs.program, runs.other)
        self.none = self.clean(runs.loops.start)[:0]
        self.kinds = {p: runs.local_states(p).flatten(1).unique(dim=1).T for p in runs.positions}

    def clean(self, loop: int) -> Int[Tensor, "state value"]:
        """Those of all inputs after some loops, without an intervention."""
        values = [x[loop + run.shift] for run in self.each for x in run.trace.variables.values()]
        return torch.cat([torch.arange(len(self.inputs))[:, None], *values], dim=1)

    def limited(self, rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
        """Each state once, and no more than are followed."""
        return self._some(_distinct(rows), _MOST_NUMBERS // rows.shape[1])

    def interchanged(self, rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
        """All that one interchange makes of some states."""
        n_kinds = sum(map(len, self.kinds.values()))
        rows = self._some(rows, max(_BRANCHES * _MOST_NUMBERS // (rows.shape[1] * n_kinds), 1))
        n_pos, made = self.inputs.shape[1], [self.none]
        for position, kinds in self.kinds.items():
            columns = torch.tensor([
                1 + n_pos * k + position - run.offset
                for k, run in enumerate(r for r in self.each for _ in r.trace.variables)
            ])  # fmt: skip
            token, local = self.inputs[rows[:, 0], position], rows[:, columns]
            for kind in kinds:
                some = rows[(token == kind[0]) & (local != kind[1:]).any(1)]
                some[:, columns] = kind[1:]
                made.append(some)
        return _distinct(torch.cat(made))

    def _some(self, rows: Int[Tensor, "row value"], most: int) -> Int[Tensor, "state value"]:
        if len(rows) <= most:
            return rows
        self.complete = False
        return rows[torch.randperm(len(rows), generator=self.generator)[:most]]

    def read_and_step(
        self, rows: Int[Tensor, "row value"], loop: int
    ) -> tuple[RepeatedStates, Int[Tensor, "state value"]]:
        """Compare the answers of some states, and go on by a loop."""
        counts, stepped = RepeatedStates(), [self.none]
        last = loop + 1 == self.runs.loops.stop
        asked = self.runs.batch.targets != IGNORE
        for some in rows.split(AT_A_TIME) if len(rows) else ():
            base, after, answers = some[:, 0], [some[:, :1]], []
            states = some[:, 1:].unflatten(1, (-1, self.inputs.shape[1]))
            begin = 0
            for run in self.each:
                names = run.program.variables
                own = {v: states[:, begin + k].contiguous() for k, v in enumerate(names)}
                begin += len(names)
                n_loops = 0 if last else 1
                gone_on = run.program.run(self.inputs[base], n_loops=n_loops, variables=own)
                answers.append(gone_on.outputs[0])
                after += [gone_on.variables[v][-1] for v in names]
            clean = self.each[1].trace.outputs[loop, base]
            differ, changes = (
                (decided_difference(answers[1], x) & asked[base]).any(1)
                for x in (answers[0], clean)
            )
            counts += RepeatedStates(len(some), int(changes.sum()), int(differ.sum()))
            stepped.append(torch.cat(after, dim=1))
        return counts, torch.cat(stepped)


def _distinct(rows: Int[Tensor, "row value"]) -> Int[Tensor, "state value"]:
    """Each row once: rows are told apart by 63 random bits of them."""
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(2**62, (rows.shape[1],), generator=generator) * 2 + 1
    _, inverse = (rows * odd).sum(1).unique(return_inverse=True)
    first = torch.empty(int(inverse.max()) + 1 if len(rows) else 0, dtype=torch.long)
    first[inverse.flip(0)] = torch.arange(len(rows)).flip(0)
    return rows[first]
