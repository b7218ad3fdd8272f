"""Interchange interventions on known models: in runs of as many loops as the program needs."""

import dataclasses

import pytest

from loopinterp.benchmark import known_models
from loopinterp.benchmark.interchange_scores import exchanged


@pytest.mark.parametrize(("n_loops", "after"), [(0, [0, 1]), (1, [0, 1]), (2, [0, 1, 2])])
def test_states_are_exchanged_after_every_loop_of_a_run_that_has_one_at_least(n_loops, after):
    (known,) = known_models(["one_shot"], n=4, examples=32)
    subspaces = {"carry": known.compiled.circuit.subspace("carry")}
    found = exchanged(dataclasses.replace(known, n_loops=n_loops), subspaces, seed=0)
    assert found.data["loop"].values.tolist() == after
