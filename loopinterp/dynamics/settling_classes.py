"""How the updates of a trajectory fall: geometrically, too slowly to end, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, PositiveFloat

from loopinterp.dynamics.measures import NOISE
from loopinterp.dynamics.regimes import LEAST_LOOPS, fit_line, late_states, logarithm
from loopinterp.settings import Settings, settings
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

LEAST_MOVES = 4
"""Fewest updates above rounding through which a line is laid."""


class SettlingClass(IntEnum):
    """How the updates of a trajectory fall over its late loops."""

    SETTLING = 0
    MARGINAL = 1
    DRIFTING = 2

    @property
    def label(self) -> str:
        """The name in plain words."""
        return self.name.lower()


@dataclass(frozen=True, repr=False)
class SettlingClasses(ShortRepr):
    r"""Class of each trajectory, and the two lines that were laid through its updates.

    Attributes:
        settling: :class:`SettlingClass` code.
        rate: Factor per loop of the update's norm, by the line against the loop; NaN of what is at
            rest or not finite.
        exponent: p of the power :math:`\|D_t\| \propto t^{-p}`, by the line against the logarithm
            of the loop; NaN likewise. Up to 1 the path has no end.
    """

    settling: Int[Tensor, "*lead"]
    rate: Float[Tensor, "*lead"]
    exponent: Float[Tensor, "*lead"]


@settings
class SettlingCriteria(Settings):
    """Where the lines between settling, marginal and drifting are drawn.

    Attributes:
        window: Late loops that are looked at; half of the trajectory if ``None``.
        rounding: Updates up to so many rounding errors of the state are none.
        fit: Share of the variance of the log updates that a line must explain (R²) for them to
            fall.
        fall: Factor over the window to which updates must fall for their rate to be told from 1.
        lasting: A fall goes on if its second half is at least so steep, relative to its first half.
    """

    window: Annotated[int, Field(ge=LEAST_LOOPS // 2)] | None = None
    rounding: PositiveFloat = float(NOISE)
    fit: Annotated[float, Field(gt=0, lt=1)] = 0.5
    fall: Annotated[float, Field(gt=0, lt=1)] = 0.8
    lasting: Annotated[float, Field(gt=0, lt=1)] = 0.5


def classify_settling(
    states: Float[Tensor, "states *lead d_model"], criteria: SettlingCriteria | None = None
) -> SettlingClasses:
    r"""Class of each trajectory by how its updates :math:`D_t = h_t - h_{t-1}` fall.

    Lines are laid through :math:`\log \|D_t\|` against :math:`t` and against :math:`\log t`, over
    the last ``window`` loops that move the state by more than rounding:

    - **settling**: at rest at the level of rounding; or the line against :math:`t` is the better
      one and falls visibly: the path ends at a limit.
    - **marginal**: updates fall, but as a power of the loop, or geometrically at a rate that the
      loops seen do not tell from 1: whether the path ends is not known.
    - **drifting**: they do not fall: a slide, an orbit, chaos, divergence
      (:func:`classify_regimes` says which), or a fall that dies out before it ends.

    The norm of the update is not divided by that of the state, which would make the residual of a
    state that grows by as much in each loop fall as 1/t. A class is a statement about the loops
    seen: two rates that take turns look like a power, and a power looks geometric
    in loops few against those that went before.

    Args:
        states: States after 0..T loops; NaN and infinity are allowed and mean drifting.
        criteria: Thresholds.

    Raises:
        InputError: If there are fewer than 12 loops, or the window is longer than the run.

    Example:
        >>> loops = torch.arange(1.0, 62.0, dtype=torch.float64)
        >>> states = torch.stack([0.8**loops, loops**-0.5, loops], dim=1)[..., None]
        >>> [SettlingClass(code).label for code in classify_settling(states).settling.tolist()]
        ['settling', 'marginal', 'drifting']
    """
    criteria = criteria or SettlingCriteria()
    late, finite = late_states(states, criteria.window)
    update, size = (late[1:] - late[:-1]).norm(dim=-1), late.norm(dim=-1)
    rounding = criteria.rounding * torch.finfo(states.dtype).eps
    floor = rounding * torch.maximum(size[1:], size[:-1])
    moves = update > floor
    window, log = len(update), logarithm(update)
    loops = torch.arange(len(states) - window, len(states), device=log.device).to(log)
    slope, geometric = fit_line(loops, log, moves)
    power, as_power = fit_line(loops.log(), log, moves)

    first, second = slice(window // 2), slice(-(window // 2), None)
    halves = [fit_line(loops[part], log[part], moves[part])[0] for part in (first, second)]
    goes_on = halves[1] <= criteria.lasting * halves[0]
    drop = (slope * moves.sum(dim=0)).exp()
    # The slope of updates that hardly change is known up to their rounding, at the best of loops.
    resolved = torch.where(moves, floor / update.clamp_min(1e-300), 1).amin(dim=0)
    falls = (torch.maximum(geometric, as_power) > criteria.fit) & (slope < -resolved)
    falls &= (moves.sum(dim=0) >= LEAST_MOVES) & (goes_on | (drop <= criteria.fall)) & finite
    rests = ~moves[-(window // 3) :].any(dim=0) & finite
    settles = rests | (falls & (geometric >= as_power) & (drop <= criteria.fall))

    code = torch.where(falls, int(SettlingClass.MARGINAL), int(SettlingClass.DRIFTING))
    code = torch.where(settles, int(SettlingClass.SETTLING), code)
    known = (moves.sum(dim=0) >= LEAST_MOVES) & ~rests & finite
    values = (torch.where(known, value, float("nan")) for value in (slope.exp(), -power))
    lead = states.shape[1:-1]
    rate, exponent = (value.reshape(lead).to(states.dtype) for value in values)
    return SettlingClasses(code.reshape(lead), rate, exponent)
