"""Decimal multiplication by next-token prediction against Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import AbacusMultiplication
from tests.tasks.test_decimal_operands import check, written

TASK = AbacusMultiplication()


def test_all_products_of_up_to_two_digits():
    every = [(a, b) for a in range(100) for b in range(100)]
    batch = TASK.encode(every)
    check(TASK, batch)
    assert batch.n.tolist() == [max(len(str(a)), len(str(b))) for a, b in every]
    assert (batch.n_loops == 2 * batch.n).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10**60)] * 2), min_size=1, max_size=4))
def test_factors_of_any_length(operands):
    batch = TASK.encode(operands)
    check(TASK, batch)
    for (a, b), tokens in zip(operands, batch.inputs.tolist()):
        text = f"{str(a)[::-1]}*{str(b)[::-1]}={str(a * b)[::-1]}"
        assert written(tokens).rstrip("$") == text


def test_leading_zeros_of_factors_are_none_of_the_product():
    digits, n_digits = torch.tensor([[[2, 0], [3, 0]]]), torch.tensor([[2, 2]])
    assert written(TASK.from_digits(digits, n_digits).inputs[0].tolist()) == "20*30=6$$$"


def test_nines_are_as_many_as_their_distribution_says():
    g = torch.Generator().manual_seed(0)
    batch = TASK.sample(40, batch_size=600, generator=g, distribution="nines")
    share = (batch.inputs[:, :81] == 9).sum(dim=1) / 80
    # A ninth of the other digits are nines as well.
    expected = torch.tensor([0.5, 0.8, 0.95]) * 8 / 9 + 1 / 9
    nearest = (share[:, None] - expected).abs()
    assert nearest.min(dim=1).values.max() < 0.25
    assert torch.bincount(nearest.argmin(dim=1), minlength=3).min() > 120


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: TASK.encode([]), "at least one pair"),
        (lambda: TASK.encode([(-1, 3)]), "operand: expected an integer"),
        (lambda: TASK.targets(torch.tensor([[1, 11, 2, 13]])), r"operator \(token 12\)"),
        (lambda: TASK.targets(torch.tensor([[1, 12, 13, 2]])), "a digit on both sides"),
    ],
)
def test_bad_inputs_are_refused(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()
