r"""Integrals along the paths of integrated gradients.

The slope of the metric along a path, :math:`f(t) = \mathrm{d} M / \mathrm{d} t`, is the sum of the
gradients that are averaged. In trained models with sharp attention it has peaks far narrower than a
hundredth of the path, at other places in each example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.core.progress import bar, track

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_ORDER = 3  # points of a panel


@dataclass(frozen=True)
class Nodes:
    """Where gradients are taken, ``[node, batch]``, and their weights, which add up to 1.

    Attributes:
        error: At least the absolute error of the integral of the slope, by example; NaN if unknown.
        n_slopes: Slopes that were computed to choose the nodes.
    """

    points: Float[Tensor, "node batch"]
    weights: Float[Tensor, "node batch"]
    error: Float[Tensor, " batch"]
    n_slopes: int = 0

    def integral(self, gradient: Callable[[Tensor], Tensor]) -> Float[Tensor, "*shape batch"]:
        """The integral of a function of the points ``[batch]`` of all examples."""
        total: Any = 0
        for points, weights in track(list(zip(self.points, self.weights)), "step"):
            total = total + weights * gradient(points)
        return total


def midpoint_nodes(n_steps: int, n_examples: int) -> Nodes:
    points = (torch.arange(n_steps, dtype=torch.float64) + 0.5) / n_steps
    unknown = torch.full((n_examples,), float("nan"), dtype=torch.float64)
    points = points[:, None].expand(-1, n_examples)
    return Nodes(points, torch.full_like(points, 1 / n_steps), unknown)


def adaptive_nodes(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    n_examples: int,
    *,
    tolerance: float,
    most: int,
    narrowest: float = 2.0**-20,
) -> Nodes:
    """Gauss-Legendre points of panels that are halved where the slope needs it.

    The error of a panel is the difference between its integral and the change of the value from its
    start to its end. Each example halves its worst panel, until the mean over examples of the
    summed errors is at most ``tolerance``, there are ``most`` points, or no panel can be halved.

    Args:
        value: The function [batch] at the points [batch] of all examples.
        slope: Its derivative there.
        narrowest: Panels of this width are not halved: their points would be equal after rounding.
    """
    x, w = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(_ORDER))
    x, w = (x + 1) / 2, w / 2
    row, n_slopes = torch.arange(n_examples), 0
    most = min(most, int(_ORDER / narrowest))  # in half precision all panels can be the narrowest

    def error_of(ends: Tensor) -> Float[Tensor, " batch"]:
        nonlocal n_slopes
        n_slopes += _ORDER
        (start, end), (at_start, at_end) = ends
        width = end - start
        slopes = torch.stack([w[k] * slope(start + x[k] * width) for k in range(_ORDER)])
        return (slopes.sum(0) * width - (at_end - at_start)).abs()

    # Of each panel, its two ends and the values there [panel, what, end, batch], and its error.
    ends = torch.stack([torch.full((n_examples,), v, dtype=torch.float64) for v in (0.0, 1.0)])
    panels = torch.stack([ends, torch.stack([value(end) for end in ends])])[None]
    errors = error_of(panels[0])[None]
    with bar("panels", total=most) as shown:
        while errors.sum(0).mean() > tolerance and _ORDER * (len(panels) + 1) <= most:
            widths = panels[:, 0, 1] - panels[:, 0, 0]  # [panel, batch]
            # The worst panel; where no error is left, the widest.
            worst = torch.where(widths > narrowest, errors + 1e-12 * widths, 0).argmax(0)
            left = panels[worst, :, :, row].permute(1, 2, 0)  # [what, end, batch]
            right, middle = left.clone(), left[0].mean(0)
            left[:, 1] = right[:, 0] = torch.stack([middle, value(middle)])
            panels[worst, :, :, row], errors[worst, row] = left.permute(2, 0, 1), error_of(left)
            panels = torch.cat([panels, right[None]])
            errors = torch.cat([errors, error_of(right)[None]])
            shown.update(_ORDER)
    starts, widths = panels[:, 0, 0], panels[:, 0, 1] - panels[:, 0, 0]
    points = starts[:, None] + x[:, None] * widths[:, None]  # [panel, point, batch]
    weights = w[:, None] * widths[:, None]
    return Nodes(points.flatten(0, 1), weights.flatten(0, 1), errors.sum(0), n_slopes)
