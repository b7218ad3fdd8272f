"""The tasks on decimal numbers against Python integers."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    AbacusMultiplication,
    AbacusSum,
    Batch,
    DecimalOperands,
    NextToken,
)
from loopinterp.tasks.decimal_operands import ALPHABET

TASKS = [AbacusAddition(), AbacusSum(), AbacusSum(n_operands=12), AbacusMultiplication()]


def written(tokens: list[int]) -> str:
    return "".join(ALPHABET[t] for t in tokens)


def check(task: DecimalOperands, batch: Batch) -> None:
    """Check every row: the text is a calculation, and the targets are its next tokens."""
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist()):
        text = written(tokens)
        question, answer = text.split("=")
        operands = question.split(task.operator)
        assert len(operands) == task.n_operands
        numbers = [int(operand[::-1]) for operand in operands]
        if task.operator == "+":
            right = str(sum(numbers)).rjust(max(map(len, operands)), "0")
        else:
            right = str(math.prod(numbers))
        answer = answer.rstrip("$")
        assert answer == right[::-1]
        asked = [ALPHABET[t] for t in targets if t != IGNORE]
        assert "".join(asked) == answer + "$"
        first = text.index("=")
        assert targets[first : first + len(asked)] == [ALPHABET.index(c) for c in answer + "$"]


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_samples_of_every_distribution_and_of_mixed_lengths(task):
    g = torch.Generator().manual_seed(0)
    n = torch.randint(1, 25, (60,), generator=g)
    for distribution in task.distributions:
        batch = task.sample(n, generator=g, distribution=distribution)
        check(task, batch)
        assert batch.n.tolist() == n.tolist()
        assert batch.n_loops.tolist() == [task.n_loops(k) for k in n.tolist()]
        assert batch.inputs.shape == (60, task.n_positions(int(n.max())))
        for tokens, length in zip(batch.inputs.tolist(), n.tolist()):
            operands = written(tokens).split("=")[0].split(task.operator)
            longest = max(map(len, operands))
            assert longest <= length if distribution == "independent" else longest == length
            if distribution in ("equal", "chain", "nines"):
                assert {len(x) for x in operands} == {length}
            if distribution == "chain":
                sums = [sum(map(int, column)) for column in zip(*operands)]
                assert sums[0] >= 10 and set(sums[1:]) <= {9}
            else:
                assert all(len(x) == 1 or x[-1] != "0" for x in operands)


@pytest.mark.parametrize("task", [AbacusAddition(), AbacusMultiplication()], ids=repr)
def test_independent_lengths_are_uniform_over_the_grid(task):
    g = torch.Generator().manual_seed(0)
    lines = task.decode(
        task.sample(4, batch_size=3200, generator=g, distribution="independent").inputs
    )
    cells = [tuple(map(len, re.split(r" [+*] ", line.removesuffix(" =")))) for line in lines]
    counts = [cells.count((a, b)) for a in range(1, 5) for b in range(1, 5)]
    # 200 in each of 16 cells, with a standard error of 14.
    assert sum(counts) == 3200 and min(counts) > 140 and max(counts) < 260


@settings(max_examples=25, deadline=None)
@given(
    task=st.sampled_from(TASKS),
    n_digits=st.lists(st.integers(1, 30), min_size=12, max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_operands_of_given_lengths_have_them(task, n_digits, seed):
    n_digits = n_digits[: task.n_operands]
    g = torch.Generator().manual_seed(seed)
    batch = task.sample_operands(*n_digits, batch_size=3, generator=g)
    check(task, batch)
    assert batch.n.tolist() == [max(n_digits)] * 3
    assert batch.n_loops.tolist() == [task.n_loops(max(n_digits))] * 3
    for tokens in batch.inputs.tolist():
        operands = written(tokens).split("=")[0].split(task.operator)
        assert [len(x) for x in operands] == n_digits
        assert all(len(x) == 1 or x[-1] != "0" for x in operands)


def test_operands_of_given_lengths_have_all_their_digits():
    g = torch.Generator().manual_seed(0)
    batch = AbacusAddition().sample_operands(1, 2, batch_size=3000, generator=g)
    # Of the single digit each of ten, of the leading one each of nine: 300 and 333 of 3,000.
    for column, counts in ((0, 10), (2, 10), (3, 9)):
        seen = torch.bincount(batch.inputs[:, column], minlength=10)
        assert int((seen > 0).sum()) == counts and seen[seen > 0].min() > 220


@pytest.mark.parametrize(
    ("task", "m", "n"),
    [(NextToken(of="multiplication", n_pause=1), 2, 7), (NextToken(of="multiplication"), 1, 3)],
)
def test_binary_factors_of_given_lengths_have_them_in_both_forms(task, m, n):
    g, again = (torch.Generator().manual_seed(4) for _ in range(2))
    batch = task.sample_operands(m, n, batch_size=5, generator=g)
    plain = task.task.sample_operands(m, n, batch_size=5, generator=again)
    assert task.decode(batch) == task.task.decode(plain)
    for line in task.decode(batch):
        a, b = line.split(" = ")[0].split(" * ")
        assert (len(a), len(b)) == (m, n)
    assert batch.n_loops.tolist() == [m * n] * 5


G = torch.Generator()
ONE = torch.ones((1, 2, 1), dtype=torch.int64)
SUM = AbacusSum(n_operands=3)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: TASKS[0].sample_operands(3, batch_size=2, generator=G), "expected 2, .* got 1"),
        (lambda: SUM.sample_operands(3, 1, batch_size=2, generator=G), "expected 3, .* got 2"),
        (lambda: TASKS[0].sample_operands(3, 0, batch_size=2, generator=G), "^n: expected an int"),
        (lambda: TASKS[0].sample_operands(3, 1, batch_size=0, generator=G), "^batch_size"),
        (lambda: TASKS[0].sample_operands(3, 1, batch_size=2, generator=7), "Generator"),
        (lambda: TASKS[0].from_digits(ONE[:, :1], ONE[:, :1, 0]), r"shapes \[batch, 2, width\]"),
        (lambda: TASKS[0].from_digits(ONE, ONE[:, :, 0] + 1), r"lengths in 1\.\.1"),
        (lambda: TASKS[0].from_digits(ONE + 9, ONE[:, :, 0]), r"digits: expected tokens in 0\.\.9"),
        (lambda: TASKS[0].from_digits([[1]], ONE[:, :, 0]), r"shapes \[batch, 2, width\]"),
        (lambda: SUM.encode([(1, 2)]), "at least one list of 3 of integers"),
        (lambda: SUM.targets(torch.tensor([[1, 11, 2, 13]])), r"2 operators \(token 11\)"),
        (lambda: SUM.targets(torch.tensor([[1, 11, 11, 2, 13]])), "a digit on both sides"),
    ],
)
def test_bad_inputs_are_refused(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()
