"""The words of tokens and answers."""

from __future__ import annotations

import pytest
import torch

from loopinterp.explorer import answer_words, token_words, words_at
from loopinterp.tasks import Addition, get_task, list_tasks


@pytest.mark.parametrize("name", list_tasks())
def test_there_is_a_word_for_each_token_or_for_none(name: str) -> None:
    task = get_task(name)
    words, answers = token_words(task), answer_words(task)
    assert words is None or len(words) == len(set(words)) == task.d_vocab
    assert answers is None or len(answers) == len(set(answers)) == task.d_vocab_out


def test_features_are_their_numbers_and_unknown_tokens_too() -> None:
    task = Addition(format="features")
    assert token_words(task) is None
    assert words_at(task.encode([(1, 2)], n=2).inputs[0], None) == ["1 0", "0 1"]
    assert words_at(torch.tensor([3, 9]), token_words(Addition())) == ["1+1", "9"]
