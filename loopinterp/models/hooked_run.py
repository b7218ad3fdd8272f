"""The run that every hooked looped model makes: embed, start, loop after loop, read.

Our own transformer and the adapters for published models say what an embedding, a loop and a
readout are, and where their taps stand; the rest is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from loopinterp.errors import HookError, check_choice, check_integer
from loopinterp.models.cache_room import need_room
from loopinterp.models.looped_cache import LoopedCache
from loopinterp.models.looped_model import Iteration
from loopinterp.models.run_inputs import check_dtype, check_state, loop_span, refuse
from loopinterp.models.run_length import ends_of
from loopinterp.models.strict_hooks import LoopHooks
from loopinterp.models.taps import NO_TAPS, Recorder, Taps
from loopinterp.models.transformer_lens_calls import (
    NOT_THE_STATE,
    StoppedRun,
    StopPoint,
    TransformerLensCalls,
    check_stop,
    refuse_options,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from loopinterp.models.positions import AttentionContext
    from loopinterp.models.sites import Address, Index

ReturnType = Literal["logits", "state", "states", "all_logits", "loss", "both"]


class HookedRun(TransformerLensCalls, LoopHooks):
    """A :class:`~loopinterp.models.LoopedModel` that is hooked at every loop.

    What a model has to say: its ``site_map``, :meth:`initial_state`, and the methods at the end of
    this class, of which embedding, loop and readout pass what has a name through the taps of its
    place.
    """

    # The protocol

    def embed(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> Float[Tensor, "batch pos d_model"]:
        """The injected input ``e``: embedding, positions that are added to it, prelude.

        Args:
            inputs: Tokens ``[batch, pos]``, or features ``[batch, pos, d_features]``.
            position_offset: Added to abacus positions: one number, or one for each example.

        Raises:
            InputError: If shape, type or range of the input is wrong, or it is too long.
        """
        return self._enter(inputs, position_offset)[0]

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """The state before the first loop."""
        raise NotImplementedError

    def step(
        self,
        h: Float[Tensor, "batch pos d_state"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
    ) -> Float[Tensor, "batch pos d_state"]:
        """One loop. For many loops over one input, :meth:`bind` computes the context once.

        The taps of the loop are those of loop 0, whatever it is in a run.
        """
        if context is None:
            context = self._length_context(h.shape[1], taps)
        return self._loop(h, e, context, taps)

    def readout(
        self, h: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos d_vocab_out"]:
        """Logits of a state: coda, final norm, unembedding."""
        if self.site_map.n_coda and h.dim() == 4:
            return torch.stack([self._readout(state) for state in h])
        return self._readout(h)

    def bind(
        self,
        inputs: Tensor,
        *,
        position_offset: int | Int[Tensor, " batch"] = 0,
        look: bool = True,
        whole: bool = False,
    ) -> Iteration:
        """The iteration over one input, with its attention context computed once.

        Args:
            inputs: Tokens ``[batch, pos]``, or features ``[batch, pos, d_features]``.
            position_offset: Added to abacus positions: one number, or one for each example.
            look: Whether tokens and offsets are looked at; False where they have been checked.
            whole: Whether attention goes over all pairs of positions, even where a window makes
                that needless.

        Raises:
            HookError: If hooks are on: its steps fire none.
            InputError: If shape, type or range of the input is wrong, or it is too long.
        """
        self.need_no_hooks()
        e, context = self._enter(inputs, position_offset, look=look, whole=whole)
        return Iteration(e, self.initial_state(e), self._loop, self.readout, context)

    # Runs

    def forward(
        self,
        inputs: Tensor,
        *,
        n_loops: int | Int[Tensor, " batch"] | None = None,
        start_at_loop: int = 0,
        stop_at_loop: int | None = None,
        state: Float[Tensor, "batch pos d_model"] | None = None,
        position_offset: int | Int[Tensor, " batch"] = 0,
        stop_at_layer: int | None = None,
        return_type: ReturnType | None = "logits",
        **options: Any,
    ) -> Any:
        """Run the loops, firing hooks where there are any.

        With a number of loops for each example, the run goes on to the greatest of them, hooks
        and all, and each example is read after its own: as if it had been run alone.

        Args:
            inputs: Tokens ``[batch, pos]``, or features ``[batch, pos, d_features]``.
            n_loops: Loops of the whole run, or a number for each example (``batch.n_loops``).
                None: what the model's :attr:`loop_rule` says of an input of this length, as T(n)
                for the model of a run; ``model.n_loops`` where it has no rule.
            start_at_loop: First loop to run; ``state`` is then the state before it.
            stop_at_loop: Run the loops before this one only.
            state: State to start from, instead of :meth:`initial_state`.
            position_offset: Added to abacus positions: one number, or one for each example.
            stop_at_layer: End before this layer, counted as TransformerLens counts, and return
                the stream that it would have read.
            return_type: ``logits`` of the last state ``[batch, pos, d_vocab_out]``; the last
                ``state``; all ``states`` ``[loop + 1, batch, pos, d_model]``, the starting one
                first; or ``all_logits``, the readout of each of them. TransformerLens' ``loss``
                is :meth:`loss_fn` of the next tokens, ``both`` logits and loss, None nothing.
            options: None; those of TransformerLens' models are refused, with what to use.

        Raises:
            InputError: If a loop is out of range, or shape or type do not fit.
        """
        refuse_options(options)
        loops = self._loops_of(n_loops, self.to_tokens(inputs))
        span = loop_span(start_at_loop, stop_at_loop, loops, state)
        points = self._hooked(loops, told=self._told(n_loops))
        taps = Taps([*self._stop(stop_at_layer, loops, n_loops, return_type), *points])
        return self._run(inputs, n_loops, span, state, position_offset, return_type, taps)

    def run_with_cache(
        self,
        inputs: Tensor,
        *,
        n_loops: int | Int[Tensor, " batch"] | None = None,
        names_filter: str | Iterable[Any] | Callable[[str], bool] | None = None,
        loops: Index = None,
        pos_slice: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        loss_fn: Callable[[Tensor], Tensor] | None = None,
        start_at_loop: int = 0,
        stop_at_loop: int | None = None,
        state: Tensor | None = None,
        position_offset: int | Int[Tensor, " batch"] = 0,
        stop_at_layer: int | None = None,
        return_type: ReturnType | None = "logits",
        return_cache_object: bool = True,
        clear_contexts: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Run and keep activations; see :meth:`forward` for what is not said here.

        Args:
            names_filter: Hook names, ``loops.{t}.blocks.{l}.…`` aliases, component names such as
                ``resid_post`` (everywhere), lists of them such as :meth:`site` gives, or a
                predicate on full names. None keeps all.
            loops: Keep only what happens inside these loops.
            pos_slice: Positions to keep (queries, for patterns): int, slice or TransformerLens'
                Slice.
            device: Where to keep them.
            dtype: Type to keep them in.
            remove_batch_dim: Drop the batch axis of a batch of one.
            incl_bwd: Also keep the gradients of ``loss_fn``; their names end in ``_grad``.
            loss_fn: From what the run returns to a scalar.
            return_cache_object: False gives a plain dictionary, as TransformerLens does.
            clear_contexts: Empty every ``hook.ctx`` afterwards.

        Returns:
            What :meth:`forward` returns, and the :class:`LoopedCache`.

        Raises:
            HookError: If the filter keeps nothing, or a name does not exist.
            InputError: If the batch axis of more than one example is to go, ``loss_fn`` is given
                without ``incl_bwd``, or the cache would not fit where it is to be kept; that is
                said before anything is run.
        """
        if not incl_bwd:
            refuse(
                {"loss_fn": loss_fn}, "none without incl_bwd=True, which it is for", "Pass both."
            )
        refuse_options(options)
        total = self._loops_of(n_loops, self.to_tokens(inputs))
        stop = self._stop(stop_at_layer, total, n_loops, return_type)
        self._need_number(n_loops, total, names_filter)
        span = loop_span(start_at_loop, stop_at_loop, total, state)
        book = self.addresses(total)
        chosen = [book.addresses[name] for name in book.select(names_filter, loops)]
        wanted = [address for address in chosen if self._fires(address, span, return_type)]
        if not wanted:
            raise HookError(
                "names_filter",
                expected=f"something inside loops {span.start} to {span.stop - 1}, or the "
                "readout where logits are returned",
                given=f"{names_filter!r} with loops={loops!r}, return_type={return_type!r}",
                fix="Widen the filter, run more loops, or return logits.",
            )
        kept_as = check_dtype(dtype)
        recorder = Recorder(pos_slice=pos_slice, device=device, dtype=kept_as, gradients=incl_bwd)
        if isinstance(inputs, torch.Tensor) and inputs.dim() > 1:  # else refused where it is read
            need_room(
                wanted,
                len(inputs),
                inputs.shape[1],
                recorder.kept_positions(inputs.shape[1]),
                dtype=kept_as or self.dtype,
                device=torch.device(inputs.device if device is None else device),
                gradients=incl_bwd,
            )
        points = self._hooked(total, told=self._told(n_loops))
        taps = Taps([*stop, *points], wanted, recorder)
        out = self._run(inputs, n_loops, span, state, position_offset, return_type, taps)
        if not recorder.kept:
            raise HookError(
                "names_filter",
                expected=f"something before layer {stop_at_layer}",
                given=f"{names_filter!r}",
                fix="Widen the filter, or stop later.",
            )
        if incl_bwd:
            recorder.backward(out if loss_fn is None else loss_fn(out))
        readout = None
        if recorder.last is not None:
            readout = recorder.readout(by_example=isinstance(n_loops, torch.Tensor))
            if readout.logits is None:
                readout = replace(readout, weights=self._digest_of_readout())
        cache = LoopedCache(recorder.kept, self.unroll(total), readout=readout)
        if remove_batch_dim:
            check_integer("batch size", len(inputs), most=1, fix="Leave remove_batch_dim out.")
            cache.remove_batch_dim(batch_size=len(inputs))
        if clear_contexts:
            self.clear_contexts()
        return out, cache if return_cache_object else cache.cache_dict

    # Inside

    def _run(
        self,
        inputs: Tensor,
        n_loops: int | Tensor | None,
        span: range,
        state: Tensor | None,
        position_offset: int | Tensor,
        return_type: str | None,
        taps: Taps,
    ) -> Any:
        """A run, in any of the ways that its result can be asked for."""
        kind = "state" if return_type is None else return_type
        check_choice("return_type", kind, get_args(ReturnType))
        kind = "logits" if kind in NOT_THE_STATE else kind
        try:
            out = self._states(inputs, n_loops, span, state, position_offset, kind, taps)
        except StoppedRun as stopped:
            return stopped.stream
        return self._answer(out, inputs, return_type) if return_type in NOT_THE_STATE else out

    def _states(
        self,
        inputs: Tensor,
        n_loops: int | Tensor | None,
        span: range,
        state: Tensor | None,
        position_offset: int | Tensor,
        return_type: str,
        taps: Taps,
    ) -> Tensor:
        ends = ends_of(n_loops, span, return_type)
        e, context = self._enter(inputs, position_offset, taps)
        if state is None:
            h = self.initial_state(e)
        else:
            h = check_state(state, e, self.site_map.state_width)
        states = [h]
        read = h
        for loop in span:
            h = self._loop(h, e, context, taps, loop)
            if ends is not None:
                read = torch.where((ends > loop)[:, None, None], h, read)
            if return_type in ("states", "all_logits"):
                states.append(h)
        h = h if ends is None else read
        logits = self._readout(h, taps) if return_type in ("logits", "all_logits") else None
        taps.end(h, logits)
        if logits is None:
            return h if return_type == "state" else torch.stack(states)
        if return_type == "all_logits":
            return torch.stack([*map(self._readout, states[:-1]), logits])
        return logits

    def _stop(
        self, layer: int | None, loops: int, n_loops: object, return_type: object
    ) -> list[tuple[Address, HookPoint]]:
        """What ends a run before a layer, where that is asked for."""
        if layer is None:
            return []
        if isinstance(n_loops, torch.Tensor) or return_type != "logits":
            refuse(
                {"stop_at_layer": layer},
                "None with a return_type, and with a number of loops for each example",
                "Pass stop_at_loop=, or one number of loops and no return_type.",
            )
        book = self.addresses(loops)
        before = check_stop(layer, self.site_map.layers_total(loops))
        return [(book.addresses[f"blocks.{before}.hook_resid_pre"], StopPoint())]

    @staticmethod
    def _fires(address: Address, span: range, return_type: str | None) -> bool:
        if address.loop is not None:
            return address.loop in span
        reads = return_type in ("logits", "all_logits", "loss", "both")
        return reads or not address.in_readout

    def _enter(
        self,
        inputs: Tensor,
        position_offset: int | Tensor,
        taps: Taps = NO_TAPS,
        *,
        look: bool = True,
        whole: bool = False,
    ) -> tuple[Tensor, AttentionContext]:
        """The injected input, and what attention is told about it."""
        context = self._context(inputs, position_offset, taps, look=look, whole=whole)
        added = self._added_positions(inputs, position_offset, look=look)
        return self._embed(inputs, context, added, taps), context

    # What a model says

    @property
    def starts_by_place(self) -> bool:
        """Whether the initial state depends on where a token stands, and not on the token."""
        return False

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        """True where a query may attend, of so many positions."""
        raise NotImplementedError

    def _context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        taps: Taps = NO_TAPS,
        *,
        look: bool = True,
        whole: bool = False,
    ) -> AttentionContext:
        """What attention is told about an input, which is checked."""
        raise NotImplementedError

    def _added_positions(
        self, inputs: Tensor, offset: int | Tensor, *, look: bool = True
    ) -> Tensor | None:
        """What is added to the embedding of each position; None where nothing is."""
        return None

    def _embed(
        self,
        inputs: Tensor,
        context: AttentionContext,
        positions: Tensor | None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """The injected input: embedding, and the layers before the loop."""
        raise NotImplementedError

    def _mask_at(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> tuple[Tensor, Tensor]:
        """What is added to scores of queries and keys at some places: in the loop, and around."""
        raise NotImplementedError

    def _qk_offset(self, inputs: Tensor, offset: int | Tensor) -> Tensor | None:
        """What is added to queries and keys of each position; None where nothing is."""
        return None

    def _length_context(
        self, n_pos: int, taps: Taps = NO_TAPS, *, whole: bool = False
    ) -> AttentionContext:
        """What attention is told about a number of positions alone."""
        raise NotImplementedError

    def _loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        """One loop, past the taps of that loop."""
        raise NotImplementedError

    def _readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        """Logits of a state."""
        raise NotImplementedError

    def _digest_of_readout(self) -> UInt8[Tensor, " byte"] | None:
        """A digest of the weights that logits are read with, where attribution asks for it."""
        return None
