"""Every study that needs no task of its own runs on every adapter, with no special case in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loopinterp import circuits, dynamics, lenses
from loopinterp.models import ResidualBelow, iterate, run_until
from loopinterp.tasks import Batch
from tests.adapters.kinds import KINDS, adapted, tokens_of

every = pytest.mark.parametrize("name", list(KINDS))

STUDIES: dict[str, Callable[[Any, Any], Any]] = {
    "convergence": lambda m, d: dynamics.convergence_study(m, d, n_loops=4, n_spectral=0),
    "extrapolation": lambda m, d: dynamics.extrapolation_study(m, d, n_loops=4),
    "geometry": lambda m, d: dynamics.geometry_study(m, d, limit_steps=2),
    "reachability": lambda m, d: dynamics.reachability_study(m, d, n_loops=4),
    "basin_map": lambda m, d: dynamics.basin_map(m, d, n_loops=3, points=2),
    "input_dependence": lambda m, d: dynamics.input_dependence_study(
        m, d, n_loops=3, n_sensitivity=1, n_probes=1
    ),
    "local_stability": lambda m, d: dynamics.local_stability_study(m, d, k=1),
    "attention_stabilisation": lambda m, d: dynamics.attention_stabilisation_study(m, d, n_loops=3),
    "attention": lambda m, d: lenses.attention_study(m, d, n_loops=2),
    "ablation": lambda m, d: circuits.ablation_study(m, d, kinds=("zero",), when=("all",)),
}
PATCHED = ["state", "resid_pre", "z", "pattern", "k"]


def _batch(name: str) -> Batch:
    tokens = tokens_of(name, batch=4, n_pos=5)
    model = adapted(name)
    n_loops = torch.full((4,), model.n_loops)
    targets = model(tokens).argmax(-1)
    targets[0] = (targets[0] + 1) % model.config.d_vocab  # one is wrong
    return Batch(tokens, targets, torch.full((4,), 5), n_loops)


@every
@pytest.mark.parametrize("study", sorted(STUDIES))
def test_a_study_runs(name: str, study: str) -> None:
    result = STUDIES[study](adapted(name), _batch(name))
    assert result.data.sizes
