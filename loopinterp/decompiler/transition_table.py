"""The transition table of a looped program: a position's next value, given its left neighbour.

A *cell* is a token with one of its values. The first position has no left neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn.functional import pad

from loopinterp.core.text import ShortRepr
from loopinterp.programs.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

Cell = tuple[int, int]  # a token and one of its values

EDGE: Cell = (-1, 0)  # in place of the left neighbour of the first position

C = TypeVar("C", bound=Hashable)
V = TypeVar("V", bound=Hashable)
Step = tuple[int, V | None, int, V]  # left token and value (None of the edge); token, value


@dataclass(frozen=True, eq=False)
class TransitionTable(ShortRepr):
    """Values of each token: start, next value and answer.

    The axis of left tokens ends with a row for the edge, which index -1 reads too.

    Attributes:
        sizes: Token -> number of its values, which are 0 .. size - 1.
        start: Value before the first loop; -1 for tokens that are never neighbours.
        step: Value after one loop; unchanged where the transition is not ``known``.
        answers: ``UNKNOWN`` where undecided.
        consistency: Share of the experiments behind it that agree with the majority of their kind.

    Example:
        >>> flip = TransitionTable.from_entries(
        ...     {0: 2}, start={(-1, 0): 0}, step={(EDGE, (0, 0)): 1, (EDGE, (0, 1)): 0},
        ...     answers={(0, 0): 0, (0, 1): 1})
        >>> flip.run(torch.tensor([[0]]), 3).flatten().tolist()
        [0, 1, 0, 1]
    """

    sizes: Mapping[int, int]
    start: Int[Tensor, "left_token token"] = field(repr=False)
    step: Int[Tensor, "left_token left_value token value"] = field(repr=False)
    known: Bool[Tensor, "left_token left_value token value"] = field(repr=False)
    answers: Int[Tensor, "token value"] = field(repr=False)
    consistency: float = 1.0

    def _shown(self) -> list[tuple[str, object]]:
        return [("sizes", dict(self.sizes)), ("transitions", len(self.steps))]

    @classmethod
    def from_entries(
        cls,
        sizes: Mapping[int, int],
        *,
        start: Mapping[tuple[int, int], int],
        step: Mapping[tuple[Cell, Cell], int],
        answers: Mapping[Cell, int],
        consistency: float = 1.0,
    ) -> TransitionTable:
        """The table with entries (left token or -1, token), (left cell, cell) and cell."""
        n_tokens, n_values = max(sizes) + 1, max(sizes.values())
        table = cls(
            sizes,
            start=torch.full((n_tokens + 1, n_tokens), -1),
            step=torch.arange(n_values).repeat(n_tokens + 1, n_values, n_tokens, 1),
            known=torch.zeros(n_tokens + 1, n_values, n_tokens, n_values, dtype=torch.bool),
            answers=torch.full((n_tokens, n_values), UNKNOWN),
            consistency=consistency,
        )
        keys = [[*left, *cell] for left, cell in step]  # [left token, left value, token, value]
        for values, at, entries in (
            (table.start, [*start], start.values()),
            (table.step, keys, step.values()),
            (table.known, keys, [True] * len(keys)),
            (table.answers, [*answers], answers.values()),
        ):
            if at:
                values[torch.tensor(at).unbind(1)] = torch.tensor([*entries])
        return table

    @classmethod
    def reached(
        cls,
        start: Mapping[tuple[int, int], V],
        step: Callable[[list[Step[V]]], Iterable[V]],
        answer: Callable[[list[tuple[int, V]]], Iterable[int]],
        *,
        most: int | None = None,
    ) -> tuple[TransitionTable, dict[Cell, V]] | None:
        """The table of every cell that a run or an interchange can make, with each cell's value.

        Args:
            start: (left token or -1, token) -> value before the first loop, for all neighbours.
            step: The value after one loop of each transition.
            answer: The answer of each token and value.
            most: None is returned beyond so many cells.
        """
        values: dict[int, list[V]] = {token: [] for _, token in start}
        for (_, token), value in start.items():
            if value not in values[token]:
                values[token].append(value)
        steps: dict[Step[V], V] = {}
        while True:
            untried = [
                (left, left_value, token, value)
                for left, token in start
                for left_value, value in product(values.get(left, [None]), values[token])
                if (left, left_value, token, value) not in steps
            ]
            if not untried:
                break
            if most is not None and sum(map(len, values.values())) > most:
                return None
            for transition, after in zip(untried, step(untried)):
                steps[transition] = after
                if after not in values[transition[2]]:
                    values[transition[2]].append(after)
        number = {(token, v): k for token, each in values.items() for k, v in enumerate(each)}
        cells = {(token, k): v for (token, v), k in number.items()}
        # The edge has one cell, whose value is None here and 0 in the table.
        number_of_left = {**number, (EDGE[0], None): EDGE[1]}
        table = cls.from_entries(
            {token: len(each) for token, each in values.items()},
            start={pair: number[pair[1], value] for pair, value in start.items()},
            step={
                ((left, number_of_left[left, left_value]), (token, number[token, value])):
                    number[token, after]
                for (left, left_value, token, value), after in steps.items()
            },
            answers=dict(zip(cells, answer(list(number)))),
        )  # fmt: skip
        return table, cells

    @cached_property
    def entries(self) -> tuple[object, ...]:
        """All that the table says but its consistency; equal tables have equal entries."""
        tensors = self.start, self.step, self.known, self.answers
        return (*self.sizes.items(), *(tuple(x.flatten().tolist()) for x in tensors))

    @property
    def cells(self) -> list[Cell]:
        """All cells, token by token."""
        return [(token, v) for token, size in self.sizes.items() for v in range(size)]

    @cached_property
    def starts(self) -> dict[tuple[int, int], int]:
        """(left token or -1, token) -> value before the first loop."""
        pairs = sorted(product((EDGE[0], *self.sizes), self.sizes))
        return {pair: int(self.start[pair]) for pair in pairs if self.start[pair] >= 0}

    @cached_property
    def steps(self) -> dict[tuple[Cell, Cell], int]:
        """(left cell, cell) -> value after one loop."""
        edge = len(self.step) - 1
        # nonzero and the mask give entries in the same order.
        return {
            (EDGE if left == edge else (left, left_value), (token, value)): after
            for (left, left_value, token, value), after in zip(
                self.known.nonzero().tolist(), self.step[self.known].tolist()
            )
        }

    @cached_property
    def answer_of(self) -> dict[Cell, int]:
        """The answer of each cell."""
        return {cell: int(self.answers[cell]) for cell in self.cells}

    def run(
        self,
        tokens: Int[Tensor, "run pos"],
        n_loops: int,
        values: Int[Tensor, "run pos"] | None = None,
    ) -> Int[Tensor, "time run pos"]:
        """Values after 0, 1, … ``n_loops`` loops, from the start or from given values.

        Raises:
            KeyError: If the table lacks a token or a pair of neighbours.
        """
        if not torch.isin(tokens, torch.tensor([*self.sizes])).all():
            raise KeyError("a token that the table does not have")
        times = self.follow(tokens, n_loops, values)
        known = self.known.flatten()[self.places(tokens, times[:-1])].all()
        if not known or (values is None and (self._starts_of(tokens) < 0).any()):
            raise KeyError("cells side by side that the table does not have")
        return times

    def follow(
        self,
        tokens: Int[Tensor, "run pos"],
        n_loops: int,
        values: Int[Tensor, "run pos"] | None = None,
    ) -> Int[Tensor, "time run pos"]:
        """Like :meth:`run`; cells in unknown transitions keep their value."""
        times = [self._starts_of(tokens).clamp(min=0) if values is None else values]
        step, of_tokens = self.step.flatten(), self._places_of(tokens)
        for _ in range(n_loops):
            times.append(step[self._places_from(of_tokens, times[-1])])
        return torch.stack(times)

    def read(
        self, tokens: Int[Tensor, "run pos"], values: Int[Tensor, "*time run pos"]
    ) -> Int[Tensor, "*time run pos"]:
        # One index into the flattened table is much faster than two.
        return self.answers.flatten()[tokens * self.answers.shape[1] + values]

    def places(
        self, tokens: Int[Tensor, "run pos"], values: Int[Tensor, "*time run pos"]
    ) -> Int[Tensor, "*time run pos"]:
        """The place of each position's transition in the flattened table."""
        return self._places_from(self._places_of(tokens), values)

    def _places_of(self, tokens: Int[Tensor, "run pos"]) -> Int[Tensor, "run pos"]:
        """The places where all values are 0."""
        n_left, n_values, n_tokens, _ = self.step.shape
        left = pad(tokens[:, :-1], (1, 0), value=n_left - 1)
        # ((left * n_values + left_value) * n_tokens + token) * n_values + value
        return (left * (n_values * n_tokens) + tokens) * n_values

    def _places_from(
        self, of_tokens: Int[Tensor, "run pos"], values: Int[Tensor, "*time run pos"]
    ) -> Int[Tensor, "*time run pos"]:
        places = of_tokens + values
        # The value of the left neighbour counts too; the edge has 0.
        places[..., 1:] += values[..., :-1] * (self.step.shape[1] * self.step.shape[2])
        return places

    def entry(self, place: int) -> tuple[Cell, Cell]:
        """The left cell and the cell of a place in the flattened table."""
        left, left_value, token, value = (
            int(x) for x in torch.unravel_index(torch.tensor(place), self.step.shape)
        )
        return EDGE if left == len(self.step) - 1 else (left, left_value), (token, value)

    def _starts_of(self, tokens: Int[Tensor, "run pos"]) -> Int[Tensor, "run pos"]:
        return self.start[pad(tokens[:, :-1], (1, 0), value=-1), tokens]  # -1 is the edge's row

    def asked_at(self, tokens: Collection[int], *, otherwise: int = UNKNOWN) -> TransitionTable:
        """The table with answers at some tokens only, and ``otherwise`` elsewhere."""
        others = torch.tensor([t for t in range(len(self.answers)) if t not in tokens])
        return replace(self, answers=self.answers.index_fill(0, others.long(), otherwise))

    def renamed(self, names: Mapping[Cell, int]) -> TransitionTable:
        """The table with other numbers for values; cells with one number are merged."""
        moved = {EDGE: EDGE, **{cell: (cell[0], name) for cell, name in names.items()}}
        return TransitionTable.from_entries(
            {t: len({n for cell, n in names.items() if cell[0] == t}) for t in self.sizes},
            start={pair: names[pair[1], value] for pair, value in self.starts.items()},
            step={
                (moved[left], moved[cell]): names[cell[0], value]
                for (left, cell), value in self.steps.items()
            },
            answers={moved[cell]: y for cell, y in self.answer_of.items()},
            consistency=self.consistency,
        )

    def merged(self) -> TransitionTable:
        """The smallest table with the same answers after every interchange."""
        return self.renamed(self.merged_names())

    def merged_names(self) -> dict[Cell, int]:
        """Cell -> its number in the smallest table with the same answers.

        Cells of a token are merged if they have one answer, become merged cells beside every
        neighbour, and turn every neighbour into merged cells.
        """
        transitions = [(left, cell, (cell[0], v)) for (left, cell), v in self.steps.items()]
        views = {cell: (cell[0], y) for cell, y in self.answer_of.items()}
        classes = moore_classes(views, transitions, edge=EDGE, by_class=False)
        names: dict[Cell, int] = {}
        for token in self.sizes:
            cells = [cell for cell in self.cells if cell[0] == token]
            order = {c: k for k, c in enumerate(dict.fromkeys(classes[cell] for cell in cells))}
            names |= {cell: order[classes[cell]] for cell in cells}
        return names


def moore_classes(
    views: Mapping[C, object],
    transitions: Collection[tuple[C, C, C]],
    *,
    edge: C,
    by_class: bool,
) -> dict[C, int]:
    """Classes of cells that look alike and behave alike beside neighbours (Moore's refinement).

    Args:
        views: Cell -> its appearance at the start.
        transitions: Left cell (``edge`` for none), cell, and the next cell.
        by_class: Whether neighbours of one class count as one.
    """

    def numbered(views: Mapping[C, object]) -> dict[C, int]:
        # Equal views get one number, in the order in which they come.
        numbers = {view: k for k, view in enumerate(dict.fromkeys(views.values()))}
        return {cell: numbers[view] for cell, view in views.items()}

    classes = numbered(views)
    while True:
        seen: dict[C, set] = {cell: set() for cell in classes}
        for left, cell, after in transitions:
            seen[cell].add(("beside", classes.get(left, -1) if by_class else left, classes[after]))
            if left != edge:
                seen[left].add(("makes", classes[cell] if by_class else cell, classes[after]))
        finer = numbered({cell: (classes[cell], frozenset(seen[cell])) for cell in classes})
        if max(finer.values()) == max(classes.values()):  # no class was split
            return classes
        classes = finer
