from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.interventions.pairs import (
    InterchangePairs,
    Stratum,
    balanced_pairs,
    draw_pairs,
    drawn_pairs,
    evenly_by_class,
    repeated_pairs,
)
from loopinterp.programs import get_program
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks import IGNORE, Addition
from tests.interventions.random_pairs import random_pairs


@pytest.fixture
def pairs() -> InterchangePairs:
    tokens = torch.arange(12).view(3, 4)
    drawn = random_pairs(tokens, n_loops=5, count=20, sites=2)
    parity = Stratum(("even", "odd"), torch.arange(20) % 2)
    return dataclasses.replace(drawn, strata={"parity": parity})


@pytest.mark.parametrize(("n_inputs", "most"), [(2, 1), (2, 9), (5, 7), (5, 100), (40, 8)])
def test_pairs_are_different_inputs_and_shared_out_evenly(n_inputs, most, generator):
    base, source = draw_pairs(n_inputs, most, generator)
    assert len(base) == min(most, n_inputs * (n_inputs - 1))
    assert (base != source).all()
    assert len({*zip(base.tolist(), source.tolist())}) == len(base)
    counts = torch.bincount(base, minlength=n_inputs)
    assert counts.max() - counts.min() <= 1


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    most=st.integers(0, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_classes_are_as_even_as_their_sizes_allow(sizes, most, seed):
    codes = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    chosen = evenly_by_class(codes, most, torch.Generator().manual_seed(seed))
    assert len(chosen.unique()) == len(chosen) == min(most, sum(sizes))
    counts = torch.bincount(codes[chosen], minlength=len(sizes)).tolist()
    fullest = max(counts)
    for count, size in zip(counts, sizes):
        assert count == size or count >= fullest - 1


@pytest.mark.parametrize(
    "rows", [[3, 1], slice(2, 9, 3), torch.tensor([5, 5]), torch.arange(20) < 4]
)
def test_some_of_the_pairs_keep_all_that_belongs_to_them(pairs, rows):
    some = pairs[rows]
    for name in ("base", "source", "positions", "loop", "source_loop"):
        assert torch.equal(getattr(some, name), getattr(pairs, name)[rows])
    assert torch.equal(some.strata["parity"].codes, (torch.arange(20) % 2)[rows])
    assert some.inputs is pairs.inputs


@pytest.mark.parametrize(("n_loops", "made"), [(None, 9), (4, 4)])
def test_exchanges_of_a_batch_run_for_its_longest_t_of_n_unless_told(n_loops, made, generator):
    batch = Addition().sample(torch.tensor([3, 8, 5]), generator=generator)
    pairs = InterchangePairs.of(
        batch,
        base=torch.tensor([0, 1]),
        source=torch.tensor([2, 0]),
        positions=torch.tensor([[1], [2]]),
        loop=torch.tensor([1, 3]),
        n_loops=n_loops,
    )
    assert pairs.n_loops == made and pairs.horizon.tolist() == [made - 1, made - 3]
    assert torch.equal(pairs.source_loop, pairs.loop)
    assert torch.equal(pairs.asked, batch.targets != IGNORE)


def test_horizons_run_from_the_exchange_to_the_end(pairs):
    assert torch.equal(pairs.horizon, 5 - pairs.loop)
    assert pairs.longest == 5 - int(pairs.loop.min())
    assert pairs[torch.zeros(20, dtype=torch.bool)].longest == 0


def test_what_is_scored_are_the_positions_asked_of_the_base(pairs):
    for k in range(len(pairs)):
        assert torch.equal(pairs.scored[k], pairs.asked[pairs.base[k]])


N = 5
BATCH = inputs_of(Addition(), (N,), 32, seed=0)
CARRIES = get_program("ripple").trace(BATCH.inputs, n_loops=N + 1).variables["carry"]


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_a_balanced_pair_has_one_token_and_two_inputs(seed: int, number: int) -> None:
    pairs = balanced_pairs(BATCH, CARRIES, number, torch.Generator().manual_seed(seed))
    position = pairs.positions[:, 0]
    assert 0 < len(pairs) <= number
    assert (pairs.base != pairs.source).all()
    tokens = (BATCH.inputs[rows, position] for rows in (pairs.base, pairs.source))
    assert torch.equal(*tokens)
    assert int(pairs.loop.max()) <= N + 1 and int(pairs.source_loop.max()) <= N + 1


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_a_second_interchange_is_no_earlier_and_has_the_token_of_its_place(
    seed: int, number: int
) -> None:
    pairs = repeated_pairs(BATCH, N + 1, number, torch.Generator().manual_seed(seed))
    second = pairs.second
    assert second is not None and second.made.all() and 0 < len(pairs) <= number
    assert (second.loop >= pairs.loop).all() and int(second.loop.max()) <= N + 1
    assert (second.source != pairs.base).all()
    tokens = (BATCH.inputs[rows, second.position] for rows in (pairs.base, second.source))
    assert torch.equal(*tokens)


def test_rare_kinds_come_as_often_as_common_ones() -> None:
    """A carry put in at loop 0 is one that no interchange at one loop can give."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for pairs in (
        drawn_pairs(BATCH, N + 1, 2000, generator, across_loops=True),
        balanced_pairs(BATCH, CARRIES, 2000, generator),
    ):
        position = pairs.positions[:, 0]
        replaced = CARRIES[pairs.loop, pairs.base, position]
        put_in = CARRIES[pairs.source_loop, pairs.source, position]
        shares.append(float((replaced != put_in).double().mean()))
    assert shares[1] > 1.3 * shares[0]
    at_first = pairs.loop == 0
    assert (put_in[at_first] == 1).any()
