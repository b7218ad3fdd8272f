"""The one place where a looped model goes on from a changed state, or from a change in a loop.

Only what a change can reach is run again: the loops after it, and of the positions

- the cone of w more positions a loop, where the next state of a position depends on a window of w
  positions to its left (:func:`loopinterp.models.reach`);
- those from the change on, in a causal model of ours without a window;
- else all of them: of a foreign model without a window nothing is known but its four methods, and
  a step with ``local_step = False`` looks at the tokens, or at where they stand.

In a model of ours keys and values of the positions before a change are those of the undisturbed
run; in any other, as many positions before it are run again as a loop looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from loopinterp.models.model_description import reach, said_of
from loopinterp.models.positions import AttentionContext
from loopinterp.models.windowed_attention import NEAR, attend_near

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration
    from loopinterp.models.taps import Taps

_MOST_KEYS = 2**26
"""Numbers of undisturbed keys and values that are kept: 256 MiB."""


class Front(NamedTuple):
    """How far changes have come after some loop: those of the rows that have begun by then.

    Attributes:
        loop: Loops done.
        place: Positions that are held of each row; some may lie past the end.
        reached: Those that the change may have reached; elsewhere ``h`` means nothing.
        h: Their states.
    """

    loop: int
    place: Int[Tensor, "row pos"]
    reached: Bool[Tensor, "row pos"]
    h: Float[Tensor, "row pos d_model"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is changed in a row when it begins, and later.

    The first two are told which rows begin, which positions of them are held, and their states.

    Attributes:
        state: Gives the states that they go on from.
        within: Gives the taps of the loop that they begin with; their rows are its last ones.
        later: Gives the states of all rows that have begun, where some are changed again: told the
            loops done, the positions that are held, and their states. It may change positions
            between the first and the last of a row.
    """

    state: Callable[[slice, Tensor, Tensor], Tensor] | None = None
    within: Callable[[slice, Tensor], Taps] | None = None
    later: Callable[[int, Tensor, Tensor], Tensor] | None = None


def growth_of(model: Any) -> int | None:
    """Positions by which a cone grows in a loop; None where a part cannot be stepped by itself."""
    return reach(model) if getattr(model, "local_step", True) else None


