"""Carry pairs: the carry into the position is opposite, and comes from where it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import Addition, carry_pairs

PAIRS, FEATURES = Addition(), Addition(format="features")


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    n=st.integers(2, 40),
    minimal=st.booleans(),
    task=st.sampled_from([PAIRS, FEATURES]),
    distribution=st.sampled_from(["uniform", "propagate"]),
)
def test_pairs_have_opposite_carries_from_a_chain_of_the_given_length(
    data, n, minimal, task, distribution
):
    bit = data.draw(st.integers(1, n - 1))
    chain = data.draw(st.integers(0, bit - 1))
    after = data.draw(st.integers(0, n - bit))
    position = bit + task.offset
    pairs = carry_pairs(
        n,
        position,
        chain,
        12,
        generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))),
        minimal=minimal,
        propagate_after=after,
        distribution=distribution,
        task=task,
    )
    assert (pairs.bit, pairs.position, pairs.chain_length) == (bit, position, chain)
    assert pairs.start == position - chain - 1
    for batch, carry in ((pairs.base, pairs.carry), (pairs.source, 1 - pairs.carry)):
        assert torch.equal(task.carry_in(batch)[:, position], carry)
        assert (task.chain_length_in(batch)[:, position] == chain).all()
        assert not task.chain_in_reaches_start(batch)[:, position].any()
        assert task.propagate(batch)[:, position : position + after].all()
        assert torch.equal(task.targets(batch), batch.targets)
    differs = (
        (pairs.base.inputs != pairs.source.inputs).reshape(12, task.n_positions(n), -1).any(-1)
    )
    assert not differs[:, position:].any()
    assert differs[:, pairs.start].all()
    if minimal:
        assert (differs.sum(dim=1) == 1).all()


def test_which_of_the_pair_generates_is_a_fair_coin():
    g = torch.Generator().manual_seed(0)
    carry = carry_pairs(8, 5, 2, 2000, generator=g).carry.double()
    assert abs(float(carry.mean()) - 0.5) < 0.06  # more than five standard errors


def test_pairs_that_are_not_minimal_differ_below_the_chain_too():
    g = torch.Generator().manual_seed(0)
    pairs = carry_pairs(12, 9, 2, 200, generator=g, minimal=False)
    share = (pairs.base.inputs != pairs.source.inputs).double().mean(dim=0)
    assert share[1 : pairs.start].min() > 0.5
    assert share[pairs.start + 1 : 9].min() > 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 1, 0, 4), r"positions? in 2\.\.8"),
        ((8, 9, 0, 4), r"positions? in 2\.\.8"),
        ((8, 5, 4, 4), r"chain_length: expected 0\.\.3"),
        ((8, 5, -1, 4), r"chain_length: expected 0\.\.3"),
        ((8, 5, 1, 0), "batch_size"),
        ((0, 5, 1, 4), "n: expected"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        carry_pairs(*arguments, generator=torch.Generator())


def test_a_run_on_that_does_not_fit_and_an_unknown_distribution_are_refused():
    with pytest.raises(InputError, match=r"propagate_after: expected 0\.\.4"):
        carry_pairs(8, 5, 1, 4, generator=torch.Generator(), propagate_after=5)
    with pytest.raises(InputError, match="distribution of carry_pairs"):
        carry_pairs(8, 5, 1, 4, generator=torch.Generator(), distribution="chain")
