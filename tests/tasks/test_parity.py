"""Parity in the full-output format against Python integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE, Parity


@pytest.mark.parametrize("n", range(1, 9))
def test_all_short_inputs(n):
    every = list(itertools.product([0, 1], repeat=n))
    batch = Parity().from_bits(torch.tensor(every), torch.full((len(every),), n))
    for row, bits in enumerate(every):
        assert batch.inputs[row].tolist() == [4, *bits, 2, 3]
        assert batch.targets[row].tolist() == [IGNORE] * (n + 1) + [sum(bits) % 2, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=500), min_size=1, max_size=4))
def test_mixed_lengths_keep_the_end_of_answer_to_the_padded_length(rows):
    width = max(map(len, rows))
    bits = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    batch = Parity().from_bits(bits, torch.tensor([len(row) for row in rows]))
    for k, row in enumerate(rows):
        tail = width - len(row) + 1
        assert batch.inputs[k].tolist() == [4, *row, 2, *[3] * tail]
        expected = [IGNORE] * (len(row) + 1) + [bin(int("".join(map(str, row)), 2)).count("1") % 2]
        assert batch.targets[k].tolist() == expected + [2] * tail
    assert batch.n_loops.tolist() == [len(row) for row in rows]


def test_bad_bits_and_tokens_are_refused():
    with pytest.raises(InputError, match="bits"):
        Parity().from_bits(torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(InputError, match=r"lengths in 1\.\.1"):
        Parity().from_bits(torch.tensor([[1]]), torch.tensor([2]))
    with pytest.raises(InputError, match=r"tokens in 0\.\.4"):
        Parity().targets(torch.tensor([[5]]))
