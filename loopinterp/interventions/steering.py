"""Steering: add a direction to an activation at chosen loops, project it out, or clamp it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer, describe_tensor, need, need_distinct
from loopinterp.core.intervals import mean_estimate, mean_of, wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.interventions.base_and_source import (
    Metric,
    chosen_loops,
    chosen_positions,
    hook_place,
    hooks_by_loop,
    metric_name,
    metric_values,
    patched_component,
    places_of,
    scored_examples,
)
from loopinterp.interventions.engine import CleanRun
from loopinterp.models.protocol import describe_model, need_hooks

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import Index
    from loopinterp.tasks.task import Batch, Task

Mode = Literal["add", "project", "clamp"]
Hook = Callable[["Tensor", Any], "Tensor"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SteeringSweep(Result, kind="steering"):
    """The result of :func:`steering_sweep`. Intervals are over examples, of controls over draws.

    Arrays:
        changed: Share of examples with an asked answer other than in the clean run.
        effect: Mean change of the metric from the clean run.
        control_changed: Control: ``changed`` of each random direction of equal norm.
        control_effect: Control: ``effect`` of each.

    Attributes:
        metric_clean: Mean of the metric in the clean run.
        norm: Norm of the direction.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("changed", "effect"), "loop strength estimate"),
        **dict.fromkeys(("control_changed", "control_effect"), "loop strength draw"),
    }

    component: str
    mode: str
    metric: str
    metric_clean: float
    norm: float
    n_examples: int

    def control(self, measure: str = "changed") -> xr.DataArray:
        """Mean of the random directions, with its 95% interval over draws."""
        return mean_of(self.data[f"control_{measure}"], "draw")

    def beyond_control(self) -> xr.DataArray:
        """Whether more answers change than under every random direction, [loop, strength].

        The low end of the interval must lie above the largest draw.
        """
        low = self.data["changed"].sel(estimate="low", drop=True)
        return low > self.data["control_changed"].max("draw")


@checked
def steer(
    direction: Float[Tensor, " feature"],
    strength: float = 1.0,
    *,
    mode: Mode = "add",
    head: int | None = None,
    positions: Bool[Tensor, "#batch pos"] | None = None,
) -> Hook:
    r"""A hook that steers an activation x along a direction v, with :math:`u = v / \|v\|`.

    .. math::
        x' = x + s v \;\text{(add)}, \qquad x' = x - s (u \cdot x) u \;\text{(project)}, \qquad
        x' = x + s v - (u \cdot x) u \;\text{(clamp)}

    A projection of strength 1 removes the direction; a clamp gives every state the same part s v.

    Args:
        direction: As wide as the activation.
        strength: The factor s.
        head: Of activations of heads: the one that is steered; all if None.
        positions: Positions that are steered; all by default.

    Raises:
        InputError: If the direction is not finite or zero; or (when the hook fires) if it has
            another width, there is no such head, or ``positions`` has another shape.

    Example:
        >>> x, v = torch.tensor([[[1.0, 2.0]]]), torch.tensor([0.0, 4.0])
        >>> [steer(v, 0.5, mode=m)(x, None).tolist() for m in ("add", "project", "clamp")]
        [[[[1.0, 4.0]]], [[[1.0, 1.0]]], [[[1.0, 2.0]]]]
    """
    _check_direction(direction)

    def hook(x: Tensor, hook: Any = None) -> Tensor:
        if x.shape[-1] != len(direction) or (head is not None and x.ndim != 4):
            raise InputError(
                "direction",
                expected=f"the width of the activation {list(x.shape)}"
                + " of heads" * (head is not None),
                given=describe_tensor(direction),
                fix="Take the direction from the same activation.",
            )
        v = direction.to(x)
        if mode == "add":
            new = x + strength * v
        else:
            unit = v / v.norm()
            part = (x @ unit)[..., None] * unit  # of x along the direction, in the shape of x
            new = x - strength * part if mode == "project" else x + strength * v - part
        inside = places_of(positions, x)
        inside = inside.reshape(*inside.shape, *[1] * (x.ndim - 2))  # [batch, pos, 1 (, 1)]
        if head is not None:
            n_heads = x.shape[2]
            check_integer("head", head, least=-n_heads, most=n_heads - 1)
            of_head = torch.arange(n_heads, device=x.device) == head % n_heads
            inside = inside & of_head[:, None]  # [batch, pos, head, 1]
        return torch.where(inside, new, x)

    return hook