class CausalCone:
    """Undisturbed runs of a model, and what becomes of changes in them.

    Args:
        model: Any looped model.
        iteration: The model, bound to the inputs of the runs.
        states: The states of the runs after 0 .. T loops.
        keep_keys: Run the undisturbed states once more and keep keys and values, where that spares
            the positions before a change. Then no change may be one of scores or patterns within a
            window.
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
        self.reach = growth_of(model)
        self._keys = self._undisturbed_keys() if keep_keys else None
        # Without a coda, our readout looks at one position at a time.
        self._reads_places = self.reach is not None or said_of(model, "n_coda") == 0

    def go_on(
        self,
        row: Int[Tensor, " row"],
        loop: Int[Tensor, " row"],
        first: Int[Tensor, " row"],
        last: Int[Tensor, " row"],
        change: Change,
    ) -> Iterator[Front]:
        """Go on from the loop of the first change to the end of the runs.

        Args:
            row: The run that each row goes on from.
            loop: Loops done when its change is made, in order; a change within a loop is made in
                the one that comes next.
            first: The first position that is changed.
            last: The last one.
            change: What is changed.
        """
        n_loops, n_pos, earliest = len(self.states) - 1, self.states.shape[2], int(loop[0])
        if self.reach is None:
            start = torch.full_like(first, int(first.min()) if self._keys else 0)
            spread, growth = n_pos - int(start[0]), 0
        else:
            start, growth = (first - self.reach).clamp(min=0), self.reach
            spread = int((last - start).max()) + 1
        widest = min(spread + growth * (n_loops - earliest), n_pos - int(start.min()))
        places = start[:, None] + torch.arange(widest, device=start.device)
        inside = places.clamp(max=n_pos - 1)
        reached = (places < n_pos) & (places >= (start if growth == 0 else first)[:, None])
        begins = torch.searchsorted(loop, torch.arange(n_loops + 1).to(loop), right=True).tolist()
        e = self.iteration.e[row[:, None], inside]
        h = self.states.new_empty(0, spread, self.states.shape[-1])
        new = slice(0, 0)
        for t in range(earliest, n_loops + 1):
            width, begun = min(spread + growth * (t - earliest), widest), len(h)
            if begun:
                part = slice(begun), slice(width)
                if self.reach is not None:  # beside the cone stand the undisturbed states
                    around = self.states[t - 1, row[:begun, None], inside[part]]
                    held = reached[:begun, : h.shape[1]]
                    held = pad(held, (0, width - h.shape[1]))[..., None]
                    h = torch.where(held, pad(h, (0, 0, 0, width - h.shape[1])), around)
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
        """Logits of all positions at the end, of which the undisturbed runs have those given."""
        at = front.reached.nonzero(as_tuple=True)
        there = at[0], front.place[at]
        if self._reads_places:
            found = logits[row]
            found[there] = self.iteration.readout(front.h)[at]
            return found
        states = self.states[-1, row]
        states[there] = front.h[at]
        return self.iteration.readout(states)

    def _step(self, h: Tensor, e: Tensor, loop: int, row: Tensor, taps: Taps | None) -> Tensor:
        """One loop of the positions that are held."""
        listening = () if taps is None else (taps,)
        if self.reach is not None:
            if listening:
                return self.model.step(h, e, None, *listening)
            return self.model.step(h, e, **self.iteration.index(loop))
        context = self.iteration.context
        context = None if context is None else context.select(row)
        start = h.shape[1] - self.states.shape[2]  # how many positions are not held, as -n
        if self._keys and start:
            assert context is not None
            context = context.after(-start, self.states.shape[2], like=h)
            layers = (
                [x[:, :-start].index_select(0, row) for x in both] for both in self._keys[loop]
            )
            context = replace(context, remember=_recalling(layers))
        return self.iteration.advance(h, e, context, *listening, **self.iteration.index(loop))

    def finish(
        self,
        row: Int[Tensor, " row"],
        loop: Int[Tensor, " row"],
        first: Int[Tensor, " row"],
        last: Int[Tensor, " row"],
        change: Change,
    ) -> Front:
        """The end of :meth:`go_on`.

        Where keys are kept within a window, rows go on by how long ago they began and not by loop,
        as all loops are one map: their cones are then equally wide.
        """
        if self.reach is None or not self._keys:
            *_, front = self.go_on(row, loop, first, last, change)
            return front
        n_loops, n_pos = len(self.states) - 1, self.states.shape[2]
        spread, most = int((last - first).max()) + 1, n_pos - int(first.min())
        widest = min(spread + self.reach * (n_loops - int(loop[0])), most)
        places = first[:, None] + torch.arange(widest, device=first.device)
        inside, every = places.clamp(max=n_pos - 1), slice(len(row))
        e = self.iteration.e[row[:, None], inside]
        width = min(spread, widest)
        h = self.states[loop[:, None], row[:, None], inside[:, :width]]
        if change.state is not None:
            h = change.state(every, places[:, :width], h)
        ended = self.states.new_zeros(*places.shape, h.shape[-1])
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
        """What attention is told of a cone: its own positions, and the window to its left."""
        context, window = self.iteration.context, said_of(self.model, "attention_window")
        before = place[:, :1] - torch.arange(window, 0, -1, device=place.device)
        near = before.clamp(min=0)
        if context.rotation is not None:
            cos, sin = context.rotation
            context = replace(context, rotation=(cos[place][:, None], sin[place][:, None]))
        bias = None
        if context.mask is not None:  # that of each distance is the same everywhere
            last = context.mask[0, :, -1].flip(-1)
            bias = last[:, : window + 1]
        attend = partial(attend_near, window=window, bias=bias, first=place[:, 0])
        layers = ([x[loop, row, near] for x in both] for both in self._by_layer)
        recalling = _recalling(layers)
        return replace(context, mask=None, is_causal=False, remember=recalling, attend=attend)

    @cached_property
    def _by_layer(self) -> list[list[Tensor]]:
        """Keys and values of each layer, ``[loop, input, pos, head, d_head]``."""
        return [[torch.stack(x) for x in zip(*loops)] for loops in zip(*self._keys or [])]

    def _keys_of(self, h: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[input, pos, head, d_head]`` of each layer in the loop after states."""
        kept: list[tuple[Tensor, Tensor]] = []

        def remember(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            kept.append((k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()))
            return k, v

        own = self.iteration
        own.advance(h, own.e, replace(own.context, remember=remember))
        return kept

    def _undisturbed_keys(self) -> list[list[tuple[Tensor, Tensor]]] | None:
        """Those of each loop, where attention is ours, looks back only, and they are not too many.

        Attention that goes block by block within a window has no mask of all pairs to cut.
        """
        context = self.iteration.context
        if not isinstance(context, AttentionContext) or context.window is not None:
            return None
        if not said_of(self.model, "causal"):
            return None
        width = said_of(self.model, "attention_window")
        if self.reach is not None and not 0 < (width or 0) <= min(NEAR, self.states.shape[2] - 1):
            return None
        kept: list[list[tuple[Tensor, Tensor]]] = []
        for h in self.states[:-1]:
            kept.append(self._keys_of(h))
            if len(self.states) * sum(x.numel() for both in kept[0] for x in both) > _MOST_KEYS:
                return None
        return kept


def _recalling(before: Iterator[list[Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Puts keys and values of the positions before in front of those held, layer by layer."""

    def remember(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # In memory by position and then head, as attention has made them.
        pairs = zip(next(before), (k.transpose(1, 2), v.transpose(1, 2)))
        k, v = (torch.cat(both, dim=1).transpose(1, 2) for both in pairs)
        return k, v

    return remember
