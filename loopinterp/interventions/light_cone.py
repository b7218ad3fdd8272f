"""Runs that continue from a changed state, or from a change inside a loop.

Only the light cone of a change is recomputed: later loops, and of the positions

- w more in each loop, if a loop reads w positions to the left (:func:`loopinterp.models.reach`);
- those from the change on, in a causal ``LoopedTransformer`` without a window;
- else all of them.

Earlier positions contribute their clean keys and values, or are recomputed as far as a loop reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from loopinterp.models.layers import NEAR, attend_near
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import declared, reach

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.iteration import Iteration
    from loopinterp.models.taps import Taps


class Front(NamedTuple):
    """The light cones after a loop, of the rows begun by then."""

    loop: int  # loops done
    place: Int[Tensor, "row pos"]  # positions held of each row; some may lie past the end
    reached: Bool[Tensor, "row pos"]  # whether the change may have reached them
    h: Float[Tensor, "row pos d_model"]  # their states, arbitrary where not reached


@dataclass(frozen=True, kw_only=True)
class Change:
    """Functions that change a row when it begins, and later.

    Attributes:
        state: (rows that begin, positions held, their states) -> the states to continue from.
        within: (rows that begin, positions held) -> taps of their first loop (the last rows).
        later: (loops done, positions held, states of all begun rows) -> the states.
    """

    state: Callable[[slice, Tensor, Tensor], Tensor] | None = None
    within: Callable[[slice, Tensor], Taps] | None = None
    later: Callable[[int, Tensor, Tensor], Tensor] | None = None


def cone_growth(model: Any) -> int | None:
    """Positions by which a cone grows in a loop; None if all positions are recomputed."""
    return reach(model) if declared(model, "local_step") else None


class LightCone:
    """Clean runs of a model, and runs that continue from changes in them.

    ``keep_keys`` stores the clean keys and values, if that saves recomputing positions before a
    change. Scores and patterns within a window then cannot be changed.
    """

    def __init__(
        self,
        model: Any,
        iteration: Iteration,
        states: Float[Tensor, "loops input pos d_model"],
        *,
        keep_keys: bool = False,
    ) -> None:
        self.model, self.iteration, self.states = model, iteration, states
        self.reach = cone_growth(model)
        self._keys = self._clean_keys() if keep_keys else []
        # Without a coda, the readout reads one position at a time.
        self._reads_places = self.reach is not None or declared(model, "n_coda") == 0

    def go_on(
        self,
        row: Int[Tensor, " row"],
        loop: Int[Tensor, " row"],
        first: Int[Tensor, " row"],
        last: Int[Tensor, " row"],
        change: Change,
    ) -> Iterator[Front]:
        """Continue from the first change to the end of the runs.

        Each row continues clean run ``row`` after ``loop`` loops (ascending), with a change between
        the positions ``first`` and ``last``.
        """
        n_loops, n_pos, earliest = len(self.states) - 1, self.states.shape[2], int(loop[0])
        if self.reach is None:
            # All positions from one on, which take part in every loop.
            start = torch.full_like(first, int(first.min()) if self._keys else 0)
            spread, growth = n_pos - int(start[0]), 0
        else:
            # A window, with the positions that the first loop looks back at.
            start, growth = (first - self.reach).clamp(min=0), self.reach
            spread = int((last - start).max()) + 1
        # Positions held of each row, [row, pos]: ``width`` of the ``widest`` at some loop.
        widest = min(spread + growth * (n_loops - earliest), n_pos - int(start.min()))
        places = start[:, None] + torch.arange(widest, device=start.device)
        inside = places.clamp(max=n_pos - 1)
        reached = (places < n_pos) & (places >= (start if growth == 0 else first)[:, None])
        # Rows that have begun after t loops are the first ``begins[t]``.
        begins = torch.searchsorted(loop, torch.arange(n_loops + 1).to(loop), right=True).tolist()
        e = self.iteration.e[row[:, None], inside]
        h = self.states.new_empty(0, spread, self.states.shape[-1])
        new = slice(0, 0)
        for t in range(earliest, n_loops + 1):
            width, begun = min(spread + growth * (t - earliest), widest), len(h)
            if begun:
                part = slice(begun), slice(width)
                if self.reach is not None:  # outside the cone are the clean states
                    more = width - h.shape[1]
                    clean = self.states[t - 1, row[:begun, None], inside[part]]
                    in_cone = pad(reached[:begun, : h.shape[1]], (0, more))[..., None]
                    h = torch.where(in_cone, pad(h, (0, 0, 0, more)), clean)
                taps = None
                if change.within is not None and new.start < new.stop:
                    taps = change.within(new, places[new, :width])
                h = self._step(h, e[part], t - 1, row[:begun], taps)
            new = slice(begun, begins[t])
            if new.start < new.stop:
                fresh = self.states[t, row[new, None], inside[new, :width]]
                if change.state is not None:
                    fresh = change.state(new, places[new, :width], fresh)
                h = torch.cat([h, fresh]) if begun else fresh
            part = slice(len(h)), slice(width)
            if change.later is not None:
                h = change.later(t, places[part], h)
            yield Front(t, places[part], reached[part], h)

    def read(
        self, front: Front, row: Int[Tensor, " row"], logits: Float[Tensor, "input pos d_vocab_out"]
    ) -> Float[Tensor, "row pos d_vocab_out"]:
        """Logits of all positions at the end; ``logits`` are those of the clean runs."""
        cells = front.reached.nonzero(as_tuple=True)  # (row, column) of positions inside the cone
        place = cells[0], front.place[cells]
        if self._reads_places:
            read = logits[row]
            read[place] = self.iteration.readout(front.h)[cells]
            return read
        states = self.states[-1, row]
        states[place] = front.h[cells]
        return self.iteration.readout(states)

    def _step(self, h: Tensor, e: Tensor, loop: int, row: Tensor, taps: Taps | None) -> Tensor:
        listening = () if taps is None else (taps,)
        if self.reach is not None:
            before = (None, *listening) if listening else ()
            return self.model.step(h, e, *before, **self.iteration.loop_argument(loop))
        context = self.iteration.context
        context = None if context is None else context.select(row)
        n_before = self.states.shape[2] - h.shape[1]  # positions that are not held
        if self._keys and n_before:
            assert context is not None
            context = context.after(n_before, self.states.shape[2], like=h)
            layers = (
                [x[loop, :, :n_before].index_select(0, row.to(x.device)) for x in both]
                for both in self._keys
            )
            context = replace(context, remember=_recalling(layers))
        return self.iteration.advance(
            h, e, context, *listening, **self.iteration.loop_argument(loop)
        )

    def finish(
        self,
        row: Int[Tensor, " row"],
        loop: Int[Tensor, " row"],
        first: Int[Tensor, " row"],
        last: Int[Tensor, " row"],
        change: Change,
    ) -> Front:
        """The end of :meth:`go_on`; with stored keys within a window, rows run side by side."""
        if self.reach is None or not self._keys:
            *_, front = self.go_on(row, loop, first, last, change)
            return front
        n_loops, n_pos = len(self.states) - 1, self.states.shape[2]
        spread, most = int((last - first).max()) + 1, n_pos - int(first.min())
        widest = min(spread + self.reach * (n_loops - int(loop[0])), most)
        places = first[:, None] + torch.arange(widest, device=first.device)
        inside = places.clamp(max=n_pos - 1)
        e = self.iteration.e[row[:, None], inside]
        width = min(spread, widest)
        h = self.states[loop[:, None], row[:, None], inside[:, :width]]
        if change.state is not None:
            h = change.state(slice(len(row)), places[:, :width], h)
        ended = self.states.new_zeros(*places.shape, h.shape[-1])
        # Rows are in the order of their loops: the last ones end first.
        for delay in range(n_loops - int(loop[0]) + 1):
            n_going = int((loop + delay < n_loops).sum())
            ended[n_going : len(h), :width] = h[n_going:]
            if not n_going:
                break
            wider, going = min(width + self.reach, widest), slice(n_going)
            at, base = loop[going, None] + delay, row[going, None]
            h = torch.cat([h[going], self.states[at, base, inside[going, width:wider]]], dim=1)
            width, part = wider, (going, slice(wider))
            taps = ()
            if change.within is not None and delay == 0:
                taps = (change.within(going, places[part]),)
            h = self.iteration.advance(h, e[part], self._windowed(at, base, inside[part]), *taps)
        ends = (first + spread + self.reach * (n_loops - loop)).clamp(max=n_pos)
        return Front(n_loops, places, places < ends[:, None], ended)

    def _windowed(self, loop: Tensor, row: Tensor, place: Tensor) -> AttentionContext:
        """The attention context of cones: their positions, and the window to their left."""
        context, window = self.iteration.context, declared(self.model, "attention_window")
        before = place[:, :1] - torch.arange(window, 0, -1, device=place.device)
        # The window to the left of each cone, [row, window].
        near = before.clamp(min=0)
        if context.rotation is not None:
            cos, sin = context.rotation
            context = replace(context, rotation=(cos[place][:, None], sin[place][:, None]))
        back = torch.arange(window + 1, device=place.device)[:, None, None, None]
        # [distance, row, head, pos]: no key lies before position 0.
        barred = place[:, None] < back
        bias = torch.zeros_like(barred, dtype=self.states.dtype).masked_fill(barred, float("-inf"))
        if context.mask is not None:  # the bias depends on the distance alone: [head, distance]
            bias = bias + context.mask[0, :, -1].flip(-1)[:, : window + 1].T[:, None, :, None]
        attend = partial(attend_near, bias=bias)
        layers = ([x[loop, row, near] for x in both] for both in self._keys)
        recalling = _recalling(layers)
        return replace(context, mask=None, is_causal=False, remember=recalling, attend=attend)

    def _clean_keys(self) -> list[list[Tensor]]:
        """Keys and values ``[loop, input, pos, head, d_head]`` of each layer, if available."""
        # Ours, causal, with a mask of all pairs, and at most 256 MiB.
        run, width = self.iteration, declared(self.model, "attention_window") or 0
        has_full_mask = isinstance(run.context, AttentionContext) and run.context.window is None
        near = self.reach is None or 0 < width <= min(NEAR, self.states.shape[2] - 1)
        if not (has_full_mask and near and declared(self.model, "causal")):
            return []
        keys: list[list[tuple[Tensor, Tensor]]] = []

        def remember(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys[-1].append((k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()))
            return k, v

        for h in self.states[:-1]:
            keys.append([])
            run.advance(h, run.e, replace(run.context, remember=remember))
            if not keys[0]:  # attention of a model's own code remembers none
                return []
            if len(self.states) * sum(x.numel() for both in keys[0] for x in both) > 2**26:
                return []
        return [[torch.stack(x) for x in zip(*loops)] for loops in zip(*keys)]


def _recalling(before: Iterator[list[Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepend the keys and values of earlier positions, layer by layer."""

    def remember(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # In memory by position and then head, as attention has made them.
        pairs = zip(next(before), (k.transpose(1, 2), v.transpose(1, 2)))
        k, v = (torch.cat(both, dim=1).transpose(1, 2) for both in pairs)
        return k, v

    return remember
