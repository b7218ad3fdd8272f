"""Decimal addition by next-token prediction against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE, AbacusAddition, Batch
from loopinterp.tasks.abacus_addition import ALPHABET

TASK = AbacusAddition()


def check(batch: Batch) -> None:
    """Check every row: the text is an addition, and the targets are its next tokens."""
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist()):
        text = "".join(ALPHABET[t] for t in tokens)
        question, answer = text.split("=")
        answer = answer.rstrip("$")
        a, b = (int(operand[::-1]) for operand in question.split("+"))
        longest = max(map(len, question.split("+")))
        total = str(a + b).rjust(longest, "0")
        assert answer == total[::-1]
        asked = [ALPHABET[t] for t in targets if t != IGNORE]
        assert "".join(asked) == answer + "$"
        first = text.index("=")
        assert targets[first : first + len(asked)] == [ALPHABET.index(c) for c in answer + "$"]


def test_all_pairs_of_up_to_two_digits():
    every = [(a, b) for a in range(100) for b in range(100)]
    batch = TASK.encode(every)
    check(batch)
    assert batch.n.tolist() == [max(len(str(a)), len(str(b))) for a, b in every]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10**100)] * 2), min_size=1, max_size=4))
def test_operands_of_any_length(operands):
    batch = TASK.encode(operands)
    check(batch)
    for (a, b), tokens in zip(operands, batch.inputs.tolist()):
        text = "".join(ALPHABET[t] for t in tokens)
        assert text.startswith(f"{str(a)[::-1]}+{str(b)[::-1]}={str(a + b)[::-1]}$"[: len(text)])


@pytest.mark.parametrize("distribution", TASK.distributions)
def test_samples_of_mixed_lengths(distribution):
    g = torch.Generator().manual_seed(0)
    n = torch.randint(1, 40, (200,), generator=g)
    batch = TASK.sample(n, generator=g, distribution=distribution)
    check(batch)
    for tokens, length in zip(batch.inputs.tolist(), n.tolist()):
        question = "".join(ALPHABET[t] for t in tokens).split("=")[0].split("+")
        assert max(map(len, question)) == length
        if distribution == "equal":
            assert len(question[0]) == len(question[1]) == length
        if distribution == "chain":
            sums = [int(x) + int(y) for x, y in zip(*question)]
            assert sums[0] >= 10 and set(sums[1:]) <= {9}
        else:
            assert all(len(x) == 1 or x[-1] != "0" for x in question)


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
        (lambda: TASK.targets(torch.tensor([[2, 13, 11]])), "a digit on both sides"),
        (lambda: TASK.targets(torch.tensor([[15, 13, 11]])), r"tokens in 0\.\.14"),
    ],
)
def test_bad_inputs_are_refused(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()
