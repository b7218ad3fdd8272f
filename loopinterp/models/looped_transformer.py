"""The looped transformer: one weight-tied block, applied again and again, every loop open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from loopinterp.errors import HookError, InputError, check_choice, check_integer
from loopinterp.models.direct_attribution import digest_of_readout
from loopinterp.models.looped_cache import LoopedCache
from loopinterp.models.looped_model import Iteration
from loopinterp.models.positions import AttentionContext
from loopinterp.models.pretrained import PretrainedMixin
from loopinterp.models.run_inputs import check_dtype, check_inputs, check_state, loop_span, refuse
from loopinterp.models.run_length import ends_of
from loopinterp.models.sites import Address, Index
from loopinterp.models.taps import NO_TAPS, Recorder, Taps
from loopinterp.models.transformer_lens_names import TransformerLensNames
from loopinterp.short_repr import MOST, as_table

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

ReturnType = Literal["logits", "state", "states", "all_logits"]


class LoopedTransformer(PretrainedMixin, TransformerLensNames):
    """A :class:`~loopinterp.models.LoopedModel` that is a transformer, hooked at every loop.

    A run of T loops over a block of L layers shows T * L hooked views over one set of weights,
    under TransformerLens' names (see :mod:`loopinterp.models.sites`). Attention is fused where
    nobody looks at scores or pattern; the two agree to rounding.

    Args:
        config: The architecture.
        seed: Seed of the initial weights.

    Example:
        >>> import torch
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> model = LoopedTransformer(config, seed=0)
        >>> logits, cache = model.run_with_cache(torch.tensor([[0, 1, 2]]), n_loops=4)
        >>> cache.stack("attn.hook_pattern").shape
        torch.Size([4, 1, 2, 3, 3])
    """

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.parameters())
        return f"LoopedTransformer({weights:,} weights, {self.config!r})"[: MOST - 1]

    def _repr_html_(self) -> str:
        return as_table(repr(self), self.config.to_dict().items())

    task: Any = None
    """What it is asked, where that is known: :func:`loopinterp.load` puts the run's task here."""

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
        context = self._context(inputs, position_offset)
        return self._embed(inputs, context, self._added_positions(inputs, position_offset))

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The state before the first loop: the embedding, zeros, or seeded noise."""
        if self.config.initial_state == "embedding":
            return e
        if self.config.initial_state == "zeros":
            return torch.zeros_like(e)
        generator = torch.Generator().manual_seed(self.config.noise_seed)
        noise = torch.randn(e.shape[1:], generator=generator) * self.config.noise_std
        return noise.to(e).expand_as(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop. For many loops over one input, :meth:`bind` computes the context once.

        The taps of the loop are those of loop 0, whatever it is in a run.
        """
        if context is None:
            if self.config.positions == "abacus" and self.config.abacus_target == "qk":
                raise InputError(
                    "step",
                    expected="the context of the input, as abacus positions enter queries and keys",
                    given="a state and an embedding alone",
                    fix="Use model.bind(inputs).step(h).",
                )
            context = self._length_context(h.shape[1], taps)
        return self._loop(h, e, context, taps)

    def readout(
        self, h: Float[Tensor, "*loop batch pos d_model"]
    ) -> Float[Tensor, "*loop batch pos d_vocab_out"]:
        """Logits of a state: coda, final norm, unembedding."""
        if self.coda and h.dim() == 4:
            return torch.stack([self._readout(state) for state in h])
        return self._readout(h)

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        """Raise unless the model can read the inputs, wherever they lie.

        :meth:`bind` and every run check the same. On a GPU that waits for what the GPU has to do;
        inputs that are checked before they are moved there can be bound with ``look=False``.

        Raises:
            InputError: If shape, type or range of the input is wrong, or it is too long.
        """
        device = inputs.device if isinstance(inputs, torch.Tensor) else self.device
        check_inputs(inputs, self.config, device, position_offset)
        if self.config.positions == "abacus":
            self._abacus_index(inputs, position_offset)

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
            look: Whether tokens and offsets are looked at; False where :meth:`check_inputs` has.
            whole: Whether attention goes over all pairs of positions, even where a window makes
                that needless.

        Raises:
            HookError: If hooks are on: its steps fire none.
            InputError: If shape, type or range of the input is wrong, or it is too long.
        """
        self.need_no_hooks()
        context = self._context(inputs, position_offset, look=look, whole=whole)
        added = self._added_positions(inputs, position_offset, look=look)
        e = self._embed(inputs, context, added)
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
        return_type: ReturnType = "logits",
    ) -> Tensor:
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
            return_type: ``logits`` of the last state ``[batch, pos, d_vocab_out]``; the last
                ``state``; all ``states`` ``[loop + 1, batch, pos, d_model]``, the starting one
                first; or ``all_logits``, the readout of each of them.

        Raises:
            InputError: If a loop is out of range, or shape or type do not fit.
        """
        loops = self._loops_of(n_loops, inputs)
        span = loop_span(start_at_loop, stop_at_loop, loops, state)
        taps = Taps(self._hooked(loops, told=self._told(n_loops)))
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
        return_type: ReturnType = "logits",
    ) -> tuple[Tensor, LoopedCache]:
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

        Raises:
            HookError: If the filter keeps nothing, or a name does not exist.
            InputError: If the batch axis of more than one example is to go, or ``loss_fn`` is
                given without ``incl_bwd``.
        """
        if not incl_bwd:
            refuse(
                {"loss_fn": loss_fn}, "none without incl_bwd=True, which it is for", "Pass both."
            )
        total = self._loops_of(n_loops, inputs)
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
        points = self._hooked(total, told=self._told(n_loops))
        taps = Taps(points, wanted, recorder)
        out = self._run(inputs, n_loops, span, state, position_offset, return_type, taps)
        if incl_bwd:
            recorder.backward(out if loss_fn is None else loss_fn(out))
        by_example = isinstance(n_loops, torch.Tensor)
        readout = recorder.readout(by_example=by_example)
        if readout.logits is None:
            readout = replace(readout, weights=digest_of_readout(self))
        cache = LoopedCache(recorder.kept, self.unroll(total), readout=readout)
        if remove_batch_dim:
            check_integer("batch size", len(inputs), most=1, fix="Leave remove_batch_dim out.")
            cache.remove_batch_dim(batch_size=len(inputs))
        return out, cache

    # Inside

    def _run(
        self,
        inputs: Tensor,
        n_loops: int | Tensor | None,
        span: range,
        state: Tensor | None,
        position_offset: int | Tensor,
        return_type: str,
        taps: Taps,
    ) -> Tensor:
        check_choice("return_type", return_type, get_args(ReturnType))
        ends = ends_of(n_loops, span, return_type)
        context = self._context(inputs, position_offset, taps)
        added = self._added_positions(inputs, position_offset)
        e = self._embed(inputs, context, added, taps)
        h = self.initial_state(e) if state is None else check_state(state, e)
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

    @staticmethod
    def _fires(address: Address, span: range, return_type: str) -> bool:
        if address.loop is not None:
            return address.loop in span
        return return_type in ("logits", "all_logits") or not address.in_readout
