"""Prefix sums mod 2 and mod m against Python integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, PrefixSum


def running_xor(bits: list[int]) -> list[int]:
    return [x % 2 for x in itertools.accumulate(bits)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=500), min_size=1, max_size=4))
def test_mixed_lengths_are_padded_on_the_right(rows):
    width = max(map(len, rows))
    bits = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    batch = PrefixSum().from_bits(bits, torch.tensor([len(row) for row in rows]))
    for k, row in enumerate(rows):
        pad = width - len(row)
        assert batch.inputs[k].tolist() == [2, *row, *[3] * pad]
        assert batch.targets[k].tolist() == [IGNORE, *running_xor(row), *[IGNORE] * pad]
    assert batch.n_loops.tolist() == [len(row) + 1 for row in rows]


@pytest.mark.parametrize(
    ("modulus", "n"), [*((2, n) for n in range(1, 9)), (3, 6), (5, 4), (10, 3)]
)
def test_all_short_sequences_of_digits(modulus, n):
    task = PrefixSum(modulus=modulus)
    every = [list(digits) for digits in itertools.product(range(modulus), repeat=n)]
    batch = task.from_bits(torch.tensor(every), torch.full((len(every),), n))
    for row, digits in enumerate(every):
        assert batch.inputs[row].tolist() == [modulus, *digits]
        running = [total % modulus for total in itertools.accumulate(digits)]
        assert batch.targets[row].tolist() == [IGNORE, *running]


@pytest.mark.parametrize("distribution", ["uniform", "biased"])
def test_sampled_digits_take_every_value(distribution):
    batch = PrefixSum(modulus=6).sample(
        50, batch_size=60, generator=torch.Generator().manual_seed(0), distribution=distribution
    )
    counts = torch.bincount(batch.inputs[:, 1:].flatten(), minlength=6)
    assert len(counts) == 6 and counts[1:].min() > 200
    running = batch.inputs[:, 1:].cumsum(dim=1) % 6
    assert torch.equal(batch.targets[:, 1:], running)


@pytest.mark.parametrize("modulus", [1, 0, 2.5, "2", True])
def test_a_bad_modulus_is_refused(modulus):
    with pytest.raises(ConfigError, match=r"^modulus: expected an integer >= 2"):
        PrefixSum(modulus=modulus)


def test_bad_bits_and_tokens_are_refused():
    with pytest.raises(InputError, match="bits"):
        PrefixSum().from_bits(torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(InputError, match=r"lengths in 1\.\.1"):
        PrefixSum().from_bits(torch.tensor([[1]]), torch.tensor([2]))
    with pytest.raises(InputError, match=r"tokens in 0\.\.3"):
        PrefixSum().targets(torch.tensor([[4]]))
