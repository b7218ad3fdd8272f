"""Newton's method, its linear systems solved by GMRES on Jacobian-vector products, batched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from loopinterp.dynamics.jacobian import jvp
from loopinterp.dynamics.krylov import orthogonalise
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
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_LEAST_DESCENT = 1e-4
"""Share of the promised descent that a step must bring (Armijo's rule)."""


@settings
class NewtonKrylov(Settings, Solver):
    r"""Inexact Newton on :math:`g(x) = f(x) - x = 0`.

    Each step solves :math:`(I - J) d = g` by GMRES, as exactly as it pays,

    .. math::

        \|g - (I - J) d\| \le \eta_k \|g\|, \qquad
        \eta_k = 0.9 \, (\|g_k\| / \|g_{k-1}\|)^2 \le \eta_0,

    then halves :math:`d` until the residual falls; where it never does, the step is a plain one.
    A Jacobian-vector product counts as one evaluation of the map, so that a step of this solver is
    worth many of another's. It can land on a fixed point that repels the plain iteration.

    Args:
        max_vectors: Largest Krylov space; each vector costs one product and one state of memory.
        forcing: :math:`\eta_0`, the largest relative residual of a linear system.
        backtracks: How often a step is halved. Few are best where loops carry something along, as
            those of trained models do: there a plain step gets further than a short one.

    Source: Eisenstat and Walker, 1996 (doi 10.1137/0917003), choice 2; Knoll and Keyes, 2004
    (doi 10.1016/j.jcp.2003.08.010).
    """

    max_vectors: PositiveInt = 20
    forcing: Annotated[float, Field(gt=0, lt=1)] = 0.5
    backtracks: NonNegativeInt = 1

    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        eta = torch.full((len(x0),), self.forcing, dtype=torch.float64, device=x0.device)
        return start(f, x0, memory=eta)

    def step(self, f: Map, state: SolverState) -> SolverState:
        eta = state.memory
        d, products = self._solve(f, state, eta * state.gap)
        state = replace(state, evaluations=state.evaluations + products)
        x = at_least_single(state.x)
        share = torch.ones_like(state.gap)
        new = advance(f, state, (x + d).to(state.x))
        for halving in range(self.backtracks + 1):
            descent = 1 - _LEAST_DESCENT * share * (1 - eta)
            fails = ~(new.gap <= descent * state.gap) & ~state.done
            if not fails.any():
                break
            share = torch.where(fails, share / 2, share)
            shorter = (x + share[:, None].to(x) * d).to(state.x)
            # Where no length will do, the loop's own step: it at least goes somewhere else.
            trial = shorter if halving < self.backtracks else state.fx
            again = advance(f, state, torch.where(fails[:, None], trial, new.x))
            again = replace(again, evaluations=new.evaluations + 1)
            new = again.keep(new, ~fails)
        ratio = (new.gap / state.gap).nan_to_num(1, 1, 1)
        # Not much more exact at once than the step before: a single good step may be luck.
        floor = torch.where(0.9 * eta**2 > 0.1, 0.9 * eta**2, 0)
        eta = torch.maximum(0.9 * ratio**2, floor).clamp(1e-6, self.forcing)
        return replace(new, memory=eta)

    def _solve(
        self, f: Map, state: SolverState, goal: Float[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch size"], Int[Tensor, " batch"]]:
        """GMRES on :math:`(I - J) d = g` of every example, and the products that each has used."""
        x = at_least_single(state.x)
        g = at_least_single(state.fx) - x
        most = min(self.max_vectors, x.shape[1])
        unmet: Bool[Tensor, " batch"] = (state.gap > goal) & ~state.done & state.gap.isfinite()
        basis = g.new_zeros(len(g), most + 1, g.shape[1])
        basis[:, 0] = torch.where(unmet[:, None], g / state.gap[:, None].to(g), 0)
        hessenberg = torch.zeros(len(g), most + 1, most, dtype=torch.float64)
        answer = torch.zeros(len(g), most, dtype=torch.float64)
        products = torch.zeros_like(state.evaluations)
        for k in range(most):
            if not unmet.any():
                break
            products += unmet
            v = basis[:, k].to(state.x)
            w = at_least_single(v) - at_least_single(jvp(f, state.x, v))
            w = torch.where(unmet[:, None], w, 0).nan_to_num(0, 0, 0)
            basis[:, k + 1], hessenberg[:, : k + 1, k], left_over = orthogonalise(
                basis[:, : k + 1], w
            )
            hessenberg[:, k + 1, k] = left_over
            y, left = _least_squares(hessenberg[:, : k + 2, : k + 1], state.gap.cpu())
            answer[:, : k + 1] = torch.where(unmet.cpu()[:, None], y, answer[:, : k + 1])
            unmet = unmet & (left.to(goal) > goal)
        return torch.einsum("bkn,bk->bn", basis[:, :-1], answer.to(g)), products


def _least_squares(
    hessenberg: Float[Tensor, "batch rows columns"], size: Float[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch columns"], Float[Tensor, " batch"]]:
    """The combination of Krylov vectors that leaves least of the right-hand side, and how much."""
    target = torch.zeros(*hessenberg.shape[:2], 1, dtype=hessenberg.dtype)
    target[:, 0, 0] = size.nan_to_num(0, 0, 0)
    # A driver that takes systems without full rank: of examples that are done, or exhausted.
    y = torch.linalg.lstsq(hessenberg, target, driver="gelsd").solution
    return y.squeeze(-1), (target - hessenberg @ y).flatten(1).norm(dim=-1)
