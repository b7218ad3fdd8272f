"""Convergence inside the loop: attention of heads, states after layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import check_integer
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import (
    check_finite,
    chunks,
    correctness,
    counted_examples,
    exact_match,
    gather,
    likeliest,
    limit_study,
    share_of_size,
    usual_loops,
)
from loopinterp.models.protocol import need_hooks

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.run import HookedRun
    from loopinterp.tasks.task import Batch, Task


FROZEN = 0.05
"""Share of a head's largest change below which it counts as frozen."""

_TwoLoops = Annotated[Loops, Field(ge=2)]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AttentionStabilisationResult(Result, kind="attention-stabilisation"):
    r"""Change of each head's pattern, :math:`\|A_t - A_{t-1}\|_F`, with exact match.

    Arrays:
        change: Change of the pattern from loop ``t - 1`` to ``t``; NaN at loop 0.
        exact: Whether an example is right after loop ``t``.
        answer_loops: T(n) of each example.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "change": "loop layer batch head",
        "exact": "loop batch",
        "answer_loops": "batch",
    }

    @property
    def n_loops(self) -> int:
        return self.data.sizes["loop"]

    def frozen_at(self) -> xr.DataArray:
        """First loop from which a head's mean change is at most 5% of its largest; else -1."""
        mean = self.data["change"].mean("batch").sel(loop=slice(1, None))
        moving = mean > FROZEN * mean.max("loop")
        last = (moving * mean["loop"]).max("loop")
        return (last + 1).where(last < self.n_loops - 1, -1)


@checked
def attention_stabilisation_study(
    model: HookedRun,
    data: Batch | Task,
    *,
    n_loops: _TwoLoops | None = None,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> AttentionStabilisationResult:
    """Follow the attention pattern of every head through the loops.

    ``n_loops`` is by default a quarter more than the longest T(n).
    """
    need_hooks(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, _ = counted_examples(model, data, needs_loops=n_loops is None, **drawn)
    n_loops = n_loops or usual_loops(batch, times=1.25, least=2)
    n_pos = batch.inputs.shape[1]
    pattern_bytes = model.site_map.n_heads * n_pos**2 * model.dtype.itemsize
    settings = {"n_loops": n_loops, "n_examples": len(batch)}
    with limit_study(model, batch.inputs, seed, **settings) as (model, watch):
        parts = (
            _patterns(model, batch[rows], n_loops) for rows in chunks(len(batch), 4 * pattern_bytes)
        )
        return AttentionStabilisationResult.of(
            watch,
            coords={"loop": range(n_loops)},
            **gather(AttentionStabilisationResult, parts),
            answer_loops=batch.n_loops,
        )


def _patterns(model: HookedRun, batch: Batch, n_loops: int) -> dict[str, Tensor]:
    exact: list[Tensor] = []

    def change(pattern: Tensor, before: Tensor | None) -> Tensor | None:
        check_finite(pattern[None], "patterns", start=len(exact))  # so many loops are scored
        if before is None:
            return None
        return (pattern - before).flatten(-2).norm(dim=-1).float().cpu()

    def score(state: Tensor, hook: object) -> None:
        right = correctness(likeliest(model.readout(state)), batch.targets)
        exact.append(exact_match(right).bool().cpu())

    states = model.site("hook_state_post", loop=slice(None), n_loops=n_loops)
    scored = [(name, score) for name in states]
    changes, _ = _compare_loops(
        model, batch.inputs, "attn.hook_pattern", change, n_loops=n_loops, hooks=scored
    )
    return {"change": changes, "exact": torch.stack(exact)}


@torch.no_grad()
def _compare_loops(
    model: HookedRun,
    inputs: Tensor,
    component: str,
    compare: Callable[[Tensor, Tensor | None], Tensor | None],
    *,
    n_loops: int,
    hooks: Sequence[tuple[str, Any]] = (),
) -> tuple[Float[Tensor, "loop layer ..."], list[Tensor]]:
    """Compare each layer's activation with that of the previous loop; NaN in the first loop.

    Also returns the activations of the last loop.
    """
    n_layers = model.site_map.n_layers
    last: deque[Tensor] = deque(maxlen=n_layers)
    values: list[Tensor] = []

    def follow(activation: Tensor, hook: object) -> None:
        before = last[0] if len(last) == n_layers else None  # of this layer, a loop ago
        value = compare(activation, before)
        if value is not None:
            values.append(value)
        last.append(activation)

    every = slice(None)
    names = model.site(component, loop=every, layer=every, n_loops=n_loops)
    added = [(name, follow) for name in names] + list(hooks)
    model.run_with_hooks(inputs, n_loops=n_loops, return_type="state", fwd_hooks=added)
    compared = torch.stack(values).unflatten(0, (-1, n_layers))  # [loop - 1, layer, ...]
    return torch.cat([torch.full_like(compared[:1], float("nan")), compared]), [*last]


@dataclass(frozen=True, repr=False)
class LayerLimits(ShortRepr):
    r"""The states :math:`s_l` after each layer of the block, in the last loop.

    Attributes:
        residual: :math:`\|s_l^t - s_l^{t-1}\| / \|s_l^t\|` over the positions of an example.
        cosine: Of each pair of layers; near 1 at any distance if the states share a large part.
        distance: :math:`\|s_l - s_m\|` over the mean of the two norms.
    """

    residual: Float[Tensor, "loop layer batch"]
    cosine: Float[Tensor, "layer other batch pos"]
    distance: Float[Tensor, "layer other batch pos"]


@checked
@torch.no_grad()
def layer_limits(
    model: HookedRun,
    inputs: Tensor,
    *,
    n_loops: _TwoLoops,
    counted: Bool[Tensor, "batch pos"] | None = None,
) -> LayerLimits:
    """Follow the state after every layer of the block (``hook_resid_post``, before the loop norm).

    If residuals vanish and distances do not, the block is a cycle of distinct points; if distances
    vanish too, its layers have collapsed to one. Residuals cover the ``counted`` positions.

    Source: arXiv 2604.11791.
    """
    need_hooks(model)
    fix = "Use convergence_study, which follows the state between loops."
    check_integer("layers of the model", model.site_map.n_layers, least=2, fix=fix)

    def residual(state: Tensor, before: Tensor | None) -> Tensor | None:
        if before is None:
            return None
        now, past = (
            (x if counted is None else torch.where(counted[..., None], x, 0)).flatten(1)
            for x in (state, before)
        )
        return share_of_size((now - past).norm(dim=1), now.norm(dim=1)).float()

    residuals, states = _compare_loops(model, inputs, "resid_post", residual, n_loops=n_loops)
    last = torch.stack(states)  # [layer, batch, pos, d_model]
    cosine = torch.cosine_similarity(last[:, None], last[None], dim=-1)
    size = last.norm(dim=-1)  # [layer, batch, pos]
    gap = torch.stack([(last - state).norm(dim=-1) for state in last])
    distance = share_of_size(gap, (size[:, None] + size[None]) / 2)
    return LayerLimits(residuals, cosine.float(), distance.float())


class NoLayers(str, Enum):
    """Why layers cannot be compared."""

    NO_HOOKS = "no hooks"
    ONE_LAYER = "one layer"


def no_layers(model: Any) -> NoLayers | None:
    if not hasattr(model, "run_with_hooks") or not hasattr(model, "site"):
        return NoLayers.NO_HOOKS
    return None if model.site_map.n_layers > 1 else NoLayers.ONE_LAYER
