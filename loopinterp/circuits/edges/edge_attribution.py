r"""How much each edge matters: exactly, by its gradient, or by gradients along a path.

The effect of an edge is the change of the metric when its receiver sees what the sender writes in
the source's run, in shares of the change from base to source. With w the weight of an edge (see
``edge_run.py``), 0 in the base's run,

.. math::
    \text{exact}_{sr} = M(w_{sr} = 1) - M(0), \qquad
    \text{eap}_{sr} = \frac{\partial M}{\partial w_{sr}}(0)

the second being the gradient at the receiver's input times the difference of what the sender
writes. Norms between the two are not left out: they are differentiated where they stand.

``eap_ig`` is the mean of such gradients while the *input* goes from base to source; its effects of
edges out of the input add up to the whole change. ``edge_ig`` is the mean while the weights of
*all edges* go from 0 to 1 together,
:math:`\int_0^1 \partial M / \partial w_{sr}\,(t, …, t)\,dt`; its effects of all edges add up to the
whole change. Where units are flat at both ends, as thresholds
are, a gradient at an end is 0; along the input's path only one of a chain of thresholds is being
crossed at a time, and what the chain carries is 0 again; between all edges' ends none is flat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.activation_patching_inputs import Comparison
from loopinterp.circuits.edges.edge_run import Donor, EdgeRuns
from loopinterp.errors import InputError
from loopinterp.models.looped_model import bind
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.progress import track

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.circuits.activation_patching_inputs import Metric
    from loopinterp.circuits.edges.unrolled_graph import UnrolledGraph

EXACT, EAP, EAP_IG, EDGE_IG = "exact", "eap", "eap_ig", "edge_ig"
MAGNITUDE, RANDOM = "magnitude", "random"
METHODS = (EXACT, EAP, EAP_IG, EDGE_IG)
CONTROLS = (MAGNITUDE, RANDOM)


class EdgeEffects:
    """Effects of the edges between two runs of a model.

    Args:
        model: The model.
        graph: Its components.
        base: Inputs of the run that is patched.
        source: Inputs of the run that values are taken from.
        compared: What scores a run.
    """

    def __init__(
        self,
        model: Any,
        graph: UnrolledGraph,
        base: Tensor,
        source: Tensor,
        compared: Comparison,
    ) -> None:
        self.model, self.graph, self.compared = model, graph, compared
        with torch.no_grad():
            self._runs = EdgeRuns(model, graph, base)
            logits, self.base = self._runs()
            _, self.source = EdgeRuns(model, graph, source)()
            self._at_base = compared.by_example(logits)
        self._total = compared.at_source - compared.at_base

    @classmethod
    def between(
        cls,
        model: Any,
        graph: UnrolledGraph,
        base: Tensor,
        source: Tensor,
        *,
        scored: Bool[Tensor, "_ _"] | None = None,
        metric: Metric | None = None,
    ) -> EdgeEffects:
        """The effects between the runs of two sets of inputs.

        Args:
            model: The model.
            graph: Its components.
            base: Inputs of the run that is patched.
            source: As many others.
            scored: Positions ``[batch, pos]`` whose answers count; all if omitted.
            metric: From logits to a number for each example; the logit of the source's answer
                less that of the base's if omitted.

        Raises:
            InputError: The model answers all alike, or a metric without examples or gradients.
        """
        with torch.no_grad():
            logits, donor = (_logits(model, x, graph.n_loops) for x in (base, source))
        compared = Comparison(logits, donor, scored, metric)
        _check_metric(compared, logits)
        return cls(model, graph, base, source, compared)

    @torch.no_grad()
    def replaced(self, edges: Bool[Tensor, "sender receiver"]) -> Float[Tensor, " batch"]:
        """The effect of the source's values on some edges; all others as the run has them."""
        logits, _ = self._runs(edges.to(self.source), Donor(self.source))
        return (self.compared.by_example(logits) - self._at_base) / self._total

    def faithfulness(self, circuit: Bool[Tensor, "sender receiver"]) -> float:
        r"""How much of the metric is left when the source's values are on all edges but these.

        .. math:: f(C) = \frac{m(C) - m(\varnothing)}{m(M) - m(\varnothing)}
        """
        return 1 - float(self.replaced(~circuit).mean())

    def tied(self, effects: Float[Tensor, "sender receiver batch"]) -> Float[Tensor, "tied batch"]:
        """Sums over the edges that are one tied edge."""
        index, there = self.graph.tied_index, self.graph.edges
        total = effects.new_zeros(len(self.graph.tied_edges), effects.shape[-1])
        return total.index_add(0, index[there].to(total.device), effects[there.to(total.device)])

    def exact_tied(self) -> Float[Tensor, "tied batch"]:
        """Each tied edge, at all loops at once."""
        numbers = track(range(len(self.graph.tied_edges)), "edge")
        return torch.stack([self.replaced(self.graph.tied_index == k) for k in numbers])

    def exact(self) -> Float[Tensor, "sender receiver batch"]:
        """Each edge alone: a run for every edge."""
        effects = self._at_base.new_zeros(*self.graph.edges.shape, len(self._at_base))
        for s, r in track(self.graph.edges.nonzero().tolist(), "edge"):
            one = torch.zeros_like(self.graph.edges)
            one[s, r] = True
            effects[s, r] = self.replaced(one)
        return effects

    def eap(self) -> Float[Tensor, "sender receiver batch"]:
        """Gradients at the base (attribution patching of edges, arXiv 2310.10348)."""
        return self._gradient(0.0, self._difference)

    def eap_ig(self, n_steps: int) -> Float[Tensor, "sender receiver batch"]:
        """Mean of gradients at inputs between base and source (arXiv 2403.17806)."""
        start, end = self.base[0], self.source[0]

        def at(point: float) -> Tensor:
            return self._gradient(0.0, self._difference, start + point * (end - start))

        return _mean_along(at, n_steps)

    def edge_ig(self, n_steps: int) -> Float[Tensor, "sender receiver batch"]:
        """Mean of gradients while all edges go from the run's own values to the source's."""
        return _mean_along(lambda point: self._gradient(point, Donor(self.source)), n_steps)

    @torch.no_grad()
    def magnitude(self) -> Float[Tensor, "sender receiver batch"]:
        """Control: norm of what is written times norm of the weights that read it."""
        written = self.base.double().norm(dim=-1).mean(-1)  # [sender, batch]
        read = [_read_weight(self.model, self.graph, r) for r in self.graph.receivers]
        return written[:, None] * torch.stack(read).to(written)[:, None]

    def random(self, generator: torch.Generator) -> Float[Tensor, "sender receiver batch"]:
        """Control: scores drawn evenly from 0 to 1, the same for all examples."""
        drawn = torch.rand(self.graph.edges.shape, generator=generator, dtype=torch.float64)
        return drawn[..., None].expand(*drawn.shape, len(self._at_base)).to(self._at_base.device)

    @cached_property
    def _difference(self) -> Donor:
        return Donor(self.source - self.base, added=True)

    def _gradient(
        self, at: float, donor: Donor, embedding: Tensor | None = None
    ) -> Float[Tensor, "sender receiver batch"]:
        """Gradient of the metric along each weight, by example, where all weights are alike."""
        shape = (*self.graph.edges.shape, len(self._at_base))
        weights = torch.full(shape, at, dtype=self.base.dtype, device=self.base.device)
        weights.requires_grad_()
        with recording_gradients():
            logits, _ = self._runs(weights, donor, embedding=embedding)
            # Examples do not meet: the gradient of the sum is that of each.
            total = self.compared.by_example(logits).sum()
        (gradient,) = torch.autograd.grad(total, weights)
        return gradient.double() / self._total


