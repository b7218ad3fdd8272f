"""Classes of trajectories: by how they end, and by how updates fall."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from loopinterp.core.boundary import Loops
from loopinterp.core.errors import check_integer, need
from loopinterp.core.settings import Settings, settings
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import NOISE, check_states
from loopinterp.models.iteration import is_coarse, rounding_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

LEAST_LOOPS = 12
"""Fewest loops of a classified trajectory."""

ClassifiedLoops = Annotated[Loops, Field(ge=LEAST_LOOPS)]
"""A number of loops of classified trajectories."""


class _Labelled(IntEnum):
    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


class Regime(_Labelled):
    """Class of a trajectory over its late loops."""

    FIXED_POINT = 0
    ORBIT = 1
    DRIFT = 2
    DIVERGENCE = 3
    IRREGULAR = 4
    CONVERGED_TO_ROUNDING = 5


@dataclass(frozen=True, repr=False)
class Regimes(ShortRepr):
    """:class:`Regime` code of each trajectory, and the loops per turn of orbits (else NaN).

    The period of a rotation that never returns is 2π over its angle.
    """

    regime: Int[Tensor, "*lead"]
    period: Float[Tensor, "*lead"]


@settings
class RegimeCriteria(Settings):
    """Thresholds between regimes.

    Attributes:
        window: Late loops used; half of the trajectory if ``None``.
        at_rest: Relative residual up to which a state no longer moves.
        to_go: Path left to a fixed point at the present rate, over the norm of the state (of the
            largest late one, if the fixed point is 0).
        recurrence: Mean squared change over an orbit's period, over twice the variance.
        straight: Net displacement over path length, above which a path is a drift.
        rotation: Evenness of a rotation, and its plane's share of variance.
        divergence: Factor over the window by which updates and states both grow.
        rounding: Relative residual of rounding; by the states' dtype if ``None``.
    """

    window: Annotated[int, Field(ge=LEAST_LOOPS // 2)] | None = None
    at_rest: PositiveFloat = 1e-4
    to_go: PositiveFloat = 0.03
    recurrence: PositiveFloat = 1e-3
    straight: PositiveFloat = 0.5
    rotation: PositiveFloat = 0.9
    divergence: PositiveFloat = 1.5
    rounding: NonNegativeFloat | None = None


def classify_regimes(
    states: Float[Tensor, "states *lead d_model"], criteria: RegimeCriteria | None = None
) -> Regimes:
    """Class of each trajectory over its last ``window`` loops; the first that applies:

    1. **divergence**: not finite, or updates and states both grow geometrically;
    2. **fixed point**: no longer moves, or updates shrink geometrically with little path to go, or
       shrink while turning (a spiral); **converged to rounding**: late updates are no larger than
       rounding, and they lead nowhere (in half precision);
    3. **orbit**: returns to itself after a period (autocorrelation), or turns evenly in the plane
       of its first two principal components;
    4. **drift**: displacement in one direction, bounded updates; also a circle larger than the
       window;
    5. **irregular**: none of these.

    ``states`` are those after 0..T loops, at least 12; NaN and infinity mean divergence.

    Source: the classes of arXiv 2502.05171.

    Example:
        >>> turns = torch.arange(25) * torch.pi / 3
        >>> circle = torch.stack([turns.cos(), turns.sin()], dim=-1)
        >>> regimes = classify_regimes(circle)
        >>> Regime(regimes.regime.item()).label, regimes.period.item()
        ('orbit', 6.0)
    """
    criteria = RegimeCriteria() if criteria is None else criteria
    late, finite = _late_states(states, criteria, RegimeCriteria)
    update, size = (late[1:] - late[:-1]).norm(dim=-1), late.norm(dim=-1)  # [loop, trajectory]
    loops = torch.arange(len(update), dtype=update.dtype, device=update.device)
    slope, fit = _fit_line(loops, _logarithm(update))
    growth = slope.clamp(-50, 50).exp()  # of the update per loop, [trajectory]
    # Net displacement over path length [trajectory]: 1 for a straight path, 0 for a return.
    path = update.sum(dim=0)
    straightness = (late[-1] - late[0]).norm(dim=-1) / torch.where(path > 0, path, 1)
    grown = growth ** len(update)  # over the window
    larger = size[-1] > criteria.divergence * size[0]
    diverges = larger & (grown > criteria.divergence) & (fit > 0.5)

    at_rest = update[-1] <= criteria.at_rest * size[-1]
    near = (growth < 1) & (fit > 0.5) & _is_close(late, growth, criteria.to_go)
    # Over the window the updates of a spiral must fall by a fifth, and do so evenly.
    leads_nowhere = straightness < criteria.straight
    spiral = (grown < 0.8) & (fit > 0.9) & leads_nowhere
    # At rest within rounding: no larger updates for a while, and they lead nowhere.
    rounding = rounding_of(states.dtype) if criteria.rounding is None else criteria.rounding
    last = slice(-max(1, len(update) // 3), None)
    within = (update[last] <= rounding * size[1:][last]).all(dim=0) & leads_nowhere
    fixed = at_rest | near | spiral
    to_rounding = within & ~fixed
    fixed |= to_rounding

    moving = (finite & ~fixed & ~diverges).nonzero().flatten()
    returns, return_time = _recurrence(late[:, moving], criteria.recurrence)
    planarity, turn, evenness = _rotation(late[:, moving])
    drifts = straightness[moving] > criteria.straight
    turns = (planarity > criteria.rotation) & (evenness > criteria.rotation) & ~drifts
    motion = torch.where(drifts, int(Regime.DRIFT), int(Regime.IRREGULAR))
    regime = torch.full(finite.shape, int(Regime.FIXED_POINT), device=late.device)
    regime[moving] = torch.where(returns | turns, int(Regime.ORBIT), motion)
    regime[to_rounding] = Regime.CONVERGED_TO_ROUNDING
    regime[diverges | ~finite] = Regime.DIVERGENCE
    period = torch.full_like(growth, float("nan"))
    period[moving] = torch.where(returns, return_time, torch.where(turns, turn, float("nan")))
    lead = states.shape[1:-1]
    return Regimes(regime.reshape(lead), period.reshape(lead).to(states.dtype))


class SettlingClass(_Labelled):
    """How the updates of a trajectory fall over its late loops."""

    SETTLING = 0
    MARGINAL = 1
    DRIFTING = 2


@dataclass(frozen=True, repr=False)
class SettlingClasses(ShortRepr):
    r""":class:`SettlingClass` codes, and two lines through the log updates (NaN without a fit).

    Attributes:
        rate: Factor per loop of the update's norm, by the line against the loop.
        exponent: p of the power :math:`\|D_t\| \propto t^{-p}`, by the line against its logarithm;
            up to 1 the path is infinite.
    """

    settling: Int[Tensor, "*lead"]
    rate: Float[Tensor, "*lead"]
    exponent: Float[Tensor, "*lead"]


@settings
class SettlingCriteria(Settings):
    """Thresholds between settling, marginal and drifting.

    Attributes:
        window: Late loops used; half of the trajectory if ``None``.
        rounding: Updates up to this many rounding errors of the state count as none.
        fit: Least share of the variance of the log updates that a line explains (R²).
        fall: Factor over the window to which updates must fall for a rate below 1.
        lasting: Least slope of the second half of a fall, relative to its first half.
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

    Lines are fitted to :math:`\log \|D_t\|` against :math:`t` and :math:`\log t`, over the last
    ``window`` loops with updates above rounding:

    - **settling**: a geometric fall, or no update above rounding: the path ends at a limit;
    - **marginal**: a fall as a power of the loop, or with a rate too close to 1;
    - **drifting**: no lasting fall (slide, orbit, chaos or divergence: :func:`classify_regimes`).

    ``states`` are those after 0..T loops, at least 12; NaN and infinity mean drifting.

    Example:
        >>> loops = torch.arange(1.0, 62.0, dtype=torch.float64)
        >>> states = torch.stack([0.8**loops, loops**-0.5, loops], dim=1)[..., None]
        >>> [SettlingClass(code).label for code in classify_settling(states).settling.tolist()]
        ['settling', 'marginal', 'drifting']
    """
    criteria = SettlingCriteria() if criteria is None else criteria
    late, finite = _late_states(states, criteria, SettlingCriteria)
    update, size = (late[1:] - late[:-1]).norm(dim=-1), late.norm(dim=-1)
    coarse = is_coarse(states.dtype)
    rounding = criteria.rounding * torch.finfo(states.dtype).eps
    # Sixteen roundings of half precision are an eighth of the state, and no small movement.
    rounding = min(rounding, rounding_of(states.dtype)) if coarse else rounding
    floor = rounding * torch.maximum(size[1:], size[:-1])
    moves = update > floor  # [loop, trajectory]
    window, log = len(update), _logarithm(update)
    loops = torch.arange(len(states) - window, len(states), device=log.device).to(log)
    slope, geometric = _fit_line(loops, log, moves)
    power, as_power = _fit_line(loops.log(), log, moves)

    first, second = slice(window // 2), slice(-(window // 2), None)
    halves = [_fit_line(loops[part], log[part], moves[part])[0] for part in (first, second)]
    goes_on = halves[1] <= criteria.lasting * halves[0]
    drop = (slope * moves.sum(dim=0)).exp()
    enough = moves.sum(dim=0) >= 4  # fewer updates above rounding define no line
    # The slope of updates that hardly change is known up to their rounding, at the best of loops.
    resolved = torch.where(moves, floor / update.clamp_min(1e-300), 1).amin(dim=0)
    falls = (torch.maximum(geometric, as_power) > criteria.fit) & (slope < -resolved)
    falls &= enough & (goes_on | (drop <= criteria.fall)) & finite
    rests = ~moves[-(window // 3) :].any(dim=0) & finite
    if coarse:  # else a slow drift could hide below the rounding of each loop
        rests &= (late[-1] - late[-(window // 3) - 1]).norm(dim=-1) <= floor[-1]
    settles = rests | (falls & (geometric >= as_power) & (drop <= criteria.fall))

    code = torch.where(falls, int(SettlingClass.MARGINAL), int(SettlingClass.DRIFTING))
    code = torch.where(settles, int(SettlingClass.SETTLING), code)
    known = enough & ~rests & finite
    values = (torch.where(known, value, float("nan")) for value in (slope.exp(), -power))
    lead = states.shape[1:-1]
    rate, exponent = (value.reshape(lead).to(states.dtype) for value in values)
    return SettlingClasses(code.reshape(lead), rate, exponent)


def _late_states(states: Tensor, criteria: Any, kind: type[Settings]) -> tuple[Tensor, Tensor]:
    """The last ``window + 1`` states, scaled to 1, in float64; which are finite."""
    expected = f"settings of the kind {kind.__name__}"
    need(isinstance(criteria, kind), "criteria", expected, repr(criteria), "Pass these, or None.")
    check_states(states, at_least=LEAST_LOOPS + 1, allow_nonfinite=True)
    window = criteria.window or max(LEAST_LOOPS // 2, (len(states) - 1) // 2)
    fix = "Run more loops, or shorten the window."
    check_integer("window", window, most=len(states) - 1, fix=fix)
    late = states[-(window + 1) :].reshape(window + 1, -1, states.shape[-1])
    finite = late.isfinite().all(dim=-1).all(dim=0)  # [trajectory]
    late = torch.where(finite[:, None], late, 0).double()  # [loop, trajectory, d_model]
    largest = late.abs().amax(dim=(0, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    return late / largest[:, None], finite


def _is_close(
    late: Float[Tensor, "loop trajectory d_model"], growth: Tensor, share: float
) -> Bool[Tensor, " trajectory"]:
    """Whether little of the path to a limit is left, as updates fall by the factor ``growth``."""
    left = (late[-1] - late[-2]) * (growth / (1 - growth).clamp_min(1e-12))[:, None]  # a series
    size = late.norm(dim=-1)  # [loop, trajectory]
    # What falls to 0 is never small beside itself, so the window's largest state measures it.
    to_zero = (late[-1] + left).norm(dim=-1) <= share * size[-1]
    return left.norm(dim=-1) <= share * torch.where(to_zero, size.amax(dim=0), size[-1])


def _logarithm(update: Tensor) -> Tensor:
    return update.clamp_min(torch.finfo(torch.float64).tiny).log()


def _fit_line(x: Tensor, y: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Slope of ``y [loop, trajectory]`` against ``x [loop]``, and R²."""
    weight = torch.ones_like(y) if counts is None else counts.to(y)
    total = weight.sum(dim=0)
    x = x[:, None] - (weight * x[:, None]).sum(dim=0) / total
    centred = y - (weight * y).sum(dim=0) / total  # [loop, trajectory]
    covariance, spread = (weight * x * centred).sum(dim=0), (weight * x**2).sum(dim=0)
    variance = (weight * centred**2).sum(dim=0)
    slope = torch.where(spread > 0, covariance / spread, float("nan"))
    return slope, torch.where((variance > 0) & (spread > 0), slope * covariance / variance, 0)


