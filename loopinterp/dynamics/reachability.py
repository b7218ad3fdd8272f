"""Reachability: limits from several initial states, and after perturbations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.intervals import share_of
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.limits import (
    OWN_START,
    DistinctLimits,
    Limits,
    answered_right,
    find_limits,
    limit_distances,
    noise_like,
    other_starts,
)
from loopinterp.dynamics.measures import Counted, counted_examples, limit_study
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import need_one_map

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReachabilityResult(Result, kind="reachability"):
    """Limits reached from several initial states, and after perturbations.

    Initial states: the model's own, zeros, noise with the norms of the clean limit, limits of other
    examples ("other 1": the next). NaN without a limit.

    Arrays:
        status, loops: :class:`Status` and loops of the search.
        period: Loops per turn of a cycle, 1 for a fixed point, 0 without a limit.
        alignment: Cosine of the limit and the clean one (asymptotic alignment, arXiv 2211.09961).
        distance: Distance between the two over the norm of the clean one.
        exact: Whether the answer is right there.
        other_alignment, other_distance: Controls: the same of the clean limits of this example and
            the next.
        n_limits: Different limits from all initial states.
        kick_status, kick_distance, kick_exact: The same after a perturbation of the limit.

    Attributes:
        same: Relative distance of limits that count as one.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("status", "period", "loops"), "start batch"),
        **dict.fromkeys(("alignment", "distance", "exact"), "start batch"),
        **dict.fromkeys(("other_alignment", "other_distance", "n_limits"), "batch"),
        **dict.fromkeys(("kick_status", "kick_distance", "kick_exact"), "kick draw batch"),
    }

    same: float

    def has_limit(self) -> xr.DataArray:
        """Examples whose own initial state leads to a limit, [batch]."""
        return self.data["period"].sel(start=OWN_START, drop=True) > 0

    def reached(self) -> xr.DataArray:
        """Share of examples with a clean limit that reach it, [start, estimate]."""
        distance = self.data["distance"].isel(batch=self.has_limit().values)
        return share_of(distance <= self.same, "batch")

    def recovered(self) -> xr.DataArray:
        """Share of perturbed limits that are reached again, [kick, estimate]."""
        distance = self.data["kick_distance"].isel(batch=self.has_limit().values)
        return share_of(distance <= self.same, "draw", "batch")

    def own_limit_differs(self) -> xr.DataArray:
        return self.data["other_distance"] > self.same

    def one_limit(self) -> xr.DataArray:
        """Share of examples with the same limit from all initial states, [estimate]."""
        everywhere = (self.data["period"] > 0).all("start")
        return share_of(everywhere & (self.data["n_limits"] == 1), "batch")


@checked
def reachability_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: Loops = 200,
    n_noise: NonNegativeInt = 2,
    n_others: NonNegativeInt = 2,
    kicks: Sequence[PositiveFloat] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    n_draws: PositiveInt = 2,
    tol: PositiveFloat = 1e-5,
    same: PositiveFloat = 0.01,
    positions: Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> ReachabilityResult:
    """Run every example from several initial states, and from its perturbed limit.

    A perturbation of size s adds noise of s times the norm of each position's state.

    Args:
        data: Two or more examples, best of one length.
        n_loops, tol: Loops in which a limit is sought, and its relative tolerance.
        n_noise, n_others: Initial states of noise, and of other examples' limits.
        kicks: Relative sizes of perturbations, with ``n_draws`` of each.
        same: Relative distance of limits that count as one.

    Source: path independence, arXiv 2211.09961; reachability, arXiv 2604.15259.

    Example:
        >>> from loopinterp.zoo import pretrained_run
        >>> run = pretrained_run("parity")
        >>> result = reachability_study(run.model(), run.task, n=4, batch_size=4, kicks=(0.1,))
        >>> result.reached().sel(start="zeros", estimate="value").item()
        1.0
    """
    need_one_map(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(model, data, positions, at_least=2, needs_loops=True, **drawn)
    check_integer("n_others", n_others, least=0, most=len(batch) - 1)
    if len({*kicks}) < len(kicks) or not kicks:
        sizes = {"expected": "sizes that differ, at least one", "given": f"{list(kicks)}"}
        raise InputError("kicks", **sizes, fix="Leave it out for six sizes from 0.01 to 3.")
    generator = torch.Generator().manual_seed(seed)
    settings = {"n_loops": n_loops, "tol": tol, "same": same, "positions": positions}
    settings["n_examples"] = len(batch)
    with limit_study(model, batch.inputs, seed, **settings) as (model, watch):
        iteration = bind(model, batch.inputs)
        search = torch.no_grad()(partial(find_limits, iteration, max_loops=n_loops, tol=tol))
        clean_limits = search(iteration.h0)
        starts = other_starts(clean_limits.state, generator, n_noise=n_noise, n_others=n_others)
        reached = {OWN_START: clean_limits}
        for name, start in track(list(starts.items()), "initial states"):
            reached[name] = search(start)
        perturbed = [
            search(clean_limits.state + size * noise_like(clean_limits.state, generator))
            for size in track([size for size in kicks for _ in range(n_draws)], "perturbations")
        ]

        def outcome(end: Limits) -> dict[str, Tensor]:
            distance, alignment = limit_distances(end, clean_limits, iteration, counted)
            return {
                "status": end.status.to(torch.int8),
                "period": end.period.to(torch.int32),
                "loops": end.loops.to(torch.int32),
                "alignment": alignment.float(),
                "distance": distance.float(),
                "exact": answered_right(iteration, end, batch.targets, n_loops),
            }

        ends, after = ([outcome(end) for end in some] for some in (reached.values(), perturbed))
        # Number of each example, [batch]
        each = torch.arange(len(batch), device=clean_limits.status.device)
        other_distance, other_alignment = limit_distances(
            clean_limits.select(each.roll(-1)), clean_limits, iteration, counted
        )
        distinct = DistinctLimits(iteration, counted, same)
        for end in reached.values():
            distinct.number(end, each)
        shape = (len(kicks), n_draws)
        return ReachabilityResult.of(
            watch,
            coords={"start": [*reached], "kick": [float(size) for size in kicks]},
            **{name: torch.stack([end[name] for end in ends]) for name in ends[0]},
            **{
                f"kick_{name}": torch.stack([end[name] for end in after]).unflatten(0, shape)
                for name in ("status", "distance", "exact")
            },
            other_alignment=other_alignment.float(),
            other_distance=other_distance.float(),
            n_limits=distinct.count().to(torch.int16),
            same=same,
        )
