"""Scores of edges against runs by hand and what they add up to; circuits of edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import simpson
from scipy.special import expit
from torch import Tensor

from loopinterp.edges.edge_effects import (
    SHARES,
    EdgeEffects,
    TiedCircuits,
    adaptive_nodes,
    areas,
    top,
)
from loopinterp.edges.edge_runs import EdgeRuns
from loopinterp.edges.unrolled_graph import UnrolledGraph
from tests.edges.by_hand import run_by_hand
from tests.edges.test_edge_runs import ARCHITECTURES, LOOPS, model_with, tokens


def effects_of(name: str, *, split: bool = True) -> EdgeEffects:
    model, (base, source) = model_with(**ARCHITECTURES[name]), tokens()
    graph = UnrolledGraph(model.config, LOOPS, split=split)
    with torch.no_grad():
        # Or an untrained model answers everything alike.
        model.unembedding.bias -= model(base, n_loops=LOOPS).mean((0, 1))
    return EdgeEffects(model, graph, base, source)


def test_the_metric_by_example_has_the_metric_as_its_mean() -> None:
    effects = effects_of("pre")
    logits = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert effects.compared.by_example(logits).mean().item() == pytest.approx(
        effects.compared._metrics(logits[None])[0].item()
    )


def test_exact_effects_are_those_of_runs_by_hand() -> None:
    effects = effects_of("post, loop norm, input", split=False)
    model, (base, source) = effects.model, tokens()
    _, donated = run_by_hand(model, source, LOOPS)
    sizes = effects.scores("exact")
    names = effects.graph.sender_names, effects.graph.receiver_names
    compared = effects.compared
    for s, r in effects.graph.edges.nonzero().tolist()[::36]:
        ends = {names[0][s]}, {names[1][r], *(f"{names[1][r]}.{slot}" for slot in "qkv")}
        logits, _ = run_by_hand(
            model, base, LOOPS,
            lambda a, b, x, ends=ends: donated[a] if a in ends[0] and b in ends[1] else x,
        )  # fmt: skip
        expected = compared.scores(logits[None])[0, 1]
        assert sizes[s, r].mean().item() == pytest.approx(expected, abs=1e-8)


def test_a_tied_edge_is_all_its_edges_at_once_and_gradients_add_up_over_them() -> None:
    effects = effects_of("window, one layer", split=False)
    graph, exact, eap = effects.graph, effects.exact_tied(), effects.scores("eap")
    for k in range(0, len(graph.tied_edges), 5):
        edges = graph.tied_index == k
        torch.testing.assert_close(exact[k], effects.replaced(edges))
        torch.testing.assert_close(effects.tied(eap)[k], eap[edges].sum(0))


@pytest.mark.parametrize("name", ["pre", "post, internal", "surround"])
def test_eap_is_the_slope_of_the_metric_along_each_edge(name: str) -> None:
    effects, small = effects_of(name), 1e-5
    eap_scores = effects.scores("eap").mean(-1)
    graph, (base, source) = effects.graph, tokens()
    runs = EdgeRuns(effects.model, graph, base)
    donor = EdgeRuns(effects.model, graph, source)()[1].detach()
    for s, r in graph.edges.nonzero().tolist()[::41]:
        ends = []
        for step in (small, -small):
            weights = torch.zeros(graph.edges.shape, dtype=torch.float64)
            weights[s, r] = step
            with torch.no_grad():
                ends.append(effects.compared.scores(runs(weights, donor)[0][None])[0, 1])
        slope = (ends[0] - ends[1]) / (2 * small)
        assert eap_scores[s, r].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "n_steps"), [("pre", 12), ("post, loop norm, input", 16), ("sandwich, sublayer", 30)]
)
def test_integrated_gradients_add_up_to_the_whole_effect(name: str, n_steps: int) -> None:
    effects = effects_of(name, split=False)
    along_input = effects.scores("eap_ig", n_steps=2 * n_steps)
    total = along_input[0].sum(0).mean().item()  # the edges out of the input
    assert total == pytest.approx(1, abs=0.01)
    along_edges = effects.scores("edge_ig", n_steps=n_steps)
    assert along_edges[effects.graph.edges].sum(0).mean().item() == pytest.approx(1, abs=0.01)
    # By example too: each adds up to its own change.
    changes = effects.replaced(effects.graph.edges)
    torch.testing.assert_close(along_edges.sum((0, 1)), changes, atol=0.02, rtol=0.02)


def test_controls_know_norms_and_draws_only() -> None:
    effects = effects_of("pre")
    sizes = effects.scores("magnitude")
    graph, model = effects.graph, effects.model
    r = graph.receivers_named("1:block.1.head.0.v")[0]
    written = effects.base[0].norm(dim=-1).mean(-1)
    expected = written * model.block[1].attn.W_V[0].norm()
    torch.testing.assert_close(sizes[0, r], expected.detach())
    draws = [
        effects.scores("random", generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0].equal(draws[1]) and not draws[0].equal(draws[2])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_full_circuit_is_faithful_and_the_empty_one_is_the_source_s_run(name: str) -> None:
    effects: Any = effects_of(name)
    assert effects.faithfulness(effects.graph.edges) == pytest.approx(1)
    assert effects.faithfulness(torch.zeros_like(effects.graph.edges)) == pytest.approx(0)


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
    tied = circuits()
    in_circuit = tied.pruned(0.05)
    n = len(in_circuit)
    assert 0 < int(in_circuit.sum()) < n
    assert tied.pruned(1e-9).sum() >= in_circuit.sum() >= tied.pruned(0.3).sum()
    # What it let go last is within the threshold of what is left.
    f = tied.faithfulness(in_circuit)
    cost = tied.minimality(in_circuit)
    assert bool((cost.isnan() == ~in_circuit).all())
    one = int(in_circuit.nonzero()[0])
    without = in_circuit.clone()
    without[one] = False
    assert cost[one].item() == pytest.approx(f - tied.faithfulness(without))


def test_the_whole_graph_is_complete() -> None:
    tied = circuits()
    every_edge = torch.ones(len(tied.pruned(0.3)), dtype=torch.bool)
    complete = tied.completeness(every_edge, torch.Generator().manual_seed(0))
    assert complete.without == pytest.approx(0)
    assert complete.mean_gap == complete.largest_gap == 0
    half = tied.completeness(top(torch.rand(len(every_edge)), 5), torch.Generator().manual_seed(0))
    assert half.largest_gap >= half.mean_gap > 0


def test_edges_at_random_are_as_many_as_asked_for() -> None:
    tied = circuits()
    n = len(tied.pruned(0.3))
    assert tied.at_random(n, torch.Generator().manual_seed(0)) == pytest.approx([1] * 10)


def sharp(effects: EdgeEffects) -> EdgeEffects:
    """The same effects of a model with sharp attention."""
    with torch.no_grad():
        for layer in effects.model.block:
            queries_and_keys = layer.attn.qkv.weight[: 2 * layer.attn.out.weight.shape[1]]
            queries_and_keys *= 6
    return EdgeEffects(effects.model, effects.graph, *tokens())


def test_adaptive_integrals_are_those_of_scipy_on_a_model_with_sharp_attention() -> None:
    effects = sharp(effects_of("pre", split=False))
    adaptive = effects.scores("eap_ig", rule="adaptive", tolerance=1e-3)
    # The first example alone, and a copy of it at each of many points of the path of its input.
    base, source = tokens()[:, :1].expand(-1, 2049, -1)
    along = EdgeEffects(effects.model, effects.graph, base, source)
    points = torch.linspace(0, 1, len(base), dtype=torch.float64)
    change = along.source - along.base
    embedding = along.base[0] + points[:, None, None] * change[0]
    share = float(effects.replaced(effects.graph.edges)[0])  # in the mean change of all examples
    gradients = share * along._gradient(0.0, change, added=True, embedding=embedding)
    expected = simpson(gradients[0].numpy(), x=points.numpy())
    coarse = simpson(gradients[0, :, ::2].numpy(), x=points[::2].numpy())
    np.testing.assert_allclose(coarse, expected, atol=1e-3)
    np.testing.assert_allclose(adaptive[0, :, 0], expected, atol=4e-3)
    # All edges together are the change of the metric itself.
    assert float(np.sum(expected)) == pytest.approx(share, abs=4e-3)
    integral = effects.integrals["eap_ig"]
    assert integral.gap <= integral.estimated <= 1e-3
    # At as many gradients the midpoint rule is farther away.
    effects.scores("eap_ig", n_steps=integral.n_gradients)
    assert effects.integrals["eap_ig"].largest_gap > integral.largest_gap


def test_the_gap_is_what_the_scores_lack_of_the_whole_change() -> None:
    effects = effects_of("pre", split=False)
    for method, lead in (("eap_ig", 1), ("edge_ig", None)):
        scores = effects.scores(method, n_steps=2)[:lead]
        whole = effects.replaced(effects.graph.edges)
        missing = (scores.sum((0, 1)) - whole).mean().abs()
        assert effects.integrals[method].gap == pytest.approx(float(missing))
        effects.scores(method, rule="adaptive", tolerance=1e-2)
        assert effects.integrals[method].gap < 1e-2
        effects.scores(method, rule="adaptive", tolerance=1e-9, n_steps=12)
        assert effects.integrals[method].n_gradients == 12  # no more than asked for


@given(centre=st.floats(0, 1), width=st.floats(1e-5, 1))
@settings(max_examples=30)
def test_adaptive_nodes_find_peaks_wherever_they_are(centre: float, width: float) -> None:
    """A logistic peak that holds the whole change, beside a flat example; errors are bounds."""

    def value(points: Tensor) -> Tensor:
        rise = torch.sigmoid((points[0] - centre) / width)
        return torch.stack([rise, points[1]])

    def slope(points: Tensor) -> Tensor:
        z = (points - centre) / width
        peak = torch.exp(-z.abs()) / (1 + torch.exp(-z.abs())) ** 2 / width
        return torch.stack([peak[0], torch.ones((), dtype=torch.float64)])

    nodes = adaptive_nodes(value, slope, 2, tolerance=1e-4, most=3000)
    torch.testing.assert_close(nodes.weights.sum(0), torch.ones(2, dtype=torch.float64))
    total = nodes.integral(slope)
    ends = expit((np.array([0, 1]) - centre) / width)
    assert nodes.error.mean() <= 1e-4
    assert abs(float(total[0]) - (ends[1] - ends[0])) <= float(nodes.error[0]) + 1e-9
    assert float(total[1]) == pytest.approx(1)


def test_adaptive_nodes_end_where_all_panels_are_the_narrowest() -> None:
    """A step has no slope, so that its error stays; half precision has few points."""

    def value(points: Tensor) -> Tensor:
        return (points > torch.tensor([0.3, 0.9])).double()

    nodes = adaptive_nodes(value, torch.zeros_like, 2, tolerance=0.01, most=3000, narrowest=2.0**-4)
    assert nodes.points.shape == (3 * 2**4, 2)
    assert nodes.error.tolist() == [1, 1]
    torch.testing.assert_close(
        nodes.weights.unflatten(0, (-1, 3)).sum(1),
        torch.full((16, 2), 2.0**-4, dtype=torch.float64),
    )
