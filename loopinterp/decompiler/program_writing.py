"""A transition table as a loop program, by messages that cells send to the right.

Left cells with the same effect on every cell send the same *message*, and a loop is

    values  <-  becomes(token, values, message from the left)      message = sends(token, values)

Several numberings of the values are tried; the shortest program is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING

import pandas as pd
import torch

from loopinterp.core.errors import need
from loopinterp.decompiler.expression_search import Atom, shortest_expression
from loopinterp.decompiler.transition_table import EDGE, Cell, TransitionTable
from loopinterp.programs.expressions import Tokens, TokMap, postorder
from loopinterp.programs.language import full, shift_right, tok_map, tokens, var
from loopinterp.programs.program import Linear, LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.programs.expressions import Seq
    from loopinterp.programs.program import RequiredLoops
    from loopinterp.tasks.task import Task


def program_of(
    table: TransitionTable,
    task: Task,
    *,
    name: str = "decompiled",
    readable: bool = True,
) -> LoopProgram:
    """The table as a program that reads the tokens of a task.

    Args:
        task: Its T(n) must be linear.
        readable: Whether to look for the shortest code of a small table; else write plain tables.
    """
    readable = readable and len(table.cells) <= 14
    known = programs_of(task)
    words = words_of(known) if readable else None
    messages, starts = Messages.of(table), {(token, v) for (_, token), v in table.starts.items()}
    # Message 0 leaves most starts as they are, the last one fewest.
    n_changed = [
        sum(messages.becomes.get((cell, m), cell[1]) != cell[1] for cell in starts)
        for m in range(messages.n)
    ]
    messages = messages.renumbered(sorted(range(messages.n), key=lambda m: n_changed[m]))
    # No two cells of a token may have the same values.
    namings = [
        (names, values)
        for names, values in _namings(table, messages)
        if len({(cell[0], v) for cell, v in values.items()}) == len(values)
    ]
    written = [
        _Writer(table, numbered, names, values, words).expressions()
        for names, values in (namings if readable else namings[:1])
        for numbered in (_renumberings(messages, values) if readable else [messages])
    ]
    prepare, step, finish = min(written, key=_length)
    return LoopProgram(
        name=name,
        task=task.name,
        inputs=known[0].inputs if known else tuple(map(str, range(task.d_vocab or 0))),
        prepare=prepare,
        step=step,
        finish=finish,
        n_loops=_loop_count(task),
        doc="Read off a model.",
        task_settings=known[0].task_settings if known else {},
    )


def _loop_count(task: Task) -> RequiredLoops:
    """T(n) of a task as data; an InputError if it is not linear in n."""
    counts = {n: task.n_loops(n) for n in (2, 3, 5, 8, 13)}
    slope = counts[3] - counts[2]
    linear = Linear(slope=slope, offset=counts[2] - 2 * slope)
    fits = all(linear(n) == count for n, count in counts.items())
    got = ", ".join(f"T({n}) = {count}" for n, count in counts.items())
    fix = "Only such programs are read so far."
    need(fits, f"T(n) of task {task.name}", "a linear function of n", got, fix)
    return linear


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


def words_of(programs: Sequence[LoopProgram]) -> dict[str, TokMap]:
    """Tables of tokens that programs name."""
    nodes = postorder([x for program in programs for x in program.expressions])
    return {
        node.name: node
        for node in nodes
        if isinstance(node, TokMap) and isinstance(node.x, Tokens) and node.name
    }


def value_by_token(values: Mapping[int, int], name: str, words: Mapping[str, TokMap]) -> Seq:
    """A value for each token: a constant, a named table of tokens, or a new one."""
    entries, token = [*values.values()], torch.tensor([*values])
    if len(set(entries)) == 1:
        return full(entries[0])
    equal = (word for word in words.values() if _applied(word, token).tolist() == entries)
    return next(equal, tok_map(tokens, values, default=0, name=name))


def response_times(
    table: TransitionTable, tokens: Int[Tensor, "batch pos"], *, n_loops: int
) -> pd.DataFrame:
    """Loops until a position's answer follows its left neighbour.

    Clean runs continue until they converge. A position that is stable under one message and then
    gets another for good changes its answer after some loops: 1 in a program that holds nothing,
    k more in one that holds an unsupported carry for k loops.

    Args:
        tokens: Inputs whose runs define which messages occur after ``n_loops``.

    Returns:
        A row for each ``token`` and change of its answer from ``before`` to ``after``: the
        ``least`` and ``most`` loops over all pairs of messages, and the number of ``ways``.

    Example:
        >>> from loopinterp.decompiler import decompile
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import get_task
        >>> task = get_task("addition")
        >>> model = compile_program("ripple_held_2", max_length=7).model
        >>> table = decompile(model, task, n=5, lengths=[4]).automaton
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs = task.sample(6, batch_size=64, generator=generator).inputs
        >>> response_times(table, inputs, n_loops=12).query("token == 1")["most"].tolist()
        [2, 1]
    """
    messages = Messages.of(table)
    resting: set[Cell] = set()
    for row in tokens:
        try:
            values = table.run(row[None], n_loops)[-1, 0]
        except KeyError:  # an input of which the table says nothing
            continue
        resting.update(zip(row.tolist(), values.tolist()))
    at_rest = sorted({messages.sends[cell] for cell in resting if cell in messages.sends})
    delays: dict[tuple[int, int, int], list[int]] = {}
    for cell in sorted(resting):
        # So many messages leave it as it is.
        ways = sum(messages.becomes.get((cell, m)) == cell[1] for m in at_rest)
        for new in at_rest if ways else ():
            value, answers = cell[1], [table.answer_of[cell]]  # after 0, 1, … loops
            for _ in range(40):  # loops within which it must follow
                value = messages.becomes.get(((cell[0], value), new))
                if value is None:
                    break
                answers.append(table.answer_of[cell[0], value])
            if value is None or messages.becomes.get(((cell[0], value), new)) != value:
                continue  # it does not converge under the new one
            last = answers[-1]
            if last != answers[0]:
                delay = max(k for k, y in enumerate(answers) if y != last) + 1
                key = cell[0], answers[0], last
                delays[key] = [*delays.get(key, []), *[delay] * ways]
    rows = [(*key, min(each), max(each), len(each)) for key, each in sorted(delays.items())]
    return pd.DataFrame(rows, columns=["token", "before", "after", "least", "most", "ways"])


@dataclass(frozen=True)
class Messages:
    """A transition table in two parts: the message of each left cell, and its effect on a cell.

    Attributes:
        becomes: (cell, message) -> value after one loop.
    """

    sends: Mapping[Cell, int] = field(repr=False)
    becomes: Mapping[tuple[Cell, int], int] = field(repr=False)

    @property
    def n(self) -> int:
        return max(self.sends.values()) + 1

    @classmethod
    def of(cls, table: TransitionTable) -> Messages:
        """The fewest messages by a greedy choice; pairs of tokens that never meet are free."""
        columns: dict[Cell, dict[Cell, int]] = {}
        for (left, cell), value in table.steps.items():
            columns.setdefault(left, {})[cell] = value
        for cell in table.cells:
            columns.setdefault(cell, {})  # nothing ever stands to its right
        sends: dict[Cell, int] = {}
        groups: list[dict[Cell, int]] = []
        # The fullest columns first: emptier ones fit into their groups.
        for left, column in sorted(columns.items(), key=lambda item: (-len(item[1]), item[0])):
            fits = (
                message
                for message, group in enumerate(groups)
                if all(group.get(cell, value) == value for cell, value in column.items())
            )
            message = next(fits, len(groups))
            if message == len(groups):
                groups.append({})
            groups[message] |= column
            sends[left] = message
        becomes = {(cell, m): v for m, group in enumerate(groups) for cell, v in group.items()}
        return cls(sends, becomes)

    def renumbered(self, order: Sequence[int]) -> Messages:
        """Message ``order[k]`` gets number k."""
        number = {old: new for new, old in enumerate(order)}
        return Messages(
            sends={cell: number[m] for cell, m in self.sends.items()},
            becomes={(cell, number[m]): value for (cell, m), value in self.becomes.items()},
        )


# The program's variables; cell -> the value of each.
_Naming = tuple[tuple[str, ...], Mapping[Cell, tuple[int, ...]]]


def _namings(table: TransitionTable, messages: Messages) -> Iterator[_Naming]:
    undecided = min(table.answer_of.values()) < 0  # 0 stands for it, as programs count from 0
    by_answer = {cell: (answer + undecided,) for cell, answer in table.answer_of.items()}
    # Numbers of values: 0 for the commonest start of a token, then by the effect of messages on it.
    from_start: dict[Cell, int] = {}
    for token, size in table.sizes.items():
        first = [value for (_, t), value in table.starts.items() if t == token] or [0]
        queue, order = [max(first, key=first.count), *range(size)], []
        while queue:
            value = queue.pop(0)
            if value in order:
                continue
            order.append(value)
            after = (messages.becomes.get(((token, value), m)) for m in range(messages.n))
            queue = [v for v in after if v is not None and v not in order] + queue
        from_start |= {(token, value): k for k, value in enumerate(order)}
    yield ("value",), {cell: (k,) for cell, k in from_start.items()}
    yield ("answer",), by_answer
    both = {cell: (*values, messages.sends[cell]) for cell, values in by_answer.items()}
    yield ("answer", "message"), both
    rank: dict[Cell, tuple[int, ...]] = {}
    for cell in sorted(from_start, key=lambda cell: (cell[0], from_start[cell])):
        before = [c for c in rank if c[0] == cell[0] and by_answer[c] == by_answer[cell]]
        rank[cell] = (*by_answer[cell], len(before))
    yield ("answer", "rest"), rank


def _renumberings(messages: Messages, values: Mapping[Cell, tuple[int, ...]]) -> Iterator[Messages]:
    """Messages with the numbers of their effects, or of their senders, if possible."""
    if messages.n > 5:  # too many to try every order
        yield messages
        return
    becoming = [(m, values[cell[0], v][0]) for (cell, m), v in messages.becomes.items()]
    sent = [(m, values[cell][-1]) for cell, m in messages.sends.items() if cell != EDGE]
    orders = []
    for pairs in (becoming, sent):
        n_equal = {
            order: sum(order[value] == m for m, value in pairs if value < messages.n)
            for order in permutations(range(messages.n))
        }
        order = max(n_equal, key=n_equal.__getitem__)
        if order not in orders:
            orders.append(order)
            yield messages.renumbered(order)


_Expressions = tuple[dict[str, "Seq"], dict[str, "Seq"], "Seq"]  # prepare, step, finish


def _length(expressions: _Expressions) -> int:
    prepare, step, finish = expressions
    every = [*prepare.values(), *step.values(), finish]
    tables = [n for n in postorder(every) if isinstance(n, TokMap) and not isinstance(n.x, Tokens)]
    entries = sum(len(table.table) for table in tables)
    return sum(len(postorder([x])) for x in every) + 2 * entries


@dataclass
class _Writer:
    table: TransitionTable
    messages: Messages
    names: tuple[str, ...]
    values: Mapping[Cell, tuple[int, ...]]
    words: Mapping[str, TokMap] | None

    def expressions(self) -> _Expressions:
        sends, becomes = self.messages.sends, self.messages.becomes
        starts = [self._start(f"{v}_at_first", k) for k, v in enumerate(self.names)]
        cells = [cell for cell in sends if cell != EDGE]
        sent = self._written("sends", cells, [sends[cell] for cell in cells])
        arrives = shift_right(sent, 1, default=sends.get(EDGE, 0))
        cells, message = zip(*becomes)
        left = (arrives, message, self.messages.n)
        after = [self.values[cell[0], v] for (cell, _), v in becomes.items()]
        steps = [
            self._written(f"{v}_next", cells, [values[k] for values in after], left)
            for k, v in enumerate(self.names)
        ]
        answers = self.table.answer_of
        finish = self._written("answers", [*answers], [*answers.values()])
        return dict(zip(self.names, starts)), dict(zip(self.names, steps)), finish

    def _start(self, name: str, k: int) -> Seq:
        """A variable's first value: by token, and by the left token if that matters."""
        starts = {
            (left, token): self.values[token, value][k]
            for (left, token), value in self.table.starts.items()
        }
        by_token = {token: value for (_, token), value in starts.items()}
        # Only where two left tokens give one token different values does the left one matter.
        if all(by_token[token] == value for (_, token), value in starts.items()):
            return self._written(name, [(token, -1) for token in by_token], [*by_token.values()])
        left = torch.tensor([left for left, _ in starts])
        of_left = [
            (shift_right(word, 1, default=0), _applied(word, left).where(left >= 0, 0))
            for word in (self.words or {}).values()
        ]
        key = shift_right(tokens + 1, 1, default=0), (left + 1).tolist(), int(left.max()) + 2
        cells = [(token, -1) for _, token in starts]
        return self._written(name, cells, [*starts.values()], key, of_left)

    def _written(
        self,
        name: str,
        cells: Sequence[Cell],
        values: Sequence[int],
        left: tuple[Seq, Sequence[int], int] | None = None,
        atoms: Sequence[Atom] = (),
    ) -> Seq:
        """An expression with one of ``values`` in each case: a cell, and its left neighbourhood.

        Value -1 of a cell stands for all of its token. ``left`` is a sequence to the left, its
        value in each case and the number of its values; ``atoms`` are further building blocks.
        """
        token = torch.tensor([token for token, _ in cells])
        keys = [(tokens, token, max(self.table.sizes) + 1)]
        if cells[0][1] >= 0:
            sizes = [max(each) + 1 for each in zip(*self.values.values())]
            variables = torch.tensor([self.values[cell] for cell in cells])
            keys += zip(map(var, self.names), variables.unbind(1), sizes)
        if left is not None:
            keys.append((left[0], torch.tensor(left[1]), left[2]))
        if self.words is not None:
            of_token = [(word, _applied(word, token)) for word in self.words.values()]
            of_keys = [(x, each) for x, each, _ in keys[1:]]
            shortest = shortest_expression(torch.tensor(values), [*of_keys, *atoms, *of_token])
            if shortest is not None:
                return shortest
        # A table of one number, which has a digit for each key.
        key, number = keys[0][0], token
        for x, each, size in keys[1:]:
            if size > 1:
                key, number = key * size + x, number * size + each
        return tok_map(key, dict(zip(number.tolist(), values)), default=0, name=name)


def _applied(word: TokMap, token: Int[Tensor, " case"]) -> Int[Tensor, " case"]:
    table = dict(word.table)
    return torch.tensor([table.get(t, word.default or 0) for t in token.tolist()])
