"""What every program must hold: exact at T(n) and after it as promised, and not before."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from loopinterp.rasp import UNKNOWN, LoopProgram, get_program, list_programs
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    Addition,
    Batch,
    BinarySum,
    Copy,
    FullOutput,
    Multiplication,
    Parity,
    PrefixSum,
    Task,
    TokenAddition,
    UniqueSet,
    get_task,
)
from loopinterp.tasks.abacus_addition import ALPHABET
from tests.tasks.answers import ANSWERS, spelled

PROGRAMS = list_programs()
MOST = 65_536
"""Inputs of one length that are tried; where there are more, as many random ones."""


def task_of(program: LoopProgram) -> Task:
    return get_task(program.task, **program.task_settings)


def answer(task: Task, tokens: list[int], n: int) -> list[int]:
    """The right outputs at the positions that are asked for, in Python integers."""
    if isinstance(task, FullOutput):
        spelling = spelled(task)
        prompt = "".join(spelling[t] for t in tokens[1 : tokens.index(task.equals)])
        classes = [spelling.index(c) for c in ANSWERS[task.name](prompt)]
        end = [task.n_answer_symbols] * (len(tokens) - len(prompt) - 1 - len(classes))
        return classes + end
    body = tokens[1 : n + 1]
    if task.name == "parity":
        return [sum(body) % 2] + [2] * (len(tokens) - n - 2)
    if isinstance(task, PrefixSum):
        return [x % task.modulus for x in itertools.accumulate(body)]
    if task.name == "abacus_addition":
        operands = "".join(ALPHABET[t] for t in tokens).split("=")[0].split("+")
        total = str(sum(int(x[::-1]) for x in operands)).rjust(max(map(len, operands)), "0")
        return [ALPHABET.index(c) for c in total[::-1] + "$"]
    x = sum((t & 1) << i for i, t in enumerate(body))
    y = sum((t >> 1) << i for i, t in enumerate(body))
    return [(x + y) >> i & 1 for i in range(n)]


@functools.cache
def every_input(task: Task, n: int) -> Batch:
    """All inputs of length n, or as many random ones; all answered right by the task itself."""
    batch = _every_input(task, n)
    asked = zip(batch.inputs.tolist(), batch.targets.tolist())
    for tokens, targets in asked:
        assert [t for t in targets if t != IGNORE] == answer(task, tokens, n)
    return batch


def _every_input(task: Task, n: int) -> Batch:
    if isinstance(task, Addition | TokenAddition):
        return task.encode([(x, y) for x in range(2**n) for y in range(2**n)], n=n)
    if isinstance(task, Multiplication):
        return task.encode([(x, y) for x in range(2**task.m) for y in range(2**n)], n=n)
    if isinstance(task, AbacusAddition) and n <= 2:
        numbers = range(10**n)
        batch = task.encode([(x, y) for x in numbers for y in numbers])
        return batch[batch.n == n]
    if isinstance(task, UniqueSet) and n <= 2:
        symbols = torch.tensor(list(itertools.product(range(task.n_symbols), repeat=n)))
        return task.from_symbols(symbols, torch.full((len(symbols),), n))
    base = task.modulus if isinstance(task, PrefixSum) else 2
    if isinstance(task, AbacusAddition | UniqueSet) or base**n > MOST:
        g = torch.Generator().manual_seed(n)
        each = (MOST if n >= 7 else MOST // 16) // len(task.distributions) + 1
        drawn = [
            task.sample(n, batch_size=each, generator=g, distribution=d) for d in task.distributions
        ]
        parts = zip(*((b.inputs, b.targets, b.n, b.n_loops) for b in drawn))
        return Batch(*(torch.cat(part) for part in parts))
    bits = torch.tensor(list(itertools.product(range(base), repeat=n)))
    assert isinstance(task, Parity | PrefixSum | Copy | BinarySum)
    return task.from_bits(bits, torch.full((len(bits),), n))


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
    if needed > 0:
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
            asked = outputs[row][batch.targets[row] != IGNORE].tolist()
            assert asked == answer(task, batch.inputs[row].tolist(), int(batch.n[row]))


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
