"""A loop program as a table of cells, and which programs a table is, decided exactly.

Two automata are compared by refining the cells of both together (Moore 1956): cells of one class
answer alike and become cells of one class beside every neighbour, in whichever of the two they
are. So nothing is drawn and no length is left out. Where a position starts is left open: training
on answers alone says nothing of the first guess, so an automaton is a program *up to its first
guess* if it becomes, after the first loop, what the program could be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loopinterp.circuits.decompiler.cell_automaton import EDGE, Cell, CellAutomaton, numbered
from loopinterp.circuits.decompiler.coded_states import Surroundings
from loopinterp.rasp.expr import Aggregate, Indices, Select, SelWidth, ShiftRight
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.node import Expr, postorder
from loopinterp.rasp.program import LoopProgram
from loopinterp.short_repr import ShortRepr

_MOST_CELLS = 4096


@dataclass(frozen=True)
class ProgramTable(ShortRepr):
    """A program as a table.

    Attributes:
        automaton: The table, of the values that a run or an interchange can make.
        values: Cell -> the value of each variable.
    """

    automaton: CellAutomaton
    values: Mapping[Cell, tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True)
class SameProgram(ShortRepr):
    """A program that an automaton is, up to its first guess.

    Attributes:
        program: The program.
        first_guess: (token to the left, own token) -> the value of each of its variables before
            the first loop, as the automaton has them; None where it starts as the program never is.
        starts_alike: Whether that is the program's own first guess, everywhere.
        values: Cell of the automaton -> the program's values there; of the cells that it has at
            the start and never again, those that are like none of the program's are left out.
    """

    program: LoopProgram
    first_guess: Mapping[tuple[int, int], tuple[int, ...] | None]
    starts_alike: bool
    values: Mapping[Cell, tuple[int, ...]] = field(repr=False)


def is_local(program: LoopProgram) -> bool:
    """Whether a loop reads no more than the left neighbour, and nothing of where it is."""
    every = postorder(program.expressions)
    if any(isinstance(node, (Aggregate, Indices, Select, SelWidth)) for node in every):
        return False
    near = [*program.prepare.values(), *program.step.values()]
    return max(map(_reach, near)) <= 1 and _reach(program.finish) == 0


def _reach(node: Expr) -> int:
    """Positions to the left that an expression reads."""
    own = node.n if isinstance(node, ShiftRight) else 0
    return own + max(map(_reach, node.children), default=0)


def tabulate_program(program: LoopProgram, pairs: Sequence[tuple[int, int]]) -> ProgramTable | None:
    """The table of a program that is local; None if it has too many cells.

    Args:
        program: The program.
        pairs: Tokens that stand side by side in inputs; -1 stands to the left of the first.
    """
    names = program.variables

    def answer(cells: list[tuple[int, tuple[int, ...]]]) -> list[int]:
        alone = torch.tensor([[token] for token, _ in cells])
        given = {name: torch.tensor([[of[k]] for _, of in cells]) for k, name in enumerate(names)}
        said = program.run(alone, n_loops=0, variables=given).outputs[0, :, 0]
        return said.clamp(min=UNKNOWN).tolist()

    found = CellAutomaton.reached(
        {pair: _first(program, pair) for pair in pairs},
        lambda wanted: _stepped(program, wanted),
        answer,
        most=_MOST_CELLS,
    )
    return None if found is None else ProgramTable(*found)


def _first(program: LoopProgram, pair: tuple[int, int]) -> tuple[int, ...]:
    """The values of a position before the first loop."""
    inputs = torch.tensor([[token for token in pair if token != EDGE[0]]])
    trace = program.trace(inputs, n_loops=0).variables
    return tuple(int(trace[name][0, 0, -1]) for name in program.variables)


def _stepped(program: LoopProgram, wanted: Sequence) -> list[tuple[int, ...]]:
    """The values of each own position after one loop."""
    found: list[tuple[int, ...]] = [()] * len(wanted)
    for alone in (True, False):
        rows = [k for k, (left, *_) in enumerate(wanted) if (left == EDGE[0]) == alone]
        if not rows:
            continue
        each = [wanted[k][2:] if alone else wanted[k] for k in rows]
        inputs = torch.tensor([of[::2] for of in each])
        values = torch.tensor([of[1::2] for of in each])  # [row, pos, variable]
        given = {name: values[..., k] for k, name in enumerate(program.variables)}
        trace = program.run(inputs, n_loops=1, variables=given).variables
        after = torch.stack([trace[name][1, :, -1] for name in program.variables], -1)
        for k, of in zip(rows, after.tolist()):
            found[k] = tuple(of)
    return found


def same_program(
    automaton: CellAutomaton, program: LoopProgram, inputs: Surroundings
) -> SameProgram | None:
    """The program that an automaton is up to its first guess; None if it is another one.

    Args:
        automaton: All of whose steps are known, as those of a model with a state code.
        program: What it may be.
        inputs: What stands side by side, and where an answer is asked for.
    """
    if not is_local(program) or set(automaton.sizes) - set(range(len(program.inputs))):
        return None
    table = tabulate_program(program, inputs.pairs)
    if table is None:
        return None
    names = _classes(automaton.asked_at(inputs.asked), table.automaton.asked_at(inputs.asked))
    if names is None:
        return None
    mine, its = names
    of_class = {name: table.values[cell] for cell, name in reversed(its.items())}
    if any(mine[cell] not in of_class for cell in automaton.recurring):
        return None
    values = {cell: of_class[name] for cell, name in mine.items() if name in of_class}
    guess = {pair: values.get((pair[1], value)) for pair, value in automaton.start.items()}
    own = table.automaton.start
    alike = all(
        mine[pair[1], value] == its[pair[1], own[pair]] for pair, value in automaton.start.items()
    )
    return SameProgram(program, guess, alike, values)


def same_algorithm(one: CellAutomaton, other: CellAutomaton, asked: Collection[int]) -> bool:
    """Whether two automata are one up to their first guesses: each can be all that the other is.

    Args:
        one: An automaton all of whose steps are known.
        other: Another of the same tokens.
        asked: Tokens at which an answer is asked for.
    """
    names = _classes(one.asked_at(asked), other.asked_at(asked))
    if names is None:
        return False
    mine, its = names
    return {mine[cell] for cell in one.recurring} == {its[cell] for cell in other.recurring}


def _classes(
    one: CellAutomaton, other: CellAutomaton
) -> tuple[dict[Cell, int], dict[Cell, int]] | None:
    """The class of each cell of two automata; None if some of them cannot be told exactly.

    Cells of a class have one token and one answer, and any two of them beside any two of another
    class become cells of one class.
    """
    both = (one, other)
    views: dict[tuple[int, Cell], object] = {
        (k, cell): (cell[0], of.answers.get(cell, UNKNOWN))
        for k, of in enumerate(both)
        for cell in of.cells
    }
    blocks = numbered(views)
    steps = [
        ((k, left), (k, own), (k, (own[0], value)))
        for k, of in enumerate(both)
        for (left, own), value in of.step.items()
    ]
    while True:
        edge = max(blocks.values()) + 1
        seen: dict[tuple[int, Cell], set] = {cell: set() for cell in blocks}
        for left, own, after in steps:
            beside = edge if left[1] == EDGE else blocks[left]
            seen[own].add(("beside", beside, blocks[after]))
            if left[1] != EDGE:
                seen[left].add(("makes", blocks[own], blocks[after]))
        finer = numbered({cell: (blocks[cell], frozenset(seen[cell])) for cell in blocks})
        if max(finer.values()) == max(blocks.values()):
            break
        blocks = finer
    after_of: dict[tuple[int, int], int] = {}
    for left, own, after in steps:
        key = (-1 if left[1] == EDGE else blocks[left], blocks[own])
        if after_of.setdefault(key, blocks[after]) != blocks[after]:
            return None
    mine, its = ({cell: b for (k, cell), b in blocks.items() if k == which} for which in (0, 1))
    return mine, its
