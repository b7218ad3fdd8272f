"""Directions along which variables are read, where it is known how they lie."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.comparison.variable_directions import (
    labelled_states,
    mean_directions,
    probe_directions,
    spread_loops,
)
from loopinterp.compiler import compile_program
from loopinterp.tasks import Addition


@pytest.mark.parametrize(
    ("directions", "least"),
    # Means differ along tokens and places as well, where these go along with the variable.
    [(probe_directions, 0.99), (mean_directions, 0.95)],
)
def test_the_directions_of_a_variable_are_found_by_themselves(directions, least):
    batch = Addition().sample(5, batch_size=128, generator=torch.Generator().manual_seed(0))
    compiled = compile_program("ripple", max_length=6)
    model, program = compiled.model, compiled.program
    found = labelled_states(model, program, ["carry"], batch).subspace(directions)
    known = compiled.circuit.subspace("carry")
    # The difference of the two values; the sum of both is constant, and nothing to find.
    difference = (known[0] - known[1]) / (known[0] - known[1]).norm()
    assert found.shape == (1, model.config.d_model)
    assert abs(float(found[0] @ difference)) > least


def test_a_probe_reads_what_tells_values_apart_and_means_what_goes_along_with_them():
    """A large noisy trace of a bit beside a small clean one."""
    generator = torch.Generator().manual_seed(0)
    bit = torch.randint(2, (4_000,), generator=generator)
    noise = torch.randn(4_000, 2, generator=generator)
    states = bit[:, None] * torch.tensor([10.0, 1.0]) + noise * torch.tensor([10.0, 0.01])
    probed, means = (f(states, bit)[-1].abs() for f in (probe_directions, mean_directions))
    assert probed[1] > 10 * probed[0]
    assert means[0] > 5 * means[1]


def test_directions_may_turn_with_the_token():
    batch = Addition().sample(5, batch_size=128, generator=torch.Generator().manual_seed(0))
    compiled = compile_program("ripple", max_length=6)
    model, program = compiled.model, compiled.program
    labelled = labelled_states(model, program, ["carry"], batch)
    table = labelled.subspace_by_token()
    assert table.shape[::2] == (len(program.inputs), model.config.d_model)
    everywhere = labelled.subspace()
    for token in range(4):
        assert float((table[token] @ everywhere.mT).norm()) > 0.9
    assert not table[program.inputs.index("BOS")].any()  # it has no target


@pytest.mark.parametrize("most", [1, 2, 5, 40])
@pytest.mark.parametrize("n_loops", [1, 2, 9, 24])
def test_loops_are_spread_over_the_run(n_loops, most):
    loops = spread_loops(n_loops, most)
    last = max(n_loops - 1, 1)
    assert loops == sorted(set(loops)) and len(loops) == min(most, last)
    assert loops[0] == 1 and loops[-1] in (last, 1)
    gaps = [b - a for a, b in itertools.pairwise(loops)]
    assert not gaps or max(gaps) - min(gaps) <= 1
