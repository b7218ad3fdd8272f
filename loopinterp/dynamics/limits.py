r"""Limits of a looped model, equality of limits, and rotation: an orbit that has no limit.

A rotating orbit turns with a period of its own, and neither converges nor repeats exactly. Late
states near such an orbit are a sum of harmonics with the period P in loops, not necessarily whole:

.. math::
    h_t \approx \bar h + \sum_{k=1}^{K} \operatorname{Re}\left(A_k e^{2 \pi i k t / P}\right)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.fixed_point import find_fixed_point, get_solver, iteration_of
from loopinterp.dynamics.measures import (
    check_states,
    correctness,
    exact_match,
    likeliest,
    share_of_size,
)
from loopinterp.dynamics.solvers import Status
from loopinterp.models.iteration import is_coarse, rounding_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.solvers import Solver
    from loopinterp.models.iteration import Iteration


LIMIT_LOOPS = 200
"""Loops in which a clean run's limit is sought."""

OWN_START = "own"

NO_LIMIT = -1
"""The number of a run without a limit."""

ZERO = 1e-4
"""Norm below which a limit counts as 0; searches end at 1e-8 there."""


@dataclass(frozen=True, repr=False)
class Limits(ShortRepr):
    """Where each example ended, with the :class:`Status` and loops of the search.

    ``state`` is a fixed point or a state of a cycle; without a limit, the last one reached.
    ``period`` is that of a cycle, 1 at a fixed point, else 0.
    """

    state: Float[Tensor, "batch pos d_model"]
    status: Int[Tensor, " batch"]
    loops: Int[Tensor, " batch"]
    period: Int[Tensor, " batch"]

    def select(self, rows: Int[Tensor, " row"] | slice) -> Limits:
        return Limits(*(getattr(self, f.name)[rows] for f in fields(self)))

    @property
    def has_limit(self) -> Bool[Tensor, " batch"]:
        converged = (self.status == Status.CONVERGED) | (self.status == Status.CYCLE)
        return converged | (self.status == Status.CONVERGED_TO_ROUNDING)


def find_limits(
    iteration: Iteration,
    start: Float[Tensor, "batch pos d_model"],
    *,
    max_loops: int,
    tol: float = 1e-5,
    solver: str | Solver = "picard",
) -> Limits:
    """Follow each example from a state until it converges or cycles.

    Only plain iteration surely finds the limit that the model reaches.
    """
    solver = get_solver(solver)
    finite = start.isfinite().flatten(1).all(dim=1)
    state = start.clone()
    status = torch.where(finite, int(Status.OUT_OF_BUDGET), int(Status.DIVERGED))
    loops, period = torch.zeros_like(status), torch.zeros_like(status)
    # A cycle is detected within one phase, so the later ones are long.
    done, steps = 0, 16
    while done < max_loops:
        rows = (status == Status.OUT_OF_BUDGET).nonzero().flatten()
        if not len(rows):
            break
        steps = min(steps, max_loops - done)
        end = find_fixed_point(
            iteration.select(rows).step, state[rows], solver=solver, tol=tol, max_iter=steps
        )
        state[rows], status[rows] = end.state, end.status
        loops[rows] += end.n_steps
        rests = end.converged | (end.status == Status.CONVERGED_TO_ROUNDING)
        period[rows] = torch.where(rests, 1, end.period)
        done, steps = done + steps, 4 * steps
    return Limits(state, status, loops, period)


def limits_of_run(
    iteration: Iteration, states: Float[Tensor, "loop batch pos d_model"], **search: Any
) -> Limits:
    """The limits after the end of a run, by :func:`find_limits`.

    None is sought if the step takes the loop's index.
    """
    if iteration.takes_loop:
        status = torch.full(states.shape[1:2], int(Status.OUT_OF_BUDGET), device=states.device)
        ends = Limits(states[-1], status, torch.zeros_like(status), torch.zeros_like(status))
    else:
        ends = find_limits(iteration, states[-1], **search)
    finite = states.isfinite().flatten(2).all(dim=2).all(dim=0)  # [batch]
    return replace(ends, status=torch.where(finite, ends.status, int(Status.DIVERGED)))


def around(iteration: Iteration, limits: Limits) -> Iterator[Float[Tensor, "batch pos d_model"]]:
    """States of the limits over the longest period; a fixed point once."""
    state, cycles = limits.state, (limits.period > 1)[:, None, None]
    yield state
    for _ in range(int(limits.period.max()) - 1):
        state = torch.where(cycles, iteration.step(state), state)
        yield state


def centre(iteration: Iteration, limits: Limits) -> Float[Tensor, "batch pos d_model"]:
    total = torch.zeros_like(limits.state)  # sum of the states around each cycle
    for number, state in enumerate(around(iteration, limits)):
        total += torch.where((number < limits.period.clamp(min=1))[:, None, None], state, 0)
    return total / limits.period.clamp(min=1)[:, None, None]


