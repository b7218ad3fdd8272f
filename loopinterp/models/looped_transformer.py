"""The looped transformer: one weight-tied block, applied again and again, every loop open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.direct_attribution import digest_of_readout
from loopinterp.models.hooked_run import HookedRun
from loopinterp.models.positions import AttentionContext
from loopinterp.models.pretrained import PretrainedMixin
from loopinterp.models.run_inputs import check_inputs
from loopinterp.models.taps import NO_TAPS, Taps
from loopinterp.models.transformer_lens_names import TransformerLensNames
from loopinterp.short_repr import MOST, as_table

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8
    from torch import Tensor


class LoopedTransformer(PretrainedMixin, TransformerLensNames, HookedRun):
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

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The state before the first loop: the embedding, zeros, seeded noise, or a code's."""
        if self.config.initial_state == "embedding":
            return e
        if self.config.initial_state == "zeros":
            return torch.zeros_like(e)
        if self.code is not None:
            start = self.code.state(-torch.ones(self.code.n_bits, device=e.device, dtype=e.dtype))
            return start.expand_as(e)
        generator = torch.Generator().manual_seed(self.config.noise_seed)
        noise = (
            torch.randn(e.shape[1:], generator=generator, dtype=torch.float32)
            * self.config.noise_std
        )
        return noise.to(e).expand_as(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop; see :meth:`HookedRun.step`.

        Raises:
            InputError: If it would have to know the tokens, and is given no context.
        """
        if context is None and (self.config.positions, self.config.abacus_target) == (
            "abacus",
            "qk",
        ):
            raise InputError(
                "step",
                expected="the context of the input, as abacus positions enter queries and keys",
                given="a state and an embedding alone",
                fix="Use model.bind(inputs).step(h).",
            )
        return super().step(h, e, context, taps)

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

    @property
    def starts_by_place(self) -> bool:
        """Whether the initial state depends on where a token stands, and not on the token."""
        return self.config.initial_state != "embedding"

    def _digest_of_readout(self) -> UInt8[Tensor, " byte"]:
        return digest_of_readout(self)
