"""Decimal addition by next-token prediction against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, AbacusAddition, AbacusSum
from loopinterp.tasks.abacus_addition import ALPHABET
from tests.tasks.test_decimal_operands import check

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
    ("attempt", "message"),
    [
        (lambda: TASK.encode([]), "at least one pair"),
        (lambda: TASK.encode([(1, 2, 3)]), "at least one pair"),  # type: ignore
        (lambda: TASK.encode(7), "at least one pair .* got 7"),  # type: ignore
        (lambda: TASK.encode([(-1, 3)]), "operand: expected an integer"),
        (lambda: TASK.encode([(1, "5")]), "operand: expected an integer"),  # type: ignore
        (lambda: TASK.targets(torch.tensor([[1, 11, 2]])), r"'=' \(token 13\)"),
        (lambda: TASK.targets(torch.tensor([[1, 13, 2]])), r"operator \(token 11\)"),
        (lambda: TASK.targets(torch.tensor([[11, 2, 13]])), "a digit on both sides"),
        (lambda: TASK.targets(torch.tensor([[2, 11, 13]])), "a digit on both sides"),
        (lambda: TASK.targets(torch.tensor([[2, 13, 11]])), r"operator \(token 11\)"),
        (lambda: TASK.targets(torch.tensor([[10, 11, 2, 13]])), r"digits 0\.\.9 alone"),
        (lambda: TASK.targets(torch.tensor([[15, 13, 11]])), r"tokens in 0\.\.14"),
    ],
)
def test_bad_inputs_are_refused(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()


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
    with pytest.raises(ConfigError, match=r"^n_operands: expected an integer >= 2"):
        AbacusSum(n_operands=n_operands)
