"""Scores of outside tools on the benchmark: edges, programs, subspaces of variables.

Edges can be read and written as EAP-IG's JSON graph (also MIB's). It unrolls a run of T loops over
a block of L layers to T·L layers: head 1 of the block's first layer at loop 3 is ``a{3L}.h1``, its
MLP ``m{3L}``, the readout ``logits``. An edge into a head is three: ``m0->a3.h1<q>``, ``<k>`` and
``<v>``.

Source: the code of arXiv 2403.17806, and arXiv 2504.13151.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from loopinterp.benchmark.known_models import Exercise, KnownCircuit, KnownModel
from loopinterp.benchmark.mechanism_scores import interchange_variables, probed_subspaces
from loopinterp.comparison.program_comparison import compare_programs
from loopinterp.comparison.subspace_search import labelled_states, mean_directions
from loopinterp.comparison.variable_interchange import RANDOM as RANDOM_CHANGE
from loopinterp.compiler.circuit import orthonormal
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice, need
from loopinterp.core.settings import Seed
from loopinterp.decompiler.decompilation import decompile
from loopinterp.decompiler.evidence import EXACT as EXACT_CLAIM
from loopinterp.decompiler.program_writing import programs_of
from loopinterp.edges.edge_effects import SHARES, EdgeEffects, TiedCircuits, areas, top
from loopinterp.edges.known_edges import recovery
from loopinterp.edges.unrolled_graph import (
    INPUT,
    READOUT,
    TIED,
    UNROLLED,
    Component,
    TiedEdge,
    UnrolledGraph,
)
from loopinterp.models import LoopedTransformerConfig
from loopinterp.programs import equivalence
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import Batch

UnrolledEdge = tuple[str, str]
"""Sender and receiver with their loops: ``("0:block.0.mlp", "1:block.0.head.0")``."""

EdgeScores = (
    Mapping[TiedEdge, float]
    | Mapping[UnrolledEdge, float]
    | Mapping[TiedEdge | UnrolledEdge, float]
)
"""Scores of tied edges, of the unrolled run's edges, or of both."""

EdgeMethod = Callable[["Exercise"], EdgeScores]
OWN_EDGE_METHODS = ("exact", "edge_ig", "eap_ig", "eap", "magnitude", "random")
"""The library's methods; the last two are controls."""


def score_edges(method: EdgeMethod, known: KnownCircuit) -> pd.DataFrame:
    """How well scores of edges separate the edges of a known circuit from others.

    Edges are ranked by absolute score; edges without one are last. If only scores of unrolled edges
    are given, a tied edge has the sum of their absolute values over the loops. AUROC and average
    precision are those of :func:`~loopinterp.edges.edges_recovered`. CPR and CMD are the areas
    under :math:`f` and :math:`|1 - f|`, where f is the faithfulness of the tied edges of highest
    score, at MIB's ten shares of the edges (arXiv 2504.13151) and, ``_of_curve``, at even steps.

    Args:
        method: Maps an exercise to scores, by (sender, receiver, lag) of tied edges or (sender,
            receiver) of unrolled ones, named as in :class:`~loopinterp.edges.UnrolledGraph`.
            Queries, keys and values of a head count as that head.

    Returns:
        A row for each graph and truth.

    Raises:
        InputError: If an edge is unknown, a score is no number, or the model was trained.
    """
    known.true_edges()  # raises where they are not known, before the method runs
    exercise = known.exercise
    graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
    scores = _checked(method(exercise), [*graph.tied_edges, *graph.edge_names])
    # [edge], of the block's edges and of the run's, in the order of the graph.
    tied = np.array([scores.get(edge, 0.0) for edge in graph.tied_edges])
    by_graph = {TIED: (graph.tied_edges, tied)}
    if any(len(edge) == 2 for edge in scores):
        unrolled = np.array([scores.get(edge, 0.0) for edge in graph.edge_names])
        tied_of = graph.tied_index[graph.edges].tolist()  # of each edge of the run
        by_graph[UNROLLED] = [graph.tied_edges[k] for k in tied_of], unrolled
        if all(len(edge) == 2 for edge in scores):
            np.add.at(tied, tied_of, unrolled)
    areas_of = {TIED: _areas_of(exercise, graph, tied)}
    rows = []
    for name, (edges, sizes) in by_graph.items():
        for row in recovery(sizes, edges, known.compiled, among=graph.tied_edges):
            rows.append({"graph": name, **row, **areas_of.get(name, {})})
    return pd.DataFrame(rows)


