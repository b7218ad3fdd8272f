"""Planes in the space of states: through a limit and two other states, in units of its size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import einsum

from loopinterp.dynamics.distinct_limits import ZERO, limits_apart
from loopinterp.dynamics.starts import OWN, other_starts
from loopinterp.dynamics.state_checks import check_finite_state, check_shape
from loopinterp.errors import InputError, check_choice

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.dynamics.limits import Limits
    from loopinterp.models.looped_model import Iteration

FLAT = 1e-6
"""Share of the sizes below which a length is rounding."""


@dataclass(frozen=True)
class StatePlane:
    """A plane through a state, on which distances are those of the states over a unit.

    Attributes:
        centre: The state at (0, 0).
        axes: Orthonormal: towards the first corner, and in the plane at right angles to it.
        unit: Norm of the centre; where that is 0, the distance to the first corner.
        corners: Places (x, y) of the corners, by name.
    """

    centre: Float[Tensor, "pos d_model"]
    axes: Float[Tensor, "axis pos d_model"]
    unit: float
    corners: dict[str, tuple[float, float]]

    @classmethod
    def through(cls, centre: Tensor, corners: Mapping[str, Tensor]) -> StatePlane:
        """The plane of a state and two corners.

        Raises:
            InputError: If they are on a line.
        """
        first, second = (state.double() - centre.double() for state in corners.values())
        size = float(centre.double().norm())
        unit = size if size > ZERO else float(first.norm())
        along = first / first.norm()
        across = second - (second * along).sum() * along
        sizes = float(first.norm()), float(across.norm())
        if not all(size > FLAT * max(unit, float(second.norm())) for size in sizes):
            raise InputError(
                "corners",
                expected="two states that span a plane with the limit of the example",
                given=f"{' and '.join(map(repr, corners))}, which are on a line with it",
                fix='Pass corners=("noise 1", "noise 2"), for instance.',
            )
        axes = torch.stack([along, across / across.norm()])
        places = einsum(torch.stack([first, second]), axes, "corner p d, k p d -> corner k")
        named = {name: (x, y) for name, (x, y) in zip(corners, (places / unit).tolist())}
        return cls(centre, axes, unit, named)

    def at(self, places: Float[Tensor, "row axis"]) -> Float[Tensor, "row pos d_model"]:
        """The states at some places."""
        moved = einsum(places.to(self.axes), self.axes, "row k, k p d -> row p d")
        return (self.centre.double() + self.unit * moved).to(self.centre)


def corner_states(
    corners: Collection[str] | Mapping[str, Tensor] | None,
    iteration: Iteration,
    own: Limits,
    counted: Bool[Tensor, "batch pos"],
    generator: torch.Generator,
    *,
    same: float,
) -> dict[str, Tensor]:
    """Two states by name, for the first example; see :func:`~loopinterp.dynamics.basin_map`.

    Raises:
        InputError: If they are not two, a name is unknown, or a state is not one of the model.
    """
    starts = other_starts(own.state, generator, n_noise=2, n_others=len(own.state) - 1)
    known = {OWN: iteration.h0, **starts}
    if corners is None:
        first = torch.zeros_like(own.status)
        gap = limits_apart(own, own.select(first), iteration.select(first), counted[first])[0]
        others = [k for k, near in enumerate((gap <= same).tolist()) if k and not near]
        corners = (f"other {others[0]}" if others else "noise 2", "noise 1")
    if not isinstance(corners, Mapping):
        corners = {check_choice("corners", name, known): known[name][0] for name in corners}
    for name, state in corners.items():
        check_shape(state, own.state[0], f"corner {name!r}", fix="Pass a state [pos, d_model].")
        check_finite_state(state, f"corner {name!r}", fix="Choose another one.")
    if len(corners) != 2:
        raise InputError(
            "corners",
            expected="two that differ: names, or states by a name",
            given=f"{list(corners)}",
            fix='Leave it out, or pass corners=("other 1", "noise 1"), for instance.',
        )
    return dict(corners)
