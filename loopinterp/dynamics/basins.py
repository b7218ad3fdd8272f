"""Basins of attraction in a plane of initial states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from einops import einsum
from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_choice, check_integer
from loopinterp.core.intervals import share_of, wilson_of
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.limits import (
    NO_LIMIT,
    OWN_START,
    ZERO,
    DistinctLimits,
    Limits,
    answered_right,
    find_limits,
    limit_distances,
    other_starts,
)
from loopinterp.dynamics.measures import (
    Counted,
    check_finite_state,
    check_shape,
    chunks,
    counted_examples,
    limit_study,
)
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import need_one_map

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


_MAPS = ("reached", "status", "period", "loops", "distance", "exact")
_RINGS = 8  # around the clean limit


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class BasinMapResult(Result, kind="basins"):
    """The limit that each initial state of a plane through one input's limit converges to.

    The clean limit is at (0, 0), and ``x`` points to the first corner. Distances are over its norm.
    Limits are numbered as they are first reached, from near to far; 0 is the clean one.

    Arrays:
        reached: Number of the limit; -1 for none.
        status, loops: :class:`Status` and loops of the search.
        period: Loops per turn of a cycle, 1 for a fixed point, 0 without a limit.
        distance: From the limit reached to the clean one.
        exact: Whether the answer is right there.
        next_reached, next_distance: Controls: the same under the next input; 0 is *its* clean
            limit, distances are to that of *this* input.
        corner_x, corner_y, corner_reached: Places of the corners, and their limits.

    Attributes:
        unit: Length of 1 on the axes: the clean limit's norm; if that is 0, distance of the first
            corner.
        same: Relative distance of limits that count as one.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*_MAPS, "next_reached", "next_distance"), "y x"),
        **dict.fromkeys(("corner_x", "corner_y", "corner_reached"), "corner"),
    }

    example: int
    unit: float
    same: float

    def shares(self) -> xr.DataArray:
        """Share of the grid that leads to each limit (-1: none), [limit, estimate]."""
        return share_of(self._is_of_limit(), "y", "x")

    def by_distance(self) -> xr.DataArray:
        """:meth:`shares` by distance from the clean limit, [limit, distance, estimate]."""
        return self._in_rings(self._is_of_limit())

    def next_by_distance(self) -> xr.DataArray:
        """:meth:`next_reaches_own` by distance, [distance, estimate]."""
        return self._in_rings(self.data["next_distance"] <= self.same)

    def _in_rings(self, hits: xr.DataArray) -> xr.DataArray:
        import xarray as xr

        edges = np.linspace(0, float(self.data["x"].max()) * (1 + 1e-9), _RINGS + 1)
        ring = np.digitize(self.from_own().values, edges) - 1  # beyond the last in the corners
        inside = xr.DataArray(
            ring == np.arange(_RINGS)[:, None, None],
            {"distance": (edges[1:] + edges[:-1]) / 2},
            ("distance", "y", "x"),
        )
        return wilson_of((hits & inside).sum(("y", "x")), inside.sum(("y", "x")))

    def from_own(self) -> xr.DataArray:
        """Distance of each initial state from the clean limit, [y, x]."""
        return (self.data["y"] ** 2 + self.data["x"] ** 2) ** 0.5

    def radius(self) -> float:
        """Distance within which all initial states lead to the clean limit, or NaN."""
        away = self.from_own()
        lost = away.where(self.data["reached"] != 0).min()  # NaN where all come back
        within = away.where((away <= self.data["x"].max()) & ~(away >= lost)).max()
        return float(within.fillna(0)) if (self.data["reached"] == 0).any() else float("nan")

    def next_reaches_own(self) -> xr.DataArray:
        """Control: share that reaches this limit under the next input, [estimate]."""
        return share_of(self.data["next_distance"] <= self.same, "y", "x")

    def limits(self) -> pd.DataFrame:
        cells = self.data[[*_MAPS]].to_dataframe()
        reached = cells[cells["reached"] != NO_LIMIT].groupby("reached")
        first = reached[["period", "distance"]].first()
        shares = reached.size() / len(cells)
        return first.assign(share=shares, exact=reached["exact"].mean()).rename_axis("limit")

    def _is_of_limit(self) -> xr.DataArray:
        import xarray as xr

        every = np.unique([NO_LIMIT, 0, *np.unique(self.data["reached"])])
        return self.data["reached"] == xr.DataArray(every, {"limit": every}, "limit")