@torch.no_grad()
def map_and_limit(model: Any, h: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The given map and state; or a model's loop, and the limit for its inputs."""
    iteration = iteration_of(model, h)
    if iteration is None:
        return model, h
    return iteration.step, find_limits(iteration, iteration.h0, max_loops=LIMIT_LOOPS).state


@torch.no_grad()
def limit_distances(
    ends: Limits, others: Limits, iteration: Iteration, counted: Bool[Tensor, "batch pos"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Relative distance, and cosine, of each limit and another; NaN without a limit.

    Two cycles are compared where they are closest. The iteration has the inputs of ``others``.
    """

    here = torch.where(counted[..., None], ends.state, 0).flatten(1)  # [batch, pos * d_model]
    distance = torch.full_like(here[:, 0], float("inf"))
    alignment = torch.full_like(distance, float("nan"))
    for state in around(iteration, others):
        there = torch.where(counted[..., None], state, 0).flatten(1)
        gap = (here - there).norm(dim=-1) / there.norm(dim=-1).clamp_min(ZERO)
        cosine = torch.cosine_similarity(here, there, dim=-1)
        # Of the nearest state around the other limit, [batch]
        alignment = torch.where(gap < distance, cosine, alignment)
        distance = torch.minimum(gap, distance)
    unknown, nan = ~(ends.has_limit & others.has_limit), float("nan")
    return distance.masked_fill(unknown, nan), alignment.masked_fill(unknown, nan)


@torch.no_grad()
def answered_right(
    iteration: Iteration, ends: Limits, targets: Int[Tensor, "batch pos"], loop: int
) -> Bool[Tensor, " batch"]:
    """Whether the whole answer is right at each state reached (on a cycle, at all its states)."""
    right = [
        exact_match(correctness(likeliest(iteration.read(state, loop)), targets)).bool()
        for state in around(iteration, ends)
    ]
    return torch.stack(right).all(dim=0)  # [batch]


@dataclass
class DistinctLimits:
    """Numbers the limits of each example in order of arrival, from 0.

    A limit takes the number of the first one within the relative distance ``same``. ``firsts``
    holds these by number.
    """

    iteration: Iteration
    counted: Bool[Tensor, "batch pos"]
    same: float
    firsts: list[Limits] = field(default_factory=list)

    def number(self, ends: Limits, example: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Numbers of some examples' limits; :data:`NO_LIMIT` for none."""
        numbers = torch.full_like(ends.status, NO_LIMIT)
        k = 0
        while (left := (ends.has_limit & (numbers == NO_LIMIT)).nonzero().flatten()).numel():
            if k == len(self.firsts):
                status = torch.full_like(self.counted[:, 0], int(Status.RUNNING), dtype=torch.int64)
                none = [torch.zeros_like(self.iteration.h0), status, status * 0, status * 0]
                self.firsts.append(Limits(*none))  # filled in below
            examples, first = example[left], self.firsts[k]
            # Of each example without a limit of that number, the first row that is left.
            row = torch.full_like(first.status, len(numbers))
            row.scatter_reduce_(0, examples, left, "amin")
            new = (~first.has_limit & (row < len(numbers))).nonzero().flatten()
            for f in fields(first):
                getattr(first, f.name)[new] = getattr(ends, f.name)[row[new]]
            bound = self.iteration.select(examples), self.counted[examples]
            gap, _ = limit_distances(ends.select(left), first.select(examples), *bound)
            numbers[left[gap <= self.same]] = k
            k += 1
        return numbers

    def count(self) -> Int[Tensor, " batch"]:
        counts = torch.zeros(len(self.counted), dtype=torch.int64, device=self.counted.device)
        for first in self.firsts:
            counts += first.has_limit
        return counts


def other_starts(
    limit: Float[Tensor, "batch pos d_model"],
    generator: torch.Generator,
    *,
    n_noise: int,
    n_others: int,
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Zeros, noise with the limits' norms, limits of other examples ("other 1": the next)."""
    starts = {"zeros": torch.zeros_like(limit)}
    starts |= {f"noise {k + 1}": noise_like(limit, generator) for k in range(n_noise)}
    return starts | {f"other {k + 1}": limit.roll(-k - 1, 0) for k in range(n_others)}


def noise_like(
    state: Float[Tensor, "batch pos d_model"], generator: torch.Generator
) -> Float[Tensor, "batch pos d_model"]:
    """Random directions with the state's norm at each position."""
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
    unit = noise / noise.norm(dim=-1, keepdim=True)
    return unit.to(state) * state.norm(dim=-1, keepdim=True)


_FINER = 16
"""Frequencies of the spectrum between two of its discrete ones."""


@checked
def lag_distance(
    states: Float[Tensor, "states *lead d_model"], n_lags: PositiveInt
) -> Float[Tensor, "lag ..."]:
    r"""Mean relative distance of states p loops apart.

    .. math::
        r_p = \frac{1}{T - n} \sum_{t > n} \frac{\|h_t - h_{t-p}\|}{\|h_t\|}, \qquad p = 1 \dots n

    A cycle of p loops has :math:`r_p = 0`, and so have constant zeros.

    Example:
        >>> states = torch.tensor([1.0, 2.0, 4.0]).repeat(4)[:, None]
        >>> lag_distance(states, 3)
        tensor([1.3333, 0.9167, 0.0000])
    """
    check_states(states, at_least=n_lags + 1)
    late = states[n_lags:]
    size = late.norm(dim=-1)
    distances = [
        share_of_size((late - states[n_lags - p : len(states) - p]).norm(dim=-1), size).mean(0)
        for p in range(1, n_lags + 1)
    ]
    return torch.stack(distances)


@dataclass(frozen=True, repr=False)
class Rotation(ShortRepr):
    r"""The rotation of one orbit.

    Attributes:
        period: Loops of a full turn.
        explained: Share of the variance over loops; about ``2 n_harmonics / T`` without a rotation.
        amplitudes: Complex amplitudes of the harmonics, shaped like states.
        mean: The mean state :math:`\bar h`.
    """

    period: float
    explained: float
    amplitudes: Tensor  # complex [harmonic, *lead, d_model]
    mean: Float[Tensor, "*lead d_model"]

    def phase(self) -> Float[Tensor, "*lead"]:
        """Angle of each position against the whole state's first harmonic, from -pi to pi.

        Positions of equal phase turn together.
        """
        first = self.amplitudes[0]
        total = first.flatten(0, -2).sum(0)  # [d_model]
        return (first @ total.conj()).angle()


@checked
def find_rotation(
    states: Float[Tensor, "states *lead d_model"], *, n_harmonics: PositiveInt = 3
) -> Rotation:
    """The rotation of an orbit from the strongest frequency of its states.

    The spectrum is that of all features together, under a Hann window, with its maximum refined
    between the discrete frequencies; harmonics are fitted by least squares. ``explained`` is NaN
    for states that do not move, or by rounding alone.

    Args:
        states: Consecutive late states of one example, at least 16.
        n_harmonics: Harmonics of the period.

    Example:
        >>> turn = 2 * math.pi * torch.arange(200.0) / 4.8
        >>> states = torch.stack([turn.cos(), turn.sin(), 0 * turn + 2], dim=-1)
        >>> rotation = find_rotation(states)
        >>> round(rotation.period, 2), round(rotation.explained, 3)
        (4.8, 1.0)
    """
    check_states(states, at_least=16)
    x, n = states.flatten(1).double(), len(states)  # [loop, feature]
    mean = x.mean(0)
    x = x - mean
    window = torch.hann_window(n, periodic=False, dtype=x.dtype, device=x.device)
    # The power of all features together, from their covariance at each lag [2 n - 1].
    tapered = x * window[:, None]
    products = tapered @ tapered.T  # [loop, loop]; a diagonal is a lag
    lags = torch.stack([products.diagonal(k).sum() for k in range(1 - n, n)])
    power = torch.fft.rfft(lags, n=_FINER * n).abs()
    lowest = 2 * _FINER  # below are a drift, and the lobe of the window
    top = lowest + int(power[lowest:-1].argmax())
    # The maximum of the parabola through the three highest points of the spectrum.
    left, here, right = (float(power[k]) for k in (top - 1, top, top + 1))
    bend = left - 2 * here + right
    shift = 0.5 * (left - right) / bend if bend else 0.0
    frequency = (top + shift) / (_FINER * n)
    turn = 2 * math.pi * frequency * torch.arange(n, dtype=x.dtype, device=x.device)
    turns = torch.arange(1, n_harmonics + 1, device=x.device) * turn[:, None]  # [loop, harmonic]
    waves = torch.stack((turns.cos(), turns.sin()), -1).flatten(1)
    # A harmonic at half a turn per loop has no sine, and one beyond repeats a lower one.
    parts = torch.linalg.pinv(waves) @ x  # [2 n_harmonics, feature]
    total = x.square().sum()
    explained = 1 - (x - waves @ parts).square().sum() / total
    if (
        is_coarse(states.dtype)
        and total <= n * rounding_of(states.dtype) ** 2 * mean.square().sum()
    ):
        explained = torch.full_like(explained, float("nan"))  # it moves by rounding alone
    real, imaginary = parts.unflatten(0, (n_harmonics, 2)).unbind(1)
    # a cos + b sin is the real part of (a - i b) e^{i turn}.
    amplitudes = torch.complex(real, -imaginary).unflatten(1, states.shape[1:])
    period = 1 / frequency
    return Rotation(period, float(explained), amplitudes, mean.view(states.shape[1:]).to(states))
