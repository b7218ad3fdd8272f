"""Runs of adapted models with a residual stream for each receiver.

The streams lie side by side in the batch, ``[row * batch, pos, d_model]``, and pass through the
model's own code, with taps: where a component reads (``hook_attn_in``, ``hook_mlp_in``), its own
row goes on alone; where it writes (``attn.hook_z``, ``hook_mlp_out``), each row sees its own value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.core.errors import InputError
from loopinterp.edges.edge_streams import Streams
from loopinterp.edges.unrolled_graph import (
    HEADS,
    MLP,
    SLOTS,
    StreamNorms,
    UnrolledGraph,
    layout_of,
    norms_in,
)
from loopinterp.models.taps import ChangingTaps, Taps, recording_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.run import HookedRun


class PublishedRuns:
    """Runs of an adapted model on some inputs; as :class:`.EdgeRuns`, which has the arguments.

    A head's output is its ``attn.hook_z`` (after its gate), filled up with zeros to ``d_model``.
    """

    def __init__(self, model: HookedRun, graph: UnrolledGraph, inputs: Tensor) -> None:
        self.model, self.graph, self._inputs = model, graph, inputs
        bound = model.bind(inputs)
        self._context, self._embedding = bound.context, bound.e

    def __call__(
        self,
        weights: Float[Tensor, "sender receiver *batch"] | None = None,
        values: Float[Tensor, "sender batch pos width"] | None = None,
        *,
        added: bool = False,
        embedding: Float[Tensor, "batch pos width"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab_out"], Float[Tensor, "sender batch pos width"]]:
        run = _Run(self.model, self.graph, len(self._inputs), weights, values, added, embedding)
        logits = self._through(run)
        width = max(x.shape[-1] for x in run.streams.outputs)
        outputs = [pad(x, (0, width - x.shape[-1])) for x in run.streams.outputs]
        return logits, torch.stack(outputs)

    def direct(self) -> Bool[Tensor, "sender receiver"]:
        """Whether a receiver's input depends on a sender's output through the stream alone."""
        _, values = self()
        generator = torch.Generator().manual_seed(0)
        how: dict[str, Any] = {"generator": generator, "dtype": values.dtype}
        weights = torch.zeros(self.graph.edges.shape, dtype=values.dtype, requires_grad=True)
        drawn = torch.randn(values.shape, **how)
        with recording_gradients(self.model):
            run = _Run(self.model, self.graph, len(self._inputs), weights, drawn, True, None)
            run.streams.detached = True
            self._through(run)
            # Each receiver has its own row, and so its own column of the gradient.
            total = sum((x * torch.randn(x.shape, **how)).sum() for x in run.read)
        (gradient,) = torch.autograd.grad(total, weights)  # type: ignore[arg-type]
        return gradient != 0

    def _through(self, run: _Run) -> Tensor:
        model, context, taps = self.model, self._context, run.taps()
        if model.site_map.n_prelude:
            e = run.alive(model.run_embedding(self._inputs, context, taps))
        else:
            e = run.enter(self._embedding)
        h = model.initial_state(e)
        for loop in range(self.graph.n_loops):
            h, e = run.alive(h), run.alive(e)
            h = model.run_loop(h, e, context, taps, loop)
        if not model.site_map.n_coda:
            return model.run_readout(run.read_one(h), context=context)
        return model.run_readout(run.alive(h), taps, context)


class _Run:
    """One run: its streams, and what happens at each place."""

    def __init__(
        self,
        model: HookedRun,
        graph: UnrolledGraph,
        n_examples: int,
        weights: Tensor | None,
        values: Tensor | None,
        added: bool,
        embedding: Tensor | None,
    ) -> None:
        self.streams = Streams(graph, weights, values, added=added)
        self.read: list[Tensor] = []  # inputs of receivers, if senders are detached
        self._sites, self._graph, self._n = model.site_map, graph, n_examples
        self._given = embedding
        self._rows: list[int] = []  # of the heads that read, each once
        self._row_of: dict[str, list[int]] = {}  # of each head, by slot

    def taps(self) -> Taps:
        sites, changes = self._sites, {}
        for section in ("prelude", "block", "coda"):
            parts = getattr(self._graph.layout, section)
            for k, each in enumerate(getattr(sites, section)):
                gated = "attn.hook_gate" in each
                norms = (f"{part}.hook_normalized" for part in parts[k] if part not in (HEADS, MLP))
                changes[section, k] = {
                    "hook_attn_in": self._read_heads,
                    **{f"attn.hook_{x}": partial(self._of_each_head, x) for x in SLOTS[:3]},
                    "attn.hook_z": self._hold_z if gated else self._write_heads,
                    **({"attn.hook_gate": self._write_gated} if gated else {}),
                    "hook_mlp_in": self.read_one,
                    "hook_mlp_out": self._write,
                    **{name: self._norm for name in norms if name in each},
                }
        if sites.prelude:
            changes["prelude", 0]["hook_resid_pre"] = self.enter
        if sites.coda:
            changes["coda", sites.n_coda - 1]["hook_resid_post"] = self.read_one
        around = {"top": sites.entry, "block": {**sites.opening, **sites.closing}}
        written = {part for each in ("block", "coda") for x in getattr(self._graph.layout, each)
                   for part in x}  # fmt: skip
        for section, these in around.items():
            norms = [name for name in norms_in(these) if name in written]
            changes[section, None] = {f"{name}.hook_normalized": self._norm for name in norms}
        return ChangingTaps(changes)

    # The stream

    def enter(self, x: Tensor) -> Float[Tensor, "row_batch pos d_model"]:
        value = self._given
        return self._write(x if value is None else value[..., : x.shape[-1]])

    def alive(self, h: Tensor) -> Float[Tensor, "row_batch pos d_state"]:
        """The rows that are read after what has been written."""
        self.streams.drop(self._graph.senders[len(self.streams.outputs) - 1].stage)
        return self.streams.alive(h.unflatten(0, (-1, self._n))).flatten(0, 1)

    def _pick(self, h: Tensor, rows: Sequence[int]) -> Float[Tensor, "some_batch pos d_model"]:
        x = h.unflatten(0, (-1, self._n))
        x = x[rows[0]] if len(rows) == 1 else x[list(rows)].flatten(0, 1)
        if self.streams.detached:
            self.read.append(x)
        return x

    def _write(self, x: Tensor) -> Float[Tensor, "row_batch pos d_model"]:
        return self.streams.mixed([x])[:, 0].flatten(0, 1)

    def read_one(self, h: Tensor) -> Float[Tensor, "batch pos d_state"]:
        """The row of the one reader of the next stage: an MLP, a norm, or the readout."""
        (reader,) = next(self.streams.stages)
        return self._pick(h, [self.streams.row(reader)])

    def _norm(self, x: Tensor) -> Tensor:
        """A norm of the stream as a component: the streams begin again with its output."""
        return self._write(self.read_one(x))

    # Heads

    def _read_heads(self, h: Tensor) -> Tensor:
        heads = next(self.streams.stages)
        slots = self._graph.layout.slots
        self._row_of = {slot: [self.streams.row(k, slot) for k in heads] for slot in slots}
        self._rows = sorted({row for rows in self._row_of.values() for row in rows})
        return self._pick(h, self._rows)

    def _of_each_head(self, slot: str, x: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        """Queries, keys, values or gates of each head, from the row that it reads."""
        if len(self._rows) == 1:
            return x
        rows = self._row_of[slot]
        # Consecutive query heads share a head of keys and values.
        heads = [head * x.shape[2] // len(rows) for head in range(len(rows))]
        at = [self._rows.index(row) for row in rows]
        # [row, batch, pos, head, d_head] -> [head, batch, pos, d_head] -> [batch, pos, head, …]
        return x.unflatten(0, (-1, self._n))[at, :, :, heads].movedim(0, 2)

    def _write_heads(self, z: Tensor) -> Float[Tensor, "row_batch pos head d_head"]:
        mixed = self.streams.mixed(list(z.unbind(2)))  # [row, head, batch, pos, d_head]
        return mixed.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def _hold_z(self, z: Tensor) -> Tensor:
        """Ones: the gate, which comes after, is given ``gate * z`` in its place."""
        self._z = z
        return torch.ones_like(z[:1])

    def _write_gated(self, gate: Tensor) -> Tensor:
        return self._write_heads(self._of_each_head("gate", gate) * self._z)


def graph_of_model(
    model: HookedRun,
    base: Tensor,
    source: Tensor,
    n_loops: int,
    stream_norms: StreamNorms,
    *,
    neurons: Mapping[str, Sequence[int]] | None,
    split: bool,
) -> UnrolledGraph:
    """The graph of an adapted model.

    Raises:
        InputError: If runs with streams are not the model's own, as one that reads its stream at
            other places.
    """
    layout = layout_of(model.site_map, stream_norms)
    graph = UnrolledGraph(layout, n_loops, neurons=neurons, split=split)
    with torch.no_grad():
        runs = [PublishedRuns(model, graph, x[:1]) for x in (base, source)]
        try:
            (logits, _), (_, values) = (run() for run in runs)
            every = graph.edges.to(values.dtype)
            pairs = [(logits, base), (runs[0](every, values)[0], source)]
        except InputError:
            raise
        except (KeyError, ValueError, StopIteration, RuntimeError) as error:
            raise _unread("taps that a layer does not pass in this order") from error
        for name, (streams, inputs) in zip(("without", "with all"), pairs):
            plain = model(inputs[:1], n_loops=n_loops)
            # Far above rounding, far below what a part of the stream that is not read makes.
            limit = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
            if bool(((streams - plain).abs() > limit).any()):
                raise _unread(f"other logits {name} edges replaced")
        if stream_norms == "nodes":
            graph.restrict(runs[0].direct())
    return graph


def _unread(got: str) -> InputError:
    expected = "one whose layers read the stream at hook_attn_in and hook_mlp_in alone"
    fix = "Pass these taps in the adapter's layer, or patch activations (patching_sweep)."
    return InputError("model", expected=expected, given=got, fix=fix)
