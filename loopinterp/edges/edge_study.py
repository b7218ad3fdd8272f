"""Edges of a looped model: their effects, and circuits made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_choice
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.edges.edge_effects import (
    SHARES,
    STEPS,
    Completeness,
    EdgeEffects,
    Integral,
    Method,
    Rule,
    TiedCircuits,
    areas,
    top,
)
from loopinterp.edges.edge_runs import graph_of_pairs
from loopinterp.edges.known_edges import as_circuit, recovery
from loopinterp.edges.unrolled_graph import (
    LAGS,
    TIED,
    UNROLLED,
    GraphLayout,
    StreamNorms,
    TiedEdge,
    UnrolledGraph,
)
from loopinterp.interventions.base_and_source import Metric
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.protocol import describe_model
from loopinterp.models.transformer import LoopedTransformer

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.compiler.circuit import Circuit
    from loopinterp.compiler.compiled import Compiled
    from loopinterp.tasks.task import Batch

_TIED_EDGE = "tied_sender tied_receiver lag"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EdgeStudy(Result, kind="edges"):
    """The result of :func:`edge_study`.

    Effects are shares of the change of the metric from base to source, NaN where there is no edge.
    Lag 2 stands for all larger ones.

    Arrays:
        effect: Effect of each edge of the unrolled graph, mean over examples.
        size: Mean absolute effect over examples.
        tied_effect: Effect of each tied edge, at all loops at once, or summed over loops.
        tied_size: Mean absolute effect of each tied edge.
        faithfulness: Faithfulness of the edges of highest score, in either graph, at MIB's shares.
        curve: Faithfulness of that many tied edges of highest score.
        pruned: 1 for tied edges that greedy pruning keeps, 0 for others.
        minimality: Loss of faithfulness without each of these.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "effect": "score sender receiver",
        "size": "score sender receiver",
        "tied_effect": f"score {_TIED_EDGE}",
        "tied_size": f"score {_TIED_EDGE}",
        "faithfulness": "graph score share",
        "curve": "score kept",
        "pruned": _TIED_EDGE,
        "minimality": _TIED_EDGE,
    }

    metric: str
    metric_base: float  # of the base's run
    metric_source: float
    n_examples: int
    n_scored: int  # answers that count: scored, and different in the two runs
    n_loops: int
    rank_by: str  # "size" or "effect" (without its sign)
    threshold: float  # of greedy pruning
    pruned_faithfulness: float  # of the edges that it kept
    random_faithfulness: float  # control: mean of as many edges, drawn at random
    completeness: Completeness  # of the edges that pruning kept
    neurons: dict[str, list[int]]  # groups that were components
    config: LoopedTransformerConfig | GraphLayout  # a layout, of an adapted model
    integrals: dict[str, Integral] = field(default_factory=dict)  # by score of a path

    @property
    def graph(self) -> UnrolledGraph:
        """The components of the run in all loops, and the edges between them."""
        split = any(name.endswith(".q") for name in self.data["receiver"].values)
        graph = UnrolledGraph(self.config, self.n_loops, neurons=self.neurons, split=split)
        # Between norms of the stream are fewer edges; where there is none, no score has an effect.
        graph.edges &= torch.from_numpy(self.data["effect"].notnull().any("score").values)
        return graph

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """A row for each score and tied edge, largest first; or the arrays named."""
        if names:
            return super().to_dataframe(*names)
        table = super().to_dataframe("tied_effect", "tied_size").dropna()  # NaN: no edge
        table = table.rename(columns=_untied)
        return table.sort_values(["score", "size"], ascending=[True, False], ignore_index=True)

    def areas(self) -> pd.DataFrame:
        """CPR and CMD of each graph and score; of tied edges also of the curve."""
        import pandas as pd

        rows = []
        faithfulness = self.data["faithfulness"]
        for graph in sorted(faithfulness["graph"].values.tolist()):
            for score in faithfulness["score"].values:
                f = faithfulness.sel(graph=graph, score=score).values
                if np.isnan(f).any():
                    continue
                row = {"graph": graph, "score": score, **dict(zip(("cpr", "cmd"), areas(f)))}
                if graph == TIED:
                    counts = self.data["kept"].values
                    curve = self.data["curve"].sel(score=score).values
                    names = ("cpr_of_curve", "cmd_of_curve")
                    row |= dict(zip(names, areas(curve, counts / counts[-1])))
                rows.append(row)
        return pd.DataFrame(rows)

    def tied_edges(self, *, score: str | None = None, count: int | None = None) -> set[TiedEdge]:
        """The tied edges that pruning kept; or the first ``count`` by a ``score``."""
        if (score is None) != (count is None):
            raise InputError(
                "score and count",
                expected="both, or neither for what pruning kept",
                given=f"score={score!r}, count={count!r}",
                fix="Pass for example score='edge_ig', count=10.",
            )
        if score is None:
            table: Any = super().to_dataframe("pruned").rename(columns=_untied)
            table = table[table["pruned"] == 1]
        else:
            check_choice("score", score, self.data["score"].values.tolist())
            table = self.to_dataframe()
            table = table[table["score"] == score]
            order = table[self.rank_by].abs().sort_values(ascending=False, kind="stable").index
            table = table.reindex(order)[:count]
        ends = table[["sender", "receiver", "lag"]].itertuples(index=False, name=None)
        return {(sender, receiver, int(lag)) for sender, receiver, lag in ends}

    def circuit(self, *, score: str | None = None, count: int | None = None) -> Circuit:
        """:meth:`tied_edges` as a `Circuit`, to be drawn, saved or compared with a compiled one."""
        return as_circuit(sorted(self.tied_edges(score=score, count=count)), self.config)


