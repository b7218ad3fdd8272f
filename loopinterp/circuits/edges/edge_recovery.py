"""Scores of edges against a circuit that is known: how well they tell its edges from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopinterp.circuits.edges.edge_study_result import TIED, UNROLLED, EdgeStudy
from loopinterp.circuits.edges.known_edges import program_edges, wiping_edges
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
    from sklearn.metrics import average_precision_score, roc_auc_score

    groups = bool(found.neurons)
    program = program_edges(known, neurons=groups)
    wiping = wiping_edges(known, neurons=groups)
    there = set(_graph(found).tied_edges)
    there = {(sender, _without_slot(receiver), lag) for sender, receiver, lag in there}
    if not program or not program < there:
        raise InputError(
            "known",
            expected="the compiled model that was studied",
            given="one with edges that are not in its graph" if program else "one without edges",
            fix="Pass the compiled model whose .model was studied.",
        )
    rows = []
    for graph, table in ((TIED, found.to_dataframe()), (UNROLLED, _with_lags(found))):
        ends = table[["sender", "receiver", "lag"]].itertuples(index=False, name=None)
        edges = [(s, _without_slot(r), int(lag)) for s, r, lag in ends]
        table = table.assign(
            program=[e in program for e in edges], wiping=[e in wiping for e in edges]
        )
        for score, of in table.groupby("score", sort=False):
            for truth in TRUTHS:
                counted: Any = of[~of["wiping"] | of["program"]] if truth == TRUTHS[0] else of
                true = counted["program"] | counted["wiping"]
                true = true if truth == TRUTHS[2] else counted["program"]
                for by in ("size", "effect"):
                    ranked = counted[by].abs()
                    # Rounding has an order too, and tells nothing.
                    ranked = ranked.where(ranked > ROUNDING * ranked.max(), 0.0)
                    rows.append(
                        {
                            "graph": graph,
                            "score": score,
                            "truth": truth,
                            "by": by,
                            "auroc": float(roc_auc_score(true, ranked)),
                            "average_precision": float(average_precision_score(true, ranked)),
                            "n_true": int(true.sum()),
                            "n_edges": len(true),
                        }
                    )
    return pd.DataFrame(rows)


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


def _without_slot(receiver: str) -> str:
    return receiver[:-2] if receiver[-2:] in {f".{slot}" for slot in SLOTS} else receiver
