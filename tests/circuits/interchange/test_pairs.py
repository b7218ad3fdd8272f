from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loopinterp.circuits.interchange.inputs import Plan, make_plan
from loopinterp.circuits.interchange.pairs import NONE, Cell, CellFinder, draw_pairs
from loopinterp.circuits.program_swaps import ProgramSwaps
from loopinterp.circuits.runs import AT_THE_END
from loopinterp.rasp import UNKNOWN, LoopProgram, counterfactual, get_program
from loopinterp.tasks import IGNORE, Batch, get_task

N = 4
DELAYS = (0, 1, AT_THE_END)


def cells_of(
    name: str, *, apart: bool = True, n: int | torch.Tensor = N, per_cell: int = 12
) -> tuple[LoopProgram, Batch, Plan, list[Cell]]:
    program = get_program(name)
    generator = torch.Generator().manual_seed(1)
    size = 48 if isinstance(n, int) else None
    batch = get_task(program.task, **program.task_settings).sample(
        n, batch_size=size, generator=generator
    )
    plan = make_plan(
        program,
        batch,
        n_loops=None,
        loops=None,
        delays=DELAYS,
        per_cell=per_cell,
        device=torch.device("cpu"),
    )
    swaps = ProgramSwaps(program, plan.inputs, n_loops=plan.furthest)
    names = program.variables if apart else ()
    finder = CellFinder(swaps, plan, apart=names, generator=generator)
    found = [c for loop in plan.loops for v in program.variables for c in finder.cells(v, loop)]
    return program, batch, plan, found


def single(cell: Cell, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Base, source and mask of one pair."""
    rows = [batch.inputs[int(r[k]) :][:1] for r in (cell.base, cell.source)]
    mask = torch.zeros_like(rows[0], dtype=torch.bool)
    mask[0, cell.position[k]] = True
    return rows[0], rows[1], mask


def some_pairs(cells: list[Cell]) -> Iterator[tuple[Cell, int]]:
    return ((cell, k) for cell in cells for k in range(0, len(cell), 9))


@pytest.mark.parametrize("name", ["parity", "copy", "latched_chain", "carry_save", "lookahead"])
def test_each_pair_is_a_counterfactual_that_changes_the_answer(name):
    program, batch, plan, cells = cells_of(name)
    assert len(cells) > len(plan.loops)
    for cell, k in some_pairs(cells):
        base, source, mask = single(cell, batch, k)
        variable = program.variables[cell.variable]
        last = cell.loop + cell.steps
        swapped = counterfactual(program, base, source, variable, cell.loop, mask, n_loops=last)
        plain = program.trace(base, n_loops=last)
        assert torch.equal(cell.said[k], swapped.outputs[last, 0])
        assert torch.equal(cell.without[k], plain.outputs[last, 0])
        values = [program.trace(x, n_loops=cell.loop).variables[variable] for x in (base, source)]
        assert values[0][-1][mask] != values[1][-1][mask]
        asked = batch.targets[cell.base[k]] != IGNORE
        assert torch.equal(cell.scored[k], asked & (cell.said[k] != UNKNOWN))
        decided = asked & (cell.said[k] != UNKNOWN) & (cell.without[k] != UNKNOWN)
        assert (cell.said[k] != cell.without[k])[decided].any()


@pytest.mark.parametrize("name", ["parity", "prefix_xor", "latched_chain", "unique_set"])
def test_the_other_loop_has_another_value_and_another_answer(name):
    program, batch, plan, cells = cells_of(name)
    found = 0
    for cell, k in some_pairs(cells):
        base, source, mask = single(cell, batch, k)
        variable = program.variables[cell.variable]
        values = program.trace(source, n_loops=plan.n_loops).variables[variable][:, mask][:, 0]
        other = int(cell.other_loop[k])
        if other == NONE:
            continue
        found += 1
        nearer = [t for t in range(len(values)) if abs(t - cell.loop) < abs(other - cell.loop)]
        assert values[other] != values[cell.loop]
        assert all(values[t] == values[cell.loop] for t in nearer)
        state = {n: x[-1] for n, x in program.trace(base, n_loops=cell.loop).variables.items()}
        state[variable] = torch.where(mask, values[other], state[variable])
        said = program.run(base, n_loops=cell.steps, variables=state).outputs[-1, 0]
        assert not cell.agrees(said[None], torch.tensor([k])).item()
    assert found > 3


def test_the_other_variable_gives_another_answer():
    program, batch, _, cells = cells_of("parity")
    for cell, k in some_pairs(cells):
        other = int(cell.other_variable[k])
        assert other == 1 - cell.variable
        args = (*single(cell, batch, k)[:2], program.variables[other], cell.loop)
        last = cell.loop + cell.steps
        run = counterfactual(program, *args, single(cell, batch, k)[2], n_loops=last)
        assert not cell.agrees(run.outputs[-1], torch.tensor([k])).item()


def test_a_program_of_one_variable_has_no_other():
    *_, cells = cells_of("prefix_xor")
    assert all((cell.other_variable == NONE).all() for cell in cells)


@pytest.mark.parametrize("name", ["parity", "token_addition"])
def test_swaps_of_the_whole_state_take_all_variables_and_keep_the_token(name):
    program, batch, _, cells = cells_of(name, apart=False)
    for cell, k in some_pairs(cells):
        base, source, mask = single(cell, batch, k)
        assert torch.equal(base[mask], source[mask])
        both = [program.trace(x, n_loops=cell.loop).variables for x in (base, source)]
        state = {v: torch.where(mask, both[1][v][-1], both[0][v][-1]) for v in program.variables}
        run = program.run(base, n_loops=cell.steps, variables=state)
        assert torch.equal(cell.said[k], run.outputs[-1, 0])


def test_a_variable_that_is_the_same_for_all_inputs_has_no_pairs():
    program, *_, cells = cells_of("copy")
    assert {program.variables[cell.variable] for cell in cells} == {"symbol"}


def test_lengths_may_differ():
    program, *_, cells = cells_of("copy", n=torch.arange(48) % 3 + 2)
    assert {program.variables[cell.variable] for cell in cells} == {"symbol", "left"}


def test_no_pair_of_inputs_comes_twice_and_cells_are_full_where_they_can_be():
    *_, cells = cells_of("parity", per_cell=7)
    for cell in cells:
        pairs = list(zip(cell.base.tolist(), cell.source.tolist()))
        assert len(set(pairs)) == len(pairs) == 7


def test_all_positions_that_matter_are_drawn():
    *_, cells = cells_of("prefix_xor", per_cell=200)
    late = next(c for c in cells if c.loop == N + 1 and c.steps == 0)
    assert late.position.unique().tolist() == [1, 2, 3, 4]  # all bits; BOS is the same for all


@pytest.mark.parametrize(("n_inputs", "most"), [(2, 1), (2, 9), (5, 7), (5, 100), (40, 8)])
def test_pairs_are_different_inputs_and_shared_out_evenly(n_inputs, most, generator):
    base, source = draw_pairs(n_inputs, most, generator)
    assert len(base) == min(most, n_inputs * (n_inputs - 1))
    assert (base != source).all()
    assert len({*zip(base.tolist(), source.tolist())}) == len(base)
    counts = torch.bincount(base, minlength=n_inputs)
    assert counts.max() - counts.min() <= 1
