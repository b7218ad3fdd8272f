"""Pairs for a variable, against one counterfactual at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loopinterp.comparison.variable_interchange import _effective, _VariablePairs
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.programs import UNKNOWN, Intervention, LoopProgram, get_program
from loopinterp.tasks import IGNORE, Batch, get_task

N = 4


def finder_of(
    name: str, *, apart: bool = True, per_loop: int = 12
) -> tuple[LoopProgram, Batch, _VariablePairs]:
    program = get_program(name)
    generator = torch.Generator().manual_seed(1)
    task = get_task(program.task, **program.task_settings)
    batch = task.sample(N, batch_size=48, generator=generator)
    n_loops = int(batch.n_loops.max())
    return (
        program,
        batch,
        _VariablePairs(
            program,
            program.trace(batch.inputs, n_loops=n_loops),
            batch,
            n_loops=n_loops,
            subspaces=dict.fromkeys(program.variables, torch.eye(1)) if apart else {},
            per_loop=per_loop,
            generator=generator,
        ),
    )


def found_by(finder: _VariablePairs) -> Iterator[tuple[str, InterchangePairs]]:
    for variable in finder.program.variables:
        pairs = finder.draw(variable, range(N + 1))
        if len(pairs):
            yield variable, pairs


def answers(
    program: LoopProgram, pairs: InterchangePairs, k: int, variable: str | None
) -> torch.Tensor:
    """Answers [delay, pos] of one pair after an exchange of one variable, or all."""
    base, source = (pairs.inputs[int(r[k])][None] for r in (pairs.base, pairs.source))
    loop, last = int(pairs.loop[k]), pairs.n_loops
    mask = torch.zeros_like(base, dtype=torch.bool)
    mask[0, pairs.positions[k]] = True
    if variable is not None:
        assert pairs.loop[k] == pairs.source_loop[k]
        donor = program.trace(source, n_loops=loop).variables[variable][loop]
        change = Intervention(variable, loop, donor, mask)
        run = program.run(base, n_loops=last, interventions=[change])
        return run.outputs[loop:, 0]
    both = [program.trace(x, n_loops=loop).variables for x in (base, source)]
    state = {v: torch.where(mask, both[1][v][-1], both[0][v][-1]) for v in program.variables}
    return program.run(base, n_loops=last, start_at_loop=loop, variables=state).outputs[:, 0]


def told(first: torch.Tensor, second: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    decided = (first != UNKNOWN) & (second != UNKNOWN) & asked
    return ((first != second) & decided).any(-1)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["parity", "copy", "latched_chain", "carry_save", "lookahead"])
def test_each_pair_changes_an_answer_of_the_program(name, apart):
    program, batch, finder = finder_of(name, apart=apart)
    seen = 0
    for variable, pairs in found_by(finder):
        counts = _effective(finder.predict(variable, pairs))
        assert counts.any(1).all()
        for k in range(0, len(pairs), 5):
            base, source = (pairs.inputs[int(r[k])][None] for r in (pairs.base, pairs.source))
            loop, at = int(pairs.loop[k]), (0, int(pairs.positions[k, 0]))
            values = [
                program.trace(x, n_loops=loop).variables[variable][-1] for x in (base, source)
            ]
            assert values[0][at] != values[1][at]
            assert apart or base[at] == source[at]
            asked = batch.targets[pairs.base[k]] != IGNORE
            exchanged = answers(program, pairs, k, variable if apart else None)
            plain = program.trace(base, n_loops=pairs.n_loops).outputs[loop:, 0]
            horizon = int(pairs.horizon[k])
            assert torch.equal(counts[k, : horizon + 1], told(plain, exchanged, asked))
            assert not counts[k, horizon + 1 :].any()
            seen += 1
    assert seen > N


@pytest.mark.parametrize("name", ["parity", "prefix_xor", "latched_chain", "unique_set"])
def test_another_loop_has_another_value_and_another_answer(name):
    program, _, finder = finder_of(name)
    seen = 0
    for variable, pairs in found_by(finder):
        control = finder.another_loop(variable, finder.predict(variable, pairs))
        right = finder.predict(variable, pairs).interchanged
        wrong = finder.predict(variable, control.pairs).interchanged
        apart = told(right, wrong, pairs.scored[:, None]) & _effective(
            finder.predict(variable, pairs)
        )
        assert torch.equal(control.counts, apart)
        for k in control.counts.any(1).nonzero().squeeze(1).tolist():
            source, at = pairs.inputs[pairs.source[k]][None], int(pairs.positions[k, 0])
            values = program.trace(source, n_loops=pairs.n_loops).variables[variable][:, 0, at]
            loop, other = int(pairs.loop[k]), int(control.pairs.source_loop[k])
            nearer = [t for t in range(len(values)) if abs(t - loop) < abs(other - loop)]
            assert values[other] != values[loop]
            assert all(values[t] == values[loop] for t in nearer)
            seen += 1
    assert seen > 3


def test_another_variable_gives_another_answer():
    program, batch, finder = finder_of("parity")
    for variable, pairs in found_by(finder):
        other, control = finder.another_variable(variable, finder.predict(variable, pairs)) or (
            "",
            None,
        )
        assert control is not None and {variable, other} == set(program.variables)
        for k in range(0, len(pairs), 7):
            asked = batch.targets[pairs.base[k]] != IGNORE
            right, wrong = (answers(program, pairs, k, name) for name in (variable, other))
            loop = int(pairs.loop[k])
            plain = program.trace(pairs.inputs[pairs.base[k]][None], n_loops=pairs.n_loops)
            counts = told(right, wrong, asked) & told(plain.outputs[loop:, 0], right, asked)
            assert torch.equal(control.counts[k, : len(counts)], counts)


def test_a_program_of_one_variable_has_no_other():
    finder = finder_of("prefix_xor")[2]
    right = finder.predict("prefix", finder.draw("prefix", [2]))
    assert finder.another_variable("prefix", right) is None


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["parity", "latched_chain", "token_addition"])
def test_a_donor_of_the_same_value_changes_no_answer_of_the_program(name, apart):
    finder = finder_of(name, apart=apart)[2]
    other_tokens = 0
    for variable, pairs in found_by(finder):
        control = finder.same_value(variable, pairs)
        made = control.pairs
        valid = control.counts.any(1)
        assert torch.equal(valid, made.source != made.base)
        prediction = finder.predict(variable, made)
        assert torch.equal(prediction.base[control.counts], prediction.interchanged[control.counts])
        at = made.positions[:, 0]
        tokens = [made.inputs[rows, at] for rows in (made.base, made.source)]
        assert apart or torch.equal(*tokens)
        other_tokens += int((tokens[0] != tokens[1]).sum())
    assert bool(other_tokens) == apart


def test_a_variable_that_is_the_same_for_all_inputs_has_no_pairs():
    assert {variable for variable, _ in found_by(finder_of("copy")[2])} == {"symbol"}


def test_loops_are_full_where_they_can_be_and_every_position_comes_up():
    finder = finder_of("prefix_xor", per_loop=100)[2]
    pairs = finder.draw("prefix", range(N + 1))
    counts = torch.bincount(pairs.loop, minlength=N + 1)
    assert counts[0] == 0 and (counts[1:] <= 100).all() and counts.max() == 100
    assert pairs.positions.unique().tolist() == [1, 2, 3, 4]  # all bits; BOS is the same for all
