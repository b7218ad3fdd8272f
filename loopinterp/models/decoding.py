"""Greedy decoding with cached keys and values per loop and layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_integer
from loopinterp.models.iteration import bind
from loopinterp.models.positions import AttentionContext, check_length
from loopinterp.models.protocol import declared, device_of, need_causal, need_model
from loopinterp.models.run import HookedRun
from loopinterp.models.run_inputs import (
    check_each,
    check_ends,
    check_logits,
    check_loops,
    check_tokens,
    refuse,
)
from loopinterp.models.transformer import LoopedTransformer

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer

    from loopinterp.models.protocol import LoopedModel


@torch.no_grad()
@checked
def greedy_decode(
    model: LoopedModel | Any,
    prompts: Integer[Tensor, "batch pos"] | Sequence[Sequence[int]],
    *,
    n_loops: int | Int[Tensor, " batch"],
    max_new_tokens: PositiveInt,
    stop_token: NonNegativeInt | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    position_offset: int | Int[Tensor, " batch"] = 0,
    use_cache: bool = True,
) -> Int[Tensor, "batch new"]:
    r"""Continue each prompt greedily, one token at a time.

    .. math::
        x_{p+1} = \operatorname{argmax}_v \; \operatorname{readout}(h_T)_{p, v}, \qquad
        h_{t+1} = \operatorname{step}(h_t, \operatorname{embed}(x_0 \dots x_p))

    A causal :class:`~loopinterp.models.LoopedTransformer` caches keys and values per layer and
    loop, so that a token costs one position; in half precision, rounding may choose another likely
    token than a rerun. Other models, and models with hooks, rerun the whole sequence.

    An initial ``noise`` is drawn once, for the prompt with all new tokens; a rerun draws the same
    if ``d_model`` is a multiple of 16.

    Args:
        model: A causal looped model whose answers are its input tokens.
        prompts: Tokens ``[batch, pos]``, or lists of tokens of any lengths.
        n_loops: Loops for each token, or a number for each example.
        max_new_tokens: New tokens at most.
        stop_token: Token that ends an example, if any.
        lengths: Length of each prompt, for a tensor padded on the right.
        position_offset: Added to abacus positions: one number, or one for each example.
        use_cache: False always reruns the whole sequence.

    Returns:
        The new tokens, as many as the longest answer has; ended examples are filled with
        ``stop_token``.

    Raises:
        InputError: If the new tokens exceed the model's context, or a logit is NaN.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config, seed=0)
        >>> greedy_decode(model, [[1, 2], [3, 0, 4]], n_loops=3, max_new_tokens=4).shape
        torch.Size([2, 4])
    """
    need_model(model)
    need_causal(model)
    tokens, lengths = _padded(prompts, lengths, device_of(model))
    filler, longest = 0, int(lengths.max())
    if isinstance(model, HookedRun):
        answers, known = model.config.d_vocab_out, model.config.d_vocab or 0
        fix = "Read the answers of such a model at once: model(inputs)."
        check_integer("d_vocab_out", answers, most=known, fix=fix)
        check_integer("stop_token", stop_token or 0, most=answers - 1)
    elif isinstance(position_offset, Tensor) or position_offset:
        refuse({"position_offset": position_offset}, "0 for another kind of model", "Omit it.")
    if isinstance(model, LoopedTransformer):
        config = model.config
        if config.positions == "absolute":
            check_length(longest + max_new_tokens - 1, config.n_ctx or 0, "prompt and new tokens")
        # The room for new tokens holds no digit, which would count as the prompt's.
        filler = min({*range(config.d_vocab or 0)} - {*config.digit_tokens}, default=0)
    loops = check_ends(n_loops, tokens) if isinstance(n_loops, Tensor) else check_loops(n_loops)
    tokens = pad(tokens[:, :longest].long(), (0, max_new_tokens))
    # Places after each prompt: [batch, pos].
    empty = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    tokens = tokens.masked_fill(empty, filler)
    if isinstance(model, HookedRun):
        model.check_inputs(tokens[:, :longest], position_offset=position_offset)
    # Without hooks, which would need all positions.
    opened = (
        isinstance(model, HookedRun)
        and model.keeps_keys
        and not model._hooked(_most(loops), is_set=True)
    )
    run = (_Cached if use_cache and opened else _Recomputed)(model, tokens, loops, position_offset)
    rows, last, n_new = torch.arange(len(tokens), device=tokens.device), lengths - 1, 0
    going = torch.ones_like(rows, dtype=torch.bool)
    while n_new < max_new_tokens and bool(going.any()):
        logits = run.logits(last, longest + n_new)
        check_logits(logits, f"of new token {n_new}")
        token = logits.argmax(-1)
        # An ended example repeats the stop token at the same place.
        token = token if stop_token is None else torch.where(going, token, stop_token)
        last = last + going
        tokens[rows, last] = token
        going = going if stop_token is None else going & (token != stop_token)
        n_new += 1
    # Places of the new tokens, which begin where each prompt ends: [batch, new].
    new = lengths[:, None] + torch.arange(n_new, device=tokens.device)
    answers = tokens.gather(1, new)
    return answers if stop_token is None else torch.where(new <= last[:, None], answers, stop_token)


class _Recomputed:
    """Reruns the whole sequence for each token."""

    def __init__(
        self, model: Any, tokens: Tensor, loops: int | Tensor, offset: int | Tensor
    ) -> None:
        self.model, self.tokens, self.loops, self.offset = model, tokens, loops, offset
        self.rows = torch.arange(len(tokens), device=tokens.device)
        self.ends = loops if isinstance(loops, Tensor) else None
        self.n_loops = _most(loops)

    def logits(self, last: Int[Tensor, " batch"], seen: int) -> Float[Tensor, "batch d_vocab_out"]:
        """Logits at position ``last`` of each example, of ``seen`` in all."""
        # [batch, pos, d_vocab_out], read at the last known position of each example.
        return self._run(self.tokens[:, :seen])[self.rows, last]

    def _run(self, inputs: Tensor) -> Tensor:
        if isinstance(self.model, HookedRun):
            return self.model(inputs, n_loops=self.loops, position_offset=self.offset)
        bound = bind(self.model, inputs)
        read = bound.h0  # each example's state after its own last loop
        for loop, h in bound.run(self.n_loops):
            read = h if self.ends is None else torch.where(_as_rows(self.ends >= loop, h), h, read)
        return bound.read(read, self.n_loops)


class _Cached(_Recomputed):
    """Runs the prompts, then the last position of each example, one token at a time.

    The n-th attention of a run (prelude, blocks, coda) reads keys and values of the n-th before it.
    """

    def __init__(
        self, model: Any, tokens: Tensor, loops: int | Tensor, offset: int | Tensor
    ) -> None:
        super().__init__(model, tokens, loops, offset)
        n_pos = tokens.shape[1]
        self.seen, self.turn = 0, 0
        self.cached: list[tuple[Tensor, Tensor]] = []
        self.rotation = model.length_context(n_pos - 1).rotation  # the last one is not read
        width, where = model.site_map.d_model, {"device": model.device, "dtype": model.dtype}
        like = torch.empty(1, n_pos, width, **where)
        self.start = model.initial_state(like)[0] if declared(model, "starts_by_place") else None

    def logits(self, last: Int[Tensor, " batch"], seen: int) -> Float[Tensor, "batch d_vocab_out"]:
        prompts, self.seen, self.turn = not self.cached, seen, 0
        if prompts:
            return self._at(torch.arange(seen, device=last.device)[None])[self.rows, last]
        return self._at(last[:, None])[:, 0]

    def _at(self, places: Int[Tensor, "#batch pos"]) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits at some positions of each example, given those before."""
        model, at = self.model, (self.rows[:, None], places)
        known, context = self.tokens[:, : self.seen], self.input_context(places)
        model.check_inputs(known, position_offset=self.offset)  # new digits make numbers longer
        added = model.added_positions(known, self.offset)
        e = model.run_embedding(known[at], context, None if added is None else added[at])
        if self.start is None:
            h = read = model.initial_state(e)
        else:
            # [batch, pos, d_state]: an initial state that depends on the position alone.
            h = read = self.start[places].expand(len(e), -1, -1)
        for loop in range(self.n_loops):
            h = model.run_loop(h, e, context, loop=loop)
            read = h if self.ends is None else torch.where(_as_rows(self.ends > loop, h), h, read)
        return model.run_readout(read, context=replace(context, qk_offset=None))

    def input_context(self, places: Int[Tensor, "#batch pos"]) -> AttentionContext:
        model, known = self.model, self.tokens[:, : self.seen]
        key = torch.arange(self.seen, device=places.device)[None, None]  # [1, 1, key]
        offset = model.qk_offset(known, self.offset)
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
            for old, new in zip(past, (k, v)):
                # The new keys and values go to their places; the earlier ones stay.
                old[self.rows[:, None], :, places] = new.transpose(1, 2)
            return past[0][:, :, : self.seen], past[1][:, :, : self.seen]

        mask, around = model.mask_at(places[..., None], key)
        surround = None if around is mask else AttentionContext(mask=around)
        return AttentionContext(
            mask=mask, rotation=rotation, qk_offset=offset, remember=remember, surround=surround
        )


def _most(loops: int | Tensor) -> int:
    return max(1, int(loops.max())) if isinstance(loops, Tensor) else loops


def _as_rows(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.view(-1, *[1] * (like.ndim - 1))


def _padded(prompts: Any, lengths: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts padded on the right, and their lengths."""
    if not isinstance(prompts, Tensor):
        refuse({"lengths": lengths}, "none with lists, which have their own", "Leave it out.")
        rows = [torch.tensor(row) for row in prompts]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        fits = rows and all(len(row) and not row.is_floating_point() for row in rows)
        prompts = pad_sequence(rows, batch_first=True).to(device) if fits else torch.empty(0)
    check_tokens(prompts, sys.maxsize)
    if lengths is None:
        lengths = torch.full((len(prompts),), prompts.shape[1], device=prompts.device)
    check_each("lengths", lengths, prompts)
    for end in lengths.aminmax():
        check_integer("lengths", int(end), least=1, most=prompts.shape[1])
    return prompts, lengths.long()
