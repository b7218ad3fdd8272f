"""What Anderson acceleration and Broyden's method share: a step along remembered differences."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, PositiveInt

from loopinterp.dynamics.solvers.fixed_point_solver import (
    Map,
    Solver,
    SolverState,
    advance,
    at_least_single,
    start,
)
from loopinterp.settings import Settings, settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@settings
class SecantSolver(Settings, Solver):
    r"""A step that takes back what the last differences say is wrong with plain iteration.

    With :math:`g_k = f(x_k) - x_k` and the last differences :math:`\Delta X, \Delta G`,

    .. math:: x_{k+1} = x_k + \beta g_k - (\Delta X + \beta \Delta G) \gamma,

    where :math:`\gamma` is what tells one such method from another.

    Args:
        window: Number of remembered differences; two states of memory each.
        mixing: :math:`\beta` in (0, 1].
        restart: The memory of an example is dropped when its residual exceeds this many times
            its best one.
    """

    window: PositiveInt
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    restart: Annotated[float, Field(ge=1)] = 100.0

    @abstractmethod
    def coefficients(
        self,
        dx: Float[Tensor, "batch window size"],
        dg: Float[Tensor, "batch window size"],
        g: Float[Tensor, "batch size"],
    ) -> Float[Tensor, "batch window"]:
        r""":math:`\gamma` of every example, from differences newest first; unused ones are zero."""

    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        empty = at_least_single(x0).new_zeros(x0.shape[0], 0, x0.shape[1])
        return start(f, x0, memory=(empty, empty))

    def step(self, f: Map, state: SolverState) -> SolverState:
        dx, dg = state.memory
        before = at_least_single(state.x)
        g = at_least_single(state.fx) - before
        gamma = self.coefficients(dx, dg, g).nan_to_num(0, 0, 0).to(g)
        plain = before + self.mixing * g
        x = plain - torch.einsum("bwn,bw->bn", dx + self.mixing * dg, gamma)
        x = torch.where(x.isfinite().all(dim=-1, keepdim=True), x, plain).to(state.x)
        new = advance(f, state, x)
        keep = (~(new.residual > self.restart * new.best)).to(g)[:, None, None]
        after = at_least_single(x)
        dx = _push(dx, after - before)[:, : self.window] * keep
        dg = _push(dg, (at_least_single(new.fx) - after) - g)[:, : self.window] * keep
        return replace(new, memory=(dx, dg))


def solve_small(
    matrix: Float[Tensor, "batch window window"], target: Float[Tensor, "batch window"]
) -> Float[Tensor, "batch window"]:
    """Solve each small system; an unknown whose row is empty comes out as zero."""
    empty = (matrix == 0).all(dim=-1)
    return torch.linalg.solve_ex(matrix + torch.diag_embed(empty.to(matrix)), target)[0]


def _push(
    history: Float[Tensor, "batch window size"], new: Float[Tensor, "batch size"]
) -> Float[Tensor, "batch longer size"]:
    """Put the newest row first; rows that are not finite become zero."""
    new = torch.where(new.isfinite().all(dim=-1, keepdim=True), new, 0)
    return torch.cat([new[:, None], history], dim=1)
