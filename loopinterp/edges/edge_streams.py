"""The residual streams of a run, one for each receiver that sees other values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
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
                self._weights, row_of = _distinct(weights)
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
        values, change = self._next(outputs)
        return self._changed(values.sum(0), change, "rbpd")

    def mixed(self, outputs: list[Tensor]) -> Float[Tensor, "row sender batch pos width"]:
        """The next senders' outputs as each stream sees them, sender by sender."""
        if self.detached:
            outputs = [x.detach() for x in outputs]
        return self._changed(*self._next(outputs), "rsbpd")

    def _changed(self, values: Tensor, change: tuple[Tensor, Tensor] | None, axes: str) -> Tensor:
        """Values as each stream sees them; over senders that ``axes`` leave out, sums."""
        if change is None:
            return values.expand(self._n_rows - self._dropped, *values.shape)
        # w [sender, row(, batch)] times d - v [sender, batch, pos, width].
        weights, difference = change
        of_weights = "sr" if weights.dim() == 2 else "srb"
        return values + torch.einsum(f"{of_weights},sbpd->{axes}", weights, difference)

    def _next(
        self, outputs: list[Tensor]
    ) -> tuple[Float[Tensor, "sender batch pos width"], tuple[Tensor, Tensor] | None]:
        """The next senders' outputs v, and w and d - v if a stream sees something else."""
        senders = slice(len(self.outputs), len(self.outputs) + len(outputs))
        self.outputs += outputs
        values, weights = torch.stack(outputs), self._weights
        if weights is not None:
            weights = weights[senders, self._dropped :]
        if weights is None or not (weights.requires_grad or weights.any()):
            return values, None
        assert self._values is not None  # there are no weights without them
        # A head's part is narrower than d_model, and filled up with zeros.
        other = self._values[senders, ..., : values.shape[-1]]
        return values, (weights, other if self._added else other - values)


def _distinct(weights: Tensor) -> tuple[Tensor, Int[Tensor, " receiver"]]:
    """The distinct columns of weights in order of last use, and the column of each receiver."""
    _, number = torch.unique(weights, dim=1, return_inverse=True)
    last: dict[int, int] = {int(row): at for at, row in enumerate(number.tolist())}
    order = {row: k for k, row in enumerate(sorted(last, key=lambda row: last[row]))}
    columns = [last[row] for row in order]  # a receiver of each distinct column
    row_of = torch.tensor([order[int(row)] for row in number.tolist()])
    return weights[:, columns], row_of
