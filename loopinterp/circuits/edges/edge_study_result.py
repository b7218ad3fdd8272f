"""What a study of edges returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.edges.edge_choice import SHARES, Completeness, areas
from loopinterp.circuits.edges.known_edges import TiedEdge, as_circuit
from loopinterp.errors import InputError, check_choice
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.results import Result

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.rasp.compiler.circuit import Circuit

TIED, UNROLLED = "tied", "unrolled"
_TIED_EDGE = "tied_sender tied_receiver lag"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EdgeStudy(Result, kind="edges"):
    """What :func:`~loopinterp.circuits.edges.edge_discovery.edge_study` returns.

    Where there is no edge, arrays are NaN. ``magnitude`` and ``random``, on the axis of scores,
    are controls. Effects are shares of the change of the metric from base to source; scores of the
    controls have a scale of their own. A lag of 2 stands for all that are larger.

    Arrays:
        effect: Of each edge of the unrolled graph, mean over examples.
        size: The same, mean of absolute values: what helps in one example and harms in another
            does not cancel.
        tied_effect: Of each edge of the tied block, at all loops at once (exact), or summed over
            loops.
        tied_size: The same, mean of absolute values.
        faithfulness: Of the edges of highest score, in either graph, at MIB's shares of the edges.
        curve: Of that many tied edges of highest score.
        pruned: 1 for tied edges that greedy pruning keeps, 0 for others.
        minimality: What faithfulness loses with each of those that were kept.

    Attributes:
        metric: Name of the metric.
        metric_base: The metric of the base's run.
        metric_source: The metric of the source's run.
        n_examples: Pairs of inputs.
        n_scored: Answers that count: scored, and different in the two runs.
        n_loops: Loops of the runs.
        rank_by: ``size`` or ``effect`` (without its sign): what edges were chosen by.
        threshold: Of greedy pruning.
        pruned_faithfulness: Faithfulness of what it kept.
        random_faithfulness: Control: mean faithfulness of as many edges, drawn at random.
        completeness: Of what it kept.
        neurons: Groups of neurons that were components.
        config: Configuration of the model.
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
    metric_base: float
    metric_source: float
    n_examples: int
    n_scored: int
    n_loops: int
    rank_by: str
    threshold: float
    pruned_faithfulness: float
    random_faithfulness: float
    completeness: Completeness
    neurons: dict[str, list[int]]
    config: LoopedTransformerConfig

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """A row for each score and tied edge that there is, largest first.

        Args:
            names: Arrays wanted, as of any other result; by default those of tied edges.
        """
        if names:
            return super().to_dataframe(*names)
        table = super().to_dataframe("tied_effect", "tied_size").dropna()
        table = table.rename(columns=_untied)
        return table.sort_values(["score", "size"], ascending=[True, False], ignore_index=True)

    def unrolled_dataframe(self) -> pd.DataFrame:
        """A row for each score and edge of the unrolled graph."""
        return super().to_dataframe("effect", "size").dropna().reset_index(drop=True)

    def areas(self) -> pd.DataFrame:
        """CPR and CMD of each graph and score, at MIB's shares; of tied edges, of the curve too."""
        import pandas as pd

        rows = []
        for graph, of in self.data["faithfulness"].groupby("graph", squeeze=False):
            for score in of["score"].values:
                f = of.sel(graph=graph, score=score).values
                if np.isnan(f).any():
                    continue
                cpr, cmd = areas(f, SHARES)
                rows.append({"graph": graph, "score": score, "cpr": cpr, "cmd": cmd})
                if graph == TIED:
                    kept = self.data["kept"].values
                    curve = self.data["curve"].sel(score=score).values
                    names = ("cpr_of_curve", "cmd_of_curve")
                    rows[-1] |= dict(zip(names, areas(curve, kept / kept[-1])))
        return pd.DataFrame(rows)

    def tied_edges(self, *, score: str | None = None, count: int | None = None) -> set[TiedEdge]:
        """The tied edges of a circuit: what pruning kept, or the first ones by a score.

        Args:
            score: Which scores choose; None for what pruning kept.
            count: How many; needed with a score, and of no use without.

        Raises:
            InputError: A score that was not asked for, or a count too many or too few.
        """
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
        """The same edges as a `Circuit`, to be drawn, saved or compared with a compiled one."""
        return as_circuit(self.tied_edges(score=score, count=count), self.config)


def _untied(column: str) -> str:
    return column.removeprefix("tied_")
