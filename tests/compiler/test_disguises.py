"""Rotations of the residual stream."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.compiler import (
    Compiled,
    add_noise,
    compare_with_program,
    distract,
    permute,
    rotate,
    superpose,
)
from loopinterp.core.errors import InputError
from tests.compiler.compiled_properties import loops_until_a_state_returns
from tests.compiler.small_models import cached, logits_of, section_of, small_model


def test_states_are_turned_and_nothing_stands_along_a_coordinate():
    plain = small_model("one_shot")
    turned = rotate(plain.compiled, seed=3)
    states, before = (
        c.model(plain.inputs, n_loops=3, return_type="states").detach().flatten(0, 2)
        for c in (turned, plain.compiled)
    )
    # A rotation keeps all inner products.
    assert torch.allclose(states @ states.mT, before @ before.mT, atol=1e-4)
    for name, w in turned.model.state_dict().items():
        columns = w.any(0) if w.ndim == 2 and w.any() else torch.ones(1)
        assert name.endswith("out.weight") or columns.all(), name
    directions = (
        turned.circuit.directions_of("local").write if "local" in turned.circuit.variables else None
    )
    for name in turned.circuit.variables:
        directions = turned.circuit.directions_of(name).write
        assert torch.allclose(directions @ directions.mT, torch.eye(len(directions)), atol=1e-5)
        assert directions.abs().max() < 0.9


def test_a_recall_reads_and_writes_the_turned_stream():
    plain = small_model("ripple").compiled
    turned = rotate(plain, seed=0)
    for name in ("recall.state.weight", "recall.input.weight"):
        old, new = (c.model.state_dict()[name].double() for c in (plain, turned))
        # Similar symmetric matrices: the same eigenvalues.
        values = torch.linalg.eigvalsh(new)
        assert torch.allclose(new, new.mT, atol=1e-6)
        assert torch.allclose(values, torch.linalg.eigvalsh(old), atol=1e-6)


LOOPS = 2


def test_the_circuit_names_the_same_heads_and_neurons_where_they_are_now():
    plain = small_model("unique_set")
    base = distract(plain.compiled, heads=3, neurons=5, width=2, seed=0)
    shuffled = permute(base, seed=1)
    patterns, neurons = (
        [cached(c, plain.inputs, LOOPS, site) for c in (base, shuffled)]
        for site in ("attn.hook_pattern", "mlp.hook_post")
    )
    moved = 0
    for number in patterns[0]:
        place = section_of(base, number, LOOPS)
        heads, groups = (
            [[n for n in nodes if (n.section, n.layer) == place] for nodes in both]
            for both in (
                (base.circuit.heads, shuffled.circuit.heads),
                (base.circuit.neurons, shuffled.circuit.neurons),
            )
        )
        for old, new in zip(*heads, strict=True):
            assert old.selector == new.selector
            assert new.id == f"{new.section}.{new.layer}.head.{new.head}"
            before, after = (p[number][:, n.head] for p, n in zip(patterns, (old, new)))
            assert torch.allclose(before, after, atol=1e-4)
            moved += old.head != new.head
        for old, new in zip(*groups, strict=True):
            assert (old.id, old.writes) == (new.id, new.writes)
            before, after = (x[number][..., list(g.neurons)] for x, g in zip(neurons, (old, new)))
            assert torch.allclose(before, after, atol=1e-3)
            moved += old.neurons != new.neurons
    assert moved > 10


def test_every_edge_leads_from_and_to_something():
    circuit = permute(small_model("unique_set").compiled, seed=2).circuit
    known = {n.id for n in (*circuit.heads, *circuit.neurons, *circuit.features)}
    assert {end for edge in circuit.edges for end in edge} <= known
    assert {n.id for n in circuit.heads} <= {end for edge in circuit.edges for end in edge}


def test_every_head_is_turned_inside():
    plain = small_model("unique_set").compiled
    shuffled = permute(plain, seed=0)
    before, after = (c.model.state_dict()["prelude.0.attn.qkv.weight"] for c in (plain, shuffled))
    assert torch.isclose(before.norm(), after.norm())
    assert (before.abs() > 1e-6).sum() < (after.abs() > 1e-6).sum()


@pytest.mark.parametrize("program", ["one_shot", "unique_set", "parity"])
def test_distractors_are_active_in_every_layer(program):
    plain = small_model(program)
    old = plain.compiled.model.config
    busy = distract(plain.compiled, heads=3, neurons=5, width=4, seed=1)
    config = busy.model.config
    assert config.n_heads == old.n_heads + 3 and config.mlp_width == old.mlp_width + 5
    assert config.d_model == old.d_model + 4 and config.head_width == old.head_width
    patterns = cached(busy, plain.inputs, 2, "attn.hook_pattern")
    posts = cached(busy, plain.inputs, 2, "mlp.hook_post")
    sites = ("hook_attn_out", "hook_mlp_out")
    written = [cached(busy, plain.inputs, 2, site) for site in sites]
    for number, pattern in patterns.items():
        theirs = pattern[:, old.n_heads :, 1:]
        # They look at some keys more than at others, and not at the same ones in every input.
        seen = torch.arange(2, theirs.shape[-1] + 1)
        assert ((theirs.amax(-1) - 1 / seen).mean((0, 2)) > 0.1).all()
        assert (theirs.std(0).amax((1, 2)) > 0.05).all()
        assert (posts[number][..., old.mlp_width :].flatten(0, 1).std(0) > 0.01).all()
        for out in written:
            assert (out[number][..., old.d_model :].flatten(0, 1).std(0) > 0.01).all()
    listed = {(n.section, n.layer, n.head) for n in busy.circuit.heads}
    assert max(head for _, _, head in listed) < old.n_heads
    assert busy.circuit.heads == plain.compiled.circuit.heads


def test_what_they_write_does_not_pile_up():
    plain = small_model("ripple")
    busy = distract(plain.compiled, seed=0)
    with torch.no_grad():
        states = busy.model(plain.inputs, n_loops=60, return_type="states")
    theirs = states[..., -8:].norm(dim=-1).amax((1, 2))
    assert theirs[1] > 0.5
    assert torch.allclose(theirs[20:], theirs[20], atol=1e-4)


def test_zeros_do_not_give_them_away_behind_a_rotation_and_a_permutation():
    hidden = permute(rotate(distract(small_model("unique_set").compiled, seed=0), seed=1), seed=2)
    weights = hidden.model.state_dict()
    circuit = hidden.circuit
    for prefix in ("prelude.0", "block.0", "block.2"):
        listed = [
            n for g in circuit.neurons if f"{g.section}.{g.layer}" == prefix for n in g.neurons
        ]
        known = weights[f"{prefix}.mlp.fc_in.weight"][listed]
        others = [n for n in range(hidden.model.config.mlp_width) if n not in listed]
        rest = weights[f"{prefix}.mlp.fc_in.weight"][others]
        busy = rest[rest.any(1)]
        assert len(busy) == 16
        assert (known.abs() < 1e-9).float().mean() < 0.01 and (
            busy.abs() < 1e-9
        ).float().mean() < 0.01


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"heads": -1}, "heads"),
        ({"neurons": 1.5}, "neurons"),
        ({"width": 0}, "width"),
        ({"heads": True}, "heads"),
        ({"heads": 0, "neurons": 0}, "heads and neurons"),
    ],
)
def test_bad_sizes(sizes, what):
    with pytest.raises(InputError) as caught:
        distract(small_model("ripple").compiled, seed=0, **sizes)
    assert caught.value.what == what


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"neurons": 0}])
def test_either_kind_can_be_left_out(sizes):
    plain = small_model("ripple")
    busy = distract(plain.compiled, seed=0, **sizes)
    logits = busy.model(plain.inputs, n_loops=plain.n_loops, return_type="all_logits")
    assert torch.allclose(logits, plain.logits, atol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
def test_noise_is_as_large_as_said_against_every_matrix_in_every_basis(turned):
    plain = small_model("unique_set").compiled
    plain = rotate(plain, seed=1) if turned else plain
    before = plain.model.state_dict()
    after = add_noise(plain, relative=0.1, seed=0).model.state_dict()
    for name, old in before.items():
        parts = zip(old.chunk(3), after[name].chunk(3)) if "qkv" in name else [(old, after[name])]
        for w, noisy in parts:
            if name.endswith("bias"):
                assert torch.equal(w, noisy)
            else:
                # Of n entries, the size is known to 1 / sqrt(2 n).
                size = float((noisy - w).norm() / w.norm().clamp(min=1e-9))
                expected = 0.1 if w.any() else 0.0
                assert abs(size - expected) < 0.5 / math.sqrt(w.numel()), name


def test_noise_of_nothing_is_nothing():
    plain = small_model("ripple").compiled
    same = add_noise(plain, relative=0, seed=0).model.state_dict()
    assert all(torch.equal(w, same[name]) for name, w in plain.model.state_dict().items())


def test_a_little_noise_is_borne_and_much_is_not():
    plain = small_model("ripple")
    wrong = []
    for relative in (1e-3, 1.0):
        noisy = add_noise(plain.compiled, relative=relative, seed=0)
        agreement = compare_with_program(noisy, plain.inputs, n_loops=plain.n_loops)
        wrong.append(sum(agreement.wrong_values.values()) + agreement.wrong_answers)
    assert wrong[0] == 0 and wrong[1] > 50


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("relative", [-0.1, math.inf, math.nan, True, "0.1", None])
def test_bad_sizes_of_noise(relative):
    with pytest.raises(InputError) as caught:
        add_noise(small_model("ripple").compiled, relative=relative, seed=0)
    assert caught.value.what == "relative"


EXACT = {
    "rotate": rotate,
    "permute": permute,
    "distract": partial(distract, heads=1, neurons=3, width=2),
    "superpose": partial(superpose, steps=40),
}
ALL = {**EXACT, "add_noise": partial(add_noise, relative=0.1)}


def weights(compiled: Compiled) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in compiled.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=5, deadline=None)
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


@pytest.mark.parametrize("program", ["ripple", "one_shot"])
def test_nothing_drifts_in_500_loops(program):
    plain = small_model(program)
    inputs = plain.inputs[:4]
    hidden = plain.compiled
    for seed, disguise in enumerate(EXACT.values()):
        hidden = disguise(hidden, seed=seed)
    n_loops = max(loops_until_a_state_returns(hidden, inputs, most=500), 20)
    agreement = compare_with_program(hidden, inputs, n_loops=n_loops)
    assert agreement.exact and agreement.state_error < 1e-3
    with torch.no_grad():
        ends = [c.model(inputs, n_loops=n_loops) for c in (hidden, plain.compiled)]
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
    with pytest.raises(InputError) as caught:
        ALL[disguise](small_model("ripple").compiled, seed=seed)
    assert caught.value.what == "seed"
