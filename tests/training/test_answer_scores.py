"""Scores of answers, against plain Python."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from loopinterp.tasks import IGNORE
from loopinterp.training.answer_scores import (
    constant_scores,
    perplexity_estimate,
    score,
    shares_right,
)


def test_scores_of_one_readout_are_those_of_plain_python(generator: torch.Generator) -> None:
    logits = torch.randn(6, 4, 3, generator=generator)
    targets = torch.randint(0, 3, (6, 4), generator=generator)
    targets[:, 0] = IGNORE
    targets[2, 3] = IGNORE
    found = score(logits, targets)
    for row in range(6):
        asked = [p for p in range(4) if targets[row, p] != IGNORE]
        right = [int(logits[row, p].argmax()) == int(targets[row, p]) for p in asked]
        odds = [logits[row, p].exp()[targets[row, p]] / logits[row, p].exp().sum() for p in asked]
        assert found.exact[row] == all(right)
        assert found.share[row].item() == pytest.approx(sum(right) / len(right))
        expected = -sum(math.log(x) for x in odds) / len(asked)
        assert found.cross_entropy[row].item() == pytest.approx(expected, rel=1e-5)


def test_a_guess_among_k_classes_has_perplexity_k() -> None:
    found = score(torch.zeros(8, 3, 5), torch.ones(8, 3, dtype=torch.long))
    assert perplexity_estimate(found.cross_entropy) == pytest.approx([5.0, 5.0, 5.0])


def test_one_example_says_nothing_of_the_spread() -> None:
    value, low, high = perplexity_estimate(torch.tensor([0.5]))
    assert (value, low) == pytest.approx((math.exp(0.5), 1.0)) and np.isinf(high)


def test_the_control_is_the_best_of_all_answers_that_read_nothing(
    generator: torch.Generator,
) -> None:
    targets = torch.randint(0, 3, (9, 4), generator=generator)
    targets[:, 0] = IGNORE
    every = [(IGNORE, *answer) for answer in itertools.product(range(3), repeat=3)]
    found = [shares_right(torch.tensor(answer).expand(9, 4), targets) for answer in every]
    assert constant_scores(targets) == pytest.approx([max(x) for x in zip(*found)])
    # Wherever the answer starts: that it is closed by 2 is known, and whether it is 0 or 1 is not.
    closed = torch.tensor([[IGNORE, 0, 2, 2], [1, 2, 2, IGNORE], [IGNORE, 1, 2, 2]])
    assert constant_scores(closed) == pytest.approx((2 / 3, 8 / 9))