@checked
def basin_map(
    model: LoopedModel,
    data: Batch | Task,
    *,
    example: int = 0,
    corners: Sequence[str] | Mapping[str, Tensor] | None = None,
    points: Annotated[int, Field(ge=3)] = 41,
    extent: PositiveFloat | None = None,
    n_loops: Loops = 200,
    tol: PositiveFloat = 1e-5,
    same: PositiveFloat = 0.01,
    positions: Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> BasinMapResult:
    r"""Run one input from a grid of initial states in a plane through its limit and two corners.

    :math:`h_0(x, y) = h^* + u (x a + y b)`, with :math:`a, b` orthonormal in the plane and
    :math:`u = \|h^*\|`. The control runs them under the next input.

    Args:
        data: Two or more examples, best of one length.
        corners: Two names (``"own"``: the model's initial state, ``"zeros"``, ``"noise 1"``,
            ``"noise 2"``, ``"other 1"`` to ``"other 8"``: limits of the next examples), or states
            [pos, d_model] by name. By default another limit (else noise), and noise.
        points: Initial states along each axis, an odd number.
        extent: Distance from the clean limit to the grid's edges, over its norm.
        n_loops, tol: Loops in which a limit is sought, and its relative tolerance.
        same: Relative distance of limits that count as one.

    Source: reachability, arXiv 2604.15259.

    Example:
        >>> from loopinterp.zoo import pretrained_run
        >>> run = pretrained_run("parity")
        >>> result = basin_map(run.model(), run.task, n=4, batch_size=2, points=3)
        >>> result.shares().sel(limit=0, estimate="value").item()
        1.0
    """
    need_one_map(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(model, data, positions, at_least=2, needs_loops=True, **drawn)
    check_integer("example", example, least=0, most=len(batch) - 1)
    if points % 2 == 0:
        raise InputError(
            "points",
            expected="an odd number of initial states along each axis, so that the limit is one",
            given=f"{points}",
            fix=f"Pass points={points + 1}.",
        )
    generator = torch.Generator().manual_seed(seed)
    options = {"n_loops": n_loops, "tol": tol, "points": points, "positions": positions}
    with limit_study(model, batch.inputs, seed, example=example, **options) as (model, watch):
        rows = (example + torch.arange(min(len(batch), 9))) % len(batch)  # corners: to "other 8"
        batch, counted = batch[rows], counted[rows]
        iteration = bind(model, batch.inputs)
        check_finite_state(iteration.h0, "initial state", fix="Check the embedding of the input.")
        with torch.no_grad():
            clean_limits = find_limits(iteration, iteration.h0, max_loops=n_loops, tol=tol)
        states = _corner_states(corners, iteration, clean_limits, counted, generator, same=same)
        plane = _StatePlane.through(clean_limits.state[0], states)
        places = torch.tensor([*plane.corners.values()], dtype=torch.float64)
        edge = float(1.25 * places.abs().max()) if extent is None else extent
        half = points // 2
        axis = edge * torch.arange(-half, half + 1, dtype=torch.float64) / half
        y, x = torch.meshgrid(axis, axis, indexing="ij")  # [y, x]
        grid = torch.stack([x, y], -1).flatten(0, 1)  # [start, axis], row by row
        # From near to far, so that limits are numbered in that order, and the corners at last.
        near = grid.norm(dim=-1).argsort(stable=True)
        starts = torch.cat([grid[near], places])
        search = {"n_loops": n_loops, "tol": tol, "same": same}
        bound = iteration, clean_limits, batch.targets, counted
        here, there = (_follow(plane, starts, k, *bound, **search) for k in (0, 1))
        back = near.argsort()  # undoes the order from near to far, [start]
        maps = {name: values[back].reshape(points, points) for name, values in here.items()}
        return BasinMapResult.of(
            watch,
            coords={"x": axis.tolist(), "y": axis.tolist(), "corner": [*states]},
            **maps,
            next_reached=there["reached"][back].reshape(points, points),
            next_distance=there["distance"][back].reshape(points, points),
            corner_x=places[:, 0],
            corner_y=places[:, 1],
            corner_reached=here["reached"][len(grid) :],
            example=example,
            unit=plane.unit,
            same=same,
        )


@torch.no_grad()
def _follow(
    plane: _StatePlane,
    places: Tensor,
    example: int,
    iteration: Iteration,
    clean_limits: Limits,
    targets: Tensor,
    counted: Tensor,
    *,
    n_loops: int,
    tol: float,
    same: float,
) -> dict[str, Tensor]:
    row = slice(example, example + 1)
    clean_limit = clean_limits.select(row)
    # Without a clean limit the first one that is reached is number 1.
    known = bool(clean_limit.has_limit)
    distinct = DistinctLimits(iteration.select(row), counted[row], same, [clean_limit] * known)
    parts: list[dict[str, Tensor]] = []
    bytes_each = 8 * plane.centre.numel() * plane.centre.element_size()
    for part in track(list(chunks(len(places), bytes_each)), "initial states"):
        start = plane.at(places[part])
        first = torch.zeros(len(start), dtype=torch.int64, device=start.device)
        under = iteration.select(first + example)
        ends = find_limits(under, start, max_loops=n_loops, tol=tol)
        numbers = distinct.number(ends, first)  # [start]
        to_first = clean_limits.select(first), iteration.select(first), counted[first]
        parts.append(
            {
                "reached": torch.where(ends.has_limit, numbers + (not known), NO_LIMIT),
                "status": ends.status.to(torch.int8),
                "period": ends.period.to(torch.int32),
                "loops": ends.loops.to(torch.int32),
                "distance": limit_distances(ends, *to_first)[0].float(),
                "exact": answered_right(under, ends, targets[first + example], n_loops),
            }
        )
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


@dataclass(frozen=True)
class _StatePlane:
    centre: Float[Tensor, "pos d_model"]
    axes: Float[Tensor, "axis pos d_model"]
    unit: float
    corners: dict[str, tuple[float, float]]

    @classmethod
    def through(cls, centre: Tensor, corners: Mapping[str, Tensor]) -> _StatePlane:
        first, second = (state.double() - centre.double() for state in corners.values())
        size = float(centre.double().norm())
        unit = size if size > ZERO else float(first.norm())
        along = first / first.norm()  # [pos, d_model]
        across = second - (second * along).sum() * along  # what is at right angles
        sizes = float(first.norm()), float(across.norm())
        # What is less than a millionth of the sizes is rounding.
        if not all(size > 1e-6 * max(unit, float(second.norm())) for size in sizes):
            raise InputError(
                "corners",
                expected="two states that span a plane with the limit of the example",
                given=f"{' and '.join(map(repr, corners))}, which are on a line with it",
                fix='Pass corners=("noise 1", "noise 2"), or states by name if the limit is 0.',
            )
        axes = torch.stack([along, across / across.norm()])  # orthonormal, [axis, pos, d_model]
        places = einsum(torch.stack([first, second]), axes, "corner p d, k p d -> corner k")
        named = {name: (x, y) for name, (x, y) in zip(corners, (places / unit).tolist())}
        return cls(centre, axes, unit, named)

    def at(self, places: Float[Tensor, "row axis"]) -> Float[Tensor, "row pos d_model"]:
        # In-plane displacement over the unit, [row, pos, d_model]
        moved = einsum(places.to(self.axes), self.axes, "row k, k p d -> row p d")
        return (self.centre.double() + self.unit * moved).to(self.centre)


def _corner_states(
    corners: Collection[str] | Mapping[str, Tensor] | None,
    iteration: Iteration,
    limits: Limits,
    counted: Bool[Tensor, "batch pos"],
    generator: torch.Generator,
    *,
    same: float,
) -> dict[str, Tensor]:
    starts = other_starts(limits.state, generator, n_noise=2, n_others=len(limits.state) - 1)
    known = {OWN_START: iteration.h0, **starts}
    if corners is None:
        first = torch.zeros_like(limits.status)
        to_first = limits.select(first), iteration.select(first), counted[first]
        near = (limit_distances(limits, *to_first)[0] <= same).tolist()
        others = [k for k, is_first in enumerate(near) if k and not is_first]
        corners = (f"other {others[0]}" if others else "noise 2", "noise 1")
    if not isinstance(corners, Mapping):
        corners = {check_choice("corners", name, known): known[name][0] for name in corners}
    for name, state in corners.items():
        expected = limits.state[0].shape
        check_shape(f"corner {name!r}", state.shape, expected, fix="Pass a state [pos, d_model].")
        check_finite_state(state, f"corner {name!r}", fix="Choose another one.")
    if len(corners) != 2:
        raise InputError(
            "corners",
            expected="two that differ: names, or states by a name",
            given=f"{list(corners)}",
            fix='Leave it out, or pass corners=("other 1", "noise 1"), for instance.',
        )
    return dict(corners)
