"""Whether heads freeze as the state settles: change of the attention pattern from loop to loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from loopinterp.dynamics.readouts import correctness, exact_match, likeliest
from loopinterp.dynamics.state_checks import asked_positions, check_finite
from loopinterp.dynamics.state_trajectories import chunks, gather
from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import need_hooks
from loopinterp.models.model_description import describe_model
from loopinterp.results import Result, study
from loopinterp.study_examples import examples_for

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.hooked_run import HookedRun
    from loopinterp.tasks.task import Batch, Task

FROZEN = 0.05
"""Share of its largest change under which a head counts as frozen."""


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
        """First loop from which a head's mean change is at most 5% of its largest, [layer, head].

        To the end of the run; -1 where there is no such loop. A head that never changes is frozen
        from loop 1 on.
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
        patterns: Patterns of all loops, ``[loop, batch, head, query, key]`` (any axes between
            loop and query), as ``cache.stack("attn.hook_pattern")`` gives.

    Returns:
        One entry less than loops: the first is the change from loop 0 to loop 1.

    Raises:
        InputError: If there are fewer than two loops, or values are not finite.

    Source: arXiv 2604.11791.

    Example:
        >>> looks_left = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> looks_here = torch.eye(2)
        >>> attention_change(torch.stack([looks_left, looks_here, looks_here]))
        tensor([1.4142, 0.0000])
    """
    if patterns.ndim < 3 or len(patterns) < 2:
        raise InputError(
            "patterns",
            expected="[loop, ..., query, key] with at least two loops",
            given=f"shape {tuple(patterns.shape)}",
            fix='Stack them with cache.stack("attn.hook_pattern").',
        )
    check_finite(patterns, "patterns")
    return _change(patterns[:-1], patterns[1:])


def _change(before: Tensor, after: Tensor) -> Tensor:
    return (after - before).flatten(-2).norm(dim=-1)


def attention_stabilisation_study(
    model: HookedRun,
    data: Batch | Task,
    *,
    n_loops: int | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> AttentionStabilisationResult:
    """Follow the attention pattern of every head through the loops.

    Args:
        model: A hooked looped model.
        data: Examples with targets, or a task to draw them from.
        n_loops: Loops of the run, at least 2; a quarter more than the longest T(n) by default.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If there are too few loops, an example asks nothing, or a pattern is not
            finite.
    """
    need_hooks(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = examples_for(model, data, needs_loops=n_loops is None, **drawn)
    asked_positions(batch, "asked")
    if n_loops is None:
        n_loops = max(2, math.ceil(1.25 * int(batch.n_loops.max())))
    check_integer("n_loops", n_loops, least=2)
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

    Of each layer only the last pattern is held, not those of all loops.
    """
    n_layers = model.site_map.n_layers
    before: deque[Tensor] = deque(maxlen=n_layers)
    changes: list[Tensor] = []
    exact: list[Tensor] = []

    def compare(pattern: Tensor, hook: object) -> None:
        check_finite(pattern[None], "patterns", start=len(exact))  # so many loops are scored
        if len(before) == n_layers:  # the first is the pattern of this layer, a loop ago
            changes.append(_change(before[0], pattern).float().cpu())
        before.append(pattern)

    def score(state: Tensor, hook: object) -> None:
        right = correctness(likeliest(model.readout(state)), batch.targets)
        exact.append(exact_match(right).bool().cpu())

    every = slice(None)
    patterns = model.site("attn.hook_pattern", loop=every, layer=every, n_loops=n_loops)
    states = model.site("hook_state_post", loop=every, n_loops=n_loops)
    hooks = [(name, compare) for name in patterns] + [(name, score) for name in states]
    model.run_with_hooks(batch.inputs, n_loops=n_loops, fwd_hooks=hooks)
    change = torch.stack(changes).unflatten(0, (-1, n_layers))
    missing = torch.full_like(change[:1], float("nan"))
    return {"change": torch.cat([missing, change]), "exact": torch.stack(exact)}
