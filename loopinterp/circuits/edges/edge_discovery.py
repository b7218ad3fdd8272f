"""Edges of a looped model: how much each matters, and which are enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.activation_patching_inputs import Metric, check_run, given_pairs
from loopinterp.circuits.edges.edge_attribution import (
    CONTROLS,
    EAP,
    EAP_IG,
    EDGE_IG,
    EXACT,
    MAGNITUDE,
    METHODS,
    RANDOM,
    EdgeEffects,
)
from loopinterp.circuits.edges.edge_choice import SHARES, TiedCircuits, top
from loopinterp.circuits.edges.edge_run import need_graph
from loopinterp.circuits.edges.edge_study_result import TIED, UNROLLED, EdgeStudy
from loopinterp.circuits.edges.unrolled_graph import LAGS, UnrolledGraph
from loopinterp.errors import InputError, check_choice, check_integer, check_number
from loopinterp.models.model_description import describe_model
from loopinterp.progress import track
from loopinterp.results import study

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.tasks.task import Batch


def edge_study(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    n_loops: int | None = None,
    methods: Sequence[str] = METHODS,
    neurons: Mapping[str, Sequence[int]] | None = None,
    split: bool = False,
    n_steps: int = 10,
    unrolled_exact: bool = False,
    rank_by: str = "size",
    threshold: float = 0.02,
    curve_points: int = 40,
    scored: Bool[Tensor, "_ _"] | None = None,
    metric: Metric | None = None,
    seed: int = 0,
) -> EdgeStudy:
    r"""Score the edges between components, unrolled and tied, and choose circuits by the scores.

    An edge's effect is what the metric does when its receiver sees what its sender writes in the
    source's run, all else as it follows from that; as a share of
    :math:`M_\text{source} - M_\text{base}`. ``exact`` makes that run, for tied edges at all loops
    at once; ``eap`` is its gradient, ``eap_ig`` and ``edge_ig`` are mean gradients along two paths
    that ``edge_attribution.py`` describes. Norm of what is written times norm of the
    weights that read it (``magnitude``) and random scores are controls, beside every method.
    Circuits of the edges of highest score, and those that greedy pruning leaves of the tied graph,
    are run with the source's values on all other edges.

    Args:
        model: A ``LoopedTransformer``.
        base: A batch, or inputs alone: tokens ``[batch, pos]``, or features.
        source: As many inputs of the same length, pair by pair.
        n_loops: Loops of the runs; T(n) by default, to be given with inputs alone.
        methods: Some of ``exact``, ``eap``, ``eap_ig``, ``edge_ig``.
        neurons: Groups of neurons that are components, as :class:`UnrolledGraph` takes them.
        split: Whether queries, keys and values are receivers of their own.
        n_steps: Points of each path.
        unrolled_exact: Whether each edge of the unrolled graph is run too: many runs.
        rank_by: What edges are chosen by: mean absolute effect over examples (``size``), or the
            absolute value of the mean (``effect``), as is published.
        threshold: The change of faithfulness below which pruning lets an edge go.
        curve_points: At so many numbers of tied edges, or all, faithfulness is measured.
        scored: Positions ``[batch, pos]`` whose answers count; by default those at which the
            batches ask for something, or all of inputs alone.
        metric: Another metric, from logits to one number for each example ``[batch]``; by default
            the logit of the source's answer less that of the base's.
        seed: Of random scores and circuits.

    Raises:
        InputError: Inputs that do not fit each other, or that the model answers alike; an unknown
            method; a metric without examples or gradients; a model with gates.

    Source: EAP arXiv 2310.10348, EAP-IG 2403.17806, pruning 2304.14997, CPR and CMD 2504.13151.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> found = edge_study(LoopedTransformer(config), base, source, n_loops=2, n_steps=2)
        >>> found.data["faithfulness"].sel(graph="tied", score="exact", share=1).item()
        1.0
    """
    base, source, n_loops, scored = given_pairs(model, base, source, n_loops, scored)
    check_run(model, base, source, source, "resid_pre")
    need_graph(model)
    names = _checked(methods, unrolled_exact)
    check_choice("rank_by", rank_by, ("size", "effect"))
    for name, value in (("n_steps", n_steps), ("curve_points", curve_points)):
        check_integer(name, value, least=1)
    check_number("threshold", threshold, above=0)
    graph = UnrolledGraph(model.config, n_loops, neurons=neurons, split=split)
    about = {"study": "edges", "n_loops": n_loops, "methods": names, "n_steps": n_steps}
    with study(seed, **about, model=describe_model(model), n_examples=len(base)) as watch:
        effects = EdgeEffects.between(model, graph, base, source, scored=scored, metric=metric)
        compared = effects.compared
        generator = torch.Generator().manual_seed(seed)
        every = [*names, *CONTROLS]
        unrolled, tied = _measured(effects, every, n_steps, generator)
        if unrolled_exact and EXACT in names:
            unrolled[names.index(EXACT)] = effects.exact()
        circuits = TiedCircuits(effects)
        kept = circuits.pruned(threshold)
        at_random = circuits.at_random(int(kept.sum()), generator)
        ranked = [x.mean(-1).abs() if rank_by == "effect" else x.abs().mean(-1) for x in tied]
        counts = _counts(len(graph.tied_edges), curve_points)
        faithful = _faithfulness(effects, circuits, unrolled, ranked, rank_by)
        axes = _TiedAxes(graph)
        return EdgeStudy.of(
            watch,
            coords={
                "score": every,
                "sender": graph.sender_names,
                "receiver": graph.receiver_names,
                **axes.coords,
                "graph": [TIED, UNROLLED],
                "share": SHARES,
                "kept": counts,
            },
            effect=np.stack([_spread(x.mean(-1), graph.edges) for x in unrolled]),
            size=np.stack([_spread(x.abs().mean(-1), graph.edges) for x in unrolled]),
            tied_effect=np.stack([axes(x.mean(-1)) for x in tied]),
            tied_size=np.stack([axes(x.abs().mean(-1)) for x in tied]),
            faithfulness=faithful,
            curve=[
                [circuits.faithfulness(top(x, k)) for k in counts] for x in track(ranked, "curve")
            ],
            pruned=axes(kept.double()),
            minimality=axes(circuits.minimality(kept)),
            metric=compared.name,
            metric_base=compared.at_base,
            metric_source=compared.at_source,
            n_examples=len(base),
            n_scored=int(compared.differ.sum()),
            n_loops=n_loops,
            rank_by=rank_by,
            threshold=threshold,
            pruned_faithfulness=circuits.faithfulness(kept),
            random_faithfulness=float(np.mean(at_random)),
            completeness=circuits.completeness(kept, generator),
            neurons={name: list(group) for name, group in (neurons or {}).items()},
            config=model.config,
        )


def _measured(
    effects: EdgeEffects, names: Iterable[str], n_steps: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Effects by name, of edges ``[sender, receiver, batch]`` and of tied ones ``[tied, batch]``.

    Exact ones of single edges are NaN, to be asked for apart.
    """
    ways = {
        EAP: effects.eap,
        EAP_IG: lambda: effects.eap_ig(n_steps),
        EDGE_IG: lambda: effects.edge_ig(n_steps),
        MAGNITUDE: effects.magnitude,
        RANDOM: lambda: effects.random(generator),
    }
    unrolled, tied = [], []
    for name in names:
        if name == EXACT:
            tied.append(effects.exact_tied())
            shape = (*effects.graph.edges.shape, tied[-1].shape[-1])
            unrolled.append(torch.full(shape, float("nan"), dtype=torch.float64))
        else:
            unrolled.append(ways[name]())
            tied.append(effects.tied(unrolled[-1]))
    return unrolled, tied