@checked
def edge_study(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    n_loops: Loops | None = None,
    methods: Annotated[Sequence[Method], Field(min_length=1)] = get_args(Method),
    neurons: Mapping[str, Sequence[int]] | None = None,
    split: bool = False,
    stream_norms: StreamNorms = "edges",
    n_steps: PositiveInt | None = None,
    rule: Rule = "midpoint",
    tolerance: PositiveFloat = 0.01,
    unrolled_exact: bool = False,
    rank_by: Literal["size", "effect"] = "size",
    threshold: PositiveFloat = 0.02,
    curve_points: PositiveInt = 40,
    scored: Bool[Tensor, "_ _"] | None = None,
    metric: Metric | None = None,
    seed: Seed = 0,
) -> EdgeStudy:
    """Score the edges between components, unrolled and tied, and choose circuits by the scores.

    Effects are those of :mod:`~loopinterp.edges.edge_effects`: ``exact`` by a run (for tied edges
    at all loops at once), ``eap``, ``eap_ig`` and ``edge_ig`` by gradients. Norms (``magnitude``;
    of a ``LoopedTransformer`` only) and random scores are controls.

    Args:
        model, base, source, n_loops, neurons: As for :func:`path_patching`.
        split: Whether queries, keys and values are separate receivers.
        stream_norms: Of an adapted model: whether edges lead through norms of the stream
            (``edges``), or end and begin at them (``nodes``; far fewer edges).
        n_steps: Points of each path, 10 by default; at most so many of the adaptive rule (3000),
            which takes 3 or more.
        rule: Points at the middles of equal parts (``midpoint``), or denser where the metric
            changes fast (``adaptive``). ``result.integrals`` has the gap.
        tolerance: Of the adaptive rule: the errors of the parts of a path, added up, as a share of
            the change. The gap is no larger, if ``n_steps`` and the model's precision suffice.
        unrolled_exact: Whether to run each edge of the unrolled graph too (many runs).
        rank_by: By mean absolute effect over examples (``size``), or by the absolute mean
            (``effect``), as published.
        threshold: Pruning removes an edge if faithfulness changes by less than this.
        curve_points: Most numbers of tied edges at which faithfulness is measured.
        scored, metric: As for :func:`~loopinterp.interventions.patching_sweep`; a metric gives one
            number for each example ``[batch]``.

    Raises:
        InputError: If the model's stream cannot be read as nodes and edges, or base and source have
            equal answers.

    Source: EAP arXiv 2310.10348, EAP-IG 2403.17806, pruning 2304.14997, CPR and CMD 2504.13151.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> result = edge_study(LoopedTransformer(config), base, source, n_loops=2, n_steps=2)
        >>> result.data["faithfulness"].sel(graph="tied", score="exact", share=1).item()
        1.0
    """
    graph, base, source, scored = graph_of_pairs(
        model, base, source, n_loops=n_loops, neurons=neurons, split=split, scored=scored,
        stream_norms=stream_norms,
    )  # fmt: skip
    if unrolled_exact and "exact" not in methods:
        expected, fix = "False without the method 'exact'", "Add 'exact' to methods."
        raise InputError("unrolled_exact", expected=expected, given="True", fix=fix)
    names = list(dict.fromkeys(methods))
    if rule == "midpoint" and tolerance != 0.01:
        expected, fix = "none with rule='midpoint'", "Pass n_steps=, or rule='adaptive'."
        raise InputError("tolerance", expected=expected, given=f"{tolerance:g}", fix=fix)
    path = {"n_steps": n_steps or STEPS[rule], "rule": rule, "tolerance": tolerance}
    about = {"study": "edges", "n_loops": graph.n_loops, "methods": names, **path}
    with study(seed, **about, model=describe_model(model), n_examples=len(base)) as watch:
        effects = EdgeEffects(model, graph, base, source, scored=scored, metric=metric)
        generator = torch.Generator().manual_seed(seed)
        circuits, axes = TiedCircuits(effects), _TiedAxes(graph)
        every = [*names, *effects.controls]
        unrolled, tied = _scores(effects, every, path, unrolled_exact, generator)
        pruned = circuits.pruned(threshold)
        at_random = circuits.at_random(int(pruned.sum()), generator)
        # Numbers of tied edges from 0 to all of them, evenly.
        n_edges = len(graph.tied_edges)
        counts = np.linspace(0, n_edges, min(curve_points, n_edges + 1)).round().astype(int)
        counts = np.unique(counts).tolist()
        compared = effects.compared
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
            effect=np.where(graph.edges, np.stack([x.mean(-1) for x in unrolled]), np.nan),
            size=np.where(graph.edges, np.stack([x.abs().mean(-1) for x in unrolled]), np.nan),
            tied_effect=np.stack([axes(x.mean(-1)) for x in tied]),
            tied_size=np.stack([axes(x.abs().mean(-1)) for x in tied]),
            **_circuit_arrays(effects, circuits, unrolled, tied, rank_by, counts),
            pruned=axes(pruned.double()),
            minimality=axes(circuits.minimality(pruned)),
            metric=compared.name,
            metric_base=compared.at_base,
            metric_source=compared.at_source,
            n_examples=len(base),
            n_scored=int(compared.differ.sum()),
            n_loops=graph.n_loops,
            rank_by=rank_by,
            threshold=threshold,
            pruned_faithfulness=circuits.faithfulness(pruned),
            random_faithfulness=float(np.mean(at_random)),
            completeness=circuits.completeness(pruned, generator),
            neurons={name: list(group) for name, group in (neurons or {}).items()},
            config=model.config if isinstance(model, LoopedTransformer) else graph.layout,
            integrals=effects.integrals,
        )


