"""Whether parts of the loop come to rest: the attention of heads, the state after each layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import check_integer
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import (
    check_finite,
    check_states,
    correctness,
    exact_match,
    likeliest,
    share_of_size,
)
from loopinterp.dynamics.runs import chunks, counted_examples, gather, usual_loops
from loopinterp.models.protocol import describe_model, need_hooks

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.run import HookedRun
    from loopinterp.tasks.task import Batch, Task


FROZEN = 0.05
"""Share of its largest change under which a head counts as frozen."""

_TwoLoops = Annotated[Loops, Field(ge=2)]
"""A number of loops of which two can be compared."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AttentionStabilisationResult(Result, kind="attention-stabilisation"):
    r"""Change of each head's pattern, :math:`\|A_t - A_{t-1}\|_F`, with exact match beside it.

    Arrays:
        change: At loop ``t``, the change of the pattern since loop ``t - 1``; NaN at loop 0.
        exact: Whether an example is right, read after loop ``t`` is done.
        answer_loops: T(n) of each example.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "change": "loop layer batch head",
        "exact": "loop batch",
        "answer_loops": "batch",
    }

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"]

    def frozen_at(self) -> xr.DataArray:
        """First loop from which a head's mean change stays within 5% of its largest, [layer, head].

        -1 where there is no such loop. A head that never changes is frozen from loop 1 on.
        """
        mean = self.data["change"].mean("batch").sel(loop=slice(1, None))
        moving = mean > FROZEN * mean.max("loop")
        last = (moving * mean["loop"]).max("loop")
        return (last + 1).where(last < self.n_loops - 1, -1)


def attention_change(
    patterns: Float[Tensor, "loop *lead query key"],
) -> Float[Tensor, "change ..."]:
    r"""Change of each head's pattern, :math:`\|A_t - A_{t-1}\|_F`.

    Args:
        patterns: Finite patterns of two loops or more, ``[loop, batch, head, query, key]`` (any
            axes between loop and query), as ``cache.stack("attn.hook_pattern")`` gives.

    Returns:
        One entry less than loops: the first is the change from loop 0 to loop 1.

    Source: arXiv 2604.11791.

    Example:
        >>> looks_left = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> looks_here = torch.eye(2)
        >>> attention_change(torch.stack([looks_left, looks_here, looks_here]))
        tensor([1.4142, 0.0000])
    """
    flat = patterns.flatten(-2)  # [loop, ..., query * key]
    check_states(flat, name="patterns")
    return (flat[1:] - flat[:-1]).norm(dim=-1)


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

    Args:
        data: Examples with targets, or a task to draw them from.
        n_loops: A quarter more than the longest T(n) by default.
    """
    need_hooks(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, _ = counted_examples(model, data, needs_loops=n_loops is None, **drawn)
    n_loops = n_loops or usual_loops(batch, times=1.25, least=2)
    n_pos = batch.inputs.shape[1]
    pattern_bytes = model.site_map.n_heads * n_pos**2 * model.dtype.itemsize
    with study(seed, model=describe_model(model), n_loops=n_loops, n_examples=len(batch)) as watch:
        parts = (
            _follow(model, batch[rows], n_loops) for rows in chunks(len(batch), 4 * pattern_bytes)
        )
        return AttentionStabilisationResult.of(
            watch,
            coords={"loop": range(n_loops)},
            **gather(AttentionStabilisationResult, parts),
            answer_loops=batch.n_loops,
        )


@torch.no_grad()
def _follow(model: HookedRun, batch: Batch, n_loops: int) -> dict[str, Tensor]:
    """Changes ``[loop, layer, batch, head]`` and exact match ``[loop, batch]``.

    Only the last pattern of each layer is held.
    """
    n_layers = model.site_map.n_layers
    before: deque[Tensor] = deque(maxlen=n_layers)
    changes: list[Tensor] = []
    exact: list[Tensor] = []

    def compare(pattern: Tensor, hook: object) -> None:
        check_finite(pattern[None], "patterns", start=len(exact))  # so many loops are scored
        if len(before) == n_layers:  # the first is the pattern of this layer, a loop ago
            changes.append((pattern - before[0]).flatten(-2).norm(dim=-1).float().cpu())
        before.append(pattern)

    def score(state: Tensor, hook: object) -> None:
        right = correctness(likeliest(model.readout(state)), batch.targets)
        exact.append(exact_match(right).bool().cpu())

    every = slice(None)
    patterns = model.site("attn.hook_pattern", loop=every, layer=every, n_loops=n_loops)
    states = model.site("hook_state_post", loop=every, n_loops=n_loops)
    hooks = [(name, compare) for name in patterns] + [(name, score) for name in states]
    model.run_with_hooks(batch.inputs, n_loops=n_loops, fwd_hooks=hooks)
    return {"change": _by_loop_and_layer(changes, n_layers), "exact": torch.stack(exact)}


def _by_loop_and_layer(values: list[Tensor], n_layers: int) -> Float[Tensor, "loop layer ..."]:
    """Values of all loops but the first, in which nothing is compared: NaN there."""
    from_second = torch.stack(values).unflatten(0, (-1, n_layers))  # [loop - 1, layer, ...]
    return torch.cat([torch.full_like(from_second[:1], float("nan")), from_second])


@dataclass(frozen=True, repr=False)
class LayerLimits(ShortRepr):
    r"""The states :math:`s_l` after each layer of the block, as they are in the last loop.

    Attributes:
        residual: :math:`\|s_l^t - s_l^{t-1}\| / \|s_l^t\|` over the positions of an example.
        cosine: Of each pair of layers at the last loop.
        distance: :math:`\|s_l - s_m\|` over the mean of the two norms: the cosine of states that
            share a large part is near 1 however far they are apart.
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

    Where residuals vanish and distances do not, the block goes round a cycle of distinct points;
    where distances vanish too, its layers have collapsed to one.

    Args:
        model: A hooked looped model with at least two layers in its block.
        inputs: Tokens or features.
        counted: Positions that residuals are over; all by default.

    Source: arXiv 2604.11791.
    """
    need_hooks(model)
    fix = "Use convergence_study, which follows the state between loops."
    n_layers = check_integer("layers of the model", model.site_map.n_layers, least=2, fix=fix)
    last_states: deque[Tensor] = deque(maxlen=n_layers)
    residuals: list[Tensor] = []

    def at_counted(state: Tensor) -> Tensor:
        return (state if counted is None else torch.where(counted[..., None], state, 0)).flatten(1)

    def follow(state: Tensor, hook: object) -> None:
        if len(last_states) == n_layers:  # the first is the state after this layer, a loop ago
            now, before = at_counted(state), at_counted(last_states[0])
            residuals.append(share_of_size((now - before).norm(dim=1), now.norm(dim=1)).float())
        last_states.append(state)

    every = slice(None)
    names = model.site("resid_post", loop=every, layer=every, n_loops=n_loops)
    hooks = [(name, follow) for name in names]
    model.run_with_hooks(inputs, n_loops=n_loops, return_type="state", fwd_hooks=hooks)
    last = torch.stack([*last_states])  # [layer, batch, pos, d_model]
    cosine = torch.cosine_similarity(last[:, None], last[None], dim=-1)
    size = last.norm(dim=-1)  # [layer, batch, pos]
    gap = torch.stack([(last - state).norm(dim=-1) for state in last])
    distance = share_of_size(gap, (size[:, None] + size[None]) / 2)
    residual = _by_loop_and_layer(residuals, n_layers)
    return LayerLimits(residual, cosine.float(), distance.float())


class NoLayers(str, Enum):
    """Why there are no limits of layers to compare."""

    NO_HOOKS = "no hooks"
    ONE_LAYER = "one layer"


def no_layers(model: Any) -> NoLayers | None:
    """Why the layers of a model's block cannot be compared; None if they can."""
    if not hasattr(model, "run_with_hooks") or not hasattr(model, "site"):
        return NoLayers.NO_HOOKS
    return None if model.site_map.n_layers > 1 else NoLayers.ONE_LAYER
