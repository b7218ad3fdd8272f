"""What every program must hold: exact at T(n) and after it as promised, and not before."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.rasp import UNKNOWN, LoopProgram, get_program, list_programs
from loopinterp.tasks import IGNORE, Addition, Batch, Parity, PrefixSum, get_task

PROGRAMS = list_programs()


def answers(task_name: str, batch: Batch, row: int) -> list[int]:
    """The right answer to a row, from its tokens, in Python integers."""
    tokens = batch.inputs[row].tolist()
    n = int(batch.n[row])
    body = tokens[1 : n + 1]
    if task_name == "parity":
        return [sum(body) % 2] + [2] * (len(tokens) - n - 2)
    if task_name == "prefix_sum":
        return [x % 2 for x in itertools.accumulate(body)]
    x = sum((t & 1) << i for i, t in enumerate(body))
    y = sum((t >> 1) << i for i, t in enumerate(body))
    return [(x + y) >> i & 1 for i in range(n)]


def every_input(task_name: str, n: int) -> Batch:
    """All inputs of n bits."""
    if task_name == "addition":
        return Addition().encode([(x, y) for x in range(2**n) for y in range(2**n)], n=n)
    bits = torch.tensor(list(itertools.product([0, 1], repeat=n)))
    task = Parity() if task_name == "parity" else PrefixSum()
    return task.from_bits(bits, torch.full((len(bits),), n))


def exact(program: LoopProgram, batch: Batch, n_loops: int) -> torch.Tensor:
    """Whether each example is answered right at every position that is asked for."""
    outputs = program.trace(batch.inputs, n_loops).outputs[-1]
    return ((outputs == batch.targets) | (batch.targets == IGNORE)).all(dim=1)


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_inputs_are_answered_at_t_of_n_and_some_not_a_loop_before(name, n):
    program = get_program(name)
    batch = every_input(program.task, n)
    for row in range(0, len(batch), 7):  # the task's own oracle, checked on every seventh
        asked = batch.targets[row][batch.targets[row] != IGNORE].tolist()
        assert asked == answers(program.task, batch, row)
    needed = program.n_loops(n)
    assert exact(program, batch, needed).all()
    assert exact(program, batch, needed + 3).all()
    if needed > 0:
        assert not exact(program, batch, needed - 1).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_inputs_of_mixed_lengths_are_answered_at_t_of_the_longest(name):
    program = get_program(name)
    task = get_task(program.task)
    generator = torch.Generator().manual_seed(0)
    for distribution in task.distributions:
        n = torch.cat([torch.tensor([64]), torch.randint(1, 65, (39,), generator=generator)])
        batch = task.sample(n, generator=generator, distribution=distribution)
        outputs = program.trace(batch.inputs, program.n_loops(64)).outputs[-1]
        for row in range(len(batch)):
            asked = outputs[row][batch.targets[row] != IGNORE].tolist()
            assert asked == answers(program.task, batch, row)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("n", [1, 2, 8, 13])
def test_each_example_is_answered_at_its_own_t_of_n_whatever_the_padding(name, n):
    program = get_program(name)
    task = get_task(program.task)
    generator = torch.Generator().manual_seed(n)
    batch = task.sample(torch.tensor([n] * 20 + [16]), generator=generator)[:20]
    assert exact(program, batch, program.n_loops(n)).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tasks_own_number_of_loops_is_enough(name):
    program = get_program(name)
    task = get_task(program.task)
    for n in (1, 2, 5, 64):
        assert program.n_loops(n) <= task.n_loops(n)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_answer_is_a_class_of_the_task_or_unknown(name):
    program = get_program(name)
    task = get_task(program.task)
    batch = task.sample(9, batch_size=30, generator=torch.Generator().manual_seed(0))
    outputs = program.trace(batch.inputs, task.n_loops(9)).outputs
    assert set(outputs.unique().tolist()) <= {UNKNOWN, *range(task.d_vocab_out)}
    assert len(program.inputs) == task.d_vocab