def edges_recovered(result: EdgeStudy, known: Compiled | Circuit) -> pd.DataFrame:
    """AUROC and average precision of every score and control, against a known circuit.

    A row for each graph, score, truth and ranking (by ``size`` or ``effect``). The truth
    ``program`` leaves edges of wiping (:func:`.wiping_edges`) out, ``program, wiping wrong`` counts
    them as wrong, ``program or wiping`` as true. An edge of the unrolled graph is true if its tied
    edge is.
    """
    import pandas as pd

    run = result.graph
    tied_of = dict(zip(run.edge_names, run.tied_index[run.edges].tolist()))
    rows = []
    unrolled = result.to_dataframe("effect", "size").dropna()
    for graph, table in ((TIED, result.to_dataframe()), (UNROLLED, unrolled)):
        for score, scored in table.groupby("score", sort=False):
            columns = ["sender", "receiver", *(["lag"] if graph == TIED else [])]
            edges = list(scored[columns].itertuples(index=False, name=None))
            edges = edges if graph == TIED else [run.tied_edges[tied_of[edge]] for edge in edges]
            options = {"among": run.tied_edges, "neurons": bool(result.neurons)}
            for by in ("size", "effect"):
                sizes = scored[by].abs().to_numpy()
                for row in recovery(sizes, edges, known, **options):
                    rows.append({"graph": graph, "score": score, "by": by, **row})
    columns = ["graph", "score", "truth", "by", "auroc", "average_precision", "n_true", "n_edges"]
    return pd.DataFrame(rows, columns=columns)


