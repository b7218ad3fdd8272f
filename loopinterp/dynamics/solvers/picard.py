"""Plain iteration: where the loop itself goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from loopinterp.dynamics.solvers.fixed_point_solver import Map, Solver, SolverState, advance, start
from loopinterp.settings import Settings, settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@settings
class Picard(Settings, Solver):
    r"""Picard iteration, :math:`x_{k+1} = (1 - \beta) x_k + \beta f(x_k)`.

    With ``damping`` 1 this is what the looped model does, so it finds only fixed points that
    the model reaches: unstable ones repel it.

    Args:
        damping: :math:`\beta` in (0, 1]; below 1 it damps oscillations.
    """

    damping: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def follows_the_map(self) -> bool:
        return self.damping == 1

    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        return start(f, x0)

    def step(self, f: Map, state: SolverState) -> SolverState:
        # fx itself, not x + (fx - x): the iterates are the model's own states, bit by bit.
        x = state.fx if self.damping == 1 else state.x + self.damping * (state.fx - state.x)
        return advance(f, state, x)
