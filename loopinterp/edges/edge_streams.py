"""The residual streams of a run, one for each receiver that sees other values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.edges.unrolled_graph import UnrolledGraph


class Streams:
    """The streams of a run, ``[row, batch, pos, d_model]``, and the row of each receiver.

    Rows are in the order of their last reading, and dropped after it, so row k is at ``k -
    dropped``. ``stages`` yields the readers of each stage; ``outputs`` are those of the senders so
    far.
    """

    def __init__(
        self, graph: UnrolledGraph, weights: Tensor | None, values: Tensor | None, *, added: bool
    ) -> None:
        self.stages: Iterator[list[int]] = graph.stages()
        self.outputs: list[Tensor] = []
        self.detached = False  # whether senders hold back gradients
        self._graph, self._values, self._added = graph, values, added
        self._weights: Tensor | None = None
        n = len(graph.receivers)
        row_of = torch.zeros(n, dtype=torch.int64)  # row that each receiver reads
        if weights is not None:
            is_edge = graph.edges.to(weights.device)
            weights = weights * (is_edge if weights.dim() == 2 else is_edge[..., None])
            if graph.groups is not None:
                # [sender, group(, batch)]: no sender has edges to two receivers of a group.
                shape = len(weights), int(graph.groups.max()) + 1, *weights.shape[2:]
                weights = weights.new_zeros(shape).index_add(1, graph.groups, weights)
            if weights.requires_grad:
                # Each receiver, or group, has its own gradient, and so its own row.
                row_of, self._weights = torch.arange(weights.shape[1]), weights
            else:
                # The distinct columns in order of last use, and the one that each receiver reads.
                _, number = torch.unique(weights, dim=1, return_inverse=True)
                last_use = {row: k for k, row in enumerate(number.tolist())}
                order = sorted(last_use, key=last_use.__getitem__)
                self._weights = weights[:, [last_use[row] for row in order]]
                row_of = torch.tensor(order).argsort()[number.cpu()]
            row_of = row_of if graph.groups is None else row_of[graph.groups]
        self._n_rows = int(row_of.max()) + 1
        self._row: dict[tuple[int, str], int] = dict(zip(graph.receivers, row_of.tolist()))
        # The last stage at which each row is read.
        last = torch.zeros(self._n_rows, dtype=torch.int64)
        self._last = last.scatter_reduce(0, row_of, graph.read_stages, "amax").tolist()
        self._dropped = 0

    def row(self, reader: int, slot: str = "") -> int:
        row = self._row.get((reader, slot))
        return (self._row[reader, ""] if row is None else row) - self._dropped

    def drop(self, stage: int) -> None:
        """Drop the rows that no receiver after a stage reads."""
        while self._dropped < self._n_rows - 1 and self._last[self._dropped] <= stage:
            self._dropped += 1

    def alive(self, h: Tensor) -> Float[Tensor, "row batch pos d_model"]:
        return h[self._dropped - self._n_rows :]

    def write(
        self, h: Tensor, e: Tensor | None, outputs: list[Tensor], bias: Tensor, norm: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The streams, and those of the injected input, after the next senders have written."""
        self.drop(self._graph.senders[len(self.outputs)].stage)
        seen = self.seen(outputs) + bias
        h = self.alive(h) + (seen if norm is None else norm(seen))
        return h, None if e is None else self.alive(e)

    def seen(self, outputs: list[Tensor]) -> Float[Tensor, "row batch pos d_model"]:
        """Sum of the next senders' outputs as each stream sees them."""
        return self._as_seen(outputs, "rbpd")

    def mixed(self, outputs: list[Tensor]) -> Float[Tensor, "row sender batch pos width"]:
        """The next senders' outputs as each stream sees them, sender by sender."""
        if self.detached:
            outputs = [x.detach() for x in outputs]
        return self._as_seen(outputs, "rsbpd")

    def _as_seen(self, outputs: list[Tensor], axes: str) -> Tensor:
        """The next senders' outputs v + w (d - v), summed over senders if ``axes`` have none."""
        senders = slice(len(self.outputs), len(self.outputs) + len(outputs))
        self.outputs += outputs
        by_sender, weights = torch.stack(outputs), self._weights
        values = by_sender if "s" in axes else by_sender.sum(0)
        if weights is not None:
            weights = weights[senders, self._dropped :]
        if weights is None or not (weights.requires_grad or weights.any()):
            return values.expand(self._n_rows - self._dropped, *values.shape)
        assert self._values is not None  # there are no weights without them
        # A head's part is narrower than d_model, and filled up with zeros.
        change = self._values[senders, ..., : by_sender.shape[-1]]
        change = change if self._added else change - by_sender
        # w [sender, row(, batch)] times d - v [sender, batch, pos, width].
        of_weights = "sr" if weights.dim() == 2 else "srb"
        return values + torch.einsum(f"{of_weights},sbpd->{axes}", weights, change)
