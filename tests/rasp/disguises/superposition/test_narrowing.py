"""The narrowest superposition with a proof."""

from __future__ import annotations

import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import compare_with_program, narrowest_superposition, superpose
from tests.rasp.disguises.subjects import subject


def test_it_is_proven_narrower_than_exact_and_right():
    plain = subject("prefix_mod_5")
    dense = narrowest_superposition(plain.compiled, seed=0, steps=60, tries=1)
    record = dense.circuit.superposition
    assert record is not None and record.proven
    assert record.d_model < record.exact_d_model < plain.compiled.model.config.d_model
    assert compare_with_program(dense, plain.inputs, n_loops=plain.n_loops).exact


def test_where_nothing_is_proven_it_is_the_exact_one():
    dense = narrowest_superposition(subject("carry_save").compiled, seed=0, steps=0, tries=1)
    assert dense.circuit.superposition is not None and dense.circuit.superposition.exact


def test_bad_tries_and_models():
    compiled = subject("ripple").compiled
    with pytest.raises(InputError, match="tries: expected an integer >= 1"):
        narrowest_superposition(compiled, seed=0, tries=0)
    with pytest.raises(InputError, match="no fewer dimensions are exact"):
        narrowest_superposition(superpose(compiled, seed=0), seed=0)