@checked
@torch.no_grad()
def mean_difference(
    model: Any,
    inputs: Tensor,
    others: Tensor,
    *,
    hook: str,
    n_loops: Loops,
    positions: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "*feature"]:
    """The mean activation on some inputs less that on others: a direction to steer along.

    For an activation of heads, one direction for each head.

    Args:
        hook: The address of the activation, such as ``loops.3.hook_state_post``.
        positions: Positions that count; all by default.

    Raises:
        InputError: If the address is of several activations, or ``positions`` has another shape
            than the activation's ``[batch, pos]``, or holds none.
    """
    need_hooks(model)
    fix = "Choose some, or leave positions out."
    need(positions is None or positions.any(), "positions", "one at least", "none", fix)
    means = []
    for x in (inputs, others):
        _, cache = model.run_with_cache(x, n_loops=n_loops, names_filter=[hook])
        expected, got = "the address of one activation", f"{hook!r}, of {len(cache)} activations"
        fix = "Name the loop and the layer, as in loops.3.hook_state_post."
        need(len(cache) == 1, "hook", expected, got, fix)
        (values,) = (cache[name] for name in cache)  # [batch, pos, (head,) feature]
        means.append(values[places_of(positions, values)].mean(0))
    return means[0] - means[1]


@torch.no_grad()
@checked
def steering_sweep(
    model: Any,
    data: Batch | Task | Tensor,
    direction: Float[Tensor, " feature"] | Any,
    *,
    strengths: Annotated[Sequence[float], Field(min_length=1)] = (0.25, 0.5, 1.0, 2.0, 4.0),
    mode: Mode = "add",
    component: str = "state_post",
    layer: int | None = None,
    head: int | None = None,
    loops: Index = None,
    positions: str | Tensor | None = None,
    metric: Metric | None = None,
    n_loops: Loops | None = None,
    n_draws: Annotated[int, Field(ge=2)] = 8,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> SteeringSweep:
    """Steer one loop at a time at several strengths: the dose and the response.

    The control is a random direction of the same norm, drawn ``n_draws`` times.

    Args:
        model: A ``LoopedTransformer``, or an adapter.
        data: A batch of one T(n), a task to draw from, or inputs alone.
        direction: A tensor, as of :func:`mean_difference`; or a fitted probe for two classes.
        strengths, mode, head: As for :func:`steer`.
        component: A hook point of a loop or layer (``state_post``, ``resid_pre``, ``z`` …), or the
            full name of a hook, for that place alone.
        layer: The layer inside the block; needed if it has several.
        loops: Loops to steer; all by default.
        positions: None or ``"all"``, or integers ``[batch]``, one of each example.
        metric: From logits of all positions to a number or ``[batch]``; by default the probability
            of the clean run's answers, mean over the asked positions.
        n_loops: Loops of the whole run; T(n) by default, required for inputs alone.

    Raises:
        InputError: If the direction does not fit the activation, or a name is unknown.

    Source: activation addition, arXiv 2308.10248; directions removed, arXiv 2406.11717.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> tokens = torch.randint(5, (8, 4), generator=torch.Generator().manual_seed(0))
        >>> sweep = steering_sweep(
        ...     LoopedTransformer(config), tokens, torch.ones(16), strengths=[0.0, 4.0], n_loops=3)
        >>> sweep.data["changed"].sel(strength=0.0, estimate="value").values.tolist()
        [0.0, 0.0, 0.0]
    """
    need_hooks(model)
    need_distinct("strengths", strengths, "Pass e.g. strengths=[0.0, 1.0, 4.0].")
    direction = _check_direction(_as_direction(direction))
    inputs, scored, n_loops = scored_examples(model, data, n_loops, n, batch_size, seed)
    place = hook_place(model, component, n_loops, loops=loops, layer=layer)
    if place is not None:
        component, layer, loops = place.component, place.layer, [place.loop or 0]
    target = patched_component(model, component)
    names = hooks_by_loop(model, target.full, layer, n_loops)
    where = chosen_positions(positions, inputs)[0]
    if len(where) != 1:
        fix = "Pass integers [batch], or None for all."
        raise InputError("positions", expected="one choice", given=repr(positions), fix=fix)
    chosen = chosen_loops(loops, n_loops)
    generator = torch.Generator().manual_seed(seed)
    about = {"study": "steering", "component": target.name, "mode": mode, "n_loops": n_loops}
    with study(seed, **about, model=describe_model(model), n_examples=len(inputs)) as watch:
        run = CleanRun(model, inputs, n_loops)
        measures = partial(_measures, run.answers, scored, metric)
        clean = measures(run.logits)
        drawn = torch.randn(n_draws, len(direction), generator=generator, dtype=torch.float32)
        drawn = drawn.to(direction)
        others = drawn * (direction.norm() / drawn.norm(dim=1, keepdim=True))
        options: dict[str, Any] = {"mode": mode, "head": head, "positions": where[0]}
        shape = len(chosen), len(strengths), 1 + n_draws
        measured = np.empty((2, *shape, len(inputs)))
        # Cells are [loop, strength, direction]; direction 0 is the given one.
        for cell in track(list(np.ndindex(shape)), "steer"):
            loop, strength, number = chosen[cell[0]], strengths[cell[1]], cell[2]
            along = others[number - 1] if number else direction
            hooks = [(names[loop], steer(along, strength, **options))]
            measured[(slice(None), *cell)] = measures(run.with_hooks(hooks, loop))
        changed, effect = measured[0], measured[1] - clean[1]
        n_changed = changed[:, :, 0].sum(-1)
        return SteeringSweep.of(
            watch,
            coords={"loop": chosen, "strength": [float(s) for s in strengths]},
            changed=wilson_estimate(n_changed, np.full(n_changed.shape, len(inputs))),
            effect=mean_estimate(effect[:, :, 0]),
            control_changed=changed[:, :, 1:].mean(-1),
            control_effect=effect[:, :, 1:].mean(-1),
            component=target.name,
            mode=mode,
            metric=metric_name(metric, "answer probability"),
            metric_clean=float(clean[1].mean()),
            norm=float(direction.norm()),
            n_examples=len(inputs),
        )


def _measures(
    answers: Int[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"],
    metric: Metric | None,
    logits: Float[Tensor, "batch pos d_vocab_out"],
) -> Float[np.ndarray, "measure batch"]:
    """Whether a scored answer is another than in the clean run, and the metric."""
    changed = ((logits.argmax(-1) != answers) & scored).any(1)
    if metric is None:
        p = logits.double().softmax(-1).gather(-1, answers[..., None])[..., 0]
        values = (p * scored).sum(1) / scored.sum(1)
    else:
        values = metric_values(metric, logits).expand(len(logits))
    return torch.stack([changed.double(), values]).cpu().numpy()


def _as_direction(given: Any) -> Any:
    coefficients = getattr(given, "coef_", None)
    if coefficients is None:
        return given
    rows = torch.as_tensor(coefficients)
    if rows.ndim != 2 or len(rows) != 1:
        raise InputError(
            "direction",
            expected="a probe of one cell and two classes, with coef_ [1, feature]",
            given=f"coef_ {list(rows.shape)}",
            fix="Pass one row of it, or the difference of two: probe.coef_[..., 1, :].",
        )
    return rows[0]


def _check_direction(direction: Any) -> Tensor:
    vector = isinstance(direction, torch.Tensor) and direction.ndim == 1
    if not vector or not direction.is_floating_point() or not 0 < float(direction.norm()) < np.inf:
        raise InputError(
            "direction",
            expected="floats [feature], finite and not all zero",
            given=describe_tensor(direction) if vector else type(direction).__name__,
            fix="Pass a row of a probe, or a difference of means.",
        )
    return direction
