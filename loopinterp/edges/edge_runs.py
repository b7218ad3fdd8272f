r"""Runs with a residual stream for each receiver, and path patching with them.

Of sender s, receiver r sees

.. math:: \text{seen}_{s \to r} = v_s + w_{s r} (d_s - v_s)

with :math:`v_s` the sender's output in this run, :math:`d_s` a value in its place (by default from
the source's run), and w the weight of the edge. Receivers with equal weights share a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch.nn.functional import linear

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError
from loopinterp.edges.edge_streams import Streams
from loopinterp.edges.published_runs import PublishedRuns, graph_of_model
from loopinterp.edges.unrolled_graph import SLOTS, StreamNorms, UnrolledGraph, layout_of
from loopinterp.interventions.base_and_source import given_pairs
from loopinterp.models.run import HookedRun
from loopinterp.models.taps import Tap
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.tasks.task import Batch


class EdgeRuns:
    def __init__(self, model: LoopedTransformer, graph: UnrolledGraph, inputs: Tensor) -> None:
        self.model, self.graph = model, graph
        bound = model.bind(inputs)
        self._context = bound.context
        # A run that stops before the prelude gives the embedding.
        before = {"n_loops": 1, "stop_at_layer": 0}
        self._embedding: Tensor = model(inputs, **before) if model.config.n_prelude else bound.e

    def __call__(
        self,
        weights: Float[Tensor, "sender receiver *batch"] | None = None,
        values: Float[Tensor, "sender batch pos d_model"] | None = None,
        *,
        added: bool = False,
        embedding: Float[Tensor, "batch pos d_model"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab_out"], Float[Tensor, "sender batch pos d_model"]]:
        """Logits of a run, and the output of every sender.

        At weight 1, receivers see ``values`` instead of the senders' outputs (or ``added`` to
        them). Without weights it is the model's own run. ``embedding`` replaces that of the inputs.
        """
        run = Streams(self.graph, weights, values, added=added)
        config, model = self.model.config, self.model
        # Streams are [row, batch, pos, d_model], a row for receivers that see the same.
        e = run.seen([self._embedding if embedding is None else embedding])
        for layer in model.prelude:
            e, _ = self._layer(layer, run, e, None)
        # Other initial states do not depend on the embedding, so that all rows are equal.
        h = e if config.initial_state == "embedding" else model.initial_state(e[0]).expand_as(e)
        for _ in range(self.graph.n_loops):
            h, e = run.alive(h), run.alive(e)
            if config.injection == "input":
                h = h + e
            elif model.recall is not None:
                h = model.recall(h, e)
            for layer in model.block:
                h, e = self._layer(layer, run, h, e)
            h = model.end_loop(h, e)
        for layer in model.coda:
            h, _ = self._layer(layer, run, h, None)
        (readout,) = next(run.stages)
        h = h[run.row(readout)]  # [batch, pos, d_model]
        h = h if model.ln_final is None else model.ln_final(h)
        return model.unembedding(h), torch.stack(run.outputs)

    def _layer(self, layer: Any, run: Streams, h: Tensor, e: Tensor | None) -> tuple[Tensor, Any]:
        context = self._context.outside_the_loop() if e is None else self._context
        heads, tap = next(run.stages), _KeepZ()
        rows = {slot: [run.row(k, slot) for k in heads] for slot in SLOTS[:3]}
        if len({row for each in rows.values() for row in each}) == 1:
            layer.attn(_read(layer, "1", h, e, rows["q"][0]), context, tap)  # one stream for all
        else:
            # [head, batch, pos, d_model] -> [batch, pos, head, d_model]: a stream for each head.
            forks = [_read(layer, "1", h, e, rows[slot]).permute(1, 2, 0, 3) for slot in SLOTS[:3]]
            # Queries, keys and values come from the forks; x only gives the shape.
            layer.attn(forks[0][:, :, 0], context, tap, forks)
        # z [batch, pos, head, d_head] through W_O [head, d_head, d_model], head by head.
        outputs = list(torch.einsum("bphd,hdm->hbpm", tap.z, layer.attn.W_O))
        h, e = run.write(h, e, outputs, layer.attn.out.bias, layer.ln1_post)
        h = layer.ln1(h) if layer.norms_sum else h
        up, down, outputs = layer.mlp.fc_in, layer.mlp.fc_out, []
        for k in next(run.stages):
            x = _read(layer, "2", h, e, run.row(k))
            group = self.graph.readers[k].neurons
            n = slice(None) if group is None else torch.tensor(group, device=x.device)
            neurons = layer.mlp.act_fn(linear(x, up.weight[n], up.bias[n]))  # of this group alone
            outputs.append(linear(neurons, down.weight[:, n]))
        h, e = run.write(h, e, outputs, down.bias, layer.ln2_post)
        return layer.ln2(h) if layer.norms_sum else h, e


def _read(
    layer: Any, sublayer: str, h: Tensor, e: Tensor | None, row: int | list[int]
) -> Float[Tensor, "*row batch pos d_model"]:
    norm, recall = getattr(layer, f"ln{sublayer}"), getattr(layer, f"recall{sublayer}")
    x = h[row] if norm is None or layer.norms_sum else norm(h[row])
    if e is None or not layer.injects:
        return x
    return x + e[row] if recall is None else recall(x, e[row])


class _KeepZ(Tap):
    z: Float[Tensor, "batch pos head d_head"]

    def __call__(self, component: str, x: Tensor) -> Tensor:
        if component == "attn.hook_z":
            self.z = x
        return x


def edge_runs(model: Any, graph: UnrolledGraph, inputs: Tensor) -> EdgeRuns | PublishedRuns:
    if isinstance(model, LoopedTransformer):
        return EdgeRuns(model, graph, inputs)
    return PublishedRuns(model, graph, inputs)


def graph_of_pairs(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    n_loops: int | None,
    neurons: Mapping[str, Sequence[int]] | None,
    split: bool,
    stream_norms: StreamNorms,
    scored: Tensor | None = None,
) -> tuple[UnrolledGraph, Tensor, Tensor, Tensor | None]:
    if isinstance(model, HookedRun):
        layout_of(model.site_map)  # raises at a layer without heads and MLP
    base, source, n_loops, scored = given_pairs(
        model, base, source, n_loops, scored, component="resid_pre"
    )
    options: dict[str, Any] = {"neurons": neurons, "split": split}
    if not isinstance(model, HookedRun):
        actual = f"a {type(model).__name__}"
        fix = "Pass the model inside it, or convert it with models.convert_model."
    elif model.device.type != "cpu":
        actual, fix = f"one on {model.device}", "Pass model.cpu()."
    elif not isinstance(model, LoopedTransformer):
        graph = graph_of_model(model, base, source, n_loops, stream_norms, **options)
        return graph, base, source, scored
    elif stream_norms == "nodes":
        actual = "stream_norms='nodes' for a LoopedTransformer"
        fix = "Leave it out: edges lead through its norms."
    elif model.config.norm == "gated":
        actual = "norm='gated', whose gates read the stream themselves"
        fix = "Study activations instead, with patching_sweep(component='attn_gate')."
    else:
        need_plain(model, "runs of edges")  # which take heads and neurons apart by their weights
        graph = UnrolledGraph(model.config, n_loops, **options)
        return graph, base, source, scored
    expected = "a LoopedTransformer or an adapted model, on the CPU"
    raise InputError("model", expected=expected, given=actual, fix=fix)


@torch.no_grad()
@checked
def path_patching(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    senders: str | Annotated[Sequence[str], Field(min_length=1)],
    receivers: str | Annotated[Sequence[str], Field(min_length=1)],
    through: str | Sequence[str] = (),
    neurons: Mapping[str, Sequence[int]] | None = None,
    stream_norms: StreamNorms = "edges",
    n_loops: Loops | None = None,
) -> Float[Tensor, "batch pos d_vocab_out"]:
    r"""Logits of the base's run in which receivers see the senders' outputs of the source's run.

    A path from a sender s to a receiver r is the residual stream, over all loops between them: r
    is recomputed with

    .. math:: \text{seen}_{s \to r} = s(\text{source})

    and its other inputs as in the base's run; components after r run on. Components ``through`` see
    s too, and are seen by receivers and one another. For the direct effect of r on the logits, go
    *through* r to ``readout``.

    Args:
        model: A ``LoopedTransformer``, or an adapted model with separate heads and MLPs.
        base: A batch, or inputs alone: tokens ``[batch, pos]``, or features.
        source: As many inputs of the same length.
        senders: ``"input"`` (the embedding), heads, MLPs, or groups of neurons:
            ``"3:block.0.head.1"`` at loop 3, ``"block.0.mlp"`` at all loops, ``"block.0.carry"``.
        receivers: The same, and ``"readout"``; ``"3:block.0.head.1.q"`` is a head's queries.
        through: Components between them.
        neurons: Groups of neurons by name, as in :class:`UnrolledGraph`; of a
            ``LoopedTransformer`` only.
        stream_norms: As for :func:`edge_study`.
        n_loops: Loops of the run; T(n) by default, required for inputs alone.

    Raises:
        InputError: If the order of components is impossible, or the model's stream cannot be read
            as nodes and edges.

    Source: arXiv 2211.00593 and 2304.05969, with loops unrolled.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> path_patching(LoopedTransformer(config), base, source, n_loops=3,
        ...               senders="0:block.0.mlp", receivers="2:block.0.head.1.v").shape
        torch.Size([8, 4, 2])
    """
    graph, base, source, _ = graph_of_pairs(
        model, base, source, n_loops=n_loops, neurons=neurons, split=True,
        stream_norms=stream_norms,
    )  # fmt: skip
    first, last = graph.senders_named(senders), graph.receivers_named(receivers)
    between = graph.senders_named(through, "through")
    read_at = graph.read_stages[last].tolist()
    if min(graph.senders[s].stage for s in first) >= max(read_at):
        raise InputError(
            "receivers",
            expected=f"some that read after {graph.senders[first[0]].name} has written",
            given=graph.receiver_names[last[-1]],
            fix="Name receivers in a later layer or loop, or 'readout'.",
        )
    wrong = [m for m in between if m in first or graph.senders[m].stage >= min(read_at)]
    if wrong:
        raise InputError(
            "through",
            expected="components before all receivers that are not senders",
            given=graph.senders[wrong[0]].name,
            fix="Leave it out: components after a receiver run on in any case.",
        )
    names = {graph.senders[m].name for m in between}
    # Receivers on a path: the last ones, and those of the components between.
    on_path: Bool[Tensor, " receiver"]
    on_path = torch.tensor([graph.readers[k].name in names for k, _ in graph.receivers])
    on_path[last] = True
    runs = edge_runs(model, graph, base)
    _, base_outputs = runs()
    _, source_outputs = edge_runs(model, graph, source)()
    # Receivers on the path see the source's values of senders; all others see the base's values
    # of the components between.
    weights = torch.zeros(graph.edges.shape)
    weights[first] = on_path.to(weights)
    weights[between] = (~on_path).to(weights)
    values = base_outputs.clone()
    values[first] = source_outputs[first]
    return runs(weights.to(values), values)[0]