@checked
def own_edge_method(name: str, *, seed: Seed = 0) -> EdgeMethod:
    """One of :data:`OWN_EDGE_METHODS`; ``seed`` is for random scores."""
    check_choice("method", name, OWN_EDGE_METHODS)

    def scores(exercise: Exercise) -> Mapping[TiedEdge | UnrolledEdge, float]:
        graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
        effects = EdgeEffects(exercise.model, graph, exercise.base, exercise.source)
        if name == "exact":
            sizes = effects.exact_tied().abs().mean(-1)
            return dict(zip(graph.tied_edges, sizes.tolist()))
        generator = torch.Generator().manual_seed(seed)
        # [sender, receiver, example]; pairs that are no edges are left out below.
        by_pair = effects.scores(name, n_steps=8, generator=generator)
        by_edge: dict[TiedEdge | UnrolledEdge, float] = {}
        # Over loops effects may cancel, which their absolute values do not.
        by_edge |= zip(graph.tied_edges, effects.tied(by_pair).abs().mean(-1).tolist())
        by_edge |= zip(graph.edge_names, by_pair.abs().mean(-1)[graph.edges].tolist())
        return by_edge

    return scores


def _areas_of(exercise: Exercise, graph: UnrolledGraph, tied: np.ndarray) -> dict[str, float]:
    effects = EdgeEffects(exercise.model, graph, exercise.base, exercise.source)
    circuits, ranked = TiedCircuits(effects), torch.from_numpy(abs(tied))
    faithfulness = cache(lambda count: circuits.faithfulness(top(ranked, count)))
    cpr, cmd = areas([faithfulness(int(share * len(tied))) for share in SHARES])
    # Numbers of edges at even steps, from none to all.
    counts = np.unique(np.linspace(0, len(tied), 21).round().astype(int))
    curve = areas([faithfulness(int(count)) for count in counts], counts / len(tied))
    return {"cpr": cpr, "cmd": cmd, "cpr_of_curve": curve[0], "cmd_of_curve": curve[1]}


def _checked(
    by_edge: EdgeScores, edges: list[TiedEdge | UnrolledEdge]
) -> dict[TiedEdge | UnrolledEdge, float]:
    scores: dict[TiedEdge | UnrolledEdge, float] = dict(by_edge.items())
    unknown = scores.keys() - set(edges)
    bad = [edge for edge, score in scores.items() if edge in unknown or not math.isfinite(score)]
    if bad or not scores:
        expected = f"finite numbers for edges such as {edges[0]} or {edges[-1]}"
        got = f"{scores[bad[0]]!r} for {bad[0]}" if bad else "none"
        fix = "Name edges as UnrolledGraph(model.config, n_loops) does; leave others out."
        raise InputError("scores of edges", expected=expected, given=got, fix=fix)
    return {edge: abs(float(score)) for edge, score in scores.items()}


