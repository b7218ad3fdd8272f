"""Runs that continue prompts: the whole sequence again, or one position with the keys kept."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from loopinterp.core.errors import HookError, InputError
from loopinterp.models.addresses import Address
from loopinterp.models.cache import LoopedCache
from loopinterp.models.hooks import check_returned
from loopinterp.models.iteration import bind, check_finite
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import check_logits, declared, refuse
from loopinterp.models.run import HookedRun
from loopinterp.models.stopped_run import StoppingRule, first_view
from loopinterp.models.taps import NO_TAPS, Recorder, RunReadout, Taps

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformer_lens.hook_points import HookPoint

_TOKEN = re.compile(r"tokens\.(\d+)\.(.+)")


def _take(x: Tensor, axis: int, places: Int[Tensor, " batch"]) -> Tensor:
    # One position of each example, as an axis of size 1: a copy.
    rows = torch.arange(len(x), device=x.device)
    return x.movedim(axis, 1)[rows, places][:, None].movedim(1, axis)


class RecomputedRun:
    """Reruns the whole sequence for each token.

    ``tokens`` are the prompts, padded on the right, with room for the new tokens ``[batch, pos]``;
    ``number`` is the new token that is being chosen, from 0.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        lengths: Tensor,
        loops: int | Tensor,
        offset: int | Tensor,
    ) -> None:
        self.model, self.tokens, self.lengths = model, tokens, lengths
        self.offset, self.number = offset, 0
        self.rows = torch.arange(len(tokens), device=tokens.device)
        # [batch, 1]: loops of each example, if it has its own.
        self.ends = loops[:, None] if isinstance(loops, Tensor) else None
        self.n_loops = max(1, int(loops.max())) if isinstance(loops, Tensor) else loops
        self.recorded: list[Address] = []
        self.recorder: TokenRecorder | None = None
        self.stops: TokenStops | None = None

    def write(
        self,
        n_new: int,
        choose: Callable[[Tensor], Tensor],
        stops: list[int],
        on_token: Callable[[Tensor], Any] | None,
    ) -> Int[Tensor, "batch new"]:
        tokens = []
        for token in self.choices(n_new, choose, stops):
            tokens.append(token)
            if on_token is not None:
                on_token(token)
        return torch.stack(tokens, 1)

    @torch.no_grad()
    def choices(
        self, n_new: int, choose: Callable[[Tensor], Tensor], stops: list[int]
    ) -> Generator[Int[Tensor, " batch"], None, None]:
        rows, last = self.rows, self.lengths - 1
        longest, ending = int(self.lengths.max()), torch.tensor(stops, device=rows.device)
        going = torch.ones_like(rows, dtype=torch.bool)
        while self.number < n_new and bool(going.any()):
            taps = NO_TAPS
            if isinstance(self.model, HookedRun):
                points = self.model._hooked(self.n_loops, is_set=True)
                taps = Taps(points, self.recorded, self.recorder)
            logits = self.logits(last, longest + self.number, taps)
            check_logits(logits, f"of new token {self.number}")
            token = choose(logits)
            # An ended example repeats the stop token at the same place.
            token = torch.where(going, token, stops[0]) if stops else token
            last = last + going
            self.tokens[rows, last] = token
            going = going & ~torch.isin(token, ending) if stops else going
            self.number += 1
            yield token

    def hooks(self, fwd_hooks: Iterable[Any]) -> Any:
        """The context of the hooks; ``tokens.3.NAME`` sees the position of new token 3 alone."""
        if not (pairs := [*fwd_hooks]):
            return nullcontext()
        if not isinstance(self.model, HookedRun):
            refuse({"fwd_hooks": pairs}, "none for a model without hooks", "Adapt it first.")
        room = self.tokens.shape[1] - int(self.lengths.max())
        for k, pair in enumerate(pairs):
            name = pair[0] if isinstance(pair, (tuple, list)) and len(pair) == 2 else None
            match = _TOKEN.fullmatch(name) if isinstance(name, str) else None
            if match is None:
                continue
            number = int(match[1])
            if number >= room:
                expected, fix = f"one of {room} new tokens, from 0", "Raise max_new_tokens."
                raise HookError(f"hook {name!r}", expected=expected, given=match[1], fix=fix)
            pairs[k] = match[2], self._at_token(number, pair[1])
        return self.model.hooks(pairs, n_loops=self.n_loops)

    def _at_token(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def hook_one(x: Tensor, *, hook: HookPoint) -> Tensor | None:
            places = self.places(number)
            if places is None:
                return None
            axis = self.model.addresses(self.n_loops).addresses[hook.name].pos_axis
            if axis is None:
                expected, fix = "an activation of positions", "Hook it without tokens."
                raise HookError(f"hook {hook.name!r}", expected=expected, given="none", fix=fix)
            part = _take(x, axis, places)
            returned = function(part, hook=hook)
            check_returned(returned, part, hook)
            part = part if returned is None else returned  # it may have been written in place
            moved = x.movedim(axis, 1)
            moved[torch.arange(len(x), device=x.device), places] = part.movedim(axis, 1)[:, 0]
            return x

        return hook_one

    def places(self, number: int) -> Int[Tensor, " batch"] | None:
        """Where the run in progress has the position of a new token, if it has."""
        return self.lengths - 1 + number if number <= self.number else None

    def logits(
        self, last: Int[Tensor, " batch"], seen: int, taps: Taps
    ) -> Float[Tensor, "batch d_vocab_out"]:
        """Logits at position ``last`` of each example, of ``seen`` in all."""
        inputs, ends, at = self.tokens[:, :seen], self.ends, (self.rows, last)
        if self.stops is not None:
            ends = torch.full(inputs.shape, self.n_loops, device=inputs.device)  # [batch, pos]
            for number, loops in enumerate(self.stops.loops):
                ends[self.rows, self.lengths - 1 + number] = loops
        if isinstance(self.model, HookedRun):
            bound = self.model.bind(inputs, position_offset=self.offset, taps=taps)
            read = self._last_states(bound.h0, bound.step, ends, at)
            logits = bound.readout(read)
        else:
            bound = bind(self.model, inputs)
            read = self._last_states(bound.h0, bound.step, ends, at)
            check_finite(read, "state", self.n_loops)
            logits = bound.read(read, self.n_loops)
        taps.end(read, logits)
        return logits[at]

    def _last_states(
        self,
        h: Float[Tensor, "batch pos d_state"],
        step: Callable[[Tensor, int], Tensor],
        ends: Int[Tensor, "batch #pos"] | None,  # noqa: F821, UP037
        chosen: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "batch pos d_state"]:
        """The states to read, each after its own loops; at the ``chosen`` place where a rule stops.

        ``chosen`` is the row and position whose logits choose the new token, ``[batch]`` each.
        """
        read, stops = h, self.stops
        if stops is not None:
            stops.begin(self.number, h[chosen][:, None], self.model.readout)
        for loop in range(self.n_loops):
            h = step(h, loop)
            read = h if ends is None else torch.where((ends > loop)[..., None], h, read)
            if stops is not None:
                stops.see(h[chosen][:, None])
        if stops is not None:
            read = read.clone()
            read[chosen] = stops.finish()[:, 0]
        return read


class CachedRun(RecomputedRun):
    """Runs the prompts, then the last position of each example, one token at a time.

    The n-th attention of a run (prelude, blocks, coda) reads keys and values of the n-th before it.
    """

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        n_pos, model = self.tokens.shape[1], self.model
        self.seen, self.turn = 0, 0
        self.cached: list[tuple[Tensor, Tensor]] = []
        self.rotation = model.length_context(n_pos - 1).rotation  # the last one is not read
        width, where = model.site_map.d_model, {"device": model.device, "dtype": model.dtype}
        like = torch.empty(1, n_pos, width, **where)
        self.start = model.initial_state(like)[0] if declared(model, "starts_by_place") else None

    def places(self, number: int) -> Int[Tensor, " batch"] | None:
        if number != self.number:
            return None
        return torch.zeros_like(self.lengths) if number else self.lengths - 1

    def logits(
        self, last: Int[Tensor, " batch"], seen: int, taps: Taps
    ) -> Float[Tensor, "batch d_vocab_out"]:
        model, prompts, self.seen, self.turn = self.model, not self.cached, seen, 0
        # [#batch, pos]: the places that are run, all of the prompts or the last of each example.
        places = torch.arange(seen, device=last.device)[None] if prompts else last[:, None]
        known = self.tokens[:, : self.seen]
        model.check_inputs(known, position_offset=self.offset)  # new digits make numbers longer
        context = self.input_context(places)
        e = model.run_embedding(known[self.rows[:, None], places], context, taps)
        if self.start is None:
            h = model.initial_state(e)
        else:
            # [batch, pos, d_state]: an initial state that depends on the position alone.
            h = self.start[places].expand(len(e), -1, -1)

        def step(h: Tensor, loop: int) -> Tensor:
            return model.run_loop(h, e, context, taps, loop)

        chosen = self.rows, self.lengths - 1 if not self.number else torch.zeros_like(self.rows)
        read = self._last_states(h, step, self.ends, chosen)
        logits = model.run_readout(read, taps, context=replace(context, qk_offset=None))
        taps.end(read, logits)
        return logits[self.rows, last] if prompts else logits[:, 0]

    def input_context(self, places: Int[Tensor, "#batch pos"]) -> AttentionContext:
        model, known = self.model, self.tokens[:, : self.seen]
        key = torch.arange(self.seen, device=places.device)[None, None]  # [1, 1, key]
        added, offset = (f(known, self.offset) for f in (model.added_positions, model.qk_offset))
        added = None if added is None else added[self.rows[:, None], places]
        if offset is not None:
            # Indexed by rows and places: [batch, pos, head, d_head], turned back to heads first.
            offset = offset[self.rows[:, None], :, places].transpose(1, 2)
        rotation = None
        if self.rotation is not None:
            cos, sin = self.rotation
            # [batch, 1, pos, d_head], alike for all heads.
            rotation = cos[places][:, None], sin[places][:, None]

        def remember(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if self.turn == len(self.cached):
                batch, n_heads, _, d_head = k.shape
                room = (batch, n_heads, self.tokens.shape[1], d_head)
                self.cached.append((k.new_zeros(room), v.new_zeros(room)))
            past, self.turn = self.cached[self.turn], self.turn + 1
            rows, at = self.rows[:, None].to(k.device), places.to(k.device)
            for old, new in zip(past, (k, v)):
                # The new keys and values go to their places; the earlier ones stay.
                old[rows, :, at] = new.transpose(1, 2)
            return past[0][:, :, : self.seen], past[1][:, :, : self.seen]

        mask, around = model.mask_at(places[..., None], key)
        bar = model.input_bar(known)
        if bar is not None:
            # Indexed by rows and places: [batch, pos, 1, key], turned back to heads first.
            bar = bar[self.rows[:, None], :, places].transpose(1, 2)
            mask, around = (mask + bar,) * 2 if around is mask else (mask + bar, around + bar)
        surround = None if around is mask else AttentionContext(mask=around)
        return AttentionContext(
            mask,
            rotation=rotation,
            qk_offset=offset,
            added=added,
            remember=remember,
            surround=surround,
        )


class TokenStops:
    """The state that each new token is read from: where a rule stops its position.

    ``loops`` has those of each new token, ``[batch]`` each.
    """

    def __init__(self, rules: Sequence[StoppingRule], n_loops: int, *, reads: bool) -> None:
        self.rules, self.n_loops, self.reads = rules, n_loops, reads
        self.loops: list[Tensor] = []
        self.rule = rules[0]

    def begin(self, number: int, h: Float[Tensor, "batch 1 d_model"], read: Any) -> None:
        self.rule = self.rules[min(number, len(self.rules) - 1)]
        every = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        read = read if self.reads else _no_readout
        self.view = first_view(h, every, None, read, [self.rule])
        self.state, self.going = h, every[:, 0]
        self.loop = torch.full_like(self.going, self.n_loops, dtype=torch.long)
        self._score()

    def see(self, h: Float[Tensor, "batch 1 d_model"]) -> None:
        self.view = self.view.next(h)
        self._score()

    def finish(self) -> Float[Tensor, "batch 1 d_model"]:
        self.loops.append(self.loop)
        return self.state

    def _score(self) -> None:
        tolerance = self.rule.tolerance
        assert tolerance is not None
        ready = self.going & (self.rule.score(self.view) <= tolerance)
        self.state = torch.where(self.going[:, None, None], self.view.state, self.state)
        self.loop = torch.where(ready, self.view.loop, self.loop)
        self.going = self.going & ~ready


def _no_readout(state: Tensor) -> Tensor:
    expected, got = "a rule of states, where a coda reads several positions", "a rule of logits"
    fix = "Pass ResidualBelow, AccelerationBelow or numbers of loops."
    raise InputError("rule", expected=expected, given=got, fix=fix)


class TokenRecorder(Recorder):
    """Keeps, of every run, the position of the new token that it chooses."""

    def __init__(
        self, run: RecomputedRun, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.run = run
        self.parts: defaultdict[Address, list[Tensor]] = defaultdict(list)
        self.states: list[Tensor] = []
        self.read: list[Tensor] = []

    def __call__(self, address: Address, x: Tensor) -> None:
        self.parts[address].append(self._keep(address, self._of_token(x, address.pos_axis)))

    def _of_token(self, x: Tensor, axis: int | None) -> Tensor:
        places = self.run.places(self.run.number)
        assert places is not None and axis is not None
        return _take(x, axis, places)

    def end(self, state: Tensor, logits: Tensor | None) -> None:
        assert logits is not None
        self.states.append(self._of_token(state, -2).to(device=self._device))
        self.read.append(self._of_token(logits, -2).to(device=self._device))

    def cache(self) -> LoopedCache:
        activations = {}
        for address, parts in self.parts.items():
            assert address.pos_axis is not None
            if address.axes[-1] == "key":  # later tokens see more keys
                fill = 0.0 if address.component.endswith("hook_pattern") else float("-inf")
                longest = parts[-1].shape[-1]
                parts = [pad(x, (0, longest - x.shape[-1]), value=fill) for x in parts]
            activations[address.name] = torch.cat(parts, address.pos_axis)
        by_example = torch.tensor(self.run.ends is not None)
        # A coda reads positions that are not kept, so that no logit can be attributed through it.
        first = int(self.run.lengths.max()) - 1 if self.run.model.site_map.n_coda else 0
        positions = torch.arange(first, first + len(self.read))
        readout = RunReadout(
            torch.cat(self.states, 1), positions, by_example, torch.cat(self.read, 1)
        )
        return LoopedCache(activations, self.run.model.unroll(self.run.n_loops), readout=readout)
