"""Heads and neurons in another order."""

from __future__ import annotations

import torch

from loopinterp.rasp import distract, permute
from tests.rasp.disguises.small_models import cached, section_of, small_model

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
