"""Exact reading: the whole transition table of a model or program, and the program it equals.

If a loop reads only a position and its left neighbour, and states are codes of bits or values of
variables, each of finitely many transitions is tried. Tables are compared by joint refinement
(Moore 1956). They may differ in the *first guess*, which training on answers leaves free.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.text import ShortRepr
from loopinterp.decompiler.interchange_runs import read_answers
from loopinterp.decompiler.program_writing import (
    program_of,
    programs_of,
    value_by_token,
    words_of,
)
from loopinterp.decompiler.transition_table import (
    EDGE,
    Cell,
    Step,
    TransitionTable,
    moore_classes,
)
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.programs.equivalence import inputs_of
from loopinterp.programs.expressions import (
    Aggregate,
    Expr,
    Indices,
    Select,
    SelWidth,
    ShiftRight,
    code,
    postorder,
)
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from typing import TypeGuard

    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task


@dataclass(frozen=True)
class Surroundings(ShortRepr):
    """Pairs of neighbouring tokens in inputs (-1 left of the first), and the scored tokens."""

    pairs: list[tuple[int, int]]
    asked: frozenset[int]

    @classmethod
    def of(cls, task: Task, lengths: Sequence[int], examples: int = 48) -> Surroundings:
        batches = [inputs_of(task, (n,), examples, seed=0) for n in lengths]
        rows = [row for batch in batches for row in batch.inputs.tolist()]
        pairs = {pair for row in rows for pair in zip([EDGE[0], *row], row)}
        asked = {x for batch in batches for x in batch.inputs[batch.targets != IGNORE].tolist()}
        return cls(sorted(pairs), frozenset(asked))


@dataclass(frozen=True)
class CodeTable(ShortRepr):
    """Every transition of a model with a state code.

    Attributes:
        automaton: The table; values of a token are numbered in the order of discovery.
        codes: Cell -> its code, whose bit k is 1 if the k-th sign is positive.
        margin: Least distance of a bit from its threshold in all transitions.
        rounding: The most that such a distance changes in float64.
    """

    automaton: TransitionTable
    codes: Mapping[Cell, int] = field(repr=False)
    margin: float
    rounding: float

    @property
    def transitions(self) -> int:
        return len(self.automaton.steps)

    @property
    def sure(self) -> bool:
        """Whether every bit is ten times farther from its threshold than rounding moves it."""
        return self.margin > 10 * self.rounding


def is_finite(model: Any) -> TypeGuard[LoopedTransformer]:
    """Whether all transitions can be tried: states are codes, and a loop reads one token to the
    left.
    """
    if not isinstance(model, LoopedTransformer) or model.code is None:
        return False
    # Such positions say how far two tokens are apart, and nothing of where they are.
    everywhere = model.config.positions in ("none", "relative", "rotary")
    return model.reach == 1 and everywhere and model.reach_before == 0


@torch.no_grad()
def tabulate_code(model: LoopedTransformer, pairs: Sequence[tuple[int, int]]) -> CodeTable:
    start = 0  # every sign is negative at first
    exact = copy.deepcopy(model).double()  # the same sums, rounded less
    margins, roundings = [], []

    def step(transitions: list[Step[int]]) -> list[int]:
        rows = torch.tensor(
            [(left, left_code or 0, token, code) for left, left_code, token, code in transitions]
        )
        z = _stepped_codes(model, rows)
        margins.append(float(z.abs().min()))
        roundings.append(float((_stepped_codes(exact, rows) - z).abs().max()))
        return ((z >= 0) * 2 ** torch.arange(z.shape[-1])).sum(-1).tolist()

    def answer(cells: list[tuple[int, int]]) -> list[int]:
        states = _states(model, torch.tensor([code for _, code in cells]))
        return read_answers(model.readout(states[None]))[0].tolist()

    reached = TransitionTable.reached(dict.fromkeys(pairs, start), step, answer)
    assert reached is not None  # as there is no bound
    return CodeTable(*reached, min(margins), max(roundings))


def _stepped_codes(
    model: LoopedTransformer, transitions: Int[Tensor, "transition 4"]
) -> Float[Tensor, "transition bit"]:
    """The numbers whose signs are the bits of each position after one loop, in float64.

    Columns are left token, left code, token, code.
    """
    assert model.code is not None
    at_edge = transitions[:, 0] == EDGE[0]
    z = torch.empty(len(transitions), model.code.n_bits, dtype=torch.float64)
    for n_positions, rows in ((1, at_edge), (2, ~at_edge)):
        if not rows.any():
            continue
        # [transition, (left,) own]
        tokens = transitions[rows][:, [0, 2]][:, -n_positions:]
        codes = transitions[rows][:, [1, 3]][:, -n_positions:]
        _, cache = model.run_with_cache(
            tokens.to(model.device),
            n_loops=1,
            state=_states(model, codes),
            names_filter=["hook_code_pre"],
            return_type="state",
        )
        z[rows] = cache.stack("hook_code_pre")[0, :, -1].double().cpu()
    return z


def _states(model: LoopedTransformer, codes: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
    assert model.code is not None
    bits = codes[..., None] >> torch.arange(model.code.n_bits) & 1  # [*shape, bit]
    return model.code.state((2.0 * bits - 1).to(model.device, model.dtype))


def read_code(
    model: LoopedTransformer, task: Task, lengths: Sequence[int] = ()
) -> tuple[CodeTable, TransitionTable, SameProgram | None]:
    """All transitions of a model, its smallest table, and the registered program it equals."""
    inputs = Surroundings.of(task, sorted({1, 2, 3, *lengths}))
    whole_table = tabulate_code(model, inputs.pairs)
    table = whole_table.automaton.asked_at(inputs.asked).merged()
    tried = (same_program(table, program, inputs) for program in programs_of(task))
    same = next((each for each in tried if each is not None), None)
    return whole_table, table.asked_at(inputs.asked, otherwise=0), same


def finite_program(model: LoopedModel | Any, task: Task) -> LoopProgram | None:
    """The program of a model whose transitions can all be tried; else None.

    This is the registered program it equals, with the model's first guess, or the recovered one.
    """
    if not is_finite(model):
        return None
    _, table, same = read_code(model, task)
    return (same and with_first_guess(same)) or program_of(table, task, name="read off")


def is_local(program: LoopProgram) -> bool:
    """Whether a loop reads at most the left neighbour, and no position."""

    def reach(node: Expr) -> int:  # positions to the left that an expression reads
        shift = node.n if isinstance(node, ShiftRight) else 0
        return shift + max(map(reach, node.children), default=0)

    every = postorder(program.expressions)
    if any(isinstance(node, (Aggregate, Indices, Select, SelWidth)) for node in every):
        return False
    near = [*program.prepare.values(), *program.step.values()]
    return max(map(reach, near)) <= 1 and reach(program.finish) == 0


def tabulate_program(
    program: LoopProgram, pairs: Sequence[tuple[int, int]]
) -> tuple[TransitionTable, dict[Cell, tuple[int, ...]]] | None:
    """The table of a local program, with the value of each variable in each cell.

    It has all cells that a run or an interchange can make; None if more than 4096.
    """
    names, starts = program.variables, {}
    for pair in pairs:
        inputs = torch.tensor([[token for token in pair if token != EDGE[0]]])
        trace = program.trace(inputs, n_loops=0).variables
        starts[pair] = tuple(int(trace[name][0, 0, -1]) for name in names)

    def step(transitions: Sequence[Step[tuple[int, ...]]]) -> list[tuple[int, ...]]:
        stepped: list[tuple[int, ...]] = [()] * len(transitions)
        for at_edge in (True, False):
            rows = [k for k, (left, *_) in enumerate(transitions) if (left == EDGE[0]) == at_edge]
            if not rows:
                continue
            each = [transitions[k][2:] if at_edge else transitions[k] for k in rows]
            inputs = torch.tensor([row[::2] for row in each])  # [row, pos]: left and own token
            values = torch.tensor([row[1::2] for row in each])  # [row, pos, variable]
            variables = {name: values[..., k] for k, name in enumerate(names)}
            trace = program.run(inputs, n_loops=1, variables=variables).variables
            after = torch.stack([trace[name][1, :, -1] for name in names], -1)
            for k, row in zip(rows, after.tolist()):
                stepped[k] = tuple(row)
        return stepped

    def answer(cells: list[tuple[int, tuple[int, ...]]]) -> list[int]:
        tokens = torch.tensor([[token] for token, _ in cells])
        values = torch.tensor([values for _, values in cells])[:, None]  # [cell, pos, variable]
        variables = {name: values[..., k] for k, name in enumerate(names)}
        outputs = program.run(tokens, n_loops=0, variables=variables).outputs[0, :, 0]
        return outputs.clamp(min=UNKNOWN).tolist()

    return TransitionTable.reached(starts, step, answer, most=4096)


@dataclass(frozen=True)
class SameProgram(ShortRepr):
    """The program that a table equals up to its first guess.

    Attributes:
        first_guess: (left token, token) -> the value of each program variable before the first
            loop in the table; None if the program is never in that state.
        starts_alike: Whether this is the program's own first guess everywhere.
        values: Cell of the table -> the program's values. Start cells that never recur and match
            no cell of the program are left out.
    """

    program: LoopProgram
    first_guess: Mapping[tuple[int, int], tuple[int, ...] | None]
    starts_alike: bool
    values: Mapping[Cell, tuple[int, ...]] = field(repr=False)


def same_program(
    table: TransitionTable, program: LoopProgram, inputs: Surroundings
) -> SameProgram | None:
    """The program, if a fully known table equals it up to its first guess; else None."""
    if not is_local(program) or set(table.sizes) - set(range(len(program.inputs))):
        return None
    tabulated = tabulate_program(program, inputs.pairs)
    if tabulated is None:
        return None
    of_program, variables = tabulated
    recurring = _classes(table, of_program, inputs.asked, recurring=True)
    if recurring is None or not {*recurring[0].values()} <= {*recurring[1].values()}:
        return None
    # Cells of the start that never recur may be those of the program all the same.
    all_cells = _classes(table, of_program, inputs.asked)
    values: dict[Cell, tuple[int, ...]] = {}
    for mine, its in (recurring,) if all_cells is None else (recurring, all_cells):
        # The first cell of the program in each class stands for it.
        of_class = {c: variables[cell] for cell, c in reversed(its.items())}
        values = {cell: of_class[c] for cell, c in mine.items() if c in of_class} | values
    alike = all_cells is not None and all(
        all_cells[0][pair[1], value] == all_cells[1][pair[1], of_program.starts[pair]]
        for pair, value in table.starts.items()
    )
    guess = {pair: values.get((pair[1], value)) for pair, value in table.starts.items()}
    return SameProgram(program, guess, alike, values)


def same_algorithm(one: TransitionTable, other: TransitionTable, tokens: Collection[int]) -> bool:
    """Whether two tables are equal up to their first guesses: each can be all that the other is."""
    classes = _classes(one, other, tokens, recurring=True)
    return classes is not None and set(classes[0].values()) == set(classes[1].values())


def _classes(
    one: TransitionTable,
    other: TransitionTable,
    tokens: Collection[int],
    *,
    recurring: bool = False,
) -> tuple[dict[Cell, int], dict[Cell, int]] | None:
    """The class of each cell of two tables; None if they cannot be decided exactly.

    Cells of a class have one token and one answer; any two of them beside any two of another class
    become cells of one class. ``recurring`` restricts this to cells that a step reaches from
    recurring cells.
    """
    edge = (-1, EDGE)
    views, transitions = {}, []
    for k, table in enumerate((one.asked_at(tokens), other.asked_at(tokens))):
        cells = {(cell[0], value) for (_, cell), value in table.steps.items()}
        cells = cells if recurring else table.answer_of.keys()
        views |= {(k, cell): (cell[0], y) for cell, y in table.answer_of.items() if cell in cells}
        transitions += [
            (edge if left == EDGE else (k, left), (k, cell), (k, (cell[0], value)))
            for (left, cell), value in table.steps.items()
            if cell in cells and (left == EDGE or left in cells)
        ]
    classes = moore_classes(views, transitions, edge=edge, by_class=True)
    after_of: dict[tuple[int, int], int] = {}
    # Every pair of classes must become one class, or the refinement says too little.
    for left, cell, after in transitions:
        key = (classes.get(left, -1), classes[cell])
        if after_of.setdefault(key, classes[after]) != classes[after]:
            return None
    mine, its = ({cell: c for (k, cell), c in classes.items() if k == n} for n in (0, 1))
    return mine, its


def with_first_guess(same: SameProgram) -> LoopProgram | None:
    """The program that a table equals, with the table's own first guess.

    None if the program is never in that state, or the guess depends on the left neighbour's token.
    """
    guess: dict[int, tuple[int, ...]] = {}
    for (_, token), values in same.first_guess.items():
        if values is None or guess.setdefault(token, values) != values:
            return None
    program = same.program
    if same.starts_alike:
        return program
    words, prepare = words_of([program]), {}
    for k, name in enumerate(program.variables):
        by_token = {token: values[k] for token, values in guess.items()}
        prepare[name] = value_by_token(by_token, f"{name}_at_first", words)
    text = ", ".join(f"{name} = {code(x, short=True)}" for name, x in prepare.items())
    return replace(
        program,
        name=f"{program.name} from {text}",
        prepare=prepare,
        doc=f"{program.doc} What it starts from was read off a model.",
    )
