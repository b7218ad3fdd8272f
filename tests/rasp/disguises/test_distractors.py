"""Heads and neurons that are busy and to which nothing listens."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import distract, permute, rotate
from tests.rasp.disguises.small_models import cached, small_model


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
    ("sizes", "message"),
    [
        ({"heads": -1}, "heads: expected an integer >= 0"),
        ({"neurons": 1.5}, "neurons: expected an integer >= 0"),
        ({"width": 0}, "width: expected an integer >= 1"),
        ({"heads": True}, "heads: expected an integer"),
        ({"heads": 0, "neurons": 0}, "at least one distractor"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(InputError, match=message):
        distract(small_model("ripple").compiled, seed=0, **sizes)


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"neurons": 0}])
def test_either_kind_can_be_left_out(sizes):
    plain = small_model("ripple")
    busy = distract(plain.compiled, seed=0, **sizes)
    logits = busy.model(plain.inputs, n_loops=plain.n_loops, return_type="all_logits")
    assert torch.allclose(logits, plain.logits, atol=1e-4)
