"""Prefix sums mod 2 against Python integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE, PrefixSum


def running_xor(bits: list[int]) -> list[int]:
    return [x % 2 for x in itertools.accumulate(bits)]


@pytest.mark.parametrize("n", range(1, 9))
def test_all_short_inputs(n):
    every = [list(bits) for bits in itertools.product([0, 1], repeat=n)]
    batch = PrefixSum().from_bits(torch.tensor(every), torch.full((len(every),), n))
    for row, bits in enumerate(every):
        assert batch.inputs[row].tolist() == [2, *bits]
        assert batch.targets[row].tolist() == [IGNORE, *running_xor(bits)]


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


def test_bad_bits_and_tokens_are_refused():
    with pytest.raises(InputError, match="bits"):
        PrefixSum().from_bits(torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(InputError, match=r"lengths in 1\.\.1"):
        PrefixSum().from_bits(torch.tensor([[1]]), torch.tensor([2]))
    with pytest.raises(InputError, match=r"tokens in 0\.\.3"):
        PrefixSum().targets(torch.tensor([[4]]))
