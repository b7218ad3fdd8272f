"""Anderson acceleration (type II), batched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from loopinterp.dynamics.solvers.fixed_point_solver import Map, Solver, SolverState, advance, start
from loopinterp.settings import Settings, settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@settings
class Anderson(Settings, Solver):
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
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    regularisation: NonNegativeFloat = 1e-10
    restart: Annotated[float, Field(ge=1)] = 100.0

    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        # Differences of the last iterates and residuals, newest first; unused rows are zero.
        empty = x0.new_zeros(x0.shape[0], self.window, x0.shape[1])
        return start(f, x0, memory=(empty, empty))

    def step(self, f: Map, state: SolverState) -> SolverState:
        dx, dg = state.memory
        g = state.fx - state.x
        gamma = self._coefficients(dg, g)
        plain = state.x + self.mixing * g
        correction = torch.einsum("bwn,bw->bn", dx + self.mixing * dg, gamma)
        x = plain - correction
        x = torch.where(x.isfinite().all(dim=-1, keepdim=True), x, plain)
        new = advance(f, state, x)
        keep = (~(new.residual > self.restart * new.best)).to(x.dtype)[:, None, None]
        dx, dg = _push(dx, x - state.x) * keep, _push(dg, (new.fx - new.x) - g) * keep
        return replace(new, memory=(dx, dg))

    def _coefficients(
        self, dg: Float[Tensor, "batch window size"], g: Float[Tensor, "batch size"]
    ) -> Float[Tensor, "batch window"]:
        """The regularised least squares of every example, in float64 on unit columns."""
        scale = dg.norm(dim=-1, keepdim=True)
        unit = (dg / torch.where(scale > 0, scale, 1)).nan_to_num(0, 0, 0).double()
        gram = unit @ unit.mT
        # Empty columns get a one on the diagonal, so that their coefficient is exactly zero.
        empty = (gram.diagonal(dim1=-2, dim2=-1) == 0).double()
        gram = gram + torch.diag_embed(empty + self.regularisation)
        target = torch.einsum("bwn,bn->bw", unit, g.nan_to_num(0, 0, 0).double())
        gamma, _ = torch.linalg.solve_ex(gram, target)
        gamma = gamma / torch.where(scale > 0, scale, 1).squeeze(-1)
        return gamma.nan_to_num(0, 0, 0).to(g.dtype)


def _push(
    history: Float[Tensor, "batch window size"], new: Float[Tensor, "batch size"]
) -> Float[Tensor, "batch window size"]:
    """Put the newest row first and drop the oldest; rows that are not finite become zero."""
    new = torch.where(new.isfinite().all(dim=-1, keepdim=True), new, 0)
    return torch.cat([new[:, None], history[:, :-1]], dim=1)
