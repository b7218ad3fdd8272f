r"""Rotation: orbits that turn with a period of their own, without converging or repeating exactly.

Late states near such an orbit are a sum of harmonics with the period P in loops, not necessarily
whole:

.. math::
    h_t \approx \bar h + \sum_{k=1}^{K} \operatorname{Re}\left(A_k e^{2 \pi i k t / P}\right)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import check_states, share_of_size
from loopinterp.models.precision import is_coarse, rounding_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

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
