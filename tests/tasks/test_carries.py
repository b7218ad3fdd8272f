"""Carry analysis against a carry loop over Python integers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.tasks import carries


def bits(x: int, n: int) -> list[int]:
    return [x >> i & 1 for i in range(n)]


def by_hand(x: int, y: int, n: int) -> dict[str, list]:
    """Each quantity by schoolbook addition, one bit at a time."""
    out: dict[str, list] = {"carries": [], "chain_length": [], "chain_start": []}
    carry, length, start = 0, 0, -1
    for i, (a, b) in enumerate(zip(bits(x, n), bits(y, n))):
        carry = (a + b + carry) // 2
        if a != b:
            length += 1
        else:
            length, start = 0, i
        out["carries"].append(carry)
        out["chain_length"].append(length)
        out["chain_start"].append(start)
    return out


def check(x: int, y: int, n: int) -> None:
    a, b = torch.tensor(bits(x, n)), torch.tensor(bits(y, n))
    for name, expected in by_hand(x, y, n).items():
        assert getattr(carries, name)(a, b).tolist() == expected, name
    assert carries.carry_in(a, b).tolist() == [0, *carries.carries(a, b).tolist()[:-1]]
    assert carries.chain_length_in(a, b).tolist() == [0, *carries.chain_length(a, b).tolist()[:-1]]
    assert carries.total(a, b).tolist() == bits(x + y, n)
    assert carries.generate(a, b).tolist() == [bool(i) for i in bits(x & y, n)]
    assert carries.propagate(a, b).tolist() == [bool(i) for i in bits(x ^ y, n)]


def test_all_pairs_of_up_to_four_bits():
    for n in range(1, 5):
        for x in range(2**n):
            for y in range(2**n):
                check(x, y, n)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 500).flatmap(lambda n: st.tuples(*[st.integers(0, 2**n - 1)] * 2, st.just(n)))
)
def test_random_pairs_of_up_to_five_hundred_bits(case):
    check(*case)


def test_the_longest_chain_at_five_hundred_bits():
    check(2**500 - 1, 1, 500)
    check(1, 2**500 - 1, 500)
    check(0, 2**500 - 1, 500)


def test_leading_axes_are_free():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randint(2, (2, 2, 3, 8), generator=g)
    batched = carries.carries(a, b)
    assert batched.shape == (2, 3, 8)
    for i in range(2):
        for j in range(3):
            assert torch.equal(batched[i, j], carries.carries(a[i, j], b[i, j]))