def _recurrence(late: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    r"""Whether a trajectory returns to itself within the window, and after how many loops.

    The return is the first local minimum below the tolerance of
    :math:`\langle\|x_{t+p} - x_t\|^2\rangle / 2 \mathrm{Var}`, once the trajectory was well away.
    """
    centred = late - late.mean(dim=0)
    variance = (centred**2).sum(dim=-1).mean(dim=0)  # [trajectory]
    lags = len(late) // 2
    miss = [torch.zeros_like(variance)]  # one minus the autocorrelation at each lag
    for lag in range(1, lags + 2):
        change = ((late[lag:] - late[:-lag]) ** 2).sum(dim=-1).mean(dim=0)  # [trajectory]
        miss.append(change / torch.where(variance > 0, 2 * variance, 1))
    away = torch.zeros_like(variance, dtype=torch.bool)
    period = torch.zeros_like(variance)
    for lag in range(2, lags + 1):
        away |= miss[lag - 1] > 0.25
        minimum = (miss[lag] <= miss[lag - 1]) & (miss[lag] <= miss[lag + 1])
        back = away & minimum & (miss[lag] < tolerance) & (period == 0) & (variance > 0)
        period = torch.where(back, float(lag), period)
    return period > 0, period


def _rotation(late: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share of variance in the first two components; loops per turn and evenness there."""
    centred = late - late.mean(dim=0)  # [loop, trajectory, d_model]
    # Principal components by the Gram matrix over loops: the window is shorter than the state.
    gram = torch.einsum("snd,tnd->nst", centred, centred)  # [trajectory, loop, loop]
    values, vectors = torch.linalg.eigh(gram)  # ascending
    total = values.sum(dim=-1)
    planarity = values[:, -2:].sum(dim=-1) / torch.where(total > 0, total, 1)
    # Scaling both components to equal size makes an ellipse a circle, so that it turns evenly.
    angle = torch.atan2(vectors[:, :, -2], vectors[:, :, -1])  # [trajectory, loop]
    step = angle[:, 1:] - angle[:, :-1]  # turn of each loop
    # Mean unit vector of the turns, complex, [trajectory]
    mean = torch.polar(torch.ones_like(step), step).mean(dim=-1)
    two_dimensional = values[:, -2] > 1e-6 * values[:, -1]
    evenness = torch.where(two_dimensional, mean.abs(), 0)
    turn = 2 * torch.pi / mean.angle().abs().clamp_min(1e-12)
    return planarity, turn, evenness
