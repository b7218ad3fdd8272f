"""Measures of a run loop by loop, in memory that does not grow with the loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.measures import NOISE, share_of_size
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration


@dataclass(frozen=True, repr=False)
class LoopMeasures(ShortRepr):
    r"""What one loop did, with :math:`D_t = h_t - h_{t-1}`; NaN where it is not defined (yet).

    Attributes:
        norm: :math:`\|h_t\|` of each token.
        residual: :math:`\|D_t\| / \|h_t\|` of each token.
        residual_max: The same of each sequence in the maximum norm.
        contraction: :math:`\|D_t\| / \|D_{t-1}\|` of each token; NaN also where an update is no
            larger than rounding error.
        cosine: :math:`\cos(D_t, D_{t-1})` of each token; NaN as ``contraction``.
    """

    norm: Float[Tensor, "batch pos"]
    residual: Float[Tensor, "batch pos"]
    residual_max: Float[Tensor, " batch"]
    contraction: Float[Tensor, "batch pos"]
    cosine: Float[Tensor, "batch pos"]


def stream_measures(
    iteration: Iteration, n_loops: int
) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"], LoopMeasures]]:
    """Run a model and measure every loop, with no more than two updates held.

    The numbers are those of :func:`relative_residual`, :func:`contraction_rates` and
    :func:`update_cosine` on the states of the whole run. States may leave the finite numbers.

    Args:
        iteration: A model bound to its input.
        n_loops: Loops of the run.

    Yields:
        Loops made, from 0 to ``n_loops``; the state after them; and what the last one did.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=3, d_vocab_out=2)
        >>> run = stream_measures(bind(LoopedTransformer(config), torch.tensor([[0, 1]])), 100)
        >>> [loop for loop, _, done in run if not done.residual.isnan().any()][:2]
        [1, 2]
    """
    norms: deque[Tensor] = deque(maxlen=3)
    before, update, size = None, None, None
    with torch.no_grad():
        for loop, h in iteration.run(n_loops, may_diverge=True):
            norms.append(norm := torch.linalg.vector_norm(h, dim=-1))
            missing = torch.full_like(norm, float("nan"))
            measures = LoopMeasures(norm, missing, missing[:, 0], missing, missing)
            if before is not None:
                last, last_size = update, size
                update = h - before
                size = torch.linalg.vector_norm(update, dim=-1)
                most = update.abs().amax(dim=(1, 2)), h.abs().amax(dim=(1, 2))
                measures = replace(
                    measures, residual=share_of_size(size, norm), residual_max=share_of_size(*most)
                )
                if last is not None and last_size is not None:
                    unknown = ~(_real(size, norms[-1], norms[-2]))
                    unknown |= ~(_real(last_size, norms[-2], norms[-3]))
                    cosine = torch.linalg.vecdot(update, last) / (size * last_size)
                    measures = replace(
                        measures,
                        contraction=(size / last_size).masked_fill(unknown, float("nan")),
                        cosine=cosine.clamp(-1, 1).masked_fill(unknown, float("nan")),
                    )
            before = h
            yield loop, h, measures


def _real(size: Tensor, norm: Tensor, norm_before: Tensor) -> Tensor:
    """Where an update is larger than the rounding error of the states between which it is."""
    return size > NOISE * torch.finfo(size.dtype).eps * torch.maximum(norm, norm_before)