def eap_graph(known: KnownCircuit) -> dict[str, Any]:
    """The true edges of a model's run, as EAP-IG's ``Graph.from_json`` reads them.

    Edges of the program have score 1 and are in the graph; all others have 0. Queries, keys and
    values of a head are in the graph together.

    Raises:
        InputError: If the model was trained; its edges are not known.

    Example:
        >>> from loopinterp.benchmark import KnownCircuit, benchmark_models
        >>> (about,) = benchmark_models(["prefix_xor.bare"])
        >>> document = eap_graph(KnownCircuit(about, about.compiled, *about.pairs(), {}))
        >>> [name for name, edge in document["edges"].items() if edge["in_graph"]][:3]
        ['input->m0', 'input->m1', 'input->m2']
    """
    exercise, true = known.exercise, known.true_edges()
    config = exercise.model.config
    graph = UnrolledGraph(config, exercise.n_loops)
    edges: dict[str, dict[str, float | bool]] = {}
    used: set[str] = set()
    tied_of = graph.tied_index[graph.edges].tolist()  # of each edge of the run, the tied edge
    for k, names in zip(tied_of, _eap_edges(graph, config)):
        is_true = graph.tied_edges[k] in true
        edges |= {name: {"score": float(is_true), "in_graph": is_true} for name in names}
        if is_true:
            used.update(names[0].split("<")[0].split("->"))
    nodes = [_eap_name(x, config, graph.n_loops) for x in (*graph.senders, graph.readers[-1])]
    return {
        "cfg": {
            "n_layers": config.n_prelude + config.n_layers * graph.n_loops + config.n_coda,
            "n_heads": config.n_heads,
            "d_model": config.d_model,
            "parallel_attn_mlp": False,
        },
        "nodes": {name: {"in_graph": name in used} for name in nodes},
        "edges": edges,
    }


def edges_of_eap_graph(
    document: Mapping[str, Any], exercise: Exercise
) -> dict[UnrolledEdge, float]:
    """Scores of unrolled edges from a graph in EAP-IG's format.

    An edge into a head has the sum of the absolute scores of its queries, keys and values.
    """
    graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
    scores = document.get("edges", {})
    totals: dict[UnrolledEdge, float] = {}
    for edge, names in zip(graph.edge_names, _eap_edges(graph, exercise.model.config)):
        missing = [name for name in names if name not in scores]
        if missing:
            expected = f"edges such as {missing[0]}, of a run of {graph.n_loops} loops"
            got = f"{len(scores)} edges, and not this one"
            fix = "Pass the graph that was made of this model."
            raise InputError("graph of edges", expected=expected, given=got, fix=fix)
        totals[edge] = sum(abs(float(scores[name]["score"])) for name in names)
    return totals


def _eap_edges(graph: UnrolledGraph, config: LoopedTransformerConfig) -> Iterator[list[str]]:
    senders = [_eap_name(sender, config, graph.n_loops) for sender in graph.senders]
    readers = [_eap_name(reader, config, graph.n_loops) for reader in graph.readers]
    for s, r in graph.edges.nonzero().tolist():
        k, _ = graph.receivers[r]
        slots = (
            [f"<{slot}>" for slot in graph.layout.slots]
            if graph.readers[k].head is not None
            else [""]
        )
        yield [f"{senders[s]}->{readers[k]}{slot}" for slot in slots]


def _eap_name(component: Component, config: LoopedTransformerConfig, n_loops: int) -> str:
    if component.tied in (INPUT, READOUT):
        return {INPUT: "input", READOUT: "logits"}[component.tied]
    # Layers of the unrolled model that run before the component's section, or its loop.
    before = {
        "prelude": 0,
        "block": config.n_prelude + config.n_layers * (component.loop or 0),
        "coda": config.n_prelude + config.n_layers * n_loops,
    }
    layer = before[component.section] + (component.layer or 0)
    return f"m{layer}" if component.head is None else f"a{layer}.h{component.head}"


def score_program(
    method: Callable[[Exercise], LoopProgram | None], known: KnownCircuit
) -> pd.DataFrame:
    """Whether a program is equivalent to the known one under interchange interventions.

    Args:
        method: Maps an exercise to a program that is claimed to be exact, or None.

    Returns:
        One row: the ``outcome`` (``equivalent``, ``no program`` or ``false name``), and in
        ``told_apart`` the share of effective interventions that separate the two programs.
    """
    program = method(known.exercise)
    if program is None:
        return pd.DataFrame([{"outcome": "no program", "told_apart": float("nan")}])
    if not isinstance(program, LoopProgram):
        got, fix = type(program).__name__, "Return the program itself."
        raise InputError("program", expected="a LoopProgram or None", given=got, fix=fix)
    result = equivalence(program, known.compiled.program)
    share = max(result.share, result.natural_share)
    outcome = "equivalent" if result.equivalent else "false name"
    return pd.DataFrame([{"outcome": outcome, "told_apart": share}])


