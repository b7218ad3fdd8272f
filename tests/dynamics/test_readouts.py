from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.dynamics import (
    correctness,
    exact_match,
    readout_entropy,
    readout_kl,
    readout_margin,
    stable_from,
)
from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE


def _logits(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_kl_and_entropy_against_torch_distributions() -> None:
    logits = _logits(4, 2, 3, 5)
    each = [torch.distributions.Categorical(logits=step) for step in logits]
    kl, entropy = readout_kl(logits), readout_entropy(logits)
    for loop in range(1, 4):
        expected = torch.distributions.kl_divergence(each[loop], each[loop - 1])
        torch.testing.assert_close(kl[loop - 1], expected)
    torch.testing.assert_close(entropy, torch.stack([d.entropy() for d in each]))


def test_kl_of_a_readout_that_does_not_change_is_zero() -> None:
    logits = _logits(1, 3, 5).expand(4, 3, 5)
    assert (readout_kl(logits) == 0).all()


def test_kl_of_a_certain_readout_is_finite() -> None:
    logits = torch.tensor([[0.0, 0.0], [200.0, -200.0], [200.0, -200.0]])
    assert readout_kl(logits).tolist() == pytest.approx([math.log(2), 0.0])


def test_margin_is_the_lead_of_the_first_over_the_second() -> None:
    logits = torch.tensor([[[1.0, 5.0, 3.5], [2.0, 2.0, 0.0]]])
    assert readout_margin(logits).tolist() == [[1.5, 0.0]]


def test_logits_of_one_class_or_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="two classes"):
        readout_margin(torch.zeros(3, 2, 1))
    logits = torch.zeros(3, 2, 4)
    logits[2] = float("inf")
    for measure in (readout_kl, readout_entropy, readout_margin):
        with pytest.raises(InputError, match="index 2"):
            measure(logits)


def _held(answers: list[int], hold: int | None) -> int:
    """The definition of stable_from, word by word."""
    last = len(answers) - 1
    for loop, answer in enumerate(answers):
        end = last if hold is None else loop + hold
        if end <= last and all(later == answer for later in answers[loop : end + 1]):
            return loop
    return -1


@given(
    answers=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=2, max_size=9),
    hold=st.integers(1, 8) | st.none(),
)
def test_stable_from_against_its_definition(answers: list[list[int]], hold: int | None) -> None:
    hold = hold if hold is None else min(hold, len(answers) - 1)
    found = stable_from(torch.tensor(answers), hold=hold)
    assert found.tolist() == [_held(list(column), hold) for column in zip(*answers)]


def test_hold_longer_than_the_run_is_refused() -> None:
    with pytest.raises(InputError, match="hold"):
        stable_from(torch.zeros(3, 2, dtype=torch.int64), hold=3)
    with pytest.raises(InputError, match="two loops"):
        stable_from(torch.zeros(1, 2, dtype=torch.int64))


def test_only_asked_positions_count_for_exact_match() -> None:
    targets = torch.tensor([[IGNORE, 1, 0], [IGNORE, 1, 1]])
    answers = torch.tensor([[[0, 1, 0], [0, 1, 0]], [[1, 1, 1], [1, 1, 1]]])
    right = correctness(answers, targets)
    assert right.tolist() == [[[-1, 1, 1], [-1, 1, 0]], [[-1, 1, 0], [-1, 1, 1]]]
    assert exact_match(right).tolist() == [[1, 0], [0, 1]]


@pytest.mark.usefixtures("no_type_checks")
def test_answers_of_another_batch_are_refused() -> None:
    with pytest.raises(InputError, match="answers"):
        correctness(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
