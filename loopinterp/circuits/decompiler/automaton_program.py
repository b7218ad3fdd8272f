"""A cell automaton as a loop program: what a position sends to the right, and what it becomes.

A left neighbour matters only by what it makes of the cell beside it. Left cells that make the same
of every cell send the same *message*, and a loop is

    values  <-  becomes(token, values, message from the left)      message = sends(token, values)

A program needs names for values, as one number or as several variables. Some are tried: in the
order in which the messages lead to them from the start; by the answer that they give; by answer
and message. Each table is written as the shortest expression of the task's own words (the tables of
tokens that its programs name) where there is a short one, and as a table where not; the shortest of
the programs is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.cell_automaton import EDGE, Cell, CellAutomaton
from loopinterp.rasp.expr import Tokens, TokMap
from loopinterp.rasp.expression_search import Atom, shortest_expression
from loopinterp.rasp.language import full, shift_right, tok_map, tokens, var
from loopinterp.rasp.node import code, postorder
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.program_registry import get_program, list_programs

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.program_automaton import SameProgram
    from loopinterp.rasp.counts import LoopCount
    from loopinterp.rasp.expr import Seq
    from loopinterp.tasks.task import Task

_BRUTE = 5
"""So many messages at most are tried in every order."""


@dataclass(frozen=True)
class Messages:
    """An automaton in two tables.

    Attributes:
        sends: Left cell -> its message.
        becomes: (own cell, message) -> value after one loop.
    """

    sends: Mapping[Cell, int] = field(repr=False)
    becomes: Mapping[tuple[Cell, int], int] = field(repr=False)

    @property
    def n(self) -> int:
        """How many there are."""
        return max(self.sends.values()) + 1

    @classmethod
    def of(cls, automaton: CellAutomaton) -> Messages:
        """The fewest that a greedy choice finds; pairs of tokens that never meet are free."""
        columns: dict[Cell, dict[Cell, int]] = {}
        for (left, own), value in automaton.step.items():
            columns.setdefault(left, {})[own] = value
        for cell in automaton.cells:
            columns.setdefault(cell, {})  # nothing ever stands to its right
        sends: dict[Cell, int] = {}
        groups: list[dict[Cell, int]] = []
        for left, column in sorted(columns.items(), key=lambda item: (-len(item[1]), item[0])):
            fits = (
                message
                for message, group in enumerate(groups)
                if all(group.get(own, value) == value for own, value in column.items())
            )
            message = next(fits, len(groups))
            if message == len(groups):
                groups.append({})
            groups[message] |= column
            sends[left] = message
        becomes = {(own, m): v for m, group in enumerate(groups) for own, v in group.items()}
        return cls(sends, becomes)

    def renumbered(self, order: Sequence[int]) -> Messages:
        """Message ``order[k]`` is called k."""
        name = {old: new for new, old in enumerate(order)}
        return Messages(
            sends={cell: name[m] for cell, m in self.sends.items()},
            becomes={(own, name[m]): value for (own, m), value in self.becomes.items()},
        )


@dataclass(frozen=True)
class Naming:
    """Names for the values of an automaton.

    Attributes:
        variables: Names of the program's variables.
        of: Cell -> the value of each variable, different for all cells of a token.
    """

    variables: tuple[str, ...]
    of: Mapping[Cell, tuple[int, ...]] = field(repr=False)

    @property
    def tells_apart(self) -> bool:
        """Whether no two cells of a token have the same names."""
        return len({(cell[0], names) for cell, names in self.of.items()}) == len(self.of)


def namings(automaton: CellAutomaton, messages: Messages) -> Iterator[Naming]:
    """Ways to name the values, the plainest first."""
    undecided = min(automaton.answers.values()) < 0  # then 0 stands for it
    by_answer = {cell: (answer + undecided,) for cell, answer in automaton.answers.items()}
    from_start = _from_start(automaton, messages)
    yield Naming(("value",), {cell: (k,) for cell, k in from_start.items()})
    yield Naming(("answer",), by_answer)
    both = {cell: (*names, messages.sends[cell]) for cell, names in by_answer.items()}
    yield Naming(("answer", "message"), both)
    rank: dict[Cell, tuple[int, ...]] = {}
    for cell in sorted(from_start, key=lambda cell: (cell[0], from_start[cell])):
        before = [c for c in rank if c[0] == cell[0] and by_answer[c] == by_answer[cell]]
        rank[cell] = (*by_answer[cell], len(before))
    yield Naming(("answer", "rest"), rank)


def _from_start(automaton: CellAutomaton, messages: Messages) -> dict[Cell, int]:
    """Numbers: 0 where most positions of a token start, then by what each message makes of those.

    Tokens that work alike get the same numbers.
    """
    starts: dict[int, list[int]] = {}
    for (_, token), value in automaton.start.items():
        starts.setdefault(token, []).append(value)
    numbers: dict[Cell, int] = {}
    for token, size in automaton.sizes.items():
        known = starts.get(token, [0])
        order, found = [max(known, key=known.count), *range(size)], []
        while order:
            value = order.pop(0)
            if value in found:
                continue
            found.append(value)
            after = (messages.becomes.get(((token, value), m)) for m in range(messages.n))
            order = [v for v in after if v is not None and v not in found] + order
        numbers |= {(token, value): k for k, value in enumerate(found)}
    return numbers


def _orders(automaton: CellAutomaton, messages: Messages) -> Messages:
    """Message 0 is what leaves most starts as they are, then by how many they leave."""
    each = {(token, value) for (_, token), value in automaton.start.items()}

    def leaving(message: int) -> int:
        return sum(messages.becomes.get((cell, message), cell[1]) != cell[1] for cell in each)

    return messages.renumbered(sorted(range(messages.n), key=leaving))


def _called(messages: Messages, naming: Naming) -> Iterator[Messages]:
    """Messages called as what they make of a cell, and as what sends them, as far as can be."""
    if messages.n > _BRUTE:
        yield messages
        return
    made = [(m, naming.of[own[0], value][0]) for (own, m), value in messages.becomes.items()]
    sent = [(m, naming.of[cell][-1]) for cell, m in messages.sends.items() if cell != EDGE]
    tried = []
    for pairs in (made, sent):

        def alike(order: Sequence[int], pairs: Sequence[tuple[int, int]] = pairs) -> int:
            return sum(order[value] == m for m, value in pairs if value < len(order))

        order = max(permutations(range(messages.n)), key=alike)
        if order not in tried:
            tried.append(order)
            yield messages.renumbered(order)


def with_first_guess(same: SameProgram) -> LoopProgram | None:
    """The program that an automaton is, from the automaton's own first guess.

    None if the automaton starts somewhere as the program never is, or by the left neighbour's
    token.
    """
    guess: dict[int, tuple[int, ...]] = {}
    for (_, token), values in same.first_guess.items():
        if values is None or guess.setdefault(token, values) != values:
            return None
    program = same.program
    if same.starts_alike:
        return program
    words = _words([program])
    prepare = {
        name: _by_token({token: of[k] for token, of in guess.items()}, f"{name}_at_first", words)
        for k, name in enumerate(program.variables)
    }
    said = ", ".join(f"{name} = {code(x, short=True)}" for name, x in prepare.items())
    return replace(
        program,
        name=f"{program.name} from {said}",
        prepare=prepare,
        doc=f"{program.doc} What it starts from was read off a model.",
    )


def _by_token(wanted: Mapping[int, int], name: str, words: Mapping[str, TokMap]) -> Seq:
    """A value for each token: a constant, a table of tokens that has a name, or another one."""
    if len(set(wanted.values())) == 1:
        return full(next(iter(wanted.values())))
    token = torch.tensor([*wanted])
    known = (
        word for word in words.values() if _applied(word, token).tolist() == [*wanted.values()]
    )
    return next(known, tok_map(tokens, wanted, default=0, name=name))


def program_of(
    automaton: CellAutomaton,
    task: Task,
    *,
    n_loops: LoopCount,
    name: str = "decompiled",
    doc: str = "",
    readable: bool = True,
) -> LoopProgram:
    """The automaton as a program.

    Args:
        automaton: The table of steps.
        task: The task whose tokens it reads.
        n_loops: T(n).
        name: What the program is called.
        doc: What it is.
        readable: Look for the shortest way to write it; else tables throughout.
    """
    kin = programs_of(task)
    words = _words(kin) if readable else None
    messages = _orders(automaton, Messages.of(automaton))
    known = [naming for naming in namings(automaton, messages) if naming.tells_apart]
    written = [
        _Writer(automaton, called, naming, words)
        for naming in (known if readable else known[:1])
        for called in (_called(messages, naming) if readable else [messages])
    ]
    parts = min((writer.parts() for writer in written), key=_length)
    return LoopProgram(
        name=name,
        task=task.name,
        inputs=kin[0].inputs if kin else tuple(map(str, range(task.d_vocab or 0))),
        prepare=parts.prepare,
        step=parts.step,
        finish=parts.finish,
        n_loops=n_loops,
        doc=doc,
        task_settings=kin[0].task_settings if kin else {},
    )


@dataclass(frozen=True)
class _Parts:
    prepare: dict[str, Seq]
    step: dict[str, Seq]
    finish: Seq


def _length(parts: _Parts) -> int:
    """Nodes of all expressions, and two for each entry of a table that is no word of the task."""
    every = [*parts.prepare.values(), *parts.step.values(), parts.finish]
    tables = [n for n in postorder(every) if isinstance(n, TokMap) and not isinstance(n.x, Tokens)]
    entries = sum(len(table.table) for table in tables)
    return sum(len(postorder([x])) for x in every) + 2 * entries


class _Writer:
    """Writes the tables of one automaton under one naming."""

    def __init__(
        self,
        automaton: CellAutomaton,
        messages: Messages,
        naming: Naming,
        words: Mapping[str, TokMap] | None,
    ) -> None:
        self.automaton, self.messages, self.naming, self.words = automaton, messages, naming, words
        each = zip(*naming.of.values())
        self.sizes = [max(values) + 1 for values in each]

    def parts(self) -> _Parts:
        """The program's expressions."""
        names = self.naming.variables
        starts = [self._start(f"{v}_at_first", k) for k, v in enumerate(names)]
        sends = self.messages.sends
        cells = [cell for cell in sends if cell != EDGE]
        sent = self._written("sends", cells, [sends[cell] for cell in cells])
        arrives = shift_right(sent, 1, default=sends.get(EDGE, 0))
        own, come = zip(*self.messages.becomes)
        n_messages = self.messages.n
        after = [self.naming.of[c[0], v] for c, v in zip(own, self.messages.becomes.values())]
        steps = [
            self._written(f"{v}_next", own, [of[k] for of in after], (arrives, come, n_messages))
            for k, v in enumerate(names)
        ]
        answers = self.automaton.answers
        finish = self._written("answers", [*answers], [*answers.values()])
        return _Parts(dict(zip(names, starts)), dict(zip(names, steps)), finish)

    def _start(self, name: str, k: int) -> Seq:
        """One variable at first: by token, and by the token to the left where that matters."""
        wanted = {
            (left, own): self.naming.of[own, value][k]
            for (left, own), value in self.automaton.start.items()
        }
        by_token = {own: value for (_, own), value in wanted.items()}
        if all(by_token[own] == value for (_, own), value in wanted.items()):
            return self._written(name, [(own, -1) for own in by_token], [*by_token.values()])
        before = torch.tensor([left for left, _ in wanted])
        of_left = [
            Atom(shift_right(word, 1, default=0), _applied(word, before).where(before >= 0, 0))
            for word in (self.words or {}).values()
        ]
        key = shift_right(tokens + 1, 1, default=0), (before + 1).tolist(), int(before.max()) + 2
        cells = [(own, -1) for _, own in wanted]
        return self._written(name, cells, [*wanted.values()], key, of_left)

    def _written(
        self,
        name: str,
        cells: Sequence[Cell],
        wanted: Sequence[int],
        beside: tuple[Seq, Sequence[int], int] | None = None,
        atoms: Sequence[Atom] = (),
    ) -> Seq:
        """An expression with a value wanted in each case: a cell, and what stands to its left.

        Cells with value -1 stand for all of a token. To the left is a sequence, its value in each
        case and the number of its values; ``atoms`` are others to build with.
        """
        target = torch.tensor(wanted)
        of_token = torch.tensor([token for token, _ in cells])
        keys = [(tokens, of_token, max(self.automaton.sizes) + 1)]
        if cells[0][1] >= 0:
            coordinates = torch.tensor([self.naming.of[cell] for cell in cells])
            keys += zip(map(var, self.naming.variables), coordinates.unbind(1), self.sizes)
        if beside is not None:
            keys.append((beside[0], torch.tensor(beside[1]), beside[2]))
        if self.words is not None:
            known = [Atom(word, _applied(word, of_token)) for word in self.words.values()]
            of_keys = [Atom(x, values) for x, values, _ in keys[1:]]
            found = shortest_expression(target, [*of_keys, *atoms, *known])
            if found is not None:
                return found
        key, number = keys[0][0], of_token
        for x, values, size in keys[1:]:
            if size > 1:
                key, number = key * size + x, number * size + values
        return tok_map(key, dict(zip(number.tolist(), wanted)), default=0, name=name)


def _applied(word: TokMap, of_token: Int[Tensor, " case"]) -> Int[Tensor, " case"]:
    table = dict(word.table)
    return torch.tensor([table.get(token, word.default or 0) for token in of_token.tolist()])


def programs_of(task: Task) -> list[LoopProgram]:
    """The registered programs that read a task's tokens."""
    settings = task.config()
    return [
        program
        for program in map(get_program, list_programs())
        if program.task == task.name
        and len(program.inputs) == task.d_vocab
        and all(settings.get(key) == value for key, value in program.task_settings.items())
    ]


def _words(programs: Sequence[LoopProgram]) -> dict[str, TokMap]:
    """Tables of tokens that programs name."""
    nodes = postorder([x for program in programs for x in program.expressions])
    return {
        node.name: node
        for node in nodes
        if isinstance(node, TokMap) and isinstance(node.x, Tokens) and node.name
    }