def _scores(
    effects: EdgeEffects,
    names: Sequence[str],
    path: dict[str, Any],
    unrolled_exact: bool,
    g: torch.Generator,
) -> tuple[list[Tensor], list[Tensor]]:
    """Effects of edges ``[sender, receiver, batch]`` and of tied ones ``[tied, batch]``.

    Exact effects of unrolled edges are NaN unless ``unrolled_exact``.
    """
    unrolled, tied = [], []
    for name in names:
        if name != "exact":
            unrolled.append(effects.scores(name, **path, generator=g))
            tied.append(effects.tied(unrolled[-1]))
            continue
        tied.append(effects.exact_tied())
        if unrolled_exact:
            unrolled.append(effects.scores(name))
        else:
            shape = (*effects.graph.edges.shape, tied[-1].shape[-1])
            unrolled.append(tied[-1].new_full(shape, np.nan))
    return unrolled, tied


class _TiedAxes:
    """Numbers of tied edges as an array [tied_sender, tied_receiver, lag], NaN elsewhere."""

    def __init__(self, graph: UnrolledGraph) -> None:
        senders, receivers, lags = zip(*graph.tied_edges)
        columns = {"tied_sender": senders, "tied_receiver": receivers, "lag": lags}
        self.coords = {name: list(dict.fromkeys(each)) for name, each in columns.items()}
        self.coords["lag"] = list(LAGS)
        # Where each tied edge stands in the array.
        self._at = tuple(
            [self.coords[name].index(end) for end in each] for name, each in columns.items()
        )

    def __call__(self, values: Float[Tensor, " tied"]) -> np.ndarray:
        array = np.full([len(names) for names in self.coords.values()], np.nan)
        array[self._at] = values.cpu().numpy()
        return array


def _circuit_arrays(
    effects: EdgeEffects,
    circuits: TiedCircuits,
    unrolled: list[Tensor],
    tied: list[Tensor],
    rank_by: str,
    counts: list[int],
) -> dict[str, Any]:
    edges = effects.graph.edges

    def ranked(x: Tensor) -> Tensor:
        return x.mean(-1).abs() if rank_by == "effect" else x.abs().mean(-1)

    def at_shares(scores: Tensor, faithfulness: Callable[[Tensor], float]) -> list[float]:
        if scores.isnan().any():  # exact effects that were not asked for
            return [float("nan")] * len(SHARES)
        return [faithfulness(top(scores, int(share * len(scores)))) for share in SHARES]

    def of_edges(chosen: Bool[Tensor, " edge"]) -> float:
        circuit = torch.zeros_like(edges)
        circuit[edges] = chosen
        return effects.faithfulness(circuit)

    of_tied = [at_shares(ranked(x), circuits.faithfulness) for x in track(tied, "tied circuits")]
    of_unrolled = [at_shares(ranked(x)[edges], of_edges) for x in track(unrolled, "circuits")]
    curve = [
        [circuits.faithfulness(top(ranked(x), k)) for k in counts] for x in track(tied, "curve")
    ]
    return {"faithfulness": np.array([of_tied, of_unrolled]), "curve": curve}


def _untied(column: str) -> str:
    return column.removeprefix("tied_")
