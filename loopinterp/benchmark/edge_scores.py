"""Scores of edges, whoever made them, against the circuit that is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from loopinterp.circuits.edges.edge_attribution import (
    EAP,
    EAP_IG,
    EDGE_IG,
    EXACT,
    MAGNITUDE,
    RANDOM,
    EdgeEffects,
)
from loopinterp.circuits.edges.edge_choice import SHARES, TiedCircuits, areas, top
from loopinterp.circuits.edges.edge_recovery import known_truths, ranking
from loopinterp.circuits.edges.edge_study_result import TIED, UNROLLED
from loopinterp.circuits.edges.known_edges import TiedEdge
from loopinterp.circuits.edges.unrolled_graph import UnrolledGraph
from loopinterp.errors import InputError, check_choice

if TYPE_CHECKING:
    from loopinterp.benchmark.benchmark_folder import Exercise, KnownCircuit

UnrolledEdge = tuple[str, str]
"""Sender and receiver of a run, with their loops: ``("0:block.0.mlp", "1:block.0.head.0")``."""

EdgeScores = (
    Mapping[TiedEdge, float]
    | Mapping[UnrolledEdge, float]
    | Mapping[TiedEdge | UnrolledEdge, float]
)
"""Of the block's edges, of the run's, or of both."""

EdgeMethod = Callable[["Exercise"], EdgeScores]

OWN_EDGE_METHODS = (EXACT, EDGE_IG, EAP_IG, EAP, MAGNITUDE, RANDOM)
"""Those of the library; the last two are controls."""

STEPS = 8
_CURVE = 20


def score_edges(method: EdgeMethod, known: KnownCircuit) -> pd.DataFrame:
    r"""How well scores of edges tell the edges of a known circuit from others.

    Edges are ranked by the absolute value of their score; those without one are last. Scores of
    the run's edges give those of tied ones too, where those are not given: the sum of absolute
    values over the loops. AUROC and average precision are of
    :func:`~loopinterp.circuits.edges.edge_recovery.known_truths`. CPR and CMD are the areas under
    :math:`f` and :math:`|1 - f|`, f being the faithfulness of the tied edges of highest score,
    at MIB's ten shares of the edges (arXiv 2504.13151) and, ``_of_curve``, at even steps.

    Args:
        method: From an exercise to scores, by (sender, receiver, lag) of tied edges or by (sender,
            receiver) of the run's, named as :class:`~loopinterp.circuits.UnrolledGraph` names
            them; queries, keys and values of a head are that head.
        known: The model.

    Returns:
        A row for each graph and truth.

    Raises:
        InputError: Scores of edges that there are not, or that are no numbers; a trained model,
            whose edges are not known.
    """
    known.true_edges()  # refused where they are not known, before the method runs
    exercise = known.exercise
    graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
    names = graph.sender_names, graph.receiver_names
    run = [(names[0][s], names[1][r]) for s, r in graph.edges.nonzero().tolist()]
    in_run = graph.tied_index[graph.edges].tolist()
    scores = _checked(method(exercise), [*graph.tied_edges, *run])
    tied = np.array([scores.get(edge, 0.0) for edge in graph.tied_edges])
    by_graph = {TIED: (graph.tied_edges, tied)}
    if any(len(edge) == 2 for edge in scores):
        unrolled = np.array([scores.get(edge, 0.0) for edge in run])
        by_graph[UNROLLED] = [graph.tied_edges[k] for k in in_run], unrolled
        if all(len(edge) == 2 for edge in scores):
            np.add.at(tied, in_run, unrolled)
    kept = _faithfulness(exercise, graph, tied)
    rows = []
    for name, (edges, sizes) in by_graph.items():
        truths = known_truths(edges, known.compiled, among=graph.tied_edges)
        for row in ranking(sizes, truths):
            rows.append({"graph": name, **row, **(kept if name == TIED else {})})
    return pd.DataFrame(rows)


def own_edge_method(name: str, *, seed: int = 0) -> EdgeMethod:
    """One of the library's methods, as an outside one would come.

    Args:
        name: One of :data:`OWN_EDGE_METHODS`.
        seed: Of random scores.

    Raises:
        InputError: There is no such method.
    """
    check_choice("method", name, OWN_EDGE_METHODS)

    def scores(exercise: Exercise) -> Mapping[TiedEdge | UnrolledEdge, float]:
        graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
        effects = _effects(exercise, graph)
        if name == EXACT:
            sizes = effects.exact_tied().abs().mean(-1)
            return dict(zip(graph.tied_edges, sizes.tolist()))
        ways = {
            EAP: effects.eap,
            EAP_IG: lambda: effects.eap_ig(STEPS),
            EDGE_IG: lambda: effects.edge_ig(STEPS),
            MAGNITUDE: effects.magnitude,
            RANDOM: lambda: effects.random(torch.Generator().manual_seed(seed)),
        }
        each = ways[name]()
        found: dict[TiedEdge | UnrolledEdge, float] = {}
        # Over loops effects may cancel, which their absolute values do not.
        found |= zip(graph.tied_edges, effects.tied(each).abs().mean(-1).tolist())
        there = graph.edges.nonzero().tolist()
        sizes = each.abs().mean(-1)[graph.edges].tolist()
        senders, receivers = graph.sender_names, graph.receiver_names
        found |= {(senders[s], receivers[r]): x for (s, r), x in zip(there, sizes)}
        return found

    return scores


def _effects(exercise: Exercise, graph: UnrolledGraph) -> EdgeEffects:
    return EdgeEffects.between(exercise.model, graph, exercise.base, exercise.source)


def _faithfulness(exercise: Exercise, graph: UnrolledGraph, tied: np.ndarray) -> dict[str, float]:
    """Areas under the curves of the tied edges of highest score."""
    circuits, ranked = TiedCircuits(_effects(exercise, graph)), torch.from_numpy(abs(tied))
    of = cache(lambda count: circuits.faithfulness(top(ranked, count)))
    cpr, cmd = areas([of(int(share * len(tied))) for share in SHARES])
    counts = np.unique(np.linspace(0, len(tied), _CURVE + 1).round().astype(int))
    curve = areas([of(int(count)) for count in counts], counts / len(tied))
    return {"cpr": cpr, "cmd": cmd, "cpr_of_curve": curve[0], "cmd_of_curve": curve[1]}


def _checked(
    found: EdgeScores, edges: list[TiedEdge | UnrolledEdge]
) -> dict[TiedEdge | UnrolledEdge, float]:
    """Absolute values of scores, all of edges that there are."""
    scores: dict[TiedEdge | UnrolledEdge, float] = dict(found.items())
    unknown = scores.keys() - set(edges)
    if not scores or unknown:
        raise InputError(
            "scores of edges",
            expected=f"edges such as {edges[0]} or {edges[-1]}",
            given=str(min(unknown, key=str)) if unknown else "none",
            fix="Name them as UnrolledGraph(model.config, n_loops) does.",
        )
    bad = [edge for edge, score in scores.items() if not math.isfinite(score)]
    if bad:
        raise InputError(
            f"score of {bad[0]}",
            expected="a finite number",
            given=repr(scores[bad[0]]),
            fix="Leave out edges that have none.",
        )
    return {edge: abs(float(score)) for edge, score in scores.items()}
