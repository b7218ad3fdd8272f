r"""Effects of edges, and circuits of edges.

The effect of an edge is the metric's change when the receiver sees the sender's output of the
source's run, as a share of the change from base to source. With w the weight of an edge (see
:mod:`~loopinterp.edges.edge_runs`), 0 in the base's run,

.. math::
    \text{exact}_{sr} = M(w_{sr} = 1) - M(0), \qquad
    \text{eap}_{sr} = \frac{\partial M}{\partial w_{sr}}(0)

``eap_ig`` averages such gradients while the input goes from base to source. ``edge_ig`` averages
them while the weights of all edges go from 0 to 1,
:math:`\int_0^1 \partial M / \partial w_{sr}\,(t, …, t)\,dt`, so that all effects sum to the whole
change.

A circuit is the model with the source's values on all other edges. Its *faithfulness* is 1 for the
whole graph, 0 for no edge:

.. math:: f(C) = \frac{m(C) - m(\varnothing)}{m(M) - m(\varnothing)}

The slope of the metric along the path of an integral, :math:`f(t) = \mathrm{d} M / \mathrm{d} t`,
has peaks in trained models with sharp attention. They are far narrower than a hundredth of the
path, and at other places in each example: the points are chosen for each example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from loopinterp.core.errors import InputError
from loopinterp.core.text import bar, track
from loopinterp.edges.edge_runs import edge_runs
from loopinterp.interventions.base_and_source import Comparison
from loopinterp.models.iteration import bind
from loopinterp.models.taps import recording_gradients
from loopinterp.models.transformer import LoopedTransformer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped
    from torch import Tensor

    from loopinterp.edges.unrolled_graph import UnrolledGraph
    from loopinterp.interventions.base_and_source import Metric


Method = Literal["exact", "eap", "eap_ig", "edge_ig"]
CONTROLS = ("magnitude", "random")

Rule = Literal["midpoint", "adaptive"]
STEPS: dict[Rule, int] = {"midpoint": 10, "adaptive": 3000}
"""Points of a path; at most so many of the adaptive rule."""

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the edges at which faithfulness is measured, as in MIB."""


@dataclass(frozen=True)
class Integral:
    """How well the scores of a path add up to the change of the metric.

    Attributes:
        n_gradients: Gradients in all edges that were averaged.
        n_slopes: Slopes along the path that chose their places (adaptive rule).
        gap: Absolute difference of the mean over examples, as a share of the change.
        largest_gap: The same of the worst example.
        estimated: The errors of all parts of the path, added up: at least the gap, up to rounding;
            NaN of the midpoint rule.
    """

    n_gradients: int
    n_slopes: int
    gap: float
    largest_gap: float
    estimated: float


