"""Matched pairs, against carries worked out bit by bit in Python."""

from __future__ import annotations

import pytest
import torch

from loopinterp.probing.carry_chains import VARIABLES, sample_chains
from loopinterp.tasks.addition import Addition

FORMATS = pytest.mark.parametrize("task", [Addition(), Addition(format="features")])


@FORMATS
def test_every_carry_is_what_python_says(task: Addition, generator: torch.Generator) -> None:
    sample = sample_chains(task, 12, max_chain=7, n_pairs=5, generator=generator)
    a, b = task.operands(sample.inputs)
    assert sample.row.shape == sample.pos.shape == sample.carry.shape == (7, 10)
    for chain in range(7):
        for k in range(10):
            row, bit = int(sample.row[chain, k]), int(sample.pos[chain, k]) - task.offset
            bits = [(int(x), int(y)) for x, y in zip(a[row], b[row])][task.offset :]
            travelled, source = 1, bit - 1
            while source >= 0 and bits[source][0] != bits[source][1]:
                travelled, source = travelled + 1, source - 1
            assert source >= 0, "a chain that runs back to the start has no source"
            assert travelled == chain + 1
            low = [sum(pair[side] << i for i, pair in enumerate(bits[:bit])) for side in (0, 1)]
            carry = sum(low) >> bit
            x, y = bits[bit]
            expected = {
                "carry in": carry,
                "carry out": (x + y + carry) >> 1,
                "generate": x & y,
                "propagate": x ^ y,
                "sum": (x + y + carry) & 1,
            }
            found = dict(zip(VARIABLES, sample.variables[:, chain, k].tolist()))
            assert found == expected


@FORMATS
def test_pairs_differ_in_the_carry_and_not_in_what_lies_between(
    task: Addition, generator: torch.Generator
) -> None:
    sample = sample_chains(task, 20, max_chain=10, n_pairs=30, generator=generator)
    first, second = sample.row[:, ::2], sample.row[:, 1::2]
    assert torch.equal(sample.pos[:, ::2], sample.pos[:, 1::2])
    assert torch.equal(sample.carry[:, ::2], 1 - sample.carry[:, 1::2])
    for chain in range(10):
        for x, y, pos in zip(first[chain], second[chain], sample.pos[chain, ::2]):
            between = slice(int(pos) - chain, int(pos))
            assert torch.equal(sample.inputs[x, between], sample.inputs[y, between])
            source = int(pos) - chain - 1
            assert not torch.equal(sample.inputs[x, source], sample.inputs[y, source])
        # No addition gives two carries to a chain length: the pairs are independent.
        assert len(set(first[chain].tolist())) == 30


def test_positions_and_own_bits_are_mixed(generator: torch.Generator) -> None:
    sample = sample_chains(Addition(), 24, max_chain=12, n_pairs=40, generator=generator)
    for chain in range(12):
        assert len(set(sample.pos[chain].tolist())) > 4
        own = sample.variables[VARIABLES.index("propagate"), chain].float().mean()
        assert 0.4 < own < 0.95


@pytest.mark.parametrize("n_pairs", [1, 40])
def test_half_of_the_short_chains_are_read_where_they_end(
    n_pairs: int, generator: torch.Generator
) -> None:
    sample = sample_chains(Addition(), 24, max_chain=12, n_pairs=n_pairs, generator=generator)
    goes_on = sample.variables[VARIABLES.index("propagate"), :, ::2].sum(-1)
    assert goes_on[:4].tolist() == [n_pairs - n_pairs // 2] * 4


def test_the_same_generator_gives_the_same_sample() -> None:
    first, second = (
        sample_chains(
            Addition(), 10, max_chain=5, n_pairs=4, generator=torch.Generator().manual_seed(9)
        )
        for _ in range(2)
    )
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.pos, second.pos)
    assert torch.equal(first.to("cpu").carry, first.carry)
