"""Broyden's good method with a limited memory, batched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, PositiveInt

from loopinterp.dynamics.solvers.secant_solver import SecantSolver, solve_small
from loopinterp.settings import settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@settings
class Broyden(SecantSolver):
    r"""Broyden's good method for :math:`g(x) = f(x) - x = 0`, with a limited memory.

    The Jacobian starts as :math:`B_0 = -I / \beta`, which makes the first step a plain one, and is
    changed as little as possible so that it maps each remembered step :math:`s_i` to the change
    :math:`y_i` of :math:`g` that was seen:
    :math:`B \leftarrow B + (y_i - B s_i) s_i^\top / s_i^\top s_i`. In closed form over the window
    (oldest first), with :math:`L` the part of :math:`S^\top S` strictly below its diagonal,

    .. math::

        \gamma = (S^\top Y + L / \beta)^{-1} S^\top g_k,
        \qquad x_{k+1} = x_k + \beta g_k - (S + \beta Y) \gamma.

    It can land on a fixed point that repels the plain iteration, as :class:`Anderson` can.

    Args:
        window: Number of remembered steps, of which the oldest is dropped; each takes the memory
            of two states.
        mixing: :math:`\beta` in (0, 1].
        restart: The memory of an example is dropped when its residual exceeds this many times
            its best one.

    Source: Broyden, 1965 (doi 10.1090/S0025-5718-1965-0198670-6); Byrd, Nocedal and Schnabel, 1994
    (doi 10.1007/BF01582063), section 6 for the closed form.
    """

    window: PositiveInt = 100
    # Single steps far off belong to the method, more so than to Anderson's.
    restart: Annotated[float, Field(ge=1)] = 1e4

    def coefficients(
        self,
        dx: Float[Tensor, "batch window size"],
        dg: Float[Tensor, "batch window size"],
        g: Float[Tensor, "batch size"],
    ) -> Float[Tensor, "batch window"]:
        """The coefficients of every example, in float64 on steps of unit length."""
        scale = dx.norm(dim=-1, keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        s, y = ((d / scale).nan_to_num(0, 0, 0).double() for d in (dx, dg))
        # Newest first, so what is strictly below the diagonal when oldest first stands above it.
        matrix = s @ y.mT + (s @ s.mT).triu(1) / self.mixing
        target = torch.einsum("bwn,bn->bw", s, g.nan_to_num(0, 0, 0).double())
        return solve_small(matrix, target) / scale.squeeze(-1)