class EdgeEffects:
    """Effects of the edges; ``scored`` and ``metric`` are as for :func:`.edge_study`."""

    def __init__(
        self,
        model: Any,
        graph: UnrolledGraph,
        base: Tensor,
        source: Tensor,
        *,
        scored: Bool[Tensor, "_ _"] | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.model, self.graph = model, graph
        with torch.no_grad():
            logits = []
            for bound in (bind(model, base), bind(model, source)):
                *_, (_, state) = bound.run(graph.n_loops)
                logits.append(bound.read(state, graph.n_loops))
            self.compared = Comparison(logits[0], logits[1], scored, metric)
            with recording_gradients(model):
                scores = self.compared.by_example(logits[0].detach().requires_grad_())
            if scores.shape != base.shape[:1] or not scores.requires_grad:
                raise InputError(
                    "metric",
                    expected=f"one number for each of the {len(base)} examples, with a gradient",
                    given=f"shape {list(scores.shape)}, requires_grad={scores.requires_grad}",
                    fix="Take means over positions, not over examples, and use no argmax.",
                )
            self._runs = edge_runs(model, graph, base)
            base_logits, self.base = self._runs()
            _, self.source = edge_runs(model, graph, source)()
            self._at_base = self.compared.by_example(base_logits)
        self._change = self.compared.at_source - self.compared.at_base
        self.integrals: dict[str, Integral] = {}

    @property
    def controls(self) -> tuple[str, ...]:
        """The control scores; no magnitudes for an adapted model: its weights have other names."""
        return CONTROLS if isinstance(self.model, LoopedTransformer) else CONTROLS[1:]

    @torch.no_grad()
    def replaced(
        self, weights: Shaped[Tensor, "sender receiver *batch"]
    ) -> Float[Tensor, " batch"]:
        """The effect where receivers see the source's values, with weights from 0 to 1."""
        logits, _ = self._runs(weights.to(self.source), self.source)
        return self._effect(logits)

    def _effect(self, logits: Tensor) -> Float[Tensor, " batch"]:
        return (self.compared.by_example(logits) - self._at_base) / self._change

    def faithfulness(self, circuit: Bool[Tensor, "sender receiver"]) -> float:
        return 1 - float(self.replaced(~circuit).mean())

    def scores(
        self,
        method: str,
        *,
        n_steps: int | None = None,
        rule: Rule = "midpoint",
        tolerance: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "sender receiver batch"]:
        """Scores of single edges; of a path also :attr:`integrals`.

        Args:
            method: ``exact`` (a run for every edge), ``eap`` (arXiv 2310.10348), ``eap_ig``
                (arXiv 2403.17806), ``edge_ig``; or the controls ``magnitude`` (norm of the sender's
                output times norm of the weights that read it; of a ``LoopedTransformer`` only)
                and ``random`` (from 0 to 1).
            n_steps, rule, tolerance: Of paths, as for :func:`.edge_study`.
            generator: Draws random scores.
        """
        edges = self.graph.edges
        match method:
            case "exact":
                effects = self._at_base.new_zeros(*edges.shape, len(self._at_base))
                for s, r in track(edges.nonzero().tolist(), "edge"):
                    one = torch.zeros_like(edges)
                    one[s, r] = True
                    effects[s, r] = self.replaced(one)
                return effects
            case "eap":
                return self._gradient(0.0, self.source - self.base, added=True)
            case "eap_ig" | "edge_ig":
                return self._along_path(method, rule, n_steps or STEPS[rule], tolerance)
            case "magnitude":
                return self._magnitude()
            case _:
                drawn = torch.rand(edges.shape, generator=generator, dtype=torch.float64)
                return drawn[..., None].expand(*drawn.shape, len(self._at_base))

    def _along_path(
        self, method: str, rule: Rule, n_steps: int, tolerance: float
    ) -> Float[Tensor, "sender receiver batch"]:
        """Mean gradient along the path of all weights (``edge_ig``), or of the input."""
        edges, change = self.graph.edges, self.source - self.base  # [sender, batch, pos, d_model]

        def embedding(points: Tensor) -> Tensor:
            return self.base[0] + points.to(self.base)[:, None, None] * change[0]

        def gradient(points: Tensor) -> Tensor:
            if method == "edge_ig":
                return self._gradient(points, self.source)
            return self._gradient(0.0, change, added=True, embedding=embedding(points))

        @torch.no_grad()
        def effect(points: Tensor) -> Tensor:
            if method == "edge_ig":
                return self.replaced(points.expand(*edges.shape, -1)).double()
            logits, _ = self._runs(embedding=embedding(points))
            return self._effect(logits).double()

        def slope(points: Tensor) -> Tensor:
            if method == "edge_ig":
                return gradient(points).sum((0, 1))
            points = points.clone().requires_grad_()
            with recording_gradients():
                logits, _ = self._runs(embedding=embedding(points))
                total = self._total(logits)
            return torch.autograd.grad(total, points)[0].double() / self._change

        n_examples = len(self._at_base)
        if rule == "midpoint":
            nodes = _midpoint_nodes(n_steps, n_examples)
        else:
            limits = {"tolerance": tolerance, "most": n_steps}
            narrowest = 8 * torch.finfo(self.base.dtype).eps
            nodes = adaptive_nodes(effect, slope, n_examples, narrowest=narrowest, **limits)
        scores = nodes.integral(gradient)
        # Edges out of the input, or all edges, have the whole change between them.
        total = scores.sum((0, 1)) if method == "edge_ig" else scores[0].sum(0)
        excess = total - self.replaced(edges).double()
        self.integrals[method] = Integral(
            n_gradients=len(nodes.points),
            n_slopes=nodes.n_slopes,
            gap=float(excess.mean().abs()),
            largest_gap=float(excess.abs().max()),
            estimated=float(nodes.error.mean()),
        )
        return scores

    def tied(self, effects: Float[Tensor, "sender receiver batch"]) -> Float[Tensor, "tied batch"]:
        index, is_edge = self.graph.tied_index, self.graph.edges
        total = effects.new_zeros(len(self.graph.tied_edges), effects.shape[-1])
        # Each edge [edge, batch] is added at the number of its tied edge.
        return total.index_add(0, index[is_edge], effects[is_edge])

    def exact_tied(self) -> Float[Tensor, "tied batch"]:
        numbers = track(range(len(self.graph.tied_edges)), "edge")
        return torch.stack([self.replaced(self.graph.tied_index == k) for k in numbers])

    @torch.no_grad()
    def _magnitude(self) -> Float[Tensor, "sender receiver batch"]:
        written = self.base.double().norm(dim=-1).mean(-1)  # [sender, batch]
        read = []  # norms of each receiver's input weights
        for k, slot in self.graph.receivers:
            reader = self.graph.readers[k]
            if not reader.section:
                read.append(self.model.unembedding.weight.norm())
                continue
            layer = getattr(self.model, reader.section)[reader.layer]
            if reader.head is None:
                neurons = slice(None) if reader.neurons is None else list(reader.neurons)
                read.append(layer.mlp.fc_in.weight[neurons].norm())
            else:
                by_slot = {"q": layer.attn.W_Q, "k": layer.attn.W_K, "v": layer.attn.W_V}
                weights = [by_slot[slot]] if slot else by_slot.values()
                # W_Q, W_K, W_V are [head, d_model, d_head].
                read.append(torch.stack([weight[reader.head] for weight in weights]).norm())
        return written[:, None] * torch.stack(read).to(written)[:, None]

    def _gradient(
        self, weight: float | Tensor, values: Tensor, **options: Any
    ) -> Float[Tensor, "sender receiver batch"]:
        """Gradient of the metric in each weight, by example, where its weights are all equal."""
        shape = (*self.graph.edges.shape, len(self._at_base))  # [sender, receiver, batch]
        weights = torch.as_tensor(weight).to(self.base).expand(shape).clone().requires_grad_()
        with recording_gradients():
            logits, _ = self._runs(weights, values, **options)
            # Examples are independent: the gradient of the sum is that of each.
            total = self._total(logits)
        (gradient,) = torch.autograd.grad(total, weights)
        return gradient.double() / self._change

    def _total(self, logits: Tensor) -> Tensor:
        """The metric, summed over examples; raise if the model cuts its gradient off."""
        total = self.compared.by_example(logits).sum()
        if not total.requires_grad:
            expected, got = "layers with gradients", "layers that cut them off"
            fix = "If it is quantised, quantise weights alone, with activations in float."
            raise InputError("model", expected=expected, given=got, fix=fix)
        return total


def areas(
    faithfulness: Sequence[float] | np.ndarray, shares: Sequence[float] | np.ndarray = SHARES
) -> tuple[float, float]:
    """CPR and CMD (arXiv 2504.13151): areas under f and abs(1 - f) over the share of edges.

    Example:
        >>> [round(area, 3) for area in areas([1.0] * 10)]
        [0.999, 0.0]
    """
    f, x = np.asarray(faithfulness, dtype=float), np.asarray(shares, dtype=float)
    return float(np.trapezoid(f, x)), float(np.trapezoid(abs(1 - f), x))


def top(scores: Float[Tensor, " edge"], count: int) -> Bool[Tensor, " edge"]:
    """The ``count`` edges of highest score; among equal ones, the first."""
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.argsort(descending=True, stable=True)[:count].cpu()] = True
    return chosen


