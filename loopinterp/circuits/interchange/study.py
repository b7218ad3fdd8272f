"""Interchange interventions on the variables of any loop program, in any looped model.

A variable of the program is taken from the run of one input and put into the run of another, at
one position after some loop; the same is done to the model, in the part of its state that is said
to hold the variable. If that part is the variable, then the model's answer becomes what the
program's becomes. (Geiger et al., arXiv 2106.02997; in a subspace, arXiv 2303.02536.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.given import one_program
from loopinterp.circuits.interchange.inputs import Plan, check_subspaces, make_plan
from loopinterp.circuits.interchange.pairs import NONE, Cell, CellFinder
from loopinterp.circuits.interchange.result import (
    NOTHING,
    OTHER_LOOP,
    OTHER_VARIABLE,
    RANDOM,
    SWAPS,
    VARIABLE,
    InterchangeResult,
    share_interval,
)
from loopinterp.circuits.program_swaps import ProgramSwaps
from loopinterp.circuits.runs import (
    AT_THE_END,
    delay_name,
    device_of,
    outputs,
    read_on,
    states_after,
)
from loopinterp.circuits.subspaces import CONTROL_ENERGY, energy_rank, project, random_subspaces
from loopinterp.models.protocol import bind, need_model
from loopinterp.probing.states import describe_model
from loopinterp.rasp.language import UNKNOWN
from loopinterp.results import study

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_AT_A_TIME = 256
"""Pairs that the model goes on with at a time."""


def interchange_study(
    model: LoopedModel | Any,
    program: str | LoopProgram,
    batch: Batch | Int[Tensor, "batch pos"],
    *,
    subspaces: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    n_loops: int | None = None,
    loops: Sequence[int] | None = None,
    delays: Sequence[int] = (1, AT_THE_END),
    pairs_per_cell: int = 64,
    seed: int = 0,
) -> InterchangeResult:
    """Swap every variable of a program after every loop, and see whether the model follows.

    For each variable v and each number of loops t, pairs of inputs (base, source) and a position p
    are drawn on which v has two values and taking v from the source changes the program's answer
    to the base. In the model's run of the base, the part of the state at p that lies in v's
    subspace is then replaced by that of the source, and the run goes on. The swap is right if the
    model's whole output is the program's, wherever an answer is asked for and the program has one.

    Beside it, on the same pairs and against the same counterfactual: random directions of equal
    rank, others for each pair; the source's state after another loop, at which v has another
    value; another variable's subspace; and no swap at all, which is the chance level. Pairs on
    which the program itself does not tell one of these from the right swap do not count for it.

    Args:
        model: Any looped model.
        program: Any loop program, or its name; it must read the model's tokens.
        batch: Inputs, or a task's batch: then only positions that have a target are scored. Rows
            may be padded; base and source are any two of them.
        subspaces: Variable -> orthonormal rows that span the directions it lies in. The whole
            state is swapped for variables that are not listed, and in the program all of its
            variables, on pairs with the same token at the position.
        n_loops: Loops of a full run; by default the largest T(n) of the batch.
        loops: Numbers of loops after which to swap; by default 0 .. ``n_loops``.
        delays: Loops between a swap and the reading of the output; ``AT_THE_END`` reads it after
            ``n_loops`` loops.
        pairs_per_cell: Most pairs of a variable, loop and delay.
        seed: Seed of pairs, positions and random directions.

    Raises:
        InputError: inputs that are not tokens of the program, or fewer than two; an unknown
            variable or a subspace of another shape; loops or delays out of range.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.

    Example:
        >>> from loopinterp.circuits import ProgramModel
        >>> from loopinterp.rasp import get_program
        >>> xor = get_program("prefix_xor")
        >>> tokens = torch.randint(2, (16, 5), generator=torch.Generator().manual_seed(0))
        >>> model = ProgramModel(xor, tokens, n_loops=6)
        >>> where = {"prefix": model.subspace("prefix")}
        >>> result = interchange_study(model, xor, tokens, subspaces=where, n_loops=5)
        >>> float(np.nanmin(result.iia))
        1.0
    """
    chosen = one_program(program)
    need_model(model)
    plan = make_plan(
        chosen,
        batch,
        n_loops=n_loops,
        loops=loops,
        delays=tuple(delays),
        per_cell=pairs_per_cell,
        device=device_of(model),
    )
    bases = dict(subspaces or {})
    width = bind(model, plan.inputs[:1]).h0.shape[-1]
    check_subspaces(bases, chosen, width)
    with study(
        seed,
        study="interchange",
        model=describe_model(model),
        program=chosen.name,
        n_loops=plan.n_loops,
        inputs=len(plan.inputs),
        pairs_per_cell=pairs_per_cell,
    ) as watch:
        generator = torch.Generator().manual_seed(seed)
        finder = CellFinder(
            ProgramSwaps(chosen, plan.inputs, n_loops=plan.furthest),
            plan,
            apart=bases,
            generator=generator,
        )
        cells = [c for loop in plan.loops for v in chosen.variables for c in finder.cells(v, loop)]
        ranked = [bases.get(v) for v in chosen.variables]
        tally = _Tally(plan, len(chosen.variables))
        _ModelSwaps(model, plan, ranked, tally, generator).run(cells)
        return tally.result(
            provenance=watch.provenance(),
            variables=list(chosen.variables),
            ranks=[width if rows is None else len(rows) for rows in ranked],
            whole=[rows is None for rows in ranked],
            program=chosen.name,
        )


class _Tally:
    """Counts of every kind of swap in every cell."""

    def __init__(self, plan: Plan, n_variables: int) -> None:
        self.plan = plan
        shape = (n_variables, len(plan.loops), len(plan.delays))
        self.right = np.zeros((len(SWAPS), *shape))
        self.n = np.zeros((len(SWAPS), *shape), dtype=np.int64)
        self.behaviour, self.chance = np.full(shape, np.nan), np.full(shape, np.nan)
        self.ranks = np.zeros(shape, dtype=np.int64)

    def at(self, cell: Cell) -> tuple[int, int, int]:
        return cell.variable, self.plan.loops.index(cell.loop), cell.delay

    def add(self, swap: str, cell: Cell, right: Bool[Tensor, " pair"]) -> None:
        where = (SWAPS.index(swap), *self.at(cell))
        self.right[where] += int(right.sum())
        self.n[where] += len(right)

    def add_unchanged(self, cell: Cell, answers: Int[Tensor, "pair pos"]) -> None:
        """What the model, and the program, answer without a swap."""
        self.add(NOTHING, cell, cell.agrees(answers))
        counted = cell.asked & (cell.without != UNKNOWN)
        same = ((answers == cell.without) | ~counted).all(-1)
        self.behaviour[self.at(cell)] = float(same.double().mean())
        self.chance[self.at(cell)] = float(cell.agrees(cell.without).double().mean())

    def result(self, **described: Any) -> InterchangeResult:
        low, high = share_interval(self.right, self.n)
        return InterchangeResult(
            agreement=np.where(self.n > 0, self.right / np.maximum(self.n, 1), np.nan),
            low=low,
            high=high,
            n_pairs=self.n,
            behaviour=self.behaviour,
            chance=self.chance,
            random_ranks=self.ranks,
            swaps=list(SWAPS),
            loops=list(self.plan.loops),
            delays=[delay_name(d) for d in self.plan.delays],
            **described,
        )


@dataclass(frozen=True)
class _Change:
    """What one kind of swap adds to the state in some pairs of a cell."""

    swap: str
    cell: Cell
    pairs: Int[Tensor, " pair"]
    added: Float[Tensor, "pair d_model"]


class _ModelSwaps:
    """Makes the swaps of all cells in a model, loop by loop.

    Args:
        model: The model.
        plan: What is tried.
        bases: The subspace of each variable; None for the whole state.
        tally: Where to count.
        generator: Draws random directions.
    """

    def __init__(
        self,
        model: LoopedModel | Any,
        plan: Plan,
        bases: list[Tensor | None],
        tally: _Tally,
        generator: torch.Generator,
    ) -> None:
        self.model, self.plan, self.bases = model, plan, bases
        self.tally, self.generator = tally, generator

    @torch.no_grad()
    def run(self, cells: list[Cell]) -> None:
        """Swap, go on and count; the cells come in the order of their loops."""
        if not cells:
            return
        answers = outputs(self.model, self.plan.inputs, self.plan.furthest)
        iteration = bind(self.model, self.plan.inputs)
        h, done = iteration.h0, 0
        everything = zip(cells, self._from_other_loops(cells))
        for loop, group in groupby(everything, key=lambda each: each[0].loop):
            for _ in range(loop - done):
                h = iteration.step(h)
            done = loop
            changes: dict[int, list[_Change]] = {}
            for cell, donors in group:
                self.tally.add_unchanged(cell, answers[loop + cell.steps, cell.base])
                changes.setdefault(cell.steps, []).extend(self._changes(cell, h, donors))
            for steps, made in changes.items():
                self._go_on(h, made, steps)

    def _from_other_loops(self, cells: list[Cell]) -> Sequence[Float[Tensor, "pair d_model"]]:
        """The source's state after the other loop, in the pairs of each cell that have one."""
        rows = [cell.other_loop != NONE for cell in cells]
        row, pos, loop = (
            torch.cat([getattr(cell, name)[r] for cell, r in zip(cells, rows)])
            for name in ("source", "position", "other_loop")
        )
        states = states_after(self.model, self.plan.inputs, row, pos, loop)
        return states.split([int(r.sum()) for r in rows])

    def _changes(self, cell: Cell, h: Tensor, donors: Tensor) -> Iterator[_Change]:
        """What every kind of swap adds to the base's state ``h`` in the pairs of a cell."""
        own = h[cell.base, cell.position]
        difference = h[cell.source, cell.position] - own
        basis = self.bases[cell.variable]
        every = torch.arange(len(cell), device=own.device)
        yield _Change(VARIABLE, cell, every, _within(difference, basis))

        rank = energy_rank(difference, CONTROL_ENERGY) if basis is None else len(basis)
        self.tally.ranks[self.tally.at(cell)] = rank
        random = random_subspaces(len(cell), rank, own.shape[-1], self.generator)
        yield _Change(RANDOM, cell, every, project(difference, random.to(own.device)))

        some = every[cell.other_loop != NONE]
        yield _Change(OTHER_LOOP, cell, some, _within(donors - own[some], basis))

        some = every[cell.other_variable != NONE]
        if len(some):
            other = self.bases[int(cell.other_variable[some[0]])]
            yield _Change(OTHER_VARIABLE, cell, some, _within(difference[some], other))

    def _go_on(self, h: Tensor, changes: list[_Change], steps: int) -> None:
        """Put all changes into the states of their bases, run on, and count what is right."""
        base = torch.cat([c.cell.base[c.pairs] for c in changes])
        position = torch.cat([c.cell.position[c.pairs] for c in changes])
        added = torch.cat([c.added for c in changes])
        rows = torch.arange(len(base), device=base.device)
        read = []
        for part in rows.split(_AT_A_TIME):
            state = h[base[part]]
            state[rows[: len(part)], position[part]] += added[part]
            reads = torch.full((1, len(part)), steps, device=base.device)
            read.append(read_on(self.model, self.plan.inputs[base[part]], state, reads)[0])
        answers = torch.cat(read).split([len(c.pairs) for c in changes])
        for change, answer in zip(changes, answers):
            right = change.cell.agrees(answer, change.pairs)
            self.tally.add(change.swap, change.cell, right)


def _within(difference: Tensor, basis: Tensor | None) -> Tensor:
    """The part of a change that lies in a subspace; all of it if there is none."""
    return difference if basis is None else project(difference, basis)
