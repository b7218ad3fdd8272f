"""A model that sees the answer in its input is scored by nothing that asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopinterp.errors import ConfigError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, WithVocabulary
from loopinterp.tasks import (
    AbacusAddition,
    AbacusMultiplication,
    TokenAddition,
    get_task,
)
from loopinterp.training import TrainingConfig, calibrate_stopping, evaluate, operand_grid
from loopinterp.training.unseen_answers import need_unseen_answers

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
        with pytest.raises(InputError, match="whose answer at a position depends on no later one"):
            ask()


@pytest.mark.parametrize("name", ["next_token", "abacus_sorting", "abacus_multiplication"])
def test_every_task_that_is_answered_token_by_token_is_watched(name: str) -> None:
    task = get_task(name)
    with pytest.raises(InputError, match=f"the input of task '{name}', got logits that change"):
        need_unseen_answers(task, Behind(1, d_vocab=task.d_vocab_out), 3)


def test_who_looks_back_is_taken() -> None:
    for model in (Behind(0), Behind(-1), both_ways(causal=True)):
        evaluate(model, ADDITION, [2], n_samples=4)


def test_who_draws_its_start_anew_is_refused() -> None:
    with pytest.raises(InputError, match="initial_state of Behind: expected the same") as error:
        evaluate(Behind(0, noise=1.0), ADDITION, [2], n_samples=4)
    assert "a seed of its own" in error.value.fix


def test_where_no_answer_stands_in_the_input_all_may_be_seen() -> None:
    task = TokenAddition()
    sizes = {"d_vocab": task.d_vocab, "d_vocab_out": task.d_vocab_out}
    evaluate(both_ways(**sizes), task, [2], n_samples=4)
    TrainingConfig(task=task.name, model=both_ways(**sizes).config)


def test_nothing_is_trained_that_would_copy_its_answers() -> None:
    with pytest.raises(ConfigError, match=r"a causal one.*got causal=False. Build it with causal="):
        TrainingConfig(task=ADDITION.name, model=both_ways().config)


def test_a_model_of_another_task_in_the_same_tokens_is_asked_nothing() -> None:
    model = both_ways(causal=True)
    model.task = AbacusMultiplication()
    for ask in (
        lambda: operand_grid(model, ADDITION, 2, loops=[1], n_samples=4),
        lambda: calibrate_stopping(model, ADDITION, [2, 3], n_samples=4),
    ):
        with pytest.raises(InputError, match="one of task 'abacus_addition', got one of"):
            ask()
