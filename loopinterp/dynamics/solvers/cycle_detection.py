"""Cycles of the loop: has a trajectory returned to where it was, and does it do so every turn?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.solvers.fixed_point_solver import distance

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_FINE = 1e-5
"""Rounding up to this share of a state does not hide a cycle."""

_ROUNDING = 64
"""Rounding errors of the state by which a trajectory that has returned may miss."""

_TURNS = 8
"""Turns after which a return within rounding counts."""

_WIDE = 1000
"""A cycle must be this many times as wide as what its returns may miss by rounding."""


class CycleWatch:
    r"""Periods of a batch of trajectories, in the memory of one state (Brent's algorithm).

    Iterates are compared with an anchor, which is moved up at steps 1, 2, 4, 8, ... The first lag
    :math:`p` at which an example is back within the tolerance is its candidate, and :math:`e_m` its
    distance to the anchor after :math:`m` turns. A slow spiral, a slow drift and a rotation by
    nearly a fraction of a turn come back as well, and miss by as much in each turn
    (:math:`e_4 = 2 e_2`). So a candidate counts where, :math:`A` being its extent and
    :math:`\epsilon` rounding,

    - the misses shrink so fast that all that are to come sum up to less than a tenth of the
      extent: :math:`10\, e_2^2 \le A\,(2 e_2 - e_4 - \epsilon)`; or
    - it misses by no more than rounding, and a thousandth of its extent, for eight turns;

    and where it is wide enough to be no work of rounding. All linear spirals fail the first,
    whatever their angle and decay. The second takes for a cycle what changes by less than rounding
    in eight turns: in float32, a spiral that loses less than some 1e-4 of its extent a turn. A
    trajectory that passes the ghost of a cycle more slowly than the tolerance a turn is taken for
    the cycle, as with fixed points.

    Args:
        x0: Where the trajectories start.
        tol: Relative tolerance of a return, to the size of the anchor or the extent.
        atol: Absolute tolerance.

    Source: Brent, 1980 (doi 10.1007/BF01933190).
    """

    def __init__(self, x0: Float[Tensor, "batch size"], tol: float, atol: float) -> None:
        self.noise = _ROUNDING * torch.finfo(x0.dtype).eps
        # No trajectory comes back more nearly than rounding lets it; where that is coarse, it may
        # all the same, and what is nearly back says little.
        self.tol, self.atol = max(tol, min(self.noise, _FINE)), atol
        # Where the precision is low, all slow motion is rounded away: then what is wide counts.
        self.least_extent = min(_WIDE * self.noise, 0.1)
        self.n_steps = 0
        self._move_anchor(x0)

    def _move_anchor(self, x: Tensor) -> None:
        self.anchor, self.moved_at, self.anchor_norm = x, self.n_steps, distance(x)
        # Of each example: its candidate (0: none), largest distance, that after two turns, and
        # the largest at a return.
        self.period = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.extent, self.second, self.worst = (torch.zeros_like(self.anchor_norm) for _ in "123")

    @property
    def checking(self) -> Bool[Tensor, " batch"]:
        """Examples that have come back once, and are followed for some turns more."""
        return self.period > 0

    def see(self, x: Float[Tensor, "batch size"]) -> Int[Tensor, " batch"]:
        """Take in the next iterates; the period of each example on a cycle, else 0."""
        self.n_steps += 1
        lag = self.n_steps - self.moved_at
        miss = distance(x, self.anchor)
        self.extent = torch.where(self.checking, self.extent, torch.maximum(self.extent, miss))
        scale = torch.maximum(self.anchor_norm, self.extent)
        near = miss <= self.tol * scale + self.atol
        if lag > 1:  # after one step it would be a fixed point
            self.period = torch.where(near & ~self.checking, lag, self.period)
        period = self.period.clamp(min=1)
        turns = torch.where(self.checking & (lag % period == 0), lag // period, 0)
        returned = turns > 0
        self.worst = torch.where(returned, torch.maximum(self.worst, miss), self.worst)
        self.second = torch.where(turns == 2, miss, self.second)
        shrink = 2 * self.second - miss - self.noise * scale
        arrives = (turns == 4) & (10 * self.second**2 <= self.extent * shrink)
        exact = self.worst <= torch.minimum(self.noise * scale, self.extent / _WIDE)
        held = (turns == _TURNS) & exact
        wide = self.extent >= self.least_extent * scale
        found = torch.where(near & wide & (arrives | held), self.period, 0)
        refused = returned & (~near | (turns == _TURNS)) & (found == 0)
        self.period, self.worst = (
            torch.where(refused, 0, kept) for kept in (self.period, self.worst)
        )
        if self.n_steps & (self.n_steps - 1) == 0:
            self._move_anchor(x)
        return found
