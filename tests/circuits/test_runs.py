from __future__ import annotations

import pytest
import torch

from loopinterp.circuits.pairs import swap_pairs
from loopinterp.circuits.runs import (
    AT_THE_END,
    DELAYS,
    outputs,
    prepare_swaps,
    read_on,
    states,
    states_after,
)
from loopinterp.errors import InputError


@pytest.fixture(scope="module")
def pairs(untrained):
    return swap_pairs(untrained, n=16, per_place=3, max_chain=6)


@pytest.fixture(scope="module")
def run(untrained, pairs):
    return prepare_swaps(untrained, pairs)


def test_outputs_are_those_of_the_model_at_every_loop(untrained, pairs):
    read = outputs(untrained, pairs.base, 5)
    for n_loops in range(6):
        if n_loops:
            logits = untrained(pairs.base, n_loops=n_loops)
            assert torch.equal(read[n_loops], logits.argmax(-1))


def test_swaps_equal_one_patched_run_at_a_time(untrained, pairs, run):
    swapped = run.swap()
    for k in range(0, len(pairs), 4):
        loop, position = int(pairs.loop[k]), int(pairs.position[k])
        base, source = pairs.base[k : k + 1], pairs.source[k : k + 1]
        donor = untrained(source, n_loops=loop, return_type="state")

        def put_in(state, hook, donor=donor, position=position):
            state[:, position] = donor[:, position]
            return state

        name = f"loops.{loop - 1}.hook_state_post"
        for d, delay in enumerate(DELAYS):
            n_loops = pairs.n_loops if delay == AT_THE_END else loop + delay
            logits = untrained.run_with_hooks(base, n_loops=n_loops, fwd_hooks=[(name, put_in)])
            assert torch.equal(swapped[d, k], logits[0].argmax(-1)), (k, delay)


def test_each_run_goes_on_as_long_as_it_is_told(untrained, pairs):
    inputs = pairs.base[:4]
    steps = torch.tensor([[0, 3, 1, 2], [2, 2, 0, 5]])
    read = read_on(untrained, inputs, states(untrained, inputs, 2)[2], steps)
    answers = outputs(untrained, inputs, 7)
    assert torch.equal(read, answers[2 + steps, torch.arange(4)])


def test_each_place_has_its_own_loop(untrained, pairs):
    inputs = pairs.base[:4]
    row, pos, loop = torch.tensor([[0, 3, 3, 1], [5, 2, 7, 5], [0, 4, 2, 4]])
    found = states_after(untrained, inputs, row, pos, loop)
    assert torch.equal(found, states(untrained, inputs, 4)[loop, row, pos])
    assert states_after(untrained, inputs, row[:0], pos[:0], loop[:0]).shape == (0, 16)


def test_without_a_difference_nothing_changes(untrained, pairs):
    same = type(pairs)(**{**pairs.__dict__, "source": pairs.base})
    run = prepare_swaps(untrained, same)
    assert torch.equal(run.swap(), run.base)


def test_the_whole_space_is_the_whole_swap(run):
    width = run.state.shape[-1]
    gauss = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    turned = torch.linalg.qr(gauss).Q
    assert torch.equal(run.swap(turned), run.swap())


def test_a_subspace_swap_changes_only_that_part(untrained, run):
    rows = torch.eye(run.state.shape[-1])[2:5]
    seen = []
    original = untrained.readout
    untrained.readout = lambda h: seen.append(h) or original(h)
    try:
        run.swap(rows, delays=(0,))
    finally:
        del untrained.readout
    moved = seen[0] - run.state
    index = torch.arange(len(moved))
    assert torch.allclose(moved[index, run.pairs.position][:, 2:5], run.difference[:, 2:5])
    moved[index, run.pairs.position] = 0 * moved[index, run.pairs.position]
    assert moved.abs().max() == 0


def test_pairs_can_have_subspaces_of_their_own(run):
    shared = torch.eye(run.state.shape[-1])[:3]
    own = shared.expand(len(run.pairs), -1, -1)
    assert torch.equal(run.swap(shared), run.swap(own))


def test_rows_must_be_orthonormal(run):
    with pytest.raises(InputError, match="orthonormal"):
        run.swap(2 * torch.eye(run.state.shape[-1])[:2])
