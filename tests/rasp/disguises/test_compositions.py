"""Disguises over disguises: any order, many loops, saved and read back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.rasp import (
    Compiled,
    add_noise,
    compare_with_program,
    distract,
    permute,
    rotate,
    superpose,
)
from tests.rasp.disguises.small_models import logits_of, small_model

EXACT = {
    "rotate": rotate,
    "permute": permute,
    "distract": partial(distract, heads=1, neurons=3, width=2),
    "superpose": superpose,
}
ALL = {**EXACT, "add_noise": partial(add_noise, relative=0.1)}


def weights(compiled: Compiled) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in compiled.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=8, deadline=None)
@given(
    program=st.sampled_from(["ripple", "one_shot"]),
    before=st.lists(st.sampled_from(["rotate", "permute", "distract"]), max_size=3),
    after=st.lists(st.sampled_from(["rotate", "permute", "distract"]), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
def test_disguises_compose_in_any_order(program, before, after, seed):
    plain = small_model(program)
    hidden = plain.compiled
    for name in [*before, "superpose", *after]:
        hidden = EXACT[name](hidden, seed=seed)
    logits = logits_of(hidden, plain.inputs, plain.n_loops)
    assert (logits - plain.logits).abs().max() < 1e-4
    agreement = compare_with_program(hidden, plain.inputs, n_loops=plain.n_loops)
    assert agreement.exact and agreement.state_error < 1e-3
    assert max(agreement.attention_error.values()) < 1e-3
    assert len(hidden.circuit.disguises) == len(before) + 1 + len(after)


@pytest.mark.parametrize("program", ["parity", "ripple", "one_shot"])
def test_nothing_drifts_in_500_loops(program):
    plain = small_model(program)
    inputs = plain.inputs[:4]
    hidden = plain.compiled
    for seed, disguise in enumerate(EXACT.values()):
        hidden = disguise(hidden, seed=seed)
    agreement = compare_with_program(hidden, inputs, n_loops=500)
    assert agreement.exact and agreement.state_error < 1e-3
    with torch.no_grad():
        ends = [c.model(inputs, n_loops=500) for c in (hidden, plain.compiled)]
    assert torch.allclose(*ends, atol=1e-4)


@pytest.mark.parametrize("disguise", ALL)
def test_the_input_stays_as_it_was_and_a_seed_gives_one_model(disguise):
    plain = small_model("one_shot").compiled
    before = weights(plain)
    first, again, other = (ALL[disguise](plain, seed=seed) for seed in (5, 5, 6))
    assert same(weights(plain), before)
    assert plain.circuit.disguises == ()
    assert same(weights(first), weights(again)) and not same(weights(first), weights(other))
    assert len(first.circuit.disguises) == 1 and "(seed 5)" in first.circuit.disguises[0]
    assert first.program is plain.program


def test_a_disguised_model_is_saved_with_its_circuit(tmp_path):
    hidden = small_model("one_shot").compiled
    for seed, disguise in enumerate(ALL.values()):
        hidden = disguise(hidden, seed=seed)
    hidden.save(tmp_path)
    loaded = Compiled.load(tmp_path)
    assert same(weights(loaded), weights(hidden))
    for name in ("disguises", "superposition", "heads", "neurons", "edges", "features"):
        assert getattr(loaded.circuit, name) == getattr(hidden.circuit, name), name
    for name, directions in hidden.circuit.directions.items():
        assert torch.equal(loaded.circuit.directions[name].write, directions.write)
        assert torch.equal(loaded.circuit.directions[name].read, directions.read)


def test_a_model_keeps_its_precision():
    plain = small_model("ripple").compiled
    double = Compiled(type(plain.model)(plain.model.config).double(), plain.circuit, plain.program)
    double.model.load_state_dict(plain.model.state_dict())
    for disguise in ALL.values():
        assert disguise(double, seed=0).model.dtype == torch.float64


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, True, None, "0"])
@pytest.mark.parametrize("disguise", ALL)
def test_bad_seeds(disguise, seed):
    with pytest.raises(InputError, match="seed: expected an integer"):
        ALL[disguise](small_model("ripple").compiled, seed=seed)
