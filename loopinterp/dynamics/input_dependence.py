"""Input dependence of the limits, also token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import check_integer
from loopinterp.core.intervals import bootstrap_ratio
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.fixed_point import find_fixed_point
from loopinterp.dynamics.jacobian import Linearised, jvp
from loopinterp.dynamics.limits import Limits, centre, find_limits, other_starts
from loopinterp.dynamics.measures import (
    Counted,
    chunks,
    counted_examples,
    likeliest,
    limit_study,
    share_of_size,
)
from loopinterp.dynamics.solvers import Anderson, Status
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import need_one_map

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class InputDependenceResult(Result, kind="input-dependence"):
    """Differences of limits between inputs, against those between initial states.

    The limit is a fixed point, or the mean state of a cycle. Lengths are over counted positions,
    relative to the limits' root mean square norm; NaN without a limit.

    Arrays:
        status, period: Of the search for the clean limit, as in :class:`ReachabilityResult`.
        over_inputs: Squared distance of a limit to the mean limit of all examples.
        over_starts: Mean squared distance of an example's limits, from all initial states, to their
            mean.
        effect: Relative change of the limit at a position when the token at another (``source``)
            becomes that of the next example; NaN if it is the same token.
        answer_changes: Whether the answer there changes: 1, 0, or -1 if unknown.
        sensitivity: :func:`limit_sensitivity`, at fixed points.
        counted: Positions that are compared.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("status", "period", "over_inputs", "over_starts"), "batch"),
        **dict.fromkeys(("effect", "answer_changes", "sensitivity"), "batch source pos"),
        "counted": "batch pos",
    }

    def share_of_input(self) -> xr.DataArray:
        """Share of the spread that inputs explain, :math:`V_{inputs} / (V_{inputs} + V_{starts})`.

        1 if every input has its own limit, 0 if all share theirs; bootstrap interval over examples.
        """
        known = self.data["over_starts"].notnull() & self.data["over_inputs"].notnull()
        inputs, starts = (
            self.data[name].values[known.values] for name in ("over_inputs", "over_starts")
        )
        return bootstrap_ratio(inputs, inputs + starts)

    def spread(self) -> float:
        """Root mean square distance of all runs' limits from their mean."""
        return float((self.data["over_inputs"] + self.data["over_starts"]).mean()) ** 0.5

    def by_distance(self, name: str = "effect") -> xr.DataArray:
        """Mean of an array by distance from source to position (negative: leftwards)."""
        import xarray as xr

        values = self.data[name].where(self.data["counted"])
        values = values.where(values >= 0).values
        n_pos = values.shape[-1]
        at = {d: np.diagonal(values, d, 1, 2) for d in range(1 - n_pos, n_pos)}
        means = {d: np.nanmean(v) for d, v in at.items() if not np.isnan(v).all()}
        return xr.DataArray([*means.values()], dims="distance", coords={"distance": [*means]})


