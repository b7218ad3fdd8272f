"""A looped program as a table: what a position becomes, from its own and its left neighbour's.

A *cell* is a position with a token and one of that token's values. In one loop its value becomes
what the table says of its left neighbour's token and value and its own. The first position has no
left neighbour, which the table knows as :data:`EDGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch

from loopinterp.rasp.language import UNKNOWN
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

Cell = tuple[int, int]
"""A token and one of its values."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)
Transition = tuple[int, V | None, int, V]
"""Left token and value, None of the edge; own token and value."""

EDGE: Cell = (-1, 0)
"""In place of the left neighbour of the first position."""


@dataclass(frozen=True)
class CellAutomaton(ShortRepr):
    """Values of each token, where they start, what they become, and what they answer.

    Attributes:
        sizes: Token -> how many values a position with it can have: 0 .. size - 1.
        start: (token to the left, -1 for none; own token) -> value before the first loop.
        step: (left cell, own cell) -> value after one loop.
        answers: Cell -> the answer read there; ``UNKNOWN`` where it is undecided.
    """

    sizes: Mapping[int, int]
    start: Mapping[tuple[int, int], int] = field(repr=False)
    step: Mapping[tuple[Cell, Cell], int] = field(repr=False)
    answers: Mapping[Cell, int] = field(repr=False)

    def _shown(self) -> list[tuple[str, object]]:
        return [("sizes", dict(self.sizes)), ("cells", len(self.step))]

    @classmethod
    def reached(
        cls,
        start: Mapping[tuple[int, int], V],
        step: Callable[[list[Transition[V]]], Iterable[V]],
        answer: Callable[[list[tuple[int, V]]], Iterable[int]],
        *,
        most: int | None = None,
    ) -> tuple[CellAutomaton, dict[Cell, V]] | None:
        """The automaton of all that a run can make, from the start or from whatever is put in.

        Args:
            start: (token to the left, -1 for none; own token) -> value before the first loop, of
                any kind; of all tokens that stand side by side.
            step: The value after one loop of each transition: left token and value (None of the
                edge), own token and value.
            answer: The answer of each token and value.
            most: Cells at most; None for no bound.

        Returns:
            The automaton, and the value of each of its cells; None if there are more cells.
        """
        known: dict[int, list[V]] = {token: [] for _, token in start}
        for (_, own), value in start.items():
            if value not in known[own]:
                known[own].append(value)
        steps: dict[Transition[V], V] = {}
        while True:
            wanted = [
                (left, of_left, own, of)
                for left, own in start
                for of_left, of in product(known.get(left, [None]), known[own])
                if (left, of_left, own, of) not in steps
            ]
            if not wanted:
                break
            if most is not None and sum(map(len, known.values())) > most:
                return None
            for which, after in zip(wanted, step(wanted)):
                steps[which] = after
                if after not in known[which[2]]:
                    known[which[2]].append(after)
        number = {(token, of): k for token, each in known.items() for k, of in enumerate(each)}
        cells = {(token, k): of for (token, of), k in number.items()}
        answers = answer([(token, of) for (token, _), of in cells.items()])
        automaton = cls(
            sizes={token: len(each) for token, each in known.items()},
            start={pair: number[pair[1], of] for pair, of in start.items()},
            step={
                (
                    EDGE if of_left is None else (left, number[left, of_left]),
                    (own, number[own, of]),
                ): number[own, after]
                for (left, of_left, own, of), after in steps.items()
            },
            answers=dict(zip(cells, answers)),
        )
        return automaton, cells

    @property
    def cells(self) -> list[Cell]:
        """All of them, token by token."""
        return [(token, v) for token, size in self.sizes.items() for v in range(size)]

    @property
    def recurring(self) -> frozenset[Cell]:
        """The cells that some step leads to; others are met before the first loop only."""
        return frozenset((own[0], value) for (_, own), value in self.step.items())

    def run(
        self,
        tokens: Int[Tensor, "batch pos"],
        n_loops: int,
        values: Int[Tensor, "batch pos"] | None = None,
    ) -> Iterator[Int[Tensor, "batch pos"]]:
        """Values after 0, 1, … ``n_loops`` loops, from the start or from given ones.

        Raises:
            KeyError: a token, or two side by side, of which the table says nothing.
        """
        rows = tokens.tolist()
        if values is None:
            now = [[self.start[pair] for pair in zip([-1, *row], row)] for row in rows]
        else:
            now = values.tolist()
        yield torch.tensor(now)
        for _ in range(n_loops):
            cells = [list(zip(row, value)) for row, value in zip(rows, now)]
            now = [[self.step[pair] for pair in zip([EDGE, *row], row)] for row in cells]
            yield torch.tensor(now)

    def read(
        self, tokens: Int[Tensor, "batch pos"], values: Int[Tensor, "batch pos"]
    ) -> Int[Tensor, "batch pos"]:
        """The answers of cells."""
        both = zip(tokens.tolist(), values.tolist())
        return torch.tensor([[self.answers.get(c, UNKNOWN) for c in zip(*row)] for row in both])

    def asked_at(self, tokens: Collection[int], *, otherwise: int = UNKNOWN) -> CellAutomaton:
        """The same where an answer is asked for at some tokens only, and at others is one."""
        answers = {cell: y if cell[0] in tokens else otherwise for cell, y in self.answers.items()}
        return replace(self, answers=answers)

    def renamed(self, names: Mapping[Cell, int]) -> CellAutomaton:
        """The same with other numbers for values; cells that get one number become one.

        Args:
            names: Cell -> its number, 0 .. for each token. Cells that are left out are taken away.
        """
        sizes = {
            token: len({new for (of, _), new in names.items() if of == token})
            for token in self.sizes
        }

        def moved(cell: Cell) -> Cell:
            return cell if cell == EDGE else (cell[0], names[cell])

        kept = {EDGE, *names}
        return CellAutomaton(
            sizes=sizes,
            start={pair: names[pair[1], value] for pair, value in self.start.items()},
            step={
                (moved(left), moved(own)): names[own[0], value]
                for (left, own), value in self.step.items()
                if left in kept and own in kept
            },
            answers={moved(cell): y for cell, y in self.answers.items() if cell in kept},
        )

    def merged(self) -> CellAutomaton:
        """The smallest automaton with the same answers whatever is put in: equal cells are one."""
        return self.renamed(self.merged_names())

    def merged_names(self) -> dict[Cell, int]:
        """Cell -> its number in the smallest automaton with the same answers.

        Cells of a token are equal if they answer alike and become equal ones beside every
        neighbour, and if neighbours of either become equal ones (Moore's refinement).
        """
        block = numbered({cell: (cell[0], self.answers.get(cell, UNKNOWN)) for cell in self.cells})
        while True:
            seen: dict[Cell, set[tuple[str, Cell, int]]] = {cell: set() for cell in self.cells}
            for (left, own), value in self.step.items():
                after = block[own[0], value]
                seen[own].add(("beside", left, after))
                if left != EDGE:
                    seen[left].add(("makes", own, after))
            finer = numbered({cell: (block[cell], frozenset(seen[cell])) for cell in self.cells})
            if max(finer.values()) == max(block.values()):
                break
            block = finer
        names: dict[Cell, int] = {}
        for token in self.sizes:
            own = [cell for cell in self.cells if cell[0] == token]
            order = {b: k for k, b in enumerate(dict.fromkeys(block[cell] for cell in own))}
            names |= {cell: order[block[cell]] for cell in own}
        return names


def numbered(views: Mapping[K, object]) -> dict[K, int]:
    """Equal views get one number, in the order in which they come."""
    numbers = {view: k for k, view in enumerate(dict.fromkeys(views.values()))}
    return {cell: numbers[view] for cell, view in views.items()}
