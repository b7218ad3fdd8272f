"""Geometry of the states: dimension, principal axes of trajectories, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.intervals import share_of
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr, track
from loopinterp.dynamics.inside_loop import layer_limits, no_layers
from loopinterp.dynamics.limits import centre, limits_of_run
from loopinterp.dynamics.measures import (
    NOISE,
    AfterLoops,
    Counted,
    check_finite,
    check_states,
    chunks,
    correctness,
    counted_examples,
    exact_match,
    gather,
    likeliest,
    limit_study,
    run_loops,
    state_chunks,
    usual_loops,
)
from loopinterp.dynamics.regimes import (
    ClassifiedLoops,
    SettlingClass,
    classify_regimes,
    classify_settling,
)
from loopinterp.models.iteration import bind

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.models.run import HookedRun
    from loopinterp.tasks.task import Batch, Task

EMBEDDING, LIMITS = "embedding", "limits"
"""Further sets of states."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GeometryResult(AfterLoops, Result, kind="geometry"):
    """Dimension of the states, trajectories along principal axes, classes, and layers' limits.

    Loop 0 is the initial state. A set holds the states of all counted tokens: one per loop, one of
    injected inputs, one of limits.

    Arrays:
        rank, participation: Effective rank and participation ratio of the states after each loop.
        spread: Root mean square distance from the mean, over that from 0.
        set_rank, set_participation, set_spread, set_size: The same of the other sets; their sizes.
        control_rank, control_participation: Controls: those of as many Gaussian vectors.
        exact: Whether an example is right after a loop.
        right: Each token after the last loop: 1 right, 0 wrong, -1 not asked.
        regime, settling: :class:`Regime` and :class:`SettlingClass` codes.
        rate, exponent: As in :class:`SettlingClasses`.
        limit_status: :class:`Status` of the search for a limit.
        path, path_limit: States and limits of the first examples, along principal axes.
        explained: Share of their variance along each axis.
        layer_residual, layer_cosine, layer_distance: As in :class:`LayerLimits`.
        answer_loops: T(n) of each example.

    Attributes:
        no_layers: Why layers are skipped (:class:`NoLayers`), or "".
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("rank", "participation", "spread"), "loop"),
        **dict.fromkeys(("set_rank", "set_participation", "set_spread", "set_size"), "set"),
        **dict.fromkeys(("control_rank", "control_participation"), "set draw"),
        "exact": "loop batch",
        **dict.fromkeys(
            ("right", "regime", "settling", "rate", "exponent", "counted"), "batch pos"
        ),
        "path": "loop shown pos component",
        "path_limit": "shown pos component",
        "explained": "component",
        **dict.fromkeys(("limit_status", "answer_loops"), "batch"),
        "layer_residual": "loop layer batch",
        **dict.fromkeys(("layer_cosine", "layer_distance"), "layer other batch pos"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(n for n in VARIABLES if n.startswith("layer"))

    no_layers: str = ""

    def exact_match(self) -> xr.DataArray:
        """Share of examples right after each loop, [loop, estimate]."""
        return share_of(self.data["exact"], "batch")

    def classes(self) -> xr.DataArray:
        """Counted tokens by class and correctness, [settling, answer]."""
        import xarray as xr

        codes = self.data["settling"].where(self.data["counted"])
        answers = {"right": 1, "wrong": 0, "not asked": -1}
        cells = [
            [int(((codes == kind) & (self.data["right"] == a)).sum()) for a in answers.values()]
            for kind in SettlingClass
        ]
        coords = {"settling": [kind.label for kind in SettlingClass], "answer": [*answers]}
        return xr.DataArray(cells, coords, dims=("settling", "answer"))

    def converged(self) -> xr.DataArray:
        """Examples whose counted tokens all converge, [batch]."""
        settles = self.data["settling"] == SettlingClass.SETTLING
        return (settles | ~self.data["counted"]).all("pos")

    def of_pairs(self, name: str) -> xr.DataArray:
        """An array of layer pairs, each pair once and counted tokens only, [pair, …]."""
        n_layers = self.data.sizes["layer"]
        first, second = np.triu_indices(n_layers, 1)
        at = [f"{a} and {b}" for a, b in zip(first, second)]
        values = self.data[name].where(self.data["counted"])
        pairs = values.stack(pair=("layer", "other"), create_index=False)
        chosen = pairs.isel(pair=first * n_layers + second).transpose("pair", ...)
        return chosen.drop_vars(("layer", "other"), errors="ignore").assign_coords(pair=at)


@checked
def geometry_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: ClassifiedLoops | None = None,
    n_trajectories: PositiveInt = 4,
    limit_tol: PositiveFloat = 1e-5,
    limit_steps: PositiveInt = 200,
    positions: Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> GeometryResult:
    """Measure the states of all examples after each loop, and follow a few trajectories.

    Layers are followed if the model has hooks and its block several layers.

    Args:
        n_loops: By default twice the longest T(n), and at least 48.
        n_trajectories: Examples whose paths are recorded.
        limit_tol, limit_steps: Relative tolerance of a limit; most steps beyond the run.

    Source: arXiv 2604.15259; trajectories, arXiv 2502.05171; layers, arXiv 2604.11791.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(
        model, data, positions, needs_loops=n_loops is None, of_states=True, **drawn
    )
    n_loops = n_loops or usual_loops(batch, times=2, least=48)
    skipped = no_layers(model)
    settings = {"n_loops": n_loops, "limit_tol": limit_tol, "limit_steps": limit_steps}
    settings |= {"positions": positions, "n_examples": len(batch)}
    with limit_study(model, batch.inputs, seed, **settings) as (model, watch), torch.no_grad():
        sets = {name: _StateMoments() for name in ("loops", EMBEDDING, LIMITS)}
        shown, parts = [], []
        for rows in track(state_chunks(model, batch, n_loops + 1), "geometry"):
            iteration, tokens = bind(model, batch.inputs[rows]), counted[rows]
            states = run_loops(iteration, n_loops)
            limits = limits_of_run(iteration, states, max_loops=limit_steps, tol=limit_tol)
            reached = limits.has_limit  # [batch]
            # Limit points, NaN where none was reached, [batch, pos, d_model]
            middle = centre(iteration, limits).masked_fill(~reached[:, None, None], float("nan"))
            sets["loops"].add(states[:, tokens])
            sets[EMBEDDING].add(iteration.e[tokens])
            sets[LIMITS].add(middle[reached][tokens[reached]])
            n_shown = max(0, min(n_trajectories, len(batch)) - rows.start)
            shown.append(torch.cat([states[:, :n_shown], middle[None, :n_shown]]))
            answers = [likeliest(iteration.read(state, loop)) for loop, state in enumerate(states)]
            right = correctness(torch.stack(answers), batch.targets[rows])  # [loop, batch, pos]
            classes = classify_settling(states)
            part = {
                "exact": exact_match(right).bool(),
                "right": right[-1],
                "regime": classify_regimes(states).regime.to(torch.int8),
                "settling": classes.settling.to(torch.int8),
                "rate": classes.rate.float(),
                "exponent": classes.exponent.float(),
                "limit_status": limits.status.to(torch.int8),
            }
            if not skipped:
                hooked = cast("HookedRun", model)
                of_layers = layer_limits(
                    hooked, batch.inputs[rows], n_loops=n_loops, counted=tokens
                )
                # Before the first loop there are no states between layers.
                residual = torch.cat([of_layers.residual[:1], of_layers.residual])
                part |= {"layer_residual": residual, "layer_cosine": of_layers.cosine}
                part["layer_distance"] = of_layers.distance
            parts.append(part)
        generator = torch.Generator().manual_seed(seed)
        return GeometryResult.of(
            watch,
            coords={"loop": range(n_loops + 1), "set": (EMBEDDING, LIMITS)},
            **gather(GeometryResult, parts),
            **_dimensions(sets, generator),
            **_paths(torch.cat(shown, dim=1), counted[:n_trajectories]),
            counted=counted,
            answer_loops=batch.n_loops,
            no_layers=skipped.value if skipped else "",
        )