class _TiedAxes:
    """Numbers of tied edges as an array [tied_sender, tied_receiver, lag], NaN elsewhere."""

    def __init__(self, graph: UnrolledGraph) -> None:
        senders, receivers, lags = zip(*graph.tied_edges)
        axes = {"tied_sender": senders, "tied_receiver": receivers, "lag": lags}
        self.coords = {name: list(dict.fromkeys(of)) for name, of in axes.items()}
        self.coords["lag"] = list(LAGS)
        self._at = tuple([self.coords[name].index(one) for one in of] for name, of in axes.items())

    def __call__(self, values: Float[Tensor, " tied"]) -> np.ndarray:
        array = np.full([len(names) for names in self.coords.values()], np.nan)
        array[self._at] = values.cpu().numpy()
        return array


def _faithfulness(
    effects: EdgeEffects,
    circuits: TiedCircuits,
    unrolled: list[Tensor],
    ranked: list[Tensor],
    rank_by: str,
) -> np.ndarray:
    """Of the edges of highest score [graph, score, share]."""
    edges = effects.graph.edges
    tied = [
        [circuits.faithfulness(top(scores, int(share * len(scores)))) for share in SHARES]
        for scores in track(ranked, "tied circuits")
    ]
    loose = []
    for x in track(unrolled, "circuits"):
        scores = (x.mean(-1).abs() if rank_by == "effect" else x.abs().mean(-1))[edges]
        if scores.isnan().any():
            loose.append([float("nan")] * len(SHARES))
            continue
        row = []
        for share in SHARES:
            chosen = torch.zeros_like(edges)
            chosen[edges] = top(scores, int(share * len(scores)))
            row.append(effects.faithfulness(chosen))
        loose.append(row)
    return np.array([tied, loose])


def _counts(n_edges: int, most: int) -> list[int]:
    """Numbers of edges from 0 to all of them, evenly."""
    return np.unique(np.linspace(0, n_edges, min(most, n_edges + 1)).round().astype(int)).tolist()


def _spread(values: Tensor, edges: Tensor) -> np.ndarray:
    return np.where(edges.numpy(), values.cpu().numpy(), np.nan)


def _checked(methods: Sequence[str], unrolled_exact: bool) -> list[str]:
    if isinstance(methods, str) or not methods:
        raise InputError(
            "methods",
            expected=f"a list of some of {', '.join(METHODS)}",
            given=repr(methods),
            fix="Pass for example methods=['edge_ig'].",
        )
    if unrolled_exact and EXACT not in methods:
        raise InputError(
            "unrolled_exact",
            expected=f"false where {EXACT!r} is none of the methods",
            given="True",
            fix=f"Add {EXACT!r} to methods.",
        )
    return list(dict.fromkeys(check_choice("method", name, METHODS) for name in methods))
