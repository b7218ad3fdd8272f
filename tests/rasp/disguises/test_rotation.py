"""Rotations of the residual stream."""

from __future__ import annotations

import torch

from loopinterp.rasp import rotate
from tests.rasp.disguises.small_models import small_model


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
    directions = turned.circuit.of("local").write if "local" in turned.circuit.variables else None
    for name in turned.circuit.variables:
        directions = turned.circuit.of(name).write
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