@dataclass(frozen=True)
class Completeness:
    """Gaps between a circuit C and the model M without random halves K of C (arXiv 2211.00593)."""

    without: float  # f(M without C): 0 if nothing else computes what C does
    mean_gap: float  # mean over K of |f(M without K) - f(C without K)|
    largest_gap: float


class TiedCircuits:
    def __init__(self, effects: EdgeEffects) -> None:
        self._effects = effects
        self._index, self._n = effects.graph.tied_index, len(effects.graph.tied_edges)

    def faithfulness(self, circuit: Bool[Tensor, " tied"]) -> float:
        # Index -1, where there is no edge, reads the last entry.
        unrolled = torch.cat([circuit, torch.zeros(1, dtype=torch.bool)])[self._index]
        return self._effects.faithfulness(unrolled)

    def pruned(self, threshold: float) -> Bool[Tensor, " tied"]:
        """Greedy pruning of the edges in turn, from the readout backwards.

        An edge is removed if that changes faithfulness by less than the threshold (ACDC, arXiv
        2304.14997, with the metric instead of a divergence).
        """
        graph = self._effects.graph
        # Tied edges in the order of the last stage at which each is read.
        stages = graph.read_stages.expand(graph.edges.shape)[graph.edges]
        last = torch.zeros(self._n, dtype=torch.int64)
        last = last.scatter_reduce(0, self._index[graph.edges], stages, "amax")
        backwards = last.argsort(descending=True, stable=True).tolist()
        circuit = torch.ones(self._n, dtype=torch.bool)
        now = self.faithfulness(circuit)
        for edge in track(backwards, "edge"):
            circuit[edge] = False
            without = self.faithfulness(circuit)
            circuit[edge] = abs(now - without) >= threshold
            now = now if circuit[edge] else without
        return circuit

    def minimality(self, circuit: Bool[Tensor, " tied"]) -> Float[Tensor, " tied"]:
        full = self.faithfulness(circuit)
        cost = torch.full((self._n,), float("nan"), dtype=torch.float64)
        for edge in circuit.nonzero().flatten().tolist():
            without = circuit.clone()
            without[edge] = False
            cost[edge] = full - self.faithfulness(without)
        return cost

    def completeness(
        self, circuit: Bool[Tensor, " tied"], generator: torch.Generator
    ) -> Completeness:
        every = torch.ones_like(circuit)
        gaps = []
        for _ in range(10):
            drawn = torch.rand(self._n, generator=generator, dtype=torch.float32) < 0.5
            part = circuit & drawn
            gaps.append(abs(self.faithfulness(every & ~part) - self.faithfulness(circuit & ~part)))
        return Completeness(self.faithfulness(every & ~circuit), float(np.mean(gaps)), max(gaps))

    def at_random(self, count: int, generator: torch.Generator) -> list[float]:
        """Control: faithfulness of ``count`` random edges, drawn ten times."""
        scores = torch.rand(10, self._n, generator=generator, dtype=torch.float32)
        return [self.faithfulness(top(drawn, count)) for drawn in scores]


