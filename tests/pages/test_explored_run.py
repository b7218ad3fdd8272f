from __future__ import annotations

import pytest
import torch

from loopinterp.pages.exploration import NOT_SAID
from loopinterp.pages.explored_run import program_values
from loopinterp.programs import get_program
from loopinterp.tasks import get_task


@pytest.mark.parametrize("name", ["ripple", "carry_save", "latched_chain", "token_addition"])
def test_a_value_is_implied_where_it_alone_gives_the_models_answer(name: str) -> None:
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(3, batch_size=4, generator=generator)
    n_loops, asked = 3, batch.targets >= 0
    answers = torch.randint(2, (n_loops + 1, *batch.targets.shape), generator=generator)
    trace = program.trace(batch.inputs, n_loops)
    found = {k: pair for k, *pair in program_values(program, batch.inputs, answers, asked)}
    assert list(found) == [*(f"{name}.{v}" for v in program.variables), f"{name}'s answer"]
    n_pos = answers.shape[-1]
    places = torch.cartesian_prod(torch.arange(4), torch.arange(n_pos))
    each = torch.arange(len(places))  # an example of its own for each place
    row, pos = places.T
    for variable in program.variables:
        values, implied = found[f"{name}.{variable}"]
        assert torch.equal(values, trace.variables[variable])
        for loop in range(n_loops + 1):
            here = {v: x[loop][row] for v, x in trace.variables.items()}
            agreeing: list[list[int]] = [[] for _ in places]
            for value in values.unique().tolist():
                changed = here[variable].clone()
                changed[each, pos] = value  # here alone, and everywhere else as it is
                tried = {**here, variable: changed}
                said = program.run(batch.inputs[row], n_loops=0, variables=tried).outputs[0]
                for k in (said[each, pos] == answers[loop, row, pos]).nonzero().flatten().tolist():
                    agreeing[k].append(value)
            for k, those in enumerate(agreeing):
                alone = len(those) == 1 and bool(asked[row[k], pos[k]])
                assert implied[loop, row[k], pos[k]] == (those[0] if alone else NOT_SAID)


def test_an_answer_that_is_read_elsewhere_implies_nothing() -> None:
    from loopinterp.programs import Linear, full, shift_right, tokens, var
    from loopinterp.programs.program import LoopProgram

    program = LoopProgram(
        name="late",
        task="prefix_sum",
        inputs=("0", "1"),
        prepare={"x": full(0)},
        step={"x": var("x") ^ tokens},
        finish=shift_right(var("x")),
        n_loops=Linear(),
    )
    inputs = torch.tensor([[0, 1, 1]])
    answers = torch.zeros(2, 1, 3, dtype=torch.int64)
    (_, _, implied), _ = program_values(program, inputs, answers, inputs >= 0)
    assert (implied == NOT_SAID).all()
