"""Where each head attends by loop, compared with even attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import NonNegativeInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.dynamics.measures import check_finite
from loopinterp.models.protocol import describe_model, need_hooks
from loopinterp.models.study_examples import inputs_and_loops

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models import HookedRun
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AttentionResult(Result, kind="attention"):
    """The result of :func:`attention_study`.

    Arrays:
        patterns: Attention of one example.
        mass: Mean attention to the key ``distance`` positions to the left of its query (negative:
            to the right), over queries that see that far; 95% interval over examples.
        mass_even: Control: the same under even attention to all visible keys; NaN where none is at
            that distance.
        received: Mean attention that a key gets from all other queries that see it, with its
            interval; NaN if these are fewer than a quarter of the positions.
        received_even, entropy_even: Controls: the same under even attention.
        entropy: Mean entropy of attention, in bits.

    Attributes:
        labels: A label for each position of the example.
        fixed: Whether all examples have the same input at a position.
        example: Number of the example in ``patterns``.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "patterns": "loop layer head query key",
        "mass": f"loop layer head distance {ESTIMATE}",
        "mass_even": "head distance",
        "received": f"loop layer head key {ESTIMATE}",
        "received_even": "head key",
        "entropy": "loop layer head",
        "entropy_even": "head",
    }

    labels: list[str]
    fixed: list[bool]
    example: int
    n_examples: int

    def strongest(self) -> dict[str, int]:
        """Layer, head and distance whose mass exceeds the even control most, over all loops."""
        return self._furthest("mass")

    def strongest_sink(self) -> dict[str, int] | None:
        """Layer, head and key that receives most above the even control; None if all are NaN."""
        any_key = self.data["received_even"].notnull().any()
        return self._furthest("received") if any_key else None

    def _furthest(self, name: str) -> dict[str, int]:
        # [layer, head, distance or key]
        above = self.data[name].sel({ESTIMATE: "value"}).mean("loop") - self.data[f"{name}_even"]
        best = above.argmax(list(map(str, above.dims)))
        return {str(axis): int(above[axis][at]) for axis, at in best.items()}


@torch.no_grad()
@checked
def attention_study(
    model: HookedRun,
    data: Batch | Task | Tensor,
    *,
    n_loops: Loops | None = None,
    labels: Sequence[str] | None = None,
    example: NonNegativeInt = 0,
    max_distance: NonNegativeInt = 8,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> AttentionResult:
    """Attention of every head at every loop, by position, by distance and by key.

    The mass of distance d is the mean of :math:`A_{q, q-d}` over examples and queries. A key k
    receives the mean of :math:`A_{q, k}` over all other queries, which is large for a sink.

    Args:
        data: Examples of one length, or inputs alone.
        n_loops: The longest T(n) by default; required for inputs alone.
        labels: A word for each position of the shown example.
        example: The example shown in ``patterns``.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> tokens = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
        >>> result = attention_study(LoopedTransformer(config), tokens, n_loops=3)
        >>> result
        AttentionResult(loop: 3, layer: 1, head: 2, query: 4, key: 4, distance: 4, estimate: 3;
                        patterns, mass, mass_even, received, received_even, entropy, entropy_even)
    """
    need_hooks(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, n_loops = inputs_and_loops(model, data, n_loops, **drawn)
    n_examples, n_pos = inputs.shape[:2]
    check_integer("example", example, least=0, most=n_examples - 1)
    if labels is not None and len(labels) != n_pos:
        raise InputError(
            "labels",
            expected=f"{n_pos} labels, one for each position",
            given=str(len(labels)),
            fix="Leave labels out to number the positions.",
        )
    settings = {"n_loops": n_loops, "example": example, "max_distance": max_distance}
    config = {"model": describe_model(model), "n_examples": n_examples, **settings}
    with study(seed, **config) as watch:
        patterns = _patterns(model, inputs, n_loops)
        check_finite(patterns, "patterns")
        visible = model.visible(n_pos).expand(model.site_map.n_heads, n_pos, n_pos)
        even = visible / visible.sum(-1, keepdim=True)
        mass, mass_even, distances = _by_distance(patterns, even, visible, max_distance)
        # Queries that may see a key, the key itself left out: [head, query, key].
        others = visible & ~torch.eye(n_pos, dtype=torch.bool, device=visible.device)
        seen_by = others.sum(-2)  # [head, key]
        count = torch.where(seen_by >= max(3, n_pos / 4), seen_by, float("nan")).double()
        axes = dict(zip(("loop", "layer", "head"), map(range, patterns[:, 0].shape)))
        return AttentionResult.of(
            watch,
            coords={**axes, "distance": distances},
            patterns=patterns[:, example],
            mass=_over_examples(mass),
            mass_even=mass_even,
            received=_over_examples((patterns * others).sum(-2) / count),
            received_even=(even * others).sum(-2) / count,
            entropy=torch.special.entr(patterns).sum(-1).mean((1, -1)) / math.log(2),  # bits
            entropy_even=visible.sum(-1).double().log2().mean(-1),
            labels=[str(k) for k in labels or range(n_pos)],
            fixed=(inputs == inputs[:1]).reshape(n_examples, n_pos, -1).all(-1).all(0).tolist(),
            example=example,
            n_examples=n_examples,
        )


def _patterns(
    model: HookedRun, inputs: Tensor, n_loops: int
) -> Float[Tensor, "loop batch layer head query key"]:
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter="attn.hook_pattern")
    return cache.stack("attn.hook_pattern", layer=slice(None)).transpose(1, 2).double()


def _over_examples(mass: Tensor) -> Tensor:
    """Mean and interval over examples, the second axis."""
    n_examples = mass.shape[1]
    half = 1.96 * mass.std(1, correction=1 if n_examples > 1 else 0) / n_examples**0.5
    mean = mass.mean(1)  # [loop, layer, head, place]
    return torch.stack([mean, (mean - half).clamp(min=0), (mean + half).clamp(max=1)], -1)


def _by_distance(
    patterns: Tensor, even: Tensor, visible: Bool[Tensor, "head query key"], max_distance: int
) -> tuple[Tensor, Float[Tensor, "head distance"], list[int]]:
    mass, control, distances = [], [], []
    furthest = min(max_distance, visible.shape[-1] - 1)
    for distance in range(-furthest, furthest + 1):
        # A head sees so far or it does not, whatever the query.
        seen = visible.diagonal(-distance, dim1=-2, dim2=-1).all(-1)  # [head]
        if not seen.any():
            continue
        for shares, weights in ((mass, patterns), (control, even)):
            share = weights.diagonal(-distance, dim1=-2, dim2=-1).mean(-1)  # [..., head]
            shares.append(torch.where(seen, share, float("nan")))
        distances.append(distance)
    return torch.stack(mass, -1), torch.stack(control, -1), distances