_ORDER = 3  # points of a panel


@dataclass(frozen=True)
class Nodes:
    """Where gradients are taken, ``[node, batch]``, and their weights, which add up to 1.

    Attributes:
        error: At least the absolute error of the integral of the slope, by example; NaN if unknown.
        n_slopes: Slopes that were computed to choose the nodes.
    """

    points: Float[Tensor, "node batch"]
    weights: Float[Tensor, "node batch"]
    error: Float[Tensor, " batch"]
    n_slopes: int = 0

    def integral(self, gradient: Callable[[Tensor], Tensor]) -> Float[Tensor, "*shape batch"]:
        """The integral of a function of the points ``[batch]`` of all examples."""
        total: Any = 0
        for points, weights in track(list(zip(self.points, self.weights)), "step"):
            total = total + weights * gradient(points)
        return total


def _midpoint_nodes(n_steps: int, n_examples: int) -> Nodes:
    points = (torch.arange(n_steps, dtype=torch.float64) + 0.5) / n_steps
    unknown = torch.full((n_examples,), float("nan"), dtype=torch.float64)
    points = points[:, None].expand(-1, n_examples)
    return Nodes(points, torch.full_like(points, 1 / n_steps), unknown)


def adaptive_nodes(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    n_examples: int,
    *,
    tolerance: float,
    most: int,
    narrowest: float = 2.0**-20,
) -> Nodes:
    """Gauss-Legendre points of panels that are halved where the slope needs it.

    The error of a panel is the difference between its integral and the change of the value from its
    start to its end. Each example halves its worst panel, until the mean over examples of the
    summed errors is at most ``tolerance``, there are ``most`` points, or no panel can be halved.

    Args:
        value: The function [batch] at the points [batch] of all examples.
        slope: Its derivative there.
        narrowest: Panels of this width are not halved: their points would be equal after rounding.
    """
    x, w = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(_ORDER))
    x, w = (x + 1) / 2, w / 2
    row = torch.arange(n_examples)
    most = min(most, int(_ORDER / narrowest))  # in half precision all panels can be the narrowest

    def error_of(ends: Tensor) -> Float[Tensor, " batch"]:
        (start, end), (at_start, at_end) = ends
        width = end - start
        slopes = torch.stack([w[k] * slope(start + x[k] * width) for k in range(_ORDER)])
        return (slopes.sum(0) * width - (at_end - at_start)).abs()

    # Of each panel, its two ends and the values there [panel, what, end, batch], and its error.
    ends = torch.stack([torch.full((n_examples,), v, dtype=torch.float64) for v in (0.0, 1.0)])
    panels = torch.stack([ends, torch.stack([value(end) for end in ends])])[None]
    errors = error_of(panels[0])[None]
    with bar("panels", total=most) as shown:
        while errors.sum(0).mean() > tolerance and _ORDER * (len(panels) + 1) <= most:
            widths = panels[:, 0, 1] - panels[:, 0, 0]  # [panel, batch]
            # The worst panel; where no error is left, the widest.
            worst = torch.where(widths > narrowest, errors + 1e-12 * widths, 0).argmax(0)
            left = panels[worst, :, :, row].permute(1, 2, 0)  # [what, end, batch]
            right, middle = left.clone(), left[0].mean(0)
            left[:, 1] = right[:, 0] = torch.stack([middle, value(middle)])
            panels[worst, :, :, row], errors[worst, row] = left.permute(2, 0, 1), error_of(left)
            panels = torch.cat([panels, right[None]])
            errors = torch.cat([errors, error_of(right)[None]])
            shown.update(_ORDER)
    starts, widths = panels[:, 0, 0], panels[:, 0, 1] - panels[:, 0, 0]
    points = starts[:, None] + x[:, None] * widths[:, None]  # [panel, point, batch]
    weights = w[:, None] * widths[:, None]
    n_slopes = _ORDER * (2 * len(panels) - 1)  # of the first panel, and of the halves of others
    return Nodes(points.flatten(0, 1), weights.flatten(0, 1), errors.sum(0), n_slopes)
