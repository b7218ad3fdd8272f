"""The table of steps, by experiment: states of two neighbours are put in, and one loop is run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.cell_automaton import EDGE, Cell, CellAutomaton
from loopinterp.models import bind
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.circuits.decompiler.behaviour import Runs
    from loopinterp.circuits.decompiler.state_values import TokenValues

Place = tuple[int, int]
"""An input and a position of it."""

_AT_A_TIME = 1024
_MOST_PAIRS = 2500
"""Pairs of cells that are tried, at most."""


@dataclass(frozen=True)
class TransitionTable(ShortRepr):
    """What each experiment gave.

    Attributes:
        steps: (left cell, own cell) -> value after one loop -> in how many experiments.
        starts: (token to the left, own token) -> value before the first loop -> in how many places.
        answers: Cell -> answer -> of how many of its states.
        closed: Whether every value that a step led to was tried in its turn; else there were too
            many, and some pairs are missing.
    """

    steps: Mapping[tuple[Cell, Cell], Counter[int]] = field(repr=False)
    starts: Mapping[tuple[int, int], Counter[int]] = field(repr=False)
    answers: Mapping[Cell, Counter[int]] = field(repr=False)
    closed: bool

    @property
    def consistency(self) -> float:
        """Share of the experiments that gave what most of their kind gave."""
        each = [*self.steps.values(), *self.starts.values(), *self.answers.values()]
        agreed = sum(max(counts.values()) for counts in each)
        return agreed / sum(counts.total() for counts in each)

    def automaton(self, sizes: Mapping[int, int]) -> CellAutomaton:
        """By the majority of each kind."""
        return CellAutomaton(
            sizes=sizes,
            start=_most(self.starts),
            step=_most(self.steps),
            answers=_most(self.answers),
        )


def _most(counts: Mapping) -> dict:
    return {key: of.most_common(1)[0][0] for key, of in counts.items()}


Starts = dict[tuple[int, int], Counter[int]]
"""(token to the left, own token) -> value before the first loop -> in how many places."""


def start_values(
    runs: Runs,
    places: Mapping[tuple[int, int], list[Place]],
    values: Mapping[int, TokenValues],
    *,
    tries: int,
    most: int,
    generator: torch.Generator,
) -> Starts:
    """What positions start with, by their token and the one to their left, in some places each."""
    starts = {}
    for (before, own), known in places.items():
        chosen = [known[k] for k in torch.randint(len(known), (tries,), generator=generator)]
        rows, columns = torch.tensor(chosen).unbind(1)
        found = values[own].sort(runs.states[0, rows, columns], most=most)
        starts[before, own] = Counter(found.tolist())
    return starts


def tabulate(
    runs: Runs,
    values: Mapping[int, TokenValues],
    places: Mapping[tuple[int, int], list[Place]],
    starts: Starts,
    *,
    tries: int,
    most: int,
    generator: torch.Generator,
) -> TransitionTable:
    """Try every pair of cells that can stand side by side, and those that come of it.

    Args:
        runs: Undisturbed runs.
        values: Token -> its values; new ones are added.
        places: Where each two tokens stand side by side (:func:`side_by_side`).
        starts: What positions start with (:func:`start_values`).
        tries: Experiments for each pair, in other places, loops, and with other states.
        most: Values of a token, at most; beyond that a new state is the nearest value.
        generator: Of places and loops.
    """
    steps: dict[tuple[Cell, Cell], Counter[int]] = {}
    while True:
        wanted = [
            (left, (own, v))
            for before, own in places
            for left in _cells(before, values)
            for v in range(len(values[own]))
            if (left, (own, v)) not in steps
        ]
        closed = not wanted
        if closed or len(steps) + len(wanted) > _MOST_PAIRS:
            break
        after = _stepped(runs, values, wanted, places, tries, generator)
        for token in values:
            mine = [k for k, (_, own) in enumerate(wanted) if own[0] == token]
            if mine:
                found = values[token].sort(after[mine].flatten(0, 1), most=most)
                for k, row in zip(mine, found.unflatten(0, (len(mine), tries)).tolist()):
                    steps[wanted[k]] = Counter(row)
    answers = {
        (token, v): Counter(of.behaviour.read(torch.stack(states)).tolist())
        for token, of in values.items()
        for v, states in enumerate(of.states)
    }
    return TransitionTable(steps, starts, answers, closed)


def _cells(token: int, values: Mapping[int, TokenValues]) -> list[Cell]:
    if token == EDGE[0]:
        return [EDGE]
    return [(token, v) for v in range(len(values[token]))]


def side_by_side(runs: Runs) -> dict[tuple[int, int], list[Place]]:
    """Where each two tokens stand side by side; the first position has :data:`EDGE` before it."""
    found = defaultdict(list)
    for row, tokens in enumerate(runs.batch.inputs.tolist()):
        for position, pair in enumerate(zip([EDGE[0], *tokens], tokens)):
            found[pair].append((row, position))
    return dict(sorted(found.items()))


@torch.no_grad()
def _stepped(
    runs: Runs,
    values: Mapping[int, TokenValues],
    wanted: Sequence[tuple[Cell, Cell]],
    places: Mapping[tuple[int, int], list[Place]],
    tries: int,
    generator: torch.Generator,
) -> Float[Tensor, "pair try d_model"]:
    """State of the own position after one loop from both put in, all else as undisturbed."""
    after = []
    each = [(pair, turn) for pair in wanted for turn in range(tries)]
    for start in range(0, len(each), _AT_A_TIME):
        some = each[start : start + _AT_A_TIME]
        drawn = []
        for (left, own), _ in some:
            known = places[left[0], own[0]]
            drawn.append(known[int(torch.randint(len(known), (), generator=generator))])
        rows, columns = torch.tensor(drawn).unbind(1)
        loops = torch.randint(max(runs.n_loops, 1), (len(some),), generator=generator)
        h = runs.states[loops, rows].clone()
        for k, ((left, own), turn) in enumerate(some):
            position = int(columns[k])
            h[k, position] = values[own[0]].state(own[1], turn)
            if left != EDGE:
                h[k, position - 1] = values[left[0]].state(left[1], turn // 2)
        stepped = bind(runs.model, runs.inputs[rows]).step(h)
        after.append(stepped[torch.arange(len(some)), columns])
    if not after:
        return runs.states.new_empty(0, tries, runs.states.shape[-1])
    return torch.cat(after).unflatten(0, (len(wanted), tries))