@checked
def input_dependence_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: Loops = 200,
    n_noise: NonNegativeInt = 2,
    n_others: NonNegativeInt = 2,
    n_substituted: NonNegativeInt | None = None,
    n_sensitivity: NonNegativeInt = 4,
    n_probes: PositiveInt = 4,
    tol: PositiveFloat = 1e-5,
    positions: Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> InputDependenceResult:
    """Compare limits over inputs and over initial states; change the input token by token.

    Args:
        data: Three or more examples, best of one length.
        n_loops, tol: Loops in which a limit is sought, and its relative tolerance.
        n_noise, n_others: Initial states of noise and of other examples' limits, beside the own and
            zeros.
        n_substituted: Examples whose tokens are changed one by one; all if None.
        n_sensitivity, n_probes: Examples whose limit is differentiated, and random directions of
            each derivative (relative error about ``1 / sqrt(2 * n_probes)``).

    Source: input dependence, arXiv 2604.15259.
    """
    need_one_map(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(model, data, positions, at_least=3, needs_loops=True, **drawn)
    check_integer("n_others", n_others, least=0, most=len(batch) - 1)
    n_substituted = len(batch) if n_substituted is None else n_substituted
    generator = torch.Generator().manual_seed(seed)
    options = {"n_loops": n_loops, "tol": tol, "positions": positions, "n_examples": len(batch)}
    seek = partial(find_limits, max_loops=n_loops, tol=tol)
    with limit_study(model, batch.inputs, seed, **options) as (model, watch):
        iteration = bind(model, batch.inputs)
        with torch.no_grad():
            clean_limits = seek(iteration, iteration.h0)
            starts = other_starts(clean_limits.state, generator, n_noise=n_noise, n_others=n_others)
            ends = [clean_limits, *(seek(iteration, start) for start in starts.values())]
            limits = torch.stack([centre(iteration, end) for end in ends])  # [start, batch, pos, d]
            middle = limits[0]  # limit points of the clean runs, [batch, pos, d_model]
            answer = likeliest(iteration.read(clean_limits.state, int(clean_limits.loops.max())))
            effect, changes = _substitute(model, batch, middle, answer, seek, n_substituted)
        reached = clean_limits.has_limit
        # Examples with a limit from every start, [batch]
        everywhere = torch.stack([end.has_limit for end in ends]).all(dim=0)
        # Mean squared norm of a limit
        size = _squared(middle[reached], 0, counted[reached]).mean().clamp_min(1e-30)
        over_inputs = _squared(middle, middle[reached].mean(dim=0), counted) / size
        over_starts = _squared(limits, limits.mean(dim=0), counted).mean(dim=0) / size
        sensitivity = torch.full_like(effect, float("nan"))
        rows = (clean_limits.status == Status.CONVERGED).nonzero().flatten()[:n_sensitivity]
        if len(rows):
            at = iteration.select(rows), clean_limits.state[rows]
            derivative = limit_sensitivity(*at, n_probes=n_probes, seed=seed)
            sensitivity[rows.cpu()] = derivative.float().cpu()
        unknown = ~reached[:, None, None].cpu()
        return InputDependenceResult.of(
            watch,
            status=clean_limits.status.to(torch.int8),
            period=clean_limits.period.to(torch.int32),
            over_inputs=over_inputs.float().masked_fill(~reached, float("nan")),
            over_starts=over_starts.float().masked_fill(~everywhere, float("nan")),
            effect=effect.masked_fill(unknown, float("nan")),
            answer_changes=changes.masked_fill(unknown, -1),
            sensitivity=sensitivity,
            counted=counted,
        )


@checked
def limit_sensitivity(
    iteration: Iteration,
    limit: Float[Tensor, "batch pos d_model"],
    *,
    n_probes: PositiveInt = 4,
    tol: PositiveFloat = 1e-4,
    max_products: PositiveInt = 200,
    seed: Seed = 0,
) -> Float[Tensor, "batch source pos"]:
    r"""Relative change of the limit at a position per relative change of the input at another.

    By the implicit function theorem,
    :math:`\partial h^*/\partial e = (I - J)^{-1} \partial f / \partial e`. Entry ``[b, j, i]``
    estimates :math:`\|\partial h_i^* / \partial e_j\|_F \|e_j\| / (\sqrt{d} \, \|h_i^*\|)` from
    ``n_probes`` random directions, one linear system each; NaN if one was not solved. It is 0 for a
    loop without injection.

    Args:
        limit: A fixed point of each example.
        tol, max_products: Relative tolerance and most Jacobian-vector products of a linear system.
    """
    generator = torch.Generator().manual_seed(seed)
    n_examples, n_pos, width = iteration.e.shape
    squares = torch.zeros(n_examples, n_pos, n_pos, dtype=torch.float64, device=limit.device)
    # A system for each example, source and direction, all of them side by side.
    grid = torch.cartesian_prod(*(torch.arange(k) for k in (n_examples, n_pos, n_probes)))
    for part in track(list(_parts(len(grid), limit)), "sensitivity"):
        row, source, _ = grid[part].T
        some, here, each = iteration.select(row), limit[row], torch.arange(len(row))
        direction = torch.randn(len(row), width, generator=generator, dtype=torch.float64)
        size = some.e[each, source].norm(dim=-1, keepdim=True) / width**0.5
        change = torch.zeros_like(some.e)  # [row, pos, d_model], at the source alone
        change[each, source] = direction.to(size) * size
        into = jvp(lambda e, some=some, h=here: some.advance(h, e, some.context), some.e, change)
        # (I - J)^-1 into is the fixed point of x -> J x + into.
        linear = Linearised(some.step, here)
        response = find_fixed_point(
            lambda x, linear=linear, into=into: linear.push(x) + into,
            into,
            solver=Anderson(),
            tol=tol,
            max_iter=max_products,
        )
        moved = response.state.norm(dim=-1).double() / here.norm(dim=-1).double()  # [row, pos]
        moved = moved.masked_fill(~response.converged[:, None], float("nan"))
        squares.index_put_((row, source), moved**2, accumulate=True)
    return (squares / n_probes).sqrt()


def _substitute(
    model: LoopedModel,
    batch: Batch,
    limit: Tensor,
    answer: Tensor,
    seek: Callable[..., Limits],
    n_substituted: int,
) -> tuple[Tensor, Tensor]:
    n_examples, n_pos = batch.inputs.shape[:2]
    other = batch.inputs.roll(-1, 0)
    differs = (batch.inputs != other).reshape(n_examples, n_pos, -1).any(dim=-1)  # [batch, pos]
    effect = torch.full((n_examples, n_pos, n_pos), float("nan"), dtype=torch.float32)  # as changes
    changes = torch.full((n_examples, n_pos, n_pos), -1, dtype=torch.int8)
    rows, sources = differs[:n_substituted].cpu().nonzero(as_tuple=True)
    for part in track(list(_parts(len(rows), limit)), "substitutions"):
        row, source = rows[part], sources[part]
        inputs = batch.inputs[row]
        inputs[torch.arange(len(row)), source] = other[row, source]
        iteration = bind(model, inputs)
        end = seek(iteration, iteration.h0)
        gap = centre(iteration, end) - limit[row]  # [row, pos, d_model]
        moved = share_of_size(gap.norm(dim=-1), limit[row].norm(dim=-1))
        there = likeliest(iteration.read(end.state, int(end.loops.max())))
        reached = end.has_limit[:, None]
        effect[row, source] = moved.float().masked_fill(~reached, float("nan")).cpu()
        changed = (there != answer[row]).to(torch.int8)
        changes[row, source] = changed.masked_fill(~reached, -1).cpu()
    return effect, changes


def _parts(n_rows: int, state: Tensor) -> Iterator[slice]:
    return chunks(n_rows, 8 * state[0].numel() * state.element_size())


def _squared(state: Tensor, middle: Tensor | float, counted: Tensor) -> Tensor:
    # Squared distance over counted positions, [..., batch]
    return torch.where(counted, ((state - middle) ** 2).sum(dim=-1), 0).sum(dim=-1)
