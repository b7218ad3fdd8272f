"""Sorting in the format of the abacus embeddings."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, AbacusSorting, Batch
from loopinterp.tasks.sorting import LETTERS, SYMBOLS

TASK = AbacusSorting(n_digits=3)


def written(tokens: list[int]) -> str:
    return "".join(SYMBOLS[t] for t in tokens)


def numbers_of(tokens: list[int]) -> list[tuple[str, str]]:
    """Letter and digits of each number, the most significant digit first."""
    parts = (part.split(":") for part in written(tokens).split("=")[0].split(","))
    return [(letter, digits[::-1]) for letter, digits in parts]


def check(task: AbacusSorting, batch: Batch) -> None:
    """Check every row: the answer is the letters in the order of Python's (stable) sort."""
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist()):
        in_order = sorted(numbers_of(tokens), key=lambda pair: int(pair[1]))
        right = ",".join(letter for letter, _ in in_order)
        text = written(tokens)
        assert text.split("=")[1].rstrip("$") == right
        answers = [SYMBOLS[t] for t in targets if t != IGNORE]
        assert "".join(answers) == right + "$"
        first = text.index("=")
        assert targets[first : first + len(answers)] == [SYMBOLS.index(c) for c in right + "$"]


def test_all_short_lists_ties_included():
    values = [0, 1, 2, 10, 12, 21]
    every = [x for n in (1, 2, 3, 4) for x in itertools.product(values, repeat=n)]
    batch = AbacusSorting(n_digits=2).encode(every)
    check(AbacusSorting(n_digits=2), batch)
    assert batch.n.tolist() == batch.n_loops.tolist() == [len(x) for x in every]
    assert written(batch.inputs[-1].tolist()) == "A:12,B:12,C:12,D:12=A,B,C,D$$$$"[:27]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), n_digits=st.sampled_from([1, 2, 18, 19, 40]))
def test_numbers_of_any_size_and_their_own_letters(data, n_digits):
    values = st.integers(0, 10**n_digits - 1)
    numbers = data.draw(st.lists(st.lists(values, min_size=1, max_size=9), min_size=1, max_size=4))
    letters = "".join(data.draw(st.permutations(LETTERS)))
    task = AbacusSorting(n_digits=n_digits)
    batch = task.encode(numbers, letters)
    check(task, batch)
    for row, tokens in zip(numbers, batch.inputs.tolist()):
        assert numbers_of(tokens) == [(x, str(number)) for x, number in zip(letters, row)]


@pytest.mark.parametrize("n_digits", [1, 3, 25])
def test_samples_of_both_distributions_and_of_mixed_lengths(n_digits):
    task = AbacusSorting(n_digits=n_digits)
    g = torch.Generator().manual_seed(0)
    n = torch.randint(1, 53, (40,), generator=g)
    for distribution in task.distributions:
        batch = task.sample(n, generator=g, distribution=distribution)
        check(task, batch)
        assert batch.n.tolist() == batch.n_loops.tolist() == n.tolist()
        assert batch.inputs.shape == (40, task.n_positions(int(n.max())))
        for tokens, length in zip(batch.inputs.tolist(), n.tolist()):
            names, numbers = zip(*numbers_of(tokens))
            first = LETTERS.index(names[0])
            assert list(names) == [LETTERS[(first + k) % 52] for k in range(length)]
            assert all(len(x) == 1 or x[0] != "0" for x in numbers)
            if distribution == "close":
                assert {len(x) for x in numbers} == {n_digits}
                unlike = [
                    sum(a != b for a, b in zip(*pair)) for pair in itertools.pairwise(numbers)
                ]
                assert max(unlike, default=0) <= 2


def test_lengths_and_letters_are_uniform():
    g = torch.Generator().manual_seed(0)
    rows = [numbers_of(x) for x in TASK.sample(4, batch_size=1500, generator=g).inputs.tolist()]
    n_digits = [len(digits) for row in rows for _, digits in row]
    # 2,000 of each of three lengths, give or take 37; 29 of each of 52 letters, give or take 5.
    assert min(n_digits.count(k) for k in (1, 2, 3)) > 1800
    first = [row[0][0] for row in rows]
    assert min(first.count(letter) for letter in LETTERS) > 5


def test_the_order_follows_from_the_numbers_whatever_stands_after_the_equals_sign():
    batch = TASK.encode([[12, 7]])
    wrong = batch.inputs.clone()
    wrong[0, written(wrong[0].tolist()).index("=") + 1 :] = 3
    assert torch.equal(TASK.targets(wrong), batch.targets)


def test_no_more_numbers_than_letters():
    for attempt in (
        lambda: TASK.sample(53, batch_size=1, generator=torch.Generator()),
        lambda: TASK.n_positions(53),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert (caught.value.what, caught.value.given) == ("n", "53")


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([[SYMBOLS.index(c) for c in text]])


FOUR = torch.ones((1, 1, 4), dtype=torch.int64)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: TASK.encode([]), "numbers"),
        (lambda: TASK.encode([[]]), "numbers"),
        (lambda: TASK.encode([[1]], "?"), "numbers"),
        (lambda: TASK.encode([[1, 2]], "A"), "numbers of an example"),
        (lambda: TASK.encode([[1, 2]], "AA"), "inputs"),
        (lambda: TASK.encode([[1000]]), "operand"),
        (lambda: TASK.encode([[-1]]), "operand"),
        (lambda: TASK.encode([["1"]]), "numbers"),  # type: ignore
        (lambda: TASK.from_digits(FOUR, FOUR[..., 0] * 4, FOUR[..., 0] * 14), "n"),
        (lambda: TASK.from_digits(FOUR, FOUR[..., 0] * 0, FOUR[..., 0] * 14), "digits and letters"),
        (lambda: TASK.from_digits(FOUR, FOUR[0], FOUR[..., 0]), "digits and letters"),
        (lambda: TASK.from_digits(FOUR, FOUR[..., 0], FOUR[..., 0]), "inputs"),
        (lambda: TASK.from_digits(FOUR, FOUR[..., 0], FOUR[..., 0] * 66), "letters"),
    ],
)
def test_bad_numbers_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what


@pytest.mark.parametrize(
    "text",
    [
        *("A:1,B:2", "A:=A", "A1=A", ":1=A", "A:1,=A"),
        *("A:1,,B:2=A,B", "A:1$=A", "A:1,A:2=A,A"),
    ],
)
def test_bad_prompts_are_refused(text):
    with pytest.raises(InputError) as caught:
        TASK.targets(tokens(text))
    assert caught.value.what == "inputs"


@pytest.mark.parametrize("n_digits", [0, 1.5, "2", True])
def test_a_bad_number_of_digits_is_refused(n_digits):
    with pytest.raises(ConfigError) as caught:
        AbacusSorting(n_digits=n_digits)
    assert caught.value.what == "n_digits"
