r"""A run in which every receiver has a residual stream of its own.

What receiver r sees of sender s is

.. math:: \text{seen}_{s \to r} = v_s + w_{s r} (d_s - v_s)

with :math:`v_s` what s writes in this run, :math:`d_s` what a donor's run wrote there, and w the
weight of the edge: 0 is the run itself, 1 the donor's. The stream of r is then added up, injected
into, and normed as the model does it. Path patching, circuits and the gradients of all edges are
such runs with other weights. Receivers whose weights are the same share a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from loopinterp.circuits.edges.unrolled_graph import SLOTS, UnrolledGraph
from loopinterp.errors import InputError
from loopinterp.models.changed_layers import need_plain
from loopinterp.models.looped_model import need_hooks
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.models.taps import Tap

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.circuits.edges.unrolled_graph import Component


@dataclass(frozen=True, eq=False, repr=False)
class Donor:
    """What receivers see in place of what a sender writes, as far as an edge's weight says.

    Attributes:
        values: What each sender writes in the donor's run ``[sender, batch, pos, d_model]``.
        added: Whether they are added to what is written, and not put in its place.
    """

    values: Float[Tensor, "sender batch pos d_model"]
    added: bool = False


class EdgeRuns:
    """Runs of a model on some inputs, with weights on its edges.

    Args:
        model: A ``LoopedTransformer``.
        graph: Its components.
        inputs: Tokens ``[batch, pos]``, or features ``[batch, pos, d_features]``.

    Attributes:
        embedding: What the input writes ``[batch, pos, d_model]``.

    Raises:
        InputError: A model of another kind, with gates, with layers that somebody has changed, or
            not on the CPU, or inputs that it cannot read.
        HookError: Hooks are on: these runs fire none.
    """

    def __init__(self, model: Any, graph: UnrolledGraph, inputs: Tensor) -> None:
        need_graph(model)
        if model.device.type != "cpu":
            raise InputError(
                "device of the model",
                expected="cpu",
                given=str(model.device),
                fix="Pass model.cpu(): scores of edges are not numbers elsewhere so far.",
            )
        model.need_no_hooks()  # its layers are run one by one here, and would fire none
        need_plain(model, "runs of edges")  # which take heads and neurons apart by their weights
        self.model: LoopedTransformer = model
        self.graph = graph
        self._inside = model._context(inputs, 0)
        self._outside = self._inside.outside_the_loop()
        tokens = inputs.long() if model.config.token_input else inputs
        added = model._added_positions(inputs, 0)
        embedded = model.embedding(tokens)
        self.embedding: Tensor = embedded if added is None else embedded + added

    def __call__(
        self,
        weights: Float[Tensor, "sender receiver *batch"] | None = None,
        donor: Donor | None = None,
        *,
        embedding: Float[Tensor, "batch pos d_model"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab_out"], Float[Tensor, "sender batch pos d_model"]]:
        """One run: its logits, and what every sender wrote.

        Args:
            weights: Weight of each edge, for all examples or for each ``[sender, receiver,
                batch]``; None for the model's own run. Where there is no edge, none is looked at.
            donor: What is seen at weight 1.
            embedding: What the input writes, if not that of the inputs.
        """
        streams = _Streams(self.graph, weights, donor)
        written = [self.embedding if embedding is None else embedding]
        config, model = self.model.config, self.model
        e = streams.spread(written)
        stages = self.graph.stages()
        for layer in model.prelude:
            e, _ = self._layer(layer, streams, e, None, stages, written)
        h = e if config.initial_state == "embedding" else model.initial_state(e[0]).expand_as(e)
        for _ in range(self.graph.n_loops):
            h, e = h[-streams.alive :], e[-streams.alive :]
            if config.injection == "input":
                h = h + e
            elif model.recall is not None:
                h = model.recall(h, e)
            for layer in model.block:
                h, e = self._layer(layer, streams, h, e, stages, written)
            h = model.end_loop(h, e)
        for layer in model.coda:
            h, _ = self._layer(layer, streams, h, None, stages, written)
        (readout,) = next(stages)
        h = streams.of(h, readout, "")
        h = h if model.ln_final is None else model.ln_final(h)
        return model.unembedding(h), torch.stack(written)

    def _layer(
        self,
        layer: Any,
        streams: _Streams,
        h: Tensor,
        e: Tensor | None,
        stages: Any,
        written: list[Tensor],
    ) -> tuple[Tensor, Any]:
        """The streams after a layer, as :class:`Layer` makes them of one."""
        before, after = (None, layer.ln1) if layer.norms_sum else (layer.ln1, None)
        new = self._attention(layer, streams, h, e, next(stages), before)
        h, e = streams.write(h, e, new, written, layer.attn.out.bias, layer.ln1_post)
        h = h if after is None else after(h)
        before, after = (None, layer.ln2) if layer.norms_sum else (layer.ln2, None)
        new = self._mlp(layer, streams, h, e, next(stages), before)
        h, e = streams.write(h, e, new, written, layer.mlp.fc_out.bias, layer.ln2_post)
        return h if after is None else after(h), e

    def _attention(
        self,
        layer: Any,
        streams: _Streams,
        h: Tensor,
        e: Tensor | None,
        heads: list[int],
        norm: Any,
    ) -> list[Tensor]:
        """What each head writes."""
        context = self._outside if e is None else self._inside
        catch = _CatchZ()

        def read(rows: list[int]) -> Tensor:
            x = streams.rows(h, rows)
            x = x if norm is None else norm(x)
            inside = None if e is None else streams.rows(e, rows)
            return layer._inject(x, inside, layer.recall1)

        rows = {slot: [streams.row(k, slot) for k in heads] for slot in SLOTS}
        if len({row for each in rows.values() for row in each}) == 1:
            layer.attn(read(rows["q"][:1])[0], context, catch)
        else:
            forks = [read(rows[slot]).permute(1, 2, 0, 3) for slot in SLOTS]
            # Queries, keys and values of all heads come from the forks: x gives but the shape.
            layer.attn(forks[0][:, :, 0], context, catch, forks)
        return list(torch.einsum("bphd,hdm->hbpm", catch.z, layer.attn.W_O))

    def _mlp(
        self,
        layer: Any,
        streams: _Streams,
        h: Tensor,
        e: Tensor | None,
        groups: list[int],
        norm: Any,
    ) -> list[Tensor]:
        """What each group of neurons writes."""
        up, down = layer.mlp.fc_in, layer.mlp.fc_out
        new = []
        for k in groups:
            x = streams.of(h, k, "")
            x = x if norm is None else norm(x)
            inside = None if e is None else streams.of(e, k, "")
            x = layer._inject(x, inside, layer.recall2)
            own = self.graph.readers[k].neurons
            n = slice(None) if own is None else torch.tensor(own, device=x.device)
            neurons = layer.mlp.act_fn(linear(x, up.weight[n], up.bias[n]))
            new.append(linear(neurons, down.weight[:, n]))
        return new


class _CatchZ(Tap):
    """Keeps what heads bring, before their output weights ``[batch, pos, head, d_head]``."""

    z: Tensor

    def __call__(self, component: str, x: Tensor) -> Tensor:
        if component == "attn.hook_z":
            self.z = x
        return x


class _Streams:
    """The streams of a run: which receiver reads which, and what each sees of a sender.

    Streams are ``[row, batch, pos, d_model]``. Rows stand in the order in which they are read for
    the last time; those that nobody will read again are dropped, so that row k of all is row
    ``k - dropped``.
    """

    def __init__(self, graph: UnrolledGraph, weights: Tensor | None, donor: Donor | None) -> None:
        self._graph, self._donor = graph, donor
        n = len(graph.receivers)
        self._weights: Tensor | None = None
        row_of = torch.zeros(n, dtype=torch.int64)
        if weights is not None and donor is not None:
            there = graph.edges.to(weights.device)
            there = there if weights.dim() == 2 else there[..., None]
            weights = weights * there
            if weights.requires_grad:
                row_of, self._weights = torch.arange(n), weights
            else:
                self._weights, row_of = _distinct(weights)
        self._n_rows = int(row_of.max()) + 1
        self._row: dict[tuple[int, str], int] = dict(zip(graph.receivers, row_of.tolist()))
        # The last stage at which each row is read.
        stage = torch.tensor([graph.readers[k].stage for k, _ in graph.receivers])
        last = torch.zeros(self._n_rows, dtype=torch.int64).scatter_reduce(0, row_of, stage, "amax")
        self._last = last.tolist()
        self._written = 0
        self._dropped = 0

    @property
    def alive(self) -> int:
        """How many streams there are still."""
        return self._n_rows - self._dropped

    def row(self, reader: int, slot: str) -> int:
        """The row that a receiver reads."""
        row = self._row.get((reader, slot))
        return self._row[reader, ""] if row is None else row

    def rows(self, h: Tensor, rows: list[int]) -> Float[Tensor, "row batch pos d_model"]:
        """Some of the streams."""
        return h[[row - self._dropped for row in rows]]

    def of(self, h: Tensor, reader: int, slot: str) -> Float[Tensor, "batch pos d_model"]:
        """The stream that a receiver reads."""
        return h[self.row(reader, slot) - self._dropped]

    def spread(self, new: list[Tensor]) -> Float[Tensor, "row batch pos d_model"]:
        """What is seen, all together, of the next senders; it is theirs that was written last."""
        first = self._written
        self._written += len(new)
        values = torch.stack(new)
        whole = values.sum(0)
        if self._weights is None or self._donor is None:
            return whole.expand(self.alive, *whole.shape)
        weights = self._weights[first : self._written, self._dropped :]
        if not weights.requires_grad and not weights.any():
            return whole.expand(self.alive, *whole.shape)
        given = self._donor.values[first : self._written]
        change = given if self._donor.added else given - values
        axes = "sr,sbpd->rbpd" if weights.dim() == 2 else "srb,sbpd->rbpd"
        return whole + torch.einsum(axes, weights, change)

    def write(
        self,
        h: Tensor,
        e: Tensor | None,
        new: list[Tensor],
        written: list[Tensor],
        bias: Tensor,
        norm: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The streams after the next senders have written, and the injected inputs beside them."""
        stage = self._graph.senders[self._written].stage
        while self._dropped < self._n_rows - 1 and self._last[self._dropped] <= stage:
            self._dropped += 1
        written += new
        seen = self.spread(new) + bias
        seen = seen if norm is None else norm(seen)
        h = h[-self.alive :] + seen
        return h, None if e is None else e[-self.alive :]