def by_decompiling(exercise: Exercise) -> LoopProgram | None:
    """The decompiled program, if claimed to be exact: from sharp values, else from regions."""
    model, task, n = exercise.model, exercise.task, exercise.n
    decompiled = decompile(model, task, n=n)
    if decompiled.claim.grade != EXACT_CLAIM:
        decompiled = decompile(model, task, n=n, sharp=False, across_loops=True)
    return decompiled.program if decompiled.claim.grade == EXACT_CLAIM else None


def by_comparing(exercise: Exercise, *, left_out: str | None = None) -> LoopProgram | None:
    """The stock program that the comparison identifies; ``left_out`` is no candidate."""
    rivals = [p for p in programs_of(exercise.task) if p.name != left_out]
    if not rivals:
        return None
    generator = torch.Generator().manual_seed(0)
    batch = exercise.task.sample(torch.full((256,), exercise.n), generator=generator)
    winner = compare_programs(exercise.model, rivals, batch).verdict.identified
    return None if winner is None else get_program(winner)


@checked
def score_variables(
    method: Callable[[Exercise, LoopProgram], Mapping[str, Tensor]],
    known: KnownCircuit,
    *,
    seed: Seed = 0,
) -> pd.DataFrame:
    """The IIA of the subspaces in which a tool places a program's variables.

    Args:
        method: Maps an exercise and the model's program to a subspace of each variable, as spanning
            rows ``[row, d_model]``; a variable without one is not found.

    Returns:
        One row: ``iia``, the whole-run accuracy over all variables and loops, with its interval;
        ``random``, the same after a random change of equal norm; and ``found``, the share of
        variables with a subspace. NaN where no interchange changes the program's answer.
    """
    exercise, program = known.exercise, known.compiled.program
    subspaces = dict(method(exercise, program))
    width = exercise.model.config.d_model
    for name, rows in subspaces.items():
        fits = name in program.variables and rows.ndim == 2 and rows.shape[1] == width
        expected = f"rows of d_model = {width}, of one of {', '.join(program.variables)}"
        what, got = f"subspace of {name!r}", f"shape {list(rows.shape)}"
        need(fits, what, expected, got, "Return one tensor [rank, d_model] for each variable.")
    # Variable -> [rank, d_model], orthonormal rows, so that an interchange is one projection.
    bases = {name: orthonormal(rows) for name, rows in subspaces.items() if len(rows)}
    share = len(bases) / len(program.variables)
    row: dict[str, float] = dict.fromkeys(("iia", "low", "high", "random"), float("nan"))
    if bases:
        model = KnownModel(known.compiled, _batch(exercise), exercise.n_loops)
        runs = interchange_variables(model, bases, seed)
        iia, low, high, n_runs = runs.pooled()
        if n_runs:
            row = {"iia": iia, "low": low, "high": high, "random": runs.pooled(RANDOM_CHANGE)[0]}
    return pd.DataFrame([{**row, "found": share}])


def by_probing(exercise: Exercise, program: LoopProgram) -> Mapping[str, Tensor]:
    """The subspace that a ridge probe reads, for each variable."""
    return probed_subspaces(exercise.model, program, _batch(exercise, extra_loop=1))


def by_means(exercise: Exercise, program: LoopProgram) -> Mapping[str, Tensor]:
    """The directions between the mean states of a variable's values."""
    batch = _batch(exercise, extra_loop=1)
    return {
        name: labelled_states(exercise.model, program, [name], batch).subspace(mean_directions)
        for name in program.variables
    }


def _batch(exercise: Exercise, *, extra_loop: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(extra_loop)
    batch = exercise.task.sample(torch.full((256,), exercise.n), generator=generator)
    # Probes see the loops of the run: most states after it have converged and are equal.
    return replace(batch, n_loops=torch.full_like(batch.n_loops, exercise.n_loops + extra_loop))
