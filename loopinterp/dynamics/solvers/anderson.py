"""Anderson acceleration (type II), batched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import NonNegativeFloat, PositiveInt

from loopinterp.dynamics.solvers.secant_solver import SecantSolver, solve_small
from loopinterp.settings import settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@settings
class Anderson(SecantSolver):
    r"""Anderson acceleration of type II with mixing and regularisation.

    With :math:`g_k = f(x_k) - x_k` and the last differences :math:`\Delta X, \Delta G`,

    .. math::

        \gamma = \operatorname{argmin}_\gamma \|g_k - \Delta G \gamma\|^2 + \lambda \|\gamma\|^2,
        \qquad x_{k+1} = x_k + \beta g_k - (\Delta X + \beta \Delta G) \gamma.

    It can land on a fixed point that repels the plain iteration: use :class:`Picard` to ask
    where a model goes, and this to ask where its fixed points are.

    Args:
        window: Number of remembered differences :math:`m`.
        mixing: :math:`\beta` in (0, 1].
        regularisation: :math:`\lambda`, relative to the size of the differences.
        restart: The memory of an example is dropped when its residual exceeds this many times
            its best one.

    Source: Walker and Ni, 2011 (doi 10.1137/10078356X); Bai et al., 2019 (arXiv 1909.01377).
    """

    window: PositiveInt = 5
    regularisation: NonNegativeFloat = 1e-10

    def coefficients(
        self,
        dx: Float[Tensor, "batch window size"],
        dg: Float[Tensor, "batch window size"],
        g: Float[Tensor, "batch size"],
    ) -> Float[Tensor, "batch window"]:
        """The regularised least squares of every example, in float64 on unit columns."""
        scale = dg.norm(dim=-1, keepdim=True)
        unit = (dg / torch.where(scale > 0, scale, 1)).nan_to_num(0, 0, 0).double()
        gram = unit @ unit.mT
        gram = gram + self.regularisation * torch.diag_embed((scale.squeeze(-1) > 0).double())
        gamma = solve_small(gram, torch.einsum("bwn,bn->bw", unit, g.nan_to_num(0, 0, 0).double()))
        return gamma / torch.where(scale > 0, scale, 1).squeeze(-1)
