r"""Choosing edges: those of highest score, or those that an exact test does not let go.

A circuit is what the model does when all edges but its own carry the source's values. Its
*faithfulness* is

.. math:: f(C) = \frac{m(C) - m(\varnothing)}{m(M) - m(\varnothing)}

1 for the whole graph, 0 for no edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from loopinterp.progress import track

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.circuits.edges.edge_attribution import EdgeEffects

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the edges at which MIB measures faithfulness."""

_SUBSETS = 10
_EVEN = 0.5


def areas(
    faithfulness: Sequence[float] | np.ndarray, shares: Sequence[float] | np.ndarray = SHARES
) -> tuple[float, float]:
    r"""CPR and CMD: the areas under f and under abs(1 - f) over the share of edges, by trapezoids.

    Args:
        faithfulness: f at each share.
        shares: Increasing, by default MIB's ten, from .001 to 1.

    Source: arXiv 2504.13151. Large CPR and small CMD are good; CPR above 1 says that circuits do
    better than the model.

    Example:
        >>> [round(area, 3) for area in areas([1.0] * 10)]
        [0.999, 0.0]
    """
    f, x = np.asarray(faithfulness, dtype=float), np.asarray(shares, dtype=float)
    return float(np.trapezoid(f, x)), float(np.trapezoid(abs(1 - f), x))


def top(scores: Float[Tensor, " edge"], count: int) -> Bool[Tensor, " edge"]:
    """The edges of highest score; of equal ones, the first."""
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.argsort(descending=True, stable=True)[:count].cpu()] = True
    return chosen


class TiedCircuits:
    """Circuits of tied edges: what they keep of the metric.

    Args:
        effects: The two runs.
    """

    def __init__(self, effects: EdgeEffects) -> None:
        self._effects = effects
        self._index, self._n = effects.graph.tied_index, len(effects.graph.tied_edges)

    def faithfulness(self, kept: Bool[Tensor, " tied"]) -> float:
        """Of the circuit of some tied edges."""
        unrolled = torch.cat([kept, torch.zeros(1, dtype=torch.bool)])[self._index]
        return self._effects.faithfulness(unrolled)

    def pruned(self, threshold: float) -> Bool[Tensor, " tied"]:
        """What is left when each edge in turn, from the readout back, is tried and let go.

        An edge goes if faithfulness, with all that went before it, then changes by less than the
        threshold (ACDC, arXiv 2304.14997, with the metric in place of a divergence).
        """
        kept = torch.ones(self._n, dtype=torch.bool)
        now = self.faithfulness(kept)
        for edge in track(self._backwards(), "edge"):
            kept[edge] = False
            without = self.faithfulness(kept)
            if abs(now - without) < threshold:
                now = without
            else:
                kept[edge] = True
        return kept

    def minimality(self, circuit: Bool[Tensor, " tied"]) -> Float[Tensor, " tied"]:
        """How much faithfulness each edge's loss costs a circuit; NaN of edges not in it."""
        whole = self.faithfulness(circuit)
        cost = torch.full((self._n,), float("nan"), dtype=torch.float64)
        for edge in circuit.nonzero().flatten().tolist():
            without = circuit.clone()
            without[edge] = False
            cost[edge] = whole - self.faithfulness(without)
        return cost

    def completeness(
        self, circuit: Bool[Tensor, " tied"], generator: torch.Generator
    ) -> Completeness:
        """Whether the model without parts of a circuit does what the circuit without them does."""
        every = torch.ones_like(circuit)
        gaps = []
        for _ in range(_SUBSETS):
            drawn = torch.rand(self._n, generator=generator, dtype=torch.float32) < _EVEN
            taken = circuit & drawn
            model, own = self.faithfulness(every & ~taken), self.faithfulness(circuit & ~taken)
            gaps.append(abs(model - own))
        return Completeness(self.faithfulness(every & ~circuit), float(np.mean(gaps)), max(gaps))

    def at_random(
        self, count: int, generator: torch.Generator, draws: int = _SUBSETS
    ) -> list[float]:
        """Control: faithfulness of as many edges, drawn at random."""
        drawn = [
            top(torch.rand(self._n, generator=generator, dtype=torch.float32), count)
            for _ in range(draws)
        ]
        return [self.faithfulness(kept) for kept in drawn]

    def _backwards(self) -> list[int]:
        """The tied edges, from those into the readout to those into the first layer."""
        graph = self._effects.graph
        reads = torch.tensor([graph.readers[k].stage for k, _ in graph.receivers])
        last = torch.zeros(self._n, dtype=torch.int64)
        there = graph.edges
        stages = reads.expand(there.shape)[there]
        last = last.scatter_reduce(0, self._index[there], stages, "amax")
        return last.argsort(descending=True, stable=True).tolist()


@dataclass(frozen=True)
class Completeness:
    """Of a circuit C in the model M, for parts K of it (arXiv 2211.00593).

    Attributes:
        without: f(M without C): 0 if nothing else does what C does.
        mean_gap: Mean of abs(f(M without K) - f(C without K)) over random halves K of C.
        largest_gap: The largest of them.
    """

    without: float
    mean_gap: float
    largest_gap: float
