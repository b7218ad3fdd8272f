r"""A code of sign bits between the loops: the state after a loop is one of a few vectors.

.. math::
    b = \operatorname{sign}(D h + c) \in \{-1, 1\}^m, \qquad h' = U b + u

A loop then reads one of ``2^m`` states at each position and writes one: the model is a finite
automaton by construction, whose table can be enumerated
(:func:`loopinterp.circuits.decompile`). Training softens the signs, which have no gradient, and
hardens them as it goes on (:class:`Softening`).

Source: binarised activations with a straight-through gradient, arXiv 1602.02830.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.models.stacked_weights import Linear
from loopinterp.models.taps import SILENT, Tap

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.way_back import WayBack


@dataclass(frozen=True)
class Softening:
    """How soft the signs are while a model is trained.

    A bit is ``sign(tanh(gain z))`` with the gradient of ``tanh(gain z)``, for a share ``hard`` of
    bits and positions that is drawn in every loop; the others are ``tanh(gain z)`` plus Gaussian
    noise.

    Attributes:
        hard: That share.
        gain: Steepness of the hyperbolic tangent.
        noise: Standard deviation of the noise.
        generator: Of draws and noise, on the model's device.
    """

    hard: float
    gain: float
    noise: float
    generator: torch.Generator


class StateCode(nn.Module):
    """The signs of ``m`` directions of the state, and the state that they stand for."""

    def __init__(self, d_model: int, n_bits: int) -> None:
        super().__init__()
        self.read = Linear(d_model, n_bits)
        self.write = Linear(n_bits, d_model)
        self._softening: Softening | None = None

    def init_weights(self) -> None:
        """``U ~ N(0, 1)``, ``D ~ N(0, 1 / d_model)``, no biases: bits and states of order one."""
        d_model = self.read.weight.shape[-1]
        nn.init.normal_(self.write.weight)
        nn.init.normal_(self.read.weight, std=d_model**-0.5)
        nn.init.zeros_(self.read.bias)
        nn.init.zeros_(self.write.bias)

    @property
    def n_bits(self) -> int:
        """Bits of a state."""
        return self.read.weight.shape[-2]

    def forward(
        self, h: Float[Tensor, "*shape d_model"], tap: Tap = SILENT
    ) -> Float[Tensor, "*shape d_model"]:
        """The state that the signs of ``h`` stand for."""
        z = tap("hook_code_pre", self.read(h))
        return self.write(tap("hook_code", self._bits(z)))

    def state(self, bits: Float[Tensor, "*shape n_bits"]) -> Float[Tensor, "*shape d_model"]:
        """The state of bits that are -1 or 1."""
        return self.write(bits)

    @contextmanager
    def softened(self, softening: Softening) -> Iterator[None]:
        """Soft signs, for training."""
        self._softening = softening
        try:
            yield
        finally:
            self._softening = None

    def _bits(self, z: Tensor) -> Tensor:
        soft = self._softening
        if soft is None:
            return _sign(z)
        how = {"generator": soft.generator, "device": z.device, "dtype": z.dtype}
        smooth = torch.tanh(soft.gain * z)
        straight = smooth + (_sign(z) - smooth).detach()
        noisy = smooth + soft.noise * torch.randn(z.shape, **how)
        return straight.where(torch.rand(z.shape, **how) < soft.hard, noisy)

    def back(self, way: WayBack) -> None:
        """A logit's direction from the state to what it is read from: ``sign(z) = z / |z|``.

        As with the scale of a norm, ``|z|`` is held where the run had it.
        """
        way.write("code bias", self.write.bias)
        way.through_linear(self.write.weight)
        way.through_scale(way.read("hook_code_pre").abs().reciprocal())
        way.write("code threshold", self.read.bias)
        way.through_linear(self.read.weight)


def _sign(z: Tensor) -> Tensor:
    """-1 or 1, with the derivative 0; PyTorch's own sign is 0 at 0."""
    return torch.sign(torch.sign(z) + 0.5)
