"""Fewer dimensions: exact ones, too few, and what is refused."""

from __future__ import annotations

import pytest
import torch

from loopinterp.compiler import (
    Compiled,
    add_noise,
    check_disguise,
    compare_with_program,
    distract,
    permute,
    rotate,
    superpose,
)
from loopinterp.core.errors import InputError
from tests.compiler.compiled_properties import loops_until_a_state_returns
from tests.compiler.small_models import cached, logits_of, small_model


@pytest.mark.parametrize(("program", "dimensions"), [("parity", 15), ("prefix_xor", 10)])
def test_the_fewest_exact_dimensions_are_those_of_what_stands_in_one_place(program, dimensions):
    # Values less 1 of tokens, positions, variables and scratch, and 1 for their sum.
    plain = small_model(program)
    dense = superpose(plain.compiled, seed=0, steps=5)
    assert dense.model.config.d_model == dimensions
    record = dense.circuit.superposition
    assert record is not None and record.exact
    assert record.d_model == record.exact_d_model == dimensions
    fewer = superpose(plain.compiled, d_model=dimensions - 1, seed=0, steps=0).circuit.superposition
    assert fewer is not None and not fewer.exact and fewer.exact_d_model == dimensions


def test_every_width_between_the_fewest_and_the_models_own_is_exact():
    plain = small_model("ripple")
    for width in range(13, plain.compiled.model.config.d_model):
        dense = superpose(plain.compiled, d_model=width, seed=1, steps=40)
        assert dense.model.config.d_model == width
        assert (logits_of(dense, plain.inputs, 4) - plain.logits[:5]).abs().max() < 1e-4
        assert dense.circuit.superposition is not None and dense.circuit.superposition.exact


def test_what_reads_a_feature_reads_0_and_1_where_it_was_last_held():
    plain = small_model("one_shot")
    dense = superpose(plain.compiled, seed=0, steps=40).circuit
    for feature in dense.features:
        directions = dense.directions[feature.id]
        if len(directions.write) > 1:
            centred = directions.write - directions.write.mean(0)
            expected = torch.eye(len(centred)) - 1 / len(centred)
            assert torch.allclose(directions.read @ centred.mT, expected.mT, atol=1e-4)


def test_distractors_keep_their_directions():
    plain = small_model("ripple")
    busy = distract(plain.compiled, width=3, seed=0)
    dense = superpose(busy, seed=0, steps=40)
    assert dense.model.config.d_model == 13 + 3
    with torch.no_grad():
        first, last = (dense.model(plain.inputs, n_loops=t, return_type="state") for t in (5, 80))
    assert torch.allclose(first, last, atol=1e-3)


def test_an_exact_superposition_can_be_superposed_further():
    plain = small_model("ripple")
    once = superpose(plain.compiled, d_model=15, seed=0, steps=40)
    twice = superpose(once, seed=1, steps=40)
    assert twice.model.config.d_model == 13
    assert (logits_of(twice, plain.inputs, plain.n_loops) - plain.logits).abs().max() < 1e-4
    fewer = superpose(once, d_model=11, seed=0, steps=40)
    assert check_disguise(fewer, plain.compiled, plain.inputs, n_loops=plain.n_loops).exact


def test_too_few_dimensions_are_wrong():
    plain = small_model("ripple")
    crowded = superpose(plain.compiled, d_model=5, seed=0, steps=20)
    record = crowded.circuit.superposition
    assert record is not None and not record.exact
    agreement = compare_with_program(crowded, plain.inputs, n_loops=plain.n_loops)
    assert not agreement.exact
    assert crowded.circuit.disguises[0].split(" of ")[0] == "superposed in 5"


INEXACT = {"ripple": 11, "prefix_mod_5": 18, "parity": 12}
"""Program -> dimensions, fewer than are exact, in which values and answers still are."""


@pytest.mark.parametrize("program", INEXACT)
def test_interference_is_absorbed_by_units_and_does_not_drift_in_500_loops(program):
    plain = small_model(program)
    hidden = rotate(permute(plain.compiled, seed=0), seed=1)
    dense = superpose(hidden, d_model=INEXACT[program], seed=0, steps=60)
    record = dense.circuit.superposition
    assert record is not None and not record.exact
    pres = [cached(c, plain.inputs, 3, "mlp.hook_pre") for c in (hidden, dense)]
    interference = max(float((pres[0][k] - x).abs().max()) for k, x in pres[1].items())
    assert interference > 0.05
    inputs = plain.inputs[:6]
    n_loops = max(loops_until_a_state_returns(dense, inputs, most=500), 60)
    assert compare_with_program(dense, inputs, n_loops=n_loops).exact
    with torch.no_grad():
        states = dense.model(inputs, n_loops=n_loops, return_type="states")[30:]
    assert (states - states[0]).abs().max() < 1e-3


def test_a_search_finds_directions_that_interfere_less_than_random_ones():
    plain = small_model("parity")
    random, sought = (superpose(plain.compiled, d_model=11, seed=0, steps=k) for k in (0, 40))
    checks = [
        check_disguise(c, plain.compiled, plain.inputs, n_loops=plain.n_loops)
        for c in (random, sought)
    ]
    assert checks[1].exact and not checks[0].exact
    assert checks[1].reads.max() < checks[0].reads.max()


@pytest.mark.parametrize("d_model", [0, -3, 2, 17, 40, True])
def test_infeasible_widths(d_model):
    with pytest.raises(InputError) as caught:
        superpose(small_model("ripple").compiled, d_model=d_model, seed=0)
    assert caught.value.what == "d_model"


def test_no_fewer_dimensions_are_exact():
    dense = superpose(small_model("ripple").compiled, seed=0, steps=40)
    with pytest.raises(InputError) as caught:
        superpose(dense, seed=0)
    assert caught.value.what == "d_model"


def inexact(compiled: Compiled) -> Compiled:
    return superpose(compiled, d_model=10, seed=0, steps=0)


def noisy(compiled: Compiled) -> Compiled:
    return add_noise(compiled, relative=0.01, seed=0)


@pytest.mark.parametrize("disguise", [inexact, noisy])
def test_what_is_not_exact_is_not_superposed(disguise):
    with pytest.raises(InputError) as caught:
        superpose(disguise(small_model("ripple").compiled), seed=0)
    assert caught.value.what == "compiled"


def test_bad_steps():
    with pytest.raises(InputError) as caught:
        superpose(small_model("ripple").compiled, seed=0, steps=-1)
    assert caught.value.what == "steps"
