from __future__ import annotations

import pytest
import torch

from loopinterp.circuits.pairs import PLACES, RUN_ON, swap_pairs
from loopinterp.circuits.runs import outputs
from loopinterp.errors import InputError
from loopinterp.tasks import Addition

TASK = Addition()


@pytest.fixture(scope="module")
def pairs(program_model):
    return swap_pairs(program_model("ripple"), n=16, per_place=12, max_chain=6, seed=3)


def test_every_place_gets_its_pairs(pairs):
    assert torch.bincount(pairs.place).tolist() == [12] * len(PLACES)
    assert pairs.measured
    assert pairs.solved == 1.0


def test_carries_into_the_bit_are_opposite_and_what_lies_above_is_the_same(pairs):
    rows = torch.arange(len(pairs))
    carry = TASK.carry_in(pairs.base)[rows, pairs.position]
    assert (carry == pairs.carry).all()
    assert (TASK.carry_in(pairs.source)[rows, pairs.position] == 1 - carry).all()
    above = torch.arange(pairs.base.shape[1]) >= pairs.position[:, None]
    assert (pairs.base == pairs.source)[above].all()


def test_a_changed_carry_can_run_on(pairs):
    rows = torch.arange(len(pairs))[:, None]
    on = pairs.position[:, None] + torch.arange(RUN_ON)
    assert TASK.propagate(pairs.base)[rows, on].all()


def test_both_carries_occur_and_below_the_pair_differs(pairs):
    assert 0.3 < pairs.carry.float().mean() < 0.7
    assert (pairs.base != pairs.source).any(1).all()


def _distance(inputs, position):
    rows = torch.arange(len(inputs))
    return TASK.chain_length_in(inputs)[rows, position] + 1


def test_places_of_a_ripple_are_counted_in_positions_from_the_deciding_bit(pairs):
    # A ripple resolves one position a loop, so its front is where the distance equals the loop.
    base, source = (_distance(x, pairs.position) for x in (pairs.base, pairs.source))
    behind = {
        "ahead": (base > pairs.loop) & (source > pairs.loop),
        "at": (base == pairs.loop) & (source == pairs.loop),
        "one behind": (base + 1 == pairs.loop) & (source + 1 == pairs.loop),
        "two or more behind": (base + 2 <= pairs.loop) & (source + 2 <= pairs.loop),
        "planted ahead": (base > pairs.loop) & (source <= pairs.loop),
        "erased behind": (base + 2 <= pairs.loop) & (source > pairs.loop),
    }
    for k, place in enumerate(PLACES):
        assert behind[place][pairs.place == k].all(), place


def test_there_is_time_for_two_more_loops(pairs):
    assert (pairs.loop + 2 <= pairs.n_loops).all()
    assert (pairs.loop >= 1).all()


def test_the_front_is_the_models_own(program_model):
    # Lookahead resolves a distance of 2^t after t loops: its front is not one position a loop.
    model = program_model("lookahead")
    pairs = swap_pairs(model, n=16, per_place=8, max_chain=8)
    assert pairs.measured
    ahead = pairs[pairs.place == PLACES.index("ahead")]
    assert (_distance(ahead.base, ahead.position) > 2**ahead.loop).all()
    behind = pairs[pairs.place == PLACES.index("two or more behind")]
    read = outputs(model, behind.base, behind.n_loops)
    rows = torch.arange(len(behind))
    assert (read[behind.loop, rows] == read[-1])[rows, behind.position].all()


def test_a_model_that_does_not_add_gets_the_front_of_one_position_a_loop(untrained):
    pairs = swap_pairs(untrained, n=16, per_place=6, max_chain=6)
    assert not pairs.measured
    assert pairs.solved < 0.5
    at = pairs[pairs.place == PLACES.index("at")]
    assert (_distance(at.base, at.position) == at.loop).all()


def test_same_seed_same_pairs(program_model):
    model = program_model("ripple")
    one, two, other = (swap_pairs(model, n=16, per_place=4, max_chain=6, seed=s) for s in (5, 5, 6))
    assert torch.equal(one.base, two.base)
    assert torch.equal(one.loop, two.loop)
    assert not torch.equal(one.base, other.base)


@pytest.mark.parametrize("max_chain", [RUN_ON, 14])
def test_chains_that_do_not_fit_are_refused(untrained, max_chain):
    with pytest.raises(InputError, match="max_chain"):
        swap_pairs(untrained, n=16, max_chain=max_chain)
