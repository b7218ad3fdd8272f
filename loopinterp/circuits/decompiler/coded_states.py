"""The whole table of a model whose state between loops is a code of bits.

Where one loop reads a position and its left neighbour alone, wherever they stand
(:func:`is_finite`), what a position becomes is a function of two tokens and two codes. There
are finitely many, and each is tried once, in two positions: the table that comes of it says what
every loop does, of every input, whatever states interchanges put in. No sample is drawn, and no
length is left out.

The bits are signs of numbers that are rounded. How far the least of them is from its threshold,
beside what rounding changes (:attr:`CodeTable.sure`), says whether another order of the same sums,
as in longer inputs or on another machine, could give another table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.decompiler.behaviour import read_answers
from loopinterp.circuits.decompiler.cell_automaton import EDGE, Cell, CellAutomaton, Transition
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.tasks.task import Task

_EVERYWHERE = ("none", "relative", "rotary")
"""Positions that say how far two tokens are apart, and nothing of where they are."""

_TIMES_ROUNDING = 10
"""So many times as far as rounding moves a bit it has to be from its threshold."""


@dataclass(frozen=True)
class CodeTable(ShortRepr):
    """Every transition of a model with a state code.

    Attributes:
        automaton: The table; values of a token are numbered in the order in which they are met.
        codes: Cell -> its code, whose bit k is 1 where the k-th sign is positive.
        margin: Least distance of a bit from its threshold in all transitions.
        rounding: The most that such a distance changes where it is computed in float64.
    """

    automaton: CellAutomaton
    codes: Mapping[Cell, int] = field(repr=False)
    margin: float
    rounding: float

    @property
    def transitions(self) -> int:
        """How many there are."""
        return len(self.automaton.step)

    @property
    def sure(self) -> bool:
        """Whether every bit is farther from its threshold than rounding moves it, by far."""
        return self.margin > _TIMES_ROUNDING * self.rounding


def is_finite(model: Any) -> TypeGuard[LoopedTransformer]:
    """Whether all transitions of a model can be tried.

    Its states between loops are codes, and a loop reads no more than the left neighbour, and
    nothing of where it is.
    """
    if not isinstance(model, LoopedTransformer) or model.code is None:
        return False
    everywhere = model.config.positions in _EVERYWHERE and model.reach_before == 0
    return model.reach == 1 and everywhere


@torch.no_grad()
def tabulate_code(model: LoopedTransformer, pairs: Sequence[tuple[int, int]]) -> CodeTable:
    """Every transition that a run can make, from the start or from any states that are put in.

    Args:
        model: One that :func:`is_finite`.
        pairs: Tokens that stand side by side in inputs; -1 stands to the left of the first.
    """
    start = _code_of(-torch.ones(1, model.config.state_code))[0]  # type: ignore[arg-type]
    exact = copy.deepcopy(model).double()
    margins, roundings = [], []

    def step(wanted: list[Transition[int]]) -> list[int]:
        rows = torch.tensor([(left, of_left or 0, own, of) for left, of_left, own, of in wanted])
        z = _stepped(model, rows)
        margins.append(float(z.abs().min()))
        roundings.append(float((_stepped(exact, rows) - z).abs().max()))
        return _code_of(z)

    def answer(cells: list[tuple[int, int]]) -> list[int]:
        states = _states(model, torch.tensor([code for _, code in cells]))
        return read_answers(model.readout(states[None]))[0].tolist()

    found = CellAutomaton.reached(dict.fromkeys(pairs, start), step, answer)
    assert found is not None  # there is no bound
    return CodeTable(*found, min(margins), max(roundings))


def _stepped(
    model: LoopedTransformer, wanted: Int[Tensor, "transition 4"]
) -> Float[Tensor, "transition bit"]:
    """What the bits of each own position after one loop are the signs of, in float64.

    The rows are left token, left code, own token, own code; the first position has no left one.
    """
    assert model.code is not None
    first = wanted[:, 0] == EDGE[0]
    found = torch.empty(len(wanted), model.code.n_bits, dtype=torch.float64)
    for alone, rows in ((True, first), (False, ~first)):
        if not rows.any():
            continue
        tokens, codes = wanted[rows][:, [0, 2]], wanted[rows][:, [1, 3]]
        if alone:
            tokens, codes = tokens[:, 1:], codes[:, 1:]
        _, cache = model.run_with_cache(
            tokens.to(model.device),
            n_loops=1,
            state=_states(model, codes),
            names_filter=["hook_code_pre"],
            return_type="state",
        )
        found[rows] = cache.stack("hook_code_pre")[0, :, -1].double().cpu()
    return found


def _states(model: LoopedTransformer, codes: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
    """The states of codes."""
    assert model.code is not None
    bits = codes[..., None] >> torch.arange(model.code.n_bits) & 1
    return model.code.state((2.0 * bits - 1).to(model.device, model.dtype))


def _code_of(signs: Float[Tensor, "row bit"]) -> list[int]:
    weights = 2 ** torch.arange(signs.shape[-1], device=signs.device)
    return ((signs >= 0) * weights).sum(-1).tolist()


@dataclass(frozen=True)
class Surroundings(ShortRepr):
    """What the inputs of a task have side by side, and where they ask for an answer.

    Attributes:
        pairs: Tokens that stand side by side; -1 stands to the left of the first.
        asked: Tokens at which an answer is asked for.
    """

    pairs: list[tuple[int, int]]
    asked: frozenset[int]

    @classmethod
    def of(cls, task: Task, lengths: Sequence[int], examples: int = 48) -> Surroundings:
        """Those of inputs of some lengths, of every distribution."""
        batches = [inputs_of(task, (n,), examples, seed=0) for n in lengths]
        rows = [row for batch in batches for row in batch.inputs.tolist()]
        pairs = {pair for row in rows for pair in zip([EDGE[0], *row], row)}
        asked = {x for batch in batches for x in batch.inputs[batch.targets != IGNORE].tolist()}
        return cls(sorted(pairs), frozenset(asked))