def _mean_along(gradient: Callable[[float], Tensor], n_steps: int) -> Tensor:
    """The mean of gradients at the middles of as many equal parts of a path from 0 to 1."""
    total: Tensor | None = None
    for k in track(range(n_steps), "step"):
        here = gradient((k + 0.5) / n_steps)
        total = here if total is None else total + here
    assert total is not None
    return total / n_steps


def _read_weight(model: Any, graph: UnrolledGraph, receiver: tuple[int, str]) -> Tensor:
    """Norm of the weights that a receiver reads the stream with."""
    reader, slot = graph.readers[receiver[0]], receiver[1]
    if not reader.section:
        return model.unembedding.weight.norm()
    layer = getattr(model, reader.section)[reader.layer]
    if reader.head is None:
        own = slice(None) if reader.neurons is None else list(reader.neurons)
        return layer.mlp.fc_in.weight[own].norm()
    of = {"q": layer.attn.W_Q, "k": layer.attn.W_K, "v": layer.attn.W_V}
    read = [of[slot]] if slot else list(of.values())
    return torch.stack([weight[reader.head] for weight in read]).norm()


def _logits(model: Any, inputs: Tensor, n_loops: int) -> Tensor:
    """Logits of a run, which must be finite."""
    bound = bind(model, inputs)
    *_, (_, state) = bound.run(n_loops)
    return bound.read(state, n_loops)


def _check_metric(compared: Comparison, logits: Tensor) -> None:
    with recording_gradients():
        tried = compared.by_example(logits.detach().requires_grad_())
    if tried.shape != logits.shape[:1] or not tried.requires_grad:
        raise InputError(
            "metric",
            expected=f"one number for each of the {len(logits)} examples, with a gradient",
            given=f"shape {list(tried.shape)}, requires_grad={tried.requires_grad}",
            fix="Take means over positions, not over examples, and use no argmax.",
        )
