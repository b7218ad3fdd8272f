"""The run of hooked looped models: embedding, initial state, loops, readout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from transformer_lens.hook_points import HookPoint

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import HookError, InputError, check_choice, check_integer
from loopinterp.models.addresses import nbytes
from loopinterp.models.cache import LoopedCache
from loopinterp.models.hooks import LoopHooks, as_written
from loopinterp.models.iteration import Iteration
from loopinterp.models.protocol import check_dtype, loop_span, refuse, spell
from loopinterp.models.taps import NO_TAPS, Recorder, Taps, need_room
from loopinterp.models.transformer_lens_calls import TransformerLensCalls, refuse_options

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import Address, Index
    from loopinterp.models.positions import AttentionContext

_ReturnType = Literal["logits", "state", "states", "all_logits", "loss", "both"]


class HookedRun(TransformerLensCalls, LoopHooks):
    """A :class:`~loopinterp.models.LoopedModel` that is hooked at every loop.

    A subclass defines ``site_map`` and the abstract methods, which pass activations through taps.
    """

    repeatable = True
    takes_loop: bool = False  # whether loops differ, by the index that run_loop is given
    reads_tokens: bool = False  # whether a loop reads more of the input than its embedding
    keeps_keys = True  # whether attention keeps keys and values where its context remembers them

    # The protocol

    def embed(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> Float[Tensor, "batch pos d_model"]:
        """The injected input ``e``: embedding, added positions, prelude."""
        context = self.input_context(inputs, position_offset)
        return self.run_embedding(inputs, context, NO_TAPS)

    @abstractmethod
    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """The state before the first loop."""

    def step(
        self,
        h: Float[Tensor, "batch pos d_state"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_state"]:
        """One loop; :meth:`bind` computes ``context`` once, ``loop`` matters if it takes one."""
        if loop is None and self.takes_loop:
            expected, fix = "the loop's index: loops differ", "Pass loop=t."
            raise InputError("loop", expected=expected, given="none", fix=fix)
        if context is None:
            if self.reads_tokens:
                expected, got = "the input, which a loop reads", "a state and an embedding"
                fix = "Use model.bind(inputs).step(h)."
                raise InputError("step", expected=expected, given=got, fix=fix)
            context = self.length_context(h.shape[1], all_pairs=taps.see_scores())
        return self.run_loop(h, e, context, taps, loop or 0)

    def readout(
        self, h: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos d_vocab_out"]:
        """Logits of a state: coda, final norm, unembedding."""
        if self.site_map.n_coda and h.dim() == 4:
            return torch.stack([self.run_readout(state) for state in h])
        return self.run_readout(h)

    def bind(
        self,
        inputs: Tensor,
        *,
        position_offset: int | Int[Tensor, " batch"] = 0,
        checked: bool = False,
        all_pairs: bool = False,
        taps: Taps | None = None,
    ) -> Iteration:
        """The iteration over one input; it computes the attention context once.

        Args:
            checked: Whether tokens and offsets are known to be in range.
            all_pairs: Whether attention covers all pairs of positions, whatever the window.
            taps: Taps that the run passes; None: no hook may be on.
        """
        if taps is None:
            self.need_no_hooks()
        elif taps.see_scores():
            all_pairs = True
        how = {"checked": checked, "all_pairs": all_pairs}
        context = self.input_context(inputs, position_offset, **how)
        e = self.run_embedding(inputs, context, taps or NO_TAPS)
        h0 = self.initial_state(e)
        if taps is None:
            return Iteration(e, h0, self.run_loop, self.readout, context, self.takes_loop)
        step, readout = (partial(f, taps=taps) for f in (self.run_loop, self.run_readout))
        return Iteration(e, h0, step, readout, context, takes_loop=True)

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
        return_type: _ReturnType | None = "logits",
        **options: Any,
    ) -> Any:
        """Run the loops, with hooks.

        Args:
            inputs: Tokens ``[batch, pos]``, or features ``[batch, pos, d_features]``.
            n_loops: Loops of the run, or a number for each example (``batch.n_loops``), which is
                then read after its own. None: the :attr:`loop_rule` for this input length (T(n) for
                the model of a run), else ``model.n_loops``.
            start_at_loop: First loop to run; ``state`` is then the state before it.
            stop_at_loop: Run only the loops before this one.
            state: Start from this state.
            position_offset: Added to abacus positions: one number, or one for each example.
            stop_at_layer: Return the stream before this layer, in TransformerLens' count.
            return_type: ``logits`` of the last state ``[batch, pos, d_vocab_out]``; the last
                ``state``; all ``states`` ``[loop + 1, batch, pos, d_model]``; or ``all_logits``,
                the readout of each. TransformerLens' ``loss`` is :meth:`loss_fn` of the next
                tokens, ``both`` logits and loss, None nothing.
            options: Other TransformerLens options, which are refused.
        """
        refuse_options(options)
        loops = self._run_loops(n_loops, self.to_tokens(inputs))
        span = loop_span(start_at_loop, stop_at_loop, loops, state)
        points = self._hooked(loops, is_set=self._is_set(n_loops))
        taps = Taps([*self._stop(stop_at_layer, loops, n_loops, return_type), *points])
        run = as_written(self._run) if points else self._run
        return run(inputs, n_loops, span, state, position_offset, return_type, taps)

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
        return_type: _ReturnType | None = "logits",
        return_cache_object: bool = True,
        clear_contexts: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Run and keep activations; further arguments are those of :meth:`forward`.

        Args:
            names_filter: Hook names, ``loops.{t}.blocks.{l}.…`` aliases, component names such as
                ``resid_post`` (everywhere), lists of them, or a predicate. None keeps all.
            loops: Keep these loops only.
            pos_slice: Keep these positions (queries, for patterns): int, slice or TransformerLens'
                Slice.
            device, dtype: Of the kept activations.
            remove_batch_dim: Drop the batch axis of a batch of one.
            incl_bwd: Also keep gradients of ``loss_fn``; their names end in ``_grad``.
            loss_fn: From the output to a scalar.
            return_cache_object: False returns a plain dictionary.
            clear_contexts: Empty every ``hook.ctx`` afterwards.

        Returns:
            The output of :meth:`forward`, and the :class:`LoopedCache`.

        Raises:
            HookError: If the filter keeps nothing, or a name does not exist.
            InputError: If the options conflict, or the cache exceeds the free memory.
        """
        refuse_options(options)
        if not incl_bwd:
            refuse({"loss_fn": loss_fn}, "none without incl_bwd=True", "Pass both.")
        total = self._run_loops(n_loops, self.to_tokens(inputs))
        stop = self._stop(stop_at_layer, total, n_loops, return_type)
        self._need_number(n_loops, total, names_filter)
        span = loop_span(start_at_loop, stop_at_loop, total, state)
        book = self.addresses(total)
        chosen = [book.addresses[name] for name in book.select(names_filter, loops)]
        reads = return_type in ("logits", "all_logits", "loss", "both")
        fires = [
            address
            for address in chosen
            if address.loop in span or (address.loop is None and (reads or not address.in_readout))
        ]
        if stop:  # what comes after the stop is never reached
            order = list(book.addresses)
            reached = order[: order.index(stop[0][0].name)]
            fires = [address for address in fires if address.name in reached]
        if not fires:
            expected = f"activations of loops {span.start} to {span.stop - 1} or of the readout"
            got = f"{names_filter!r} with {loops=}, {return_type=}, {stop_at_layer=}"
            fix = "Widen the filter, run more loops, or return logits."
            raise HookError("names_filter", expected=expected, given=got, fix=fix)
        kept_as = check_dtype(dtype)
        device = None if device is None else resolve_device(device)
        recorder = Recorder(pos_slice=pos_slice, device=device, dtype=kept_as, gradients=incl_bwd)
        if inputs.dim() > 1:  # other inputs are refused where they are read
            batch, n_pos = inputs.shape[:2]
            itemsize = (kept_as or self.dtype).itemsize * (2 if incl_bwd else 1)
            size = nbytes(fires, batch, n_pos, recorder.kept_positions(n_pos), itemsize)
            need_room(size, torch.device(inputs.device if device is None else device))
        points = self._hooked(total, is_set=self._is_set(n_loops))
        taps = Taps([*stop, *points], fires, recorder)
        out = self._run(inputs, n_loops, span, state, position_offset, return_type, taps)
        if incl_bwd:
            recorder.add_gradients(out if loss_fn is None else loss_fn(out))
        readout = None
        if recorder.last is not None:
            readout = recorder.readout(by_example=isinstance(n_loops, torch.Tensor))
        cache = LoopedCache(recorder.activations, self.unroll(total), readout=readout)
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
        if return_type is not None:
            check_choice("return_type", return_type, get_args(_ReturnType))
        for_loss = return_type in (None, "loss", "both")  # as TransformerLens has them
        kind = "logits" if for_loss else return_type
        ends = n_loops if isinstance(n_loops, torch.Tensor) else None
        if ends is not None:
            partial = span.start or span.stop < int(ends.max()) or kind in ("states", "all_logits")
            options = {"n_loops": n_loops} if partial else {}
            refuse(options, "one number for a part of a run or its states", "Pass one n_loops.")
        try:
            all_pairs = taps.see_scores()
            context = self.input_context(inputs, position_offset, all_pairs=all_pairs)
            e = self.run_embedding(inputs, context, taps)
            h = self.initial_state(e) if state is None else state
            if state is not None:
                shape = (*e.shape[:-1], self.site_map.state_width)
                if h.shape != shape or h.dtype != e.dtype:
                    expected, fix = f"{list(shape)} of {e.dtype}", "Pass one of the same input."
                    raise InputError("state", expected=expected, given=spell(h), fix=fix)
            # Logits are read from `read`, each example's state after its own last loop.
            read, states = h, [h]
            for loop in span:
                h = self.run_loop(h, e, context, taps, loop)
                # [batch, 1, 1]: an example whose loops are over is read at its own end.
                read = h if ends is None else torch.where((ends > loop)[:, None, None], h, read)
                if kind in ("states", "all_logits"):
                    states.append(h)
            logits = self.run_readout(read, taps) if kind in ("logits", "all_logits") else None
        except _StoppedRun as stopped:
            return stopped.args[0]
        taps.end(read, logits)
        if logits is None:
            return read if kind == "state" else torch.stack(states)
        if kind == "all_logits":
            return torch.stack([*map(self.run_readout, states[:-1]), logits])
        if return_type in ("loss", "both"):
            loss = self.loss_fn(logits, inputs)
            return loss if return_type == "loss" else (logits, loss)
        return None if return_type is None else logits

    def _stop(
        self, layer: int | None, loops: int, n_loops: object, return_type: object
    ) -> list[tuple[Address, HookPoint]]:
        if layer is None:
            return []
        if isinstance(n_loops, torch.Tensor) or return_type != "logits":
            expected = "None with a return_type or loops for each example"
            refuse({"stop_at_layer": layer}, expected, "Pass stop_at_loop= instead.")
        total = self.site_map.layers_total(loops)
        check_integer("stop_at_layer", layer, least=-total, most=total - 1)
        address = self.addresses(loops).addresses[f"blocks.{layer % total}.hook_resid_pre"]
        return [(address, _StopPoint())]

    # What a model defines

    @abstractmethod
    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        """True where a query may attend, among ``n_pos`` positions."""

    @abstractmethod
    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        """Raise unless the model can read the inputs, on any device.

        On a GPU this waits for other work: check inputs before moving them, then bind with
        ``checked=True``.
        """

    def input_context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        *,
        all_pairs: bool = False,
        checked: bool = False,
    ) -> AttentionContext:
        if not checked:
            self.check_inputs(inputs, position_offset=offset)
        if inputs.device != self.device:
            expected, fix = f"a tensor on {self.device}", f"Pass inputs.to({str(self.device)!r})."
            raise InputError("inputs", expected=expected, given=str(inputs.device), fix=fix)
        bar = self.input_bar(inputs)
        every_pair = all_pairs or bar is not None
        context = self.length_context(inputs.shape[1], all_pairs=every_pair)
        added, to_qk = self.added_positions(inputs, offset), self.qk_offset(inputs, offset)
        context = replace(context, added=added, qk_offset=to_qk)
        if bar is None:
            return context
        place = torch.arange(inputs.shape[1], device=inputs.device)
        inside, around = self.mask_at(place[None, :, None], place[None, None])
        barred = {"mask": around + bar, "is_causal": False}
        surround = context.surround and replace(context.surround, **barred)
        return replace(context, mask=inside + bar, is_causal=False, surround=surround)

    @abstractmethod
    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        """The attention context, as far as the length decides it."""

    def added_positions(self, inputs: Tensor, offset: int | Tensor) -> Tensor | None:
        """Vectors added to each embedding, if any."""
        return None

    def qk_offset(self, inputs: Tensor, offset: int | Tensor) -> Tensor | None:
        """Vectors added to queries and keys, if any."""
        return None

    def input_bar(self, inputs: Tensor) -> Float[Tensor, "batch 1 query key"] | None:
        """Minus infinity where tokens bar attention, else 0; None if they never do."""
        return None

    @abstractmethod
    def mask_at(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> tuple[Tensor, Tensor]:
        """The bias on scores at some positions: in the loop, and outside."""

    @abstractmethod
    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        """The injected input: embedding and prelude."""

    @abstractmethod
    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        """One loop, with its taps."""

    @abstractmethod
    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        """Logits of a state."""


class _StoppedRun(Exception):
    """Ends a run at TransformerLens' ``stop_at_layer``; its argument is the stream there."""


class _StopPoint(HookPoint):
    def forward(self, x: Tensor) -> NoReturn:  # type: ignore[override]
        raise _StoppedRun(x)
