"""Pairs of inputs for interchange interventions on any program's variables.

A *cell* is one variable, taken after one number of loops, with the answer read after one delay.
Its pairs (base, source), each with a position, are those on which the swap matters to the
program: the variable has two values there, and with the source's value the program gives another
answer than without. So nothing that leaves the answer as it is can score on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.runs import steps_to
from loopinterp.rasp.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.circuits.interchange.inputs import Plan
    from loopinterp.circuits.program_swaps import ProgramSwaps

SEARCHED = 4
"""So many times as many pairs of inputs are searched as are wanted for a cell."""

NONE = -1
"""In place of a loop or a variable: there is none."""


@dataclass(frozen=True)
class Cell:
    """The pairs of one variable, loop and delay, and what the program says of them.

    Attributes:
        variable: Number of the variable.
        loop: The swap is made after so many loops.
        delay: Number of the delay.
        steps: Loops from the swap to the reading.
        base: Which input each pair's run is of.
        source: Which input's run the variable is taken from.
        position: At which position.
        said: The program's answer with the swap; -1 where it is undecided.
        without: Its answer without.
        scored: Positions that count: an answer is asked for, and the program has one.
        asked: Positions at which an answer is asked for.
        other_loop: A loop after which the source has another value of the variable, and with it
            the program another answer; -1 if there is none.
        other_variable: Another variable that can be swapped, with which the program has another
            answer; -1 if there is none.
    """

    variable: int
    loop: int
    delay: int
    steps: int
    base: Int[Tensor, " pair"]
    source: Int[Tensor, " pair"]
    position: Int[Tensor, " pair"]
    said: Int[Tensor, "pair pos"]
    without: Int[Tensor, "pair pos"]
    scored: Bool[Tensor, "pair pos"]
    asked: Bool[Tensor, "pair pos"]
    other_loop: Int[Tensor, " pair"]
    other_variable: Int[Tensor, " pair"]

    def __len__(self) -> int:
        return len(self.base)

    def agrees(
        self, answers: Int[Tensor, "pair pos"], pairs: Int[Tensor, " pair"] | None = None
    ) -> Bool[Tensor, " pair"]:
        """Whether answers are those of the program with the swap, at all positions that count.

        Args:
            answers: The answers.
            pairs: Which pairs they are of; all if omitted.
        """
        rows = slice(None) if pairs is None else pairs
        return ((answers == self.said[rows]) | ~self.scored[rows]).all(-1)


class CellFinder:
    """Finds the pairs of each cell.

    Args:
        swaps: The program on all inputs.
        plan: What is tried.
        apart: The variables that can be swapped by themselves. A swap of another one is a swap
            of the whole state, and so of all variables.
        generator: Draws pairs and positions.
    """

    def __init__(
        self,
        swaps: ProgramSwaps,
        plan: Plan,
        *,
        apart: Collection[str],
        generator: torch.Generator,
    ) -> None:
        self.swaps, self.plan, self.apart, self.generator = swaps, plan, set(apart), generator
        self.names = swaps.program.variables
        pairs = draw_pairs(len(plan.inputs), SEARCHED * plan.per_cell, generator)
        self._pairs = torch.stack(pairs).to(plan.inputs.device)

    def cells(self, variable: str, loop: int) -> list[Cell]:
        """The cells of a variable after so many loops: one for each delay that has pairs."""
        steps = (
            steps_to(self.plan.delays, torch.tensor([loop]), self.plan.n_loops).squeeze(1).tolist()
        )
        found = self._search(variable, loop, steps)
        return [
            self._cell(variable, loop, delay, steps[delay], places, said)
            for delay, (places, said) in enumerate(found)
            if len(said)
        ]

    def _search(
        self, variable: str, loop: int, steps: list[int]
    ) -> list[tuple[Int[Tensor, "3 pair"], Int[Tensor, "pair pos"]]]:
        """For each delay, the places (base, source, position) at which the swap matters.

        Every position at which the values differ is tried; of those that matter one is drawn.
        """
        values = self.swaps.trace.variables[variable][loop]
        nowhere = self._pairs.new_empty(3, 0)
        found = [(nowhere, values[:0])] * len(steps)
        for base, source in zip(*(rows.split(self.plan.per_cell) for rows in self._pairs)):
            differs = values[base] != values[source]
            if variable not in self.apart:
                # The whole state also holds what it was given of the token.
                differs &= self.plan.inputs[base] == self.plan.inputs[source]
            pair, position = differs.nonzero(as_tuple=True)
            if not len(pair):
                continue
            places = torch.stack([base[pair], source[pair], position])
            said = self._said(self._taken(variable), places, loop, steps)
            for delay, (before, answers) in enumerate(found):
                matters = self._matters(places[0], said[delay], loop + steps[delay])
                rows = _one_each(pair, matters, self.generator)[: self.plan.per_cell - len(answers)]
                found[delay] = (
                    torch.cat([before, places[:, rows]], dim=1),
                    torch.cat([answers, said[delay, rows]]),
                )
            if all(len(answers) == self.plan.per_cell for _, answers in found):
                break
        return found

    def _matters(self, base: Tensor, said: Tensor, loop: int) -> Bool[Tensor, " place"]:
        """Whether the swap turns an answer that is asked for into another one."""
        without = self.swaps.trace.outputs[loop, base]
        decided = (said != UNKNOWN) & (without != UNKNOWN) & self.plan.asked[base]
        return (decided & (said != without)).any(-1)

    def _cell(
        self, variable: str, loop: int, delay: int, steps: int, places: Tensor, said: Tensor
    ) -> Cell:
        base, source, position = places
        asked = self.plan.asked[base]
        scored = asked & (said != UNKNOWN)
        taken = self._taken(variable)

        def tells_apart(names: Sequence[str], source_loop: Tensor | None = None) -> Tensor:
            other = self._said(names, places, loop, [steps], source_loop)[0]
            return (scored & (other != UNKNOWN) & (other != said)).any(-1)

        other_loop = self._other_loop(variable, loop, source, position)
        conclusive = tells_apart(taken, other_loop.clamp(min=0))
        other_loop = other_loop.masked_fill(~conclusive, NONE)
        other = self._other_variable(variable, loop, places)
        other_variable = torch.full_like(base, NONE)
        if other is not None:
            conclusive = tells_apart((other,))
            other_variable.masked_fill_(conclusive, self.names.index(other))
        return Cell(
            variable=self.names.index(variable),
            loop=loop,
            delay=delay,
            steps=steps,
            base=base,
            source=source,
            position=position,
            said=said,
            without=self.swaps.trace.outputs[loop + steps, base],
            scored=scored,
            asked=asked,
            other_loop=other_loop,
            other_variable=other_variable,
        )

    def _taken(self, variable: str) -> Sequence[str]:
        return (variable,) if variable in self.apart else self.names

    def _said(
        self,
        names: Sequence[str],
        places: Int[Tensor, "3 pair"],
        loop: int,
        steps: list[int],
        source_loop: Int[Tensor, " pair"] | None = None,
    ) -> Int[Tensor, "read pair pos"]:
        base, source, position = places
        reads = torch.tensor(steps, device=base.device)[:, None].expand(-1, len(base))
        return self.swaps.outputs(
            names,
            base=base,
            source=source,
            position=position,
            loop=torch.full_like(base, loop),
            steps=reads,
            source_loop=source_loop,
        )

    def _other_loop(
        self, variable: str, loop: int, source: Tensor, position: Tensor
    ) -> Int[Tensor, " pair"]:
        """The nearest loop after which the source has another value there; -1 if none."""
        values = self.swaps.trace.variables[variable][: self.plan.n_loops + 1, source, position]
        far = len(values)
        loops = torch.arange(far, device=values.device)
        # Of two that are as near, the later one.
        distance = 2 * (loops - loop).abs() + (loops < loop)
        distance = torch.where(values != values[loop], distance[:, None], 2 * far)
        nearest = distance.argmin(0)
        return torch.where(distance.amin(0) < 2 * far, nearest, NONE)

    def _other_variable(self, variable: str, loop: int, places: Tensor) -> str | None:
        """The other variable that differs in most of the pairs, of those swapped by themselves."""
        base, source, position = places
        others = [n for n in self.names if n in self.apart and n != variable]
        if variable not in self.apart or not others:
            return None
        values = [self.swaps.trace.variables[n][loop] for n in others]
        differ = [int((x[base, position] != x[source, position]).sum()) for x in values]
        return others[differ.index(max(differ))]


def draw_pairs(
    n_inputs: int, most: int, generator: torch.Generator
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """Pairs (base, source) of different inputs: a random order, against itself moved on.

    No pair comes twice, and as long as there are pairs enough every input is a base as often as
    any other, give or take one.

    Example:
        >>> base, source = draw_pairs(3, 100, torch.Generator().manual_seed(0))
        >>> len(set(zip(base.tolist(), source.tolist()))), bool((base == source).any())
        (6, False)
    """
    order = torch.randperm(n_inputs, generator=generator)
    rounds = min(-(-most // n_inputs), n_inputs - 1)
    sources = torch.cat([order.roll(k) for k in range(1, rounds + 1)])
    return order.repeat(rounds)[:most], sources[:most]


def _one_each(
    pair: Int[Tensor, " place"], matters: Bool[Tensor, " place"], generator: torch.Generator
) -> Int[Tensor, " pair"]:
    """One of the places of each pair that matter, drawn evenly; pairs in their order."""
    shuffled = torch.randperm(len(pair), generator=generator).to(pair.device)
    rows = shuffled[matters[shuffled]]
    ordered, by_pair = pair[rows].sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return rows[by_pair[first]]