def _paths(states: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Trajectories and limits (the last states), along axes of the finite ones."""
    trajectories = states[:-1]
    through = trajectories.isfinite().all(dim=-1).all(dim=0) & counted  # [shown, pos]
    n_components = min(3, states.shape[-1])
    if not through.any():
        path = states[..., :n_components].float() * float("nan")
        explained = torch.full((n_components,), float("nan"), dtype=torch.float32)
    else:
        axes = principal_axes(trajectories[:, through], n_components)
        path, explained = axes.project(states).float(), axes.explained.float()
    path = path.masked_fill(~(through[..., None]), float("nan"))  # [loop, shown, pos, component]
    return {"path": path[:-1], "path_limit": path[-1], "explained": explained}


def _dimensions(sets: dict[str, _StateMoments], generator: torch.Generator) -> dict[str, Tensor]:
    arrays, width = _dimension(sets["loops"]), sets["loops"].origin.shape[-1]
    others = [sets[name] for name in (EMBEDDING, LIMITS)]
    each = [_dimension(moments) for moments in others]
    arrays |= {f"set_{name}": torch.stack([d[name] for d in each]) for name in arrays}
    counts = [moments.count for moments in others]
    draws = [_gaussian(count, width, generator) for count in counts]
    arrays |= {f"control_{name}": torch.stack([d[name] for d in draws]) for name in draws[0]}
    return {**arrays, "set_size": torch.tensor(counts)}


def _dimension(moments: _StateMoments) -> dict[str, Tensor]:
    if not moments.count:
        return dict.fromkeys(("rank", "participation", "spread"), torch.tensor(float("nan")))
    singular = moments.singular_values()
    values = {"rank": _rank(singular), "participation": _participation(singular)}
    values["spread"] = moments.spread()
    return {name: value.float().cpu() for name, value in values.items()}


def _gaussian(count: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    draws = []
    for _ in range(4 if count else 0):
        moments = _StateMoments()
        for rows in chunks(count, 8 * width):
            shape = rows.stop - rows.start, width
            moments.add(torch.randn(shape, generator=generator, dtype=torch.float64))
        draws.append(_dimension(moments))
    nothing = torch.full((4,), float("nan"), dtype=torch.float64)
    names = ("rank", "participation")
    return {n: torch.stack([d[n] for d in draws]) if draws else nothing for n in names}


def effective_rank(states: Float[Tensor, "*lead sample d_model"]) -> Float[Tensor, "*lead"]:
    r"""Effective rank :math:`\exp H(s / \sum s)` of the singular values of a set of states.

    It is 1 on a line and 0 at one point.

    Source: Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Example:
        >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).round()
        tensor(2.)
    """
    return _rank(_singular_values(states)).to(states.dtype)


def participation_ratio(states: Float[Tensor, "*lead sample d_model"]) -> Float[Tensor, "*lead"]:
    r"""Participation ratio :math:`(\sum s^2)^2 / \sum s^4` of the singular values of a set.

    It counts the directions with most of the variance, at most :func:`effective_rank`.

    Source: Gao et al. (2017), A theory of multineuronal dimensionality, dynamics and measurement.
    """
    return _participation(_singular_values(states)).to(states.dtype)


def _singular_values(states: Tensor) -> Tensor:
    if states.ndim < 2 or states.shape[-2] < 1 or not states.is_floating_point():
        raise InputError(
            "states",
            expected="a floating-point tensor [..., sample, feature] with at least one sample",
            given=f"shape {tuple(states.shape)}, {states.dtype}",
            fix="Flatten examples and positions into one axis.",
        )
    check_finite(states.reshape(-1, states.shape[-1]), "states")
    moments = _StateMoments()
    moments.add(states)
    return moments.singular_values()


@dataclass(frozen=True, repr=False)
class PrincipalAxes(ShortRepr):
    """Orthonormal ``axes`` about the ``mean``, widest first, and their shares of the variance."""

    mean: Float[Tensor, " d_model"]
    axes: Float[Tensor, "component d_model"]
    explained: Float[Tensor, " component"]

    def project(self, states: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead component"]:
        return (states - self.mean) @ self.axes.mT


def principal_axes(
    states: Float[Tensor, "loop *lead d_model"], n_components: int = 3
) -> PrincipalAxes:
    """Principal components of all states of trajectories ``[loop, ..., d_model]``.

    Example:
        >>> line = torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0])
        >>> principal = principal_axes(line, 1)
        >>> principal.axes, principal.explained
        (tensor([[0.6000, 0.8000]]), tensor([1.]))
    """
    check_states(states)
    rows = states.reshape(-1, states.shape[-1]).double()
    check_integer("n_components", n_components, least=1, most=min(rows.shape))
    mean = rows.mean(dim=0)  # [d_model]
    _, singular, axes = torch.linalg.svd(rows - mean, full_matrices=False)  # axes in rows
    # The component of largest modulus, made positive to fix each sign, [axis, 1]
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1, 1)
    variance = singular**2
    total = variance.sum()
    explained = variance / torch.where(total > 0, total, 1)
    parts = (mean, axes[:n_components], explained[:n_components])
    return PrincipalAxes(*(x.to(states.dtype) for x in parts))


def _rank(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    total = singular.sum(dim=-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1)  # [*lead, value], sums to 1
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(total[..., 0] == 0, 0, rank)


def _participation(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    largest = singular.amax(dim=-1, keepdim=True)
    # Over the largest, so that squares cannot overflow
    variance = (singular / torch.where(largest > 0, largest, 1)) ** 2
    squares = (variance**2).sum(dim=-1)
    return variance.sum(dim=-1) ** 2 / torch.where(squares == 0, 1, squares)


class _StateMoments:
    """First and second moments of sets of states ``[*lead, sample, d_model]``, added in parts.

    Sums are about a state near the mean, for precision.
    """

    count = 0

    def add(self, states: Float[Tensor, "*lead sample d_model"]) -> None:
        n_sample, width = states.shape[-2:]
        if not n_sample:
            return
        if not self.count:
            self.origin = states.double().mean(dim=-2)
            self.eps = torch.finfo(states.dtype).eps
            self.total = torch.zeros_like(self.origin)  # [*lead, d_model]
            self.products = torch.zeros(*self.total.shape, width).to(self.total)
        total, products = self.total.view(-1, width), self.products.view(-1, width, width)
        flat = zip(states.reshape(-1, n_sample, width), self.origin.view(-1, width))
        # Set by set, [sample, d_model]: float64 of all at once takes many times the memory.
        for k, (part, origin) in enumerate(flat):
            about = part.double() - origin  # [sample, d_model]
            total[k] += about.sum(dim=0)
            products[k] += about.T @ about
        self.count += n_sample

    def singular_values(self) -> Float[Tensor, "*lead d_model"]:
        """Singular values of each set; NaN if not finite, 0 if the spread is rounding."""
        mean = self.total / self.count
        # Gram matrix of the states about their mean, [*lead, d_model, d_model].
        gram = self.products - self.count * mean[..., :, None] * mean[..., None, :]
        known = gram.isfinite().all(dim=-1).all(dim=-1)  # [*lead]
        values = torch.linalg.eigvalsh(torch.where(known[..., None, None], gram, 0))  # ascending
        # Directions without any spread get no more than the rounding of the others.
        nothing = values <= values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
        singular = values.masked_fill(nothing, 0).sqrt()
        singular = singular.masked_fill((self.spread() == 0)[..., None], 0)
        return singular.masked_fill(~known[..., None], float("nan"))

    def spread(self) -> Float[Tensor, "*lead"]:
        """Root mean square distance from the mean over the root mean square norm."""
        mean = self.total / self.count
        # Mean square distance from the origin, [*lead]
        squares = self.products.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / self.count
        variance = (squares - (mean**2).sum(dim=-1)).clamp_min(0)
        size = variance + ((self.origin + mean) ** 2).sum(dim=-1)
        spread = (variance / torch.where(size == 0, 1, size)).sqrt()
        return torch.where(spread <= NOISE * self.eps, 0, spread)
