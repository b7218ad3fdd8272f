"""What every program must hold: exact at T(n) and after it as promised, and not before."""

from __future__ import annotations

import pytest
import torch

from loopinterp.programs import UNKNOWN, LoopProgram, get_program, list_programs
from loopinterp.tasks import IGNORE, Batch
from tests.programs.inputs import answer, every_input, task_of

PROGRAMS = list_programs()


def exact(program: LoopProgram, batch: Batch, n_loops: int) -> torch.Tensor:
    """Whether each example is answered right at every position that is asked for."""
    right = []
    for first in range(0, len(batch), 4096):
        part = batch[slice(first, first + 4096)]
        outputs = program.trace(part.inputs, n_loops).outputs[-1]
        right.append(((outputs == part.targets) | (part.targets == IGNORE)).all(dim=1))
    return torch.cat(right)


@pytest.mark.parametrize(
    "n", [*range(1, 7), *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 8))]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_inputs_are_answered_at_t_of_n_and_some_not_a_loop_before(name, n):
    program = get_program(name)
    batch = every_input(task_of(program), n)
    needed = program.n_loops(n)
    assert exact(program, batch, needed).all()
    assert exact(program, batch, needed + 3).all()
    always_one = n == 1 and name in ("late_ripple", "tomita3")  # and right from the start
    if needed > 0 and not always_one:
        assert not exact(program, batch, needed - 1).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_inputs_of_mixed_lengths_are_answered_at_t_of_the_longest(name):
    program = get_program(name)
    task = task_of(program)
    generator = torch.Generator().manual_seed(0)
    for distribution in task.distributions:
        n = torch.cat([torch.tensor([64]), torch.randint(1, 65, (39,), generator=generator)])
        batch = task.sample(n, generator=generator, distribution=distribution)
        outputs = program.trace(batch.inputs, program.n_loops(64)).outputs[-1]
        for row in range(len(batch)):
            answers = outputs[row][batch.targets[row] != IGNORE].tolist()
            assert answers == answer(task, batch.inputs[row].tolist(), int(batch.n[row]))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("n", [1, 2, 8, 13])
def test_each_example_is_answered_at_its_own_t_of_n_whatever_the_padding(name, n):
    program = get_program(name)
    task = task_of(program)
    generator = torch.Generator().manual_seed(n)
    batch = task.sample(torch.tensor([n] * 20 + [16]), generator=generator)[:20]
    assert exact(program, batch, program.n_loops(n)).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tasks_own_number_of_loops_is_enough(name):
    program = get_program(name)
    task = task_of(program)
    for n in (1, 2, 5, 64):
        assert program.n_loops(n) <= task.n_loops(n)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_answer_is_a_class_of_the_task_or_unknown(name):
    program = get_program(name)
    task = task_of(program)
    batch = task.sample(9, batch_size=30, generator=torch.Generator().manual_seed(0))
    outputs = program.trace(batch.inputs, task.n_loops(9)).outputs
    assert set(outputs.unique().tolist()) <= {UNKNOWN, *range(task.d_vocab_out)}
    assert len(program.inputs) == task.d_vocab
