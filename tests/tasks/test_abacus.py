"""Decimal arithmetic in the format of the abacus embeddings."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    AbacusMultiplication,
    AbacusSum,
    Batch,
    DecimalOperands,
    NextToken,
)
from loopinterp.tasks.abacus import ALPHABET

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
        answers = [ALPHABET[t] for t in targets if t != IGNORE]
        assert "".join(answers) == answer + "$"
        first = text.index("=")
        assert targets[first : first + len(answers)] == [ALPHABET.index(c) for c in answer + "$"]


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
    ("attempt", "what"),
    [
        (lambda: TASKS[0].sample_operands(3, batch_size=2, generator=G), "n_digits"),
        (lambda: SUM.sample_operands(3, 1, batch_size=2, generator=G), "n_digits"),
        (lambda: TASKS[0].sample_operands(3, 0, batch_size=2, generator=G), "n"),
        (lambda: TASKS[0].sample_operands(3, 1, batch_size=0, generator=G), "batch_size"),
        (lambda: TASKS[0].sample_operands(3, 1, batch_size=2, generator=7), "generator"),
        (lambda: TASKS[0].from_digits(ONE[:, :1], ONE[:, :1, 0]), "digits and n_digits"),
        (lambda: TASKS[0].from_digits(ONE, ONE[:, :, 0] + 1), "n"),
        (lambda: TASKS[0].from_digits(ONE + 9, ONE[:, :, 0]), "digits"),
        (lambda: TASKS[0].from_digits([[1]], ONE[:, :, 0]), "digits and n_digits"),
        (lambda: SUM.encode([(1, 2)]), "operands"),
        (lambda: SUM.targets(torch.tensor([[1, 11, 2, 13]])), "inputs"),
        (lambda: SUM.targets(torch.tensor([[1, 11, 11, 2, 13]])), "inputs"),
    ],
)
def test_bad_inputs_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what


TASK = AbacusAddition()


def test_all_pairs_of_up_to_two_digits():
    every = [(a, b) for a in range(100) for b in range(100)]
    batch = TASK.encode(every)
    check(TASK, batch)
    assert batch.n.tolist() == [max(len(str(a)), len(str(b))) for a, b in every]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10**100)] * 2), min_size=1, max_size=4))
def test_operands_of_any_length(operands):
    batch = TASK.encode(operands)
    check(TASK, batch)
    for (a, b), tokens in zip(operands, batch.inputs.tolist()):
        text = "".join(ALPHABET[t] for t in tokens)
        assert text.startswith(f"{str(a)[::-1]}+{str(b)[::-1]}={str(a + b)[::-1]}$"[: len(text)])


def test_of_mixed_operands_either_may_be_the_shorter():
    g = torch.Generator().manual_seed(0)
    batch = TASK.sample(6, batch_size=300, generator=g, distribution="mixed")
    plus, equals = ((batch.inputs == ALPHABET.index(c)).long().argmax(1) for c in "+=")
    n_a, n_b = plus, equals - plus - 1
    for shorter, longer in ((n_a, n_b), (n_b, n_a)):
        assert (longer == 6)[shorter < 6].all()
        # A sixth of the other lengths each: 25 of 300, give or take 5.
        assert torch.bincount(shorter[shorter < 6], minlength=6)[1:].min() > 8


@pytest.mark.usefixtures("no_type_checks")
def test_operands_may_be_the_rows_of_an_array():
    pairs = [(3, 51), (12, 0)]
    assert torch.equal(TASK.encode(np.array(pairs)).inputs, TASK.encode(pairs).inputs)  # type: ignore


def test_the_answer_follows_from_the_operands_whatever_stands_after_the_equals_sign():
    batch = TASK.encode([(95, 8)])
    wrong = batch.inputs.clone()
    wrong[0, 5:] = 7
    assert torch.equal(TASK.targets(wrong), batch.targets)
    assert TASK.targets(batch.inputs[:, :5]).tolist() == [[IGNORE] * 4 + [3]]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: TASK.encode([]), "operands"),
        (lambda: TASK.encode([(1, 2, 3)]), "operands"),  # type: ignore
        (lambda: TASK.encode(7), "operands"),  # type: ignore
        (lambda: TASK.encode([(-1, 3)]), "operand"),
        (lambda: TASK.encode([(1, "5")]), "operand"),  # type: ignore
        (lambda: TASK.targets(torch.tensor([[1, 11, 2]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[1, 13, 2]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[11, 2, 13]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[2, 11, 13]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[2, 13, 11]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[10, 11, 2, 13]])), "inputs"),
        (lambda: TASK.targets(torch.tensor([[15, 13, 11]])), "inputs"),
    ],
)
def test_bad_sums_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what


@settings(max_examples=30, deadline=None)
@given(data=st.data(), k=st.sampled_from([2, 3, 11, 101]))
def test_sums_of_several_numbers_of_any_length(data, k):
    numbers = st.tuples(*[st.integers(0, 10**30)] * k)
    operands = data.draw(st.lists(numbers, min_size=1, max_size=3))
    task = AbacusSum(n_operands=k)
    batch = task.encode([*operands, (10**9 - 1,) * k])
    check(task, batch)
    assert batch.inputs.shape[1] == task.n_positions(int(batch.n.max()))


def test_a_sum_of_two_numbers_is_an_addition():
    pair = AbacusSum(n_operands=2)
    for distribution in pair.distributions:
        one, other = (
            task.sample(
                9,
                batch_size=20,
                generator=torch.Generator().manual_seed(1),
                distribution=distribution,
            )
            for task in (pair, TASK)
        )
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.n_loops, other.n_loops)


def test_carries_out_of_many_numbers_are_answered_in_as_many_digits():
    task = AbacusSum(n_operands=12)
    assert task.decode(task.encode([(99,) * 12])) == [f"{' + '.join(['99'] * 12)} = 1188"]
    assert task.n_loops(2) == 4 and AbacusSum().n_loops(2) == TASK.n_loops(2) == 3


def test_of_several_mixed_operands_each_may_be_the_longest():
    g = torch.Generator().manual_seed(0)
    task = AbacusSum(n_operands=3)
    question = task.decode(task.sample(6, batch_size=400, generator=g).inputs)
    n_digits = torch.tensor(
        [[len(x) for x in line.removesuffix(" =").split(" + ")] for line in question]
    )
    only = n_digits[(n_digits == 6).sum(dim=1) == 1]
    # A third each of the (5/6)^2 whose others are shorter: 93 of 400, give or take 8.
    assert (only == 6).sum(dim=0).min() > 50
    assert torch.bincount(n_digits[n_digits < 6], minlength=6)[1:].min() > 60


@pytest.mark.parametrize("n_operands", [1, 0, 2.5, "3", True])
def test_a_bad_number_of_operands_is_refused(n_operands):
    with pytest.raises(ConfigError) as caught:
        AbacusSum(n_operands=n_operands)
    assert caught.value.what == "n_operands"


MULTIPLICATION = AbacusMultiplication()


def test_all_products_of_up_to_two_digits():
    every = [(a, b) for a in range(100) for b in range(100)]
    batch = MULTIPLICATION.encode(every)
    check(MULTIPLICATION, batch)
    assert batch.n.tolist() == [max(len(str(a)), len(str(b))) for a, b in every]
    assert (batch.n_loops == 2 * batch.n).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10**60)] * 2), min_size=1, max_size=4))
def test_factors_of_any_length(operands):
    batch = MULTIPLICATION.encode(operands)
    check(MULTIPLICATION, batch)
    for (a, b), tokens in zip(operands, batch.inputs.tolist()):
        text = f"{str(a)[::-1]}*{str(b)[::-1]}={str(a * b)[::-1]}"
        assert written(tokens).rstrip("$") == text


def test_leading_zeros_of_factors_are_none_of_the_product():
    digits, n_digits = torch.tensor([[[2, 0], [3, 0]]]), torch.tensor([[2, 2]])
    assert written(MULTIPLICATION.from_digits(digits, n_digits).inputs[0].tolist()) == "20*30=6$$$"


def test_nines_are_as_many_as_their_distribution_says():
    g = torch.Generator().manual_seed(0)
    batch = MULTIPLICATION.sample(40, batch_size=600, generator=g, distribution="nines")
    share = (batch.inputs[:, :81] == 9).sum(dim=1) / 80
    # A ninth of the other digits are nines as well.
    expected = torch.tensor([0.5, 0.8, 0.95]) * 8 / 9 + 1 / 9
    nearest = (share[:, None] - expected).abs()
    assert nearest.min(dim=1).values.max() < 0.25
    assert torch.bincount(nearest.argmin(dim=1), minlength=3).min() > 120


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: MULTIPLICATION.encode([]), "operands"),
        (lambda: MULTIPLICATION.encode([(-1, 3)]), "operand"),
        (lambda: MULTIPLICATION.targets(torch.tensor([[1, 11, 2, 13]])), "inputs"),
        (lambda: MULTIPLICATION.targets(torch.tensor([[1, 12, 13, 2]])), "inputs"),
    ],
)
def test_bad_products_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what
