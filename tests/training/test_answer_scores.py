"""Scores of answers, unseen answers, a calibrated stopping rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, WithVocabulary
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    AbacusMultiplication,
    Addition,
    TokenAddition,
    get_task,
)
from loopinterp.training import TrainingConfig, calibrate_stopping, evaluate, operand_grid
from loopinterp.training.answer_scores import (
    _best_line,
    _right_by_example,
    _sees_answers,
    constant_scores,
    perplexity_estimate,
    score,
)
from tests.refusals import naming
from tests.training.test_evaluation import Ripple


def test_scores_of_one_readout_are_those_of_plain_python(generator: torch.Generator) -> None:
    logits = torch.randn(6, 4, 3, generator=generator)
    targets = torch.randint(0, 3, (6, 4), generator=generator)
    targets[:, 0] = IGNORE
    targets[2, 3] = IGNORE
    result = score(logits, targets)
    for row in range(6):
        scored = [p for p in range(4) if targets[row, p] != IGNORE]
        right = [int(logits[row, p].argmax()) == int(targets[row, p]) for p in scored]
        odds = [logits[row, p].exp()[targets[row, p]] / logits[row, p].exp().sum() for p in scored]
        assert result.exact[row] == all(right)
        assert result.share[row].item() == pytest.approx(sum(right) / len(right))
        expected = -sum(math.log(x) for x in odds) / len(scored)
        assert result.cross_entropy[row].item() == pytest.approx(expected, rel=1e-5)


def test_a_guess_among_k_classes_has_perplexity_k() -> None:
    result = score(torch.zeros(8, 3, 5), torch.ones(8, 3, dtype=torch.long))
    assert perplexity_estimate(result.cross_entropy) == pytest.approx([5.0, 5.0, 5.0])


def test_one_example_says_nothing_of_the_spread() -> None:
    value, low, high = perplexity_estimate(torch.tensor([0.5]))
    assert (value, low) == pytest.approx((math.exp(0.5), 1.0)) and np.isinf(high)


def test_the_control_is_the_best_of_all_answers_that_read_nothing(
    generator: torch.Generator,
) -> None:
    targets = torch.randint(0, 3, (9, 4), generator=generator)
    targets[:, 0] = IGNORE
    every = [(IGNORE, *answer) for answer in itertools.product(range(3), repeat=3)]
    result = [
        [float(x.double().mean()) for x in _right_by_example(torch.tensor(a).expand(9, 4), targets)]
        for a in every
    ]
    assert constant_scores(targets) == pytest.approx([max(x) for x in zip(*result)])
    # Wherever the answer starts: that it is closed by 2 is known, and whether it is 0 or 1 is not.
    closed = torch.tensor([[IGNORE, 0, 2, 2], [1, 2, 2, IGNORE], [IGNORE, 1, 2, 2]])
    assert constant_scores(closed) == pytest.approx((2 / 3, 8 / 9))


ADDITION = AbacusAddition()


class Behind:
    """Says at each position what stands ``ahead`` places after it."""

    def __init__(self, ahead: int, *, noise: float = 0.0, d_vocab: int = 15) -> None:
        self.ahead, self.noise, self.d_vocab = ahead, noise, d_vocab

    def embed(self, inputs: Tensor) -> Tensor:
        return F.one_hot(inputs.long(), self.d_vocab).float()

    def initial_state(self, e: Tensor) -> Tensor:
        return e + self.noise * torch.randn_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return e.roll(-self.ahead, 1)

    def readout(self, h: Tensor) -> Tensor:
        return 9 * h


def both_ways(**changes: Any) -> LoopedTransformer:
    sizes = {"d_vocab": ADDITION.d_vocab, "d_vocab_out": ADDITION.d_vocab_out, "causal": False}
    return LoopedTransformer(LoopedTransformerConfig(d_model=16, n_heads=2, **sizes | changes))


@pytest.mark.parametrize(
    "model",
    [Behind(1), both_ways(), WithVocabulary(WithVocabulary(both_ways()))],
    ids=["copies the next token", "not causal", "wrapped"],
)
def test_who_sees_the_answer_is_refused(model: Any) -> None:
    for ask in (
        lambda: evaluate(model, ADDITION, [3, 6], n_samples=4),
        lambda: operand_grid(model, ADDITION, 2, loops=[1], n_samples=4),
        lambda: calibrate_stopping(model, ADDITION, [2, 3], n_samples=4),
    ):
        with naming("model"):
            ask()


@pytest.mark.parametrize("name", ["next_token", "abacus_sorting", "abacus_multiplication"])
def test_every_task_that_is_answered_token_by_token_is_watched(name: str) -> None:
    task = get_task(name)
    assert _sees_answers(task, Behind(1, d_vocab=task.d_vocab_out), 3)


def test_who_looks_back_is_taken() -> None:
    for model in (Behind(0), Behind(-1), both_ways(causal=True)):
        evaluate(model, ADDITION, [2], n_samples=4)


def test_who_draws_its_start_anew_is_refused() -> None:
    with naming("initial_state of Behind") as error:
        evaluate(Behind(0, noise=1.0), ADDITION, [2], n_samples=4)
    assert ".eval()" in error.value.fix and "seed" in error.value.fix


def test_where_no_answer_stands_in_the_input_all_may_be_seen() -> None:
    task = TokenAddition()
    sizes = {"d_vocab": task.d_vocab, "d_vocab_out": task.d_vocab_out}
    evaluate(both_ways(**sizes), task, [2], n_samples=4)
    TrainingConfig(task=task.name, model=both_ways(**sizes).config)


def test_nothing_is_trained_that_would_copy_its_answers() -> None:
    with naming("model", ConfigError):
        TrainingConfig(task=ADDITION.name, model=both_ways().config)


def test_a_model_of_another_task_in_the_same_tokens_is_asked_nothing() -> None:
    model = both_ways(causal=True)
    model.task = AbacusMultiplication()
    for ask in (
        lambda: operand_grid(model, ADDITION, 2, loops=[1], n_samples=4),
        lambda: calibrate_stopping(model, ADDITION, [2, 3], n_samples=4),
    ):
        with naming("model"):
            ask()


@given(slope=st.integers(0, 2), offset=st.integers(1, 4), hold=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_known_line_is_found(slope: int, offset: int, hold: bool) -> None:
    positions = [4, 7, 9, 10]
    expected = [slope * n + offset for n in positions]
    exact = np.zeros((4, 30))
    for row, loop in zip(exact, expected):
        row[loop : None if hold else loop + 1] = 1.0
    line = _best_line(exact, positions)
    # An answer that is held is read two loops later, where one loop fewer does no harm.
    assert [line.loops(n) for n in positions] == [loop + 2 * hold for loop in expected]
    assert line.loops(40) == 40 * slope + offset + 2 * hold


@given(loop=st.integers(0, 25), hold=st.booleans())
@settings(max_examples=20, deadline=None)
def test_inputs_of_one_size_have_one_number_of_loops(loop: int, hold: bool) -> None:
    exact = np.zeros((3, 30))
    exact[:, loop : None if hold else loop + 1] = 1.0
    line = _best_line(exact, [16, 16, 16])
    spare = 2 * hold * (loop > 0)  # before loop 0 there is no wrong answer to keep away from
    assert (line.slope, line.loops(16)) == (0.0, loop + spare)


def test_the_rule_goes_on_past_the_lengths_that_it_was_learned_on() -> None:
    """Ripple needs n - 1 loops for the longest chain, far fewer for random digits."""
    line = calibrate_stopping(Ripple(), Addition(), [3, 4, 5, 6], n_samples=30)
    assert line.slope == 1.0
    result = evaluate(Ripple(), Addition(), [40], n_samples=20, stopping={"learned": line})
    stopped = result.data["stopped_exact_match"].sel(rule="learned", estimate="value")
    assert (stopped == 1).all()


@pytest.mark.parametrize(
    ("lengths", "options", "what", "given"),
    [
        ([4], {}, "lengths", "[4]"),
        ([0, 4], {}, "n", "0"),
        ([3, 4], {"n_samples": 0}, "n_samples", "0"),
        ([3, 4], {"max_loops": 0}, "max_loops", "0"),
        ([3, 4], {"distributions": ["chains"]}, "distribution of .*", "'chains'"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(lengths, options, what: str, given: str) -> None:
    with naming(what) as caught:
        calibrate_stopping(Ripple(), Addition(), lengths, **options)
    assert caught.value.given == given
