"""Areas, pruning, completeness and minimality."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.circuits.edges.edge_choice import SHARES, TiedCircuits, areas, top
from tests.circuits.edges.test_edge_attribution import effects_of


def circuits() -> TiedCircuits:
    return TiedCircuits(effects_of("window, one layer", split=False))


def test_areas_are_those_of_trapezoids() -> None:
    assert areas([0.0, 1.0, 2.0], [0.0, 0.5, 1.0]) == pytest.approx((1.0, 0.5))
    cpr, cmd = areas(np.zeros(len(SHARES)))
    assert (cpr, cmd) == pytest.approx((0, 0.999))


def test_the_top_edges_are_those_of_highest_score_in_order() -> None:
    scores = torch.tensor([0.1, 3.0, 0.1, 2.0])
    assert top(scores, 3).tolist() == [True, True, False, True]
    assert not top(scores, 0).any()


def test_pruning_lets_no_edge_go_that_the_threshold_holds() -> None:
    made = circuits()
    kept = made.pruned(0.05)
    n = len(kept)
    assert 0 < int(kept.sum()) < n
    assert made.pruned(1e-9).sum() >= kept.sum() >= made.pruned(0.3).sum()
    # What it let go last is within the threshold of what is left.
    f = made.faithfulness(kept)
    cost = made.minimality(kept)
    assert bool((cost.isnan() == ~kept).all())
    one = int(kept.nonzero()[0])
    without = kept.clone()
    without[one] = False
    assert cost[one].item() == pytest.approx(f - made.faithfulness(without))


def test_the_whole_graph_is_complete() -> None:
    made = circuits()
    whole = torch.ones(len(made.pruned(0.3)), dtype=torch.bool)
    complete = made.completeness(whole, torch.Generator().manual_seed(0))
    assert complete.without == pytest.approx(0)
    assert complete.mean_gap == complete.largest_gap == 0
    half = made.completeness(top(torch.rand(len(whole)), 5), torch.Generator().manual_seed(0))
    assert half.largest_gap >= half.mean_gap > 0


def test_edges_at_random_are_as_many_as_asked_for() -> None:
    made = circuits()
    n = len(made.pruned(0.3))
    assert made.at_random(n, torch.Generator().manual_seed(0), draws=2) == pytest.approx([1, 1])
