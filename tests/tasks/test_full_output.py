"""The tasks with full-output prediction."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import (
    IGNORE,
    Batch,
    BinarySum,
    Copy,
    FullOutput,
    Multiplication,
    Parity,
    TokenAddition,
    UniqueSet,
)
from tests.tasks.answers import ANSWERS, spelled


def check(task: FullOutput, batch: Batch) -> None:
    """Check every row against the answer in Python."""
    spelling = spelled(task)
    classes = [*spelling[: task.n_answer_symbols], "."]
    rows = zip(batch.inputs.tolist(), batch.targets.tolist(), batch.n.tolist())
    for tokens, targets, _ in rows:
        text = "".join(spelling[t] for t in tokens)
        prompt = text[1 : text.index("=")]
        assert text == "^" + prompt + "=" + "." * (len(text) - len(prompt) - 2)
        answer = ANSWERS[task.name](prompt)
        answer_text = "".join(classes[t] for t in targets[len(prompt) + 1 :])
        assert targets[: len(prompt) + 1] == [IGNORE] * (len(prompt) + 1)
        assert answer_text == answer + "." * (len(answer_text) - len(answer))
        assert len(answer_text) > len(answer)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("task", [Copy(), BinarySum(), Parity()], ids=repr)
def test_all_short_bit_strings(task, n):
    bits = torch.tensor(list(itertools.product([0, 1], repeat=n)))
    check(task, task.from_bits(bits, torch.full((len(bits),), n)))


@pytest.mark.parametrize("n", range(1, 7))
def test_all_short_sums(n):
    every = [(a, b) for a in range(2**n) for b in range(2**n)]
    batch = TokenAddition().encode(every, n=n)
    check(TokenAddition(), batch)
    assert batch.inputs[-1].tolist() == [5, *[1] * n, 2, *[1] * n, 3, *[4] * (n + 1)]


@pytest.mark.parametrize("m", range(1, 4))
@pytest.mark.parametrize("n", range(1, 6))
def test_all_short_products(m, n):
    task = Multiplication(m=3)
    batch = task.encode(list(itertools.product(range(2**m), range(2**n))), n=n, m=m)
    check(task, batch)
    assert batch.n_loops.tolist() == [m * n] * len(batch)


@pytest.mark.parametrize("n", range(1, 6))
def test_all_short_sequences_of_four_symbols(n):
    task = UniqueSet(n_symbols=4)
    symbols = torch.tensor(list(itertools.product(range(4), repeat=n)))
    check(task, task.from_symbols(symbols, torch.full((len(symbols),), n)))


@pytest.mark.parametrize(
    "task",
    [
        Copy(),
        BinarySum(),
        Parity(),
        TokenAddition(),
        Multiplication(),
        Multiplication(m=5),
        UniqueSet(),
    ],
    ids=repr,
)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), longest=st.sampled_from([3, 20, 200]))
def test_samples_of_mixed_lengths_and_every_distribution(task, seed, longest):
    generator = torch.Generator().manual_seed(seed)
    n = torch.randint(1, longest + 1, (8,), generator=generator)
    for distribution in task.distributions:
        batch = task.sample(n, generator=generator, distribution=distribution)
        check(task, batch)
        assert batch.inputs.shape == (8, task.n_positions(int(n.max())))
        assert torch.equal(task.targets(batch), batch.targets)


def test_equal_loops_give_a_short_first_factor_those_of_the_longest():
    ours, equal = Multiplication(m=3), Multiplication(m=3, equal_loops=True)
    for m in range(1, 4):
        theirs = equal.encode([(1, 5)], n=4, m=m)
        assert theirs.n_loops.tolist() == [12]
        assert torch.equal(theirs.inputs, ours.encode([(1, 5)], n=4, m=m).inputs)
    mixed = equal.sample(6, batch_size=50, seed=0, distribution="mixed")
    assert mixed.n_loops.unique().tolist() == [18]
    check(equal, mixed)


def test_mixed_products_have_first_factors_of_every_length():
    task = Multiplication(m=3)
    batch = task.sample(
        6, batch_size=300, generator=torch.Generator().manual_seed(0), distribution="mixed"
    )
    shares = torch.bincount(batch.n_loops // 6, minlength=4)[1:]
    assert shares.sum() == 300 and shares.min() > 60


@pytest.mark.parametrize(("distribution", "share"), [("uniform", 0), ("biased", 2 / 3)])
def test_factors_are_one_sided_as_often_as_their_distribution_says(distribution, share):
    generator = torch.Generator().manual_seed(0)
    task = Multiplication(m=20)
    batch = task.sample(20, batch_size=600, generator=generator, distribution=distribution)
    for factor in (batch.inputs[:, 1:21], batch.inputs[:, 22:42]):
        ones = factor.float().mean(dim=1)
        # Of 20 fair bits at most 4 are alike in a case of 80; of 0.05 or 0.95, nearly always.
        assert abs(((ones - 0.5).abs() > 0.29).float().mean() - share) < 0.07


def test_distinct_symbols_are_all_answered_and_few_are_not():
    task = UniqueSet()
    g = torch.Generator().manual_seed(0)
    distinct_ones = task.sample(50, batch_size=20, generator=g, distribution="distinct").targets
    assert ((distinct_ones >= 0) & (distinct_ones < 50)).sum(dim=1).tolist() == [50] * 20
    few = task.sample(50, batch_size=20, generator=g, distribution="few").targets
    assert ((few >= 0) & (few < 50)).sum(dim=1).max() <= 4


def test_few_symbols_are_as_likely_as_many_where_that_varies():
    g = torch.Generator().manual_seed(0)
    varied = UniqueSet().sample(400, batch_size=400, generator=g, distribution="varied").targets
    used = ((varied >= 0) & (varied < 50)).sum(dim=1)
    for most in (1, 7, 25):
        share = math.log(most + 1) / math.log(51)
        assert abs((used <= most).float().mean() - share) < 0.08  # three times the deviation
    assert used.max() > 45


@pytest.mark.parametrize("setting", [0, -1, 1.5, "2", True])
def test_bad_settings_are_refused(setting):
    with pytest.raises(ConfigError) as caught:
        Multiplication(m=setting)
    assert caught.value.what == "m"
    with pytest.raises(ConfigError) as caught:
        UniqueSet(n_symbols=setting)
    assert caught.value.what == "n_symbols"


ONE = torch.tensor([1])


def product_of(a: Any, m: Any = ONE + 1) -> Batch:
    """A product by 1 of first factors that need not be right."""
    return Multiplication(m=2).from_bits(a, ONE[None], m, ONE)


def test_only_the_first_bits_of_a_first_factor_count():
    wide, narrow = product_of(torch.tensor([[1, 1, 1]])), product_of(torch.tensor([[1, 1]]))
    assert torch.equal(wide.inputs, narrow.inputs)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: Copy().from_bits(torch.tensor([[2]]), ONE), "bits"),
        (lambda: Copy().from_bits(torch.tensor([[1]]), ONE + 1), "n"),
        (lambda: Parity().targets(torch.tensor([[4, 0, 1]])), "inputs"),
        (lambda: UniqueSet(n_symbols=3).from_symbols(torch.tensor([[3]]), ONE), "symbols"),
        (lambda: TokenAddition().encode([(4, 0)], n=2), "operand"),
        (lambda: TokenAddition().encode([], n=2), "operands"),
        (lambda: TokenAddition().encode([(1, 2, 3)], n=2), "operands"),  # type: ignore
        (lambda: TokenAddition().encode([3, 1], n=2), "operands"),  # type: ignore
        (lambda: Multiplication().encode([(4, 0)], n=2), "operand"),
        (lambda: Multiplication(m=1).encode([(3, 0)], n=2, m=2), "n"),
        (lambda: product_of([[1, 1]]), "bits a"),
        (lambda: product_of(torch.tensor([1, 1])), "bits a"),
        (lambda: product_of(torch.tensor([[1, 1, 7]])), "bits a"),
        (lambda: product_of(torch.tensor([[1, 1]]), m=[2]), "n"),
        (lambda: Copy().targets(torch.tensor([[4, 0, 1]])), "inputs"),
        (lambda: Copy().targets(torch.tensor([[4, 2, 2]])), "inputs"),
        (lambda: Copy().targets(torch.tensor([[5, 2, 2]])), "inputs"),
        (lambda: Copy().targets(torch.tensor([[4, 2, 3]])), "inputs"),
        (lambda: Parity().targets(torch.tensor([[2, 0, 3]])), "inputs"),
        (lambda: TokenAddition().targets(torch.tensor([[5, 0, 0, 3]])), "inputs"),
        (lambda: TokenAddition().targets(torch.tensor([[5, 0, 2, 3]])), "inputs"),
        (lambda: TokenAddition().targets(torch.tensor([[5, 1, 0, 2, 1, 3]])), "inputs"),
        (lambda: Multiplication().targets(torch.tensor([[5, 2, 1, 3]])), "inputs"),
        (lambda: Multiplication().targets(torch.tensor([[5, 0, 3, 2]])), "inputs"),
    ],
)
def test_bad_inputs_are_refused(attempt, what):
    with pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what
