"""Scores of edges against a circuit that is known: how well they tell its edges from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.circuits.edges.edge_study_result import TIED, UNROLLED, EdgeStudy
from loopinterp.circuits.edges.known_edges import TiedEdge, program_edges, wiping_edges
from loopinterp.circuits.edges.unrolled_graph import SLOTS, UnrolledGraph
from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import ROUNDING

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.rasp.compiler.circuit import Circuit
    from loopinterp.rasp.compiler.compiled import Compiled

TRUTHS = ("program", "program, wiping wrong", "program or wiping")


def edges_recovered(found: EdgeStudy, known: Compiled | Circuit) -> pd.DataFrame:
    """AUROC and average precision of every score and control, against a known circuit.

    Edges of wiping (see :func:`.wiping_edges`) have effects, and no part in the program. So there
    are three truths: ``program``, with those edges left out; ``program, wiping wrong``, where they
    count as edges that should not have been found; and ``program or wiping``, whatever carries
    anything. An edge of the unrolled graph is true where its tied edge is.

    Args:
        found: A study of the model.
        known: The compiled model with its circuit.

    Returns:
        A row for each graph, score, truth and what it is ranked by (``size`` or ``effect``), with
        the numbers of edges that are true and of all that count. What is smaller than rounding
        counts as 0. Where a score was not made, there is none.

    Raises:
        InputError: The circuit has edges that are not in the graph: it is another model's.
    """
    import pandas as pd

    groups = bool(found.neurons)
    there = _graph(found).tied_edges
    rows = []
    for graph, table in ((TIED, found.to_dataframe()), (UNROLLED, _with_lags(found))):
        for score, of in table.groupby("score", sort=False):
            edges = list(of[["sender", "receiver", "lag"]].itertuples(index=False, name=None))
            truths = known_truths(edges, known, among=there, neurons=groups)
            for by in ("size", "effect"):
                for row in ranking(of[by].abs().to_numpy(), truths):
                    rows.append({"graph": graph, "score": score, "by": by, **row})
    columns = ["graph", "score", "truth", "by", "auroc", "average_precision", "n_true", "n_edges"]
    return pd.DataFrame(rows, columns=columns)


def known_truths(
    edges: Sequence[TiedEdge],
    known: Compiled | Circuit,
    *,
    among: Iterable[TiedEdge],
    neurons: bool = False,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each truth of :func:`edges_recovered`: which of some edges count, and which of all are true.

    Args:
        edges: Sender, receiver (its slot, ``.q``, is not looked at) and lag.
        known: A compiled model with its circuit.
        among: All tied edges of the model.
        neurons: Whether groups of neurons are components.

    Raises:
        InputError: The circuit has edges that are not among them: it is another model's.
    """
    program = program_edges(known, neurons=neurons)
    wiping = wiping_edges(known, neurons=neurons)
    if not program or not program < {_without_slot(edge) for edge in among}:
        raise InputError(
            "known",
            expected="the compiled model that was studied",
            given="one with edges that are not in its graph" if program else "one without edges",
            fix="Pass the compiled model whose .model was studied.",
        )
    tied = [_without_slot(edge) for edge in edges]
    true = np.array([edge in program for edge in tied], dtype=bool)
    wipes = np.array([edge in wiping for edge in tied], dtype=bool)
    every = np.ones_like(true)
    return dict(zip(TRUTHS, ((~wipes | true, true), (every, true), (every, true | wipes))))


def ranking(
    sizes: np.ndarray, truths: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    """AUROC and average precision of scores, one row for each truth.

    What is smaller than rounding counts as 0.

    Args:
        sizes: Of the edges, none negative.
        truths: As :func:`known_truths` gives them.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    for truth, (counted, true) in truths.items():
        ranked, right = sizes[counted], true[counted]
        # Rounding has an order too, and tells nothing.
        ranked = np.where(ranked > ROUNDING * ranked.max(), ranked, 0.0)
        yield {
            "truth": truth,
            "auroc": float(roc_auc_score(right, ranked)),
            "average_precision": float(average_precision_score(right, ranked)),
            "n_true": int(right.sum()),
            "n_edges": len(right),
        }


def _with_lags(found: EdgeStudy) -> pd.DataFrame:
    """The edges of the unrolled graph, by the names of their tied ones."""
    graph = _graph(found)
    senders, receivers = graph.sender_names, graph.receiver_names
    tied = {
        (senders[s], receivers[r]): graph.tied_edges[int(graph.tied_index[s, r])]
        for s, r in graph.edges.nonzero().tolist()
    }
    table = found.unrolled_dataframe()
    named = [tied[pair] for pair in zip(table["sender"], table["receiver"])]
    columns = dict(zip(("sender", "receiver", "lag"), zip(*named)))
    return table.assign(**{name: list(values) for name, values in columns.items()})


def _graph(found: EdgeStudy) -> UnrolledGraph:
    split = any(name.endswith(".q") for name in found.data["receiver"].values)
    return UnrolledGraph(found.config, found.n_loops, neurons=found.neurons, split=split)


def _without_slot(edge: TiedEdge) -> TiedEdge:
    sender, receiver, lag = edge
    slotted = receiver[-2:] in {f".{slot}" for slot in SLOTS}
    return sender, receiver[:-2] if slotted else receiver, int(lag)