def _distinct(weights: Tensor) -> tuple[Tensor, Int[Tensor, " receiver"]]:
    """The distinct columns of weights, and that of each receiver; in order of their last use."""
    _, number = torch.unique(weights, dim=1, return_inverse=True)
    last: dict[int, int] = {int(row): at for at, row in enumerate(number.tolist())}
    order = {row: k for k, row in enumerate(sorted(last, key=lambda row: last[row]))}
    columns = [last[row] for row in order]
    row_of = torch.tensor([order[int(row)] for row in number.tolist()])
    return weights[:, columns], row_of


def need_graph(model: Any) -> None:
    """Raise unless a model's stream is a sum of what components write, through norms.

    Raises:
        InputError: The model has no hooks, is no ``LoopedTransformer``, or has gates.
    """
    need_hooks(model)
    if not isinstance(model, LoopedTransformer):
        raise InputError(
            "model",
            expected="a LoopedTransformer, whose heads and MLPs can be run one by one",
            given=type(model).__name__,
            fix="Pass the LoopedTransformer inside it, or convert its weights with "
            "loopinterp.models.convert_model.",
        )
    if model.config.norm == "gated":
        raise InputError(
            "model",
            expected="heads and MLPs that write to the stream, through norms or not",
            given="norm='gated': its gates read the stream themselves, and what a component "
            "writes is not its own alone",
            fix="Study activations instead, with patching_sweep(component='attn_gate').",
        )


def component_at(graph: UnrolledGraph, receiver: int) -> Component:
    """The component that a receiver belongs to."""
    return graph.readers[graph.receivers[receiver][0]]
