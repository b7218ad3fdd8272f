"""Directions that probes read, on models of which it is known where each variable lies."""

from __future__ import annotations

import torch

from loopinterp.circuits.probed_subspaces import probe_directions
from loopinterp.rasp import compile_program
from loopinterp.tasks import Addition


def test_a_probe_finds_the_directions_of_a_variable_by_itself():
    batch = Addition().sample(5, batch_size=128, generator=torch.Generator().manual_seed(0))
    compiled = compile_program("ripple", max_length=6)
    found = probe_directions(compiled.model, compiled.program, ["carry"], batch)
    known = compiled.circuit.subspace("carry")
    # The difference of the two values; the sum of both is constant, and nothing to find.
    difference = known[0] - known[1]
    assert found.shape == (1, compiled.model.config.d_model)
    assert abs(float(found[0] @ difference)) / float(difference.norm()) > 0.99
