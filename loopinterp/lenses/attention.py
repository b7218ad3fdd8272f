"""Attention by loop: where each head looks at each loop, against looking everywhere alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.results import Figure, Finding, Result, percent, study

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedTransformer

_HEAD_AXES = ("loop", "layer", "head")


@dataclass(frozen=True, kw_only=True)
class AttentionResult(Result):
    """What :func:`attention_study` returns.

    Attributes:
        patterns: Attention of one example, ``[loop, layer, head, query, key]``.
        distance_mass: Mean attention to the key ``distances[d]`` positions to the left of its
            query, over queries that can see that far.
        distance_low: Lower end of its 95% interval over examples.
        distance_high: Upper end.
        distance_even: Control: the same if each query spread its attention evenly over the keys
            it may see.
        entropy: Mean entropy of attention in bits.
        entropy_even: Control: mean entropy, in bits, of attention spread evenly.
        distances: Distances, 0 the query itself; negative distances look to the right.
        labels: One for each position of the example.
        example: Which example of the batch is shown.
        n_examples: Examples behind the means.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "patterns": (*_HEAD_AXES, "query", "key"),
        "distance_mass": (*_HEAD_AXES, "distance"),
        "distance_low": (*_HEAD_AXES, "distance"),
        "distance_high": (*_HEAD_AXES, "distance"),
        "distance_even": ("distance",),
        "entropy": _HEAD_AXES,
    }

    patterns: np.ndarray
    distance_mass: np.ndarray
    distance_low: np.ndarray
    distance_high: np.ndarray
    distance_even: np.ndarray
    entropy: np.ndarray
    entropy_even: float
    distances: list[int]
    labels: list[str]
    example: int
    n_examples: int

    def figures(self) -> list[Figure]:
        from loopinterp.lenses.figures import attention_figures

        return attention_figures(self)

    def summary(self) -> list[Finding]:
        """The head with the strongest preference, and what it prefers."""
        layer, head, distance = self.strongest()
        mass = float(self.distance_mass[:, layer, head, distance].mean())
        name = f"Head {head}" if self.patterns.shape[1] == 1 else f"Layer {layer}, head {head}"
        text = (
            f"{name} has the strongest preference: {percent(mass)} of its attention goes to "
            f"{place(self.distances[distance])} (mean over loops), against "
            f"{percent(self.distance_even[distance])} if it were spread evenly over what a "
            "position may see."
        )
        return [Finding(kind="attention", text=text, value=percent(mass))]

    def strongest(self) -> tuple[int, int, int]:
        """Layer, head and index of the distance furthest above the even control over all loops."""
        above = self.distance_mass.mean(axis=0) - self.distance_even
        layer, head, distance = np.unravel_index(int(np.argmax(above)), above.shape)
        return int(layer), int(head), int(distance)


@torch.no_grad()
def attention_study(
    model: LoopedTransformer,
    inputs: Tensor,
    *,
    n_loops: int,
    labels: Sequence[str] | None = None,
    example: int = 0,
    max_distance: int = 8,
    seed: int = 0,
) -> AttentionResult:
    r"""Attention of every head at every loop, by position and by distance.

    ``distance_mass[t, l, h, d]`` is the mean of :math:`A_{q, q-d}` over examples and over queries
    q for which q - d is a position that attention may reach.

    Args:
        model: The model.
        inputs: Tokens ``[batch, pos]`` or features ``[batch, pos, d_features]``, all of one
            length (padding would count as positions).
        n_loops: Loops to run.
        labels: A word for each position of the example shown; position numbers by default.
        example: The example whose patterns are kept.
        max_distance: Largest distance counted by itself.
        seed: Written to the provenance; the study draws nothing.

    Raises:
        InputError: If ``example`` is out of range or ``labels`` do not fit.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> tokens = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
        >>> result = attention_study(LoopedTransformer(config), tokens, n_loops=3)
        >>> result.patterns.shape, result.n_examples
        ((3, 1, 2, 4, 4), 2)
    """
    n_examples, n_pos = inputs.shape[:2]
    if not 0 <= example < n_examples:
        raise InputError(
            "example",
            expected=f"an index from 0 to {n_examples - 1}",
            given=str(example),
            fix="Choose an example of the batch.",
        )
    if labels is not None and len(labels) != n_pos:
        raise InputError(
            "labels",
            expected=f"{n_pos} labels, one for each position",
            given=str(len(labels)),
            fix="Leave labels out to number the positions.",
        )
    settings = {"n_loops": n_loops, "example": example, "max_distance": max_distance}
    config = {"model": model.config.to_dict(), "n_examples": n_examples, **settings}
    with study(seed, **config) as watch:
        patterns = _patterns(model, inputs, n_loops)
        visible = _visible(model, patterns)
        mass, even, distances = _by_distance(patterns, visible, max_distance)
        half = 1.96 * mass.std(1, correction=1 if n_examples > 1 else 0) / n_examples**0.5
        mean = mass.mean(1)
        arrays = {
            "patterns": patterns[:, example],
            "distance_mass": mean,
            "distance_low": (mean - half).clamp(min=0),
            "distance_high": (mean + half).clamp(max=1),
            "distance_even": even,
            "entropy": _entropy(patterns).mean((1, -1)),
        }
        return AttentionResult(
            **{name: value.cpu().numpy() for name, value in arrays.items()},
            entropy_even=float(visible.sum(-1).double().log2().mean()),
            distances=distances,
            labels=[str(k) for k in labels or range(n_pos)],
            example=example,
            n_examples=n_examples,
            provenance=watch.provenance(),
        )


def _patterns(
    model: LoopedTransformer, inputs: Tensor, n_loops: int
) -> Float[Tensor, "loop batch layer head query key"]:
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter="attn.hook_pattern")
    layers = [
        cache.stack("attn.hook_pattern", layer=layer) for layer in range(model.config.n_layers)
    ]
    return torch.stack(layers, dim=2).double()


def _visible(model: LoopedTransformer, patterns: Tensor) -> Tensor:
    """The keys each query may see, ``[query, key]``: what causality and the window allow."""
    n_pos = patterns.shape[-1]
    distance = torch.arange(n_pos)[:, None] - torch.arange(n_pos)[None, :]
    visible = torch.ones(n_pos, n_pos, dtype=torch.bool)
    if model.config.causal:
        visible &= distance >= 0
    if model.config.attention_window is not None:
        visible &= distance.abs() <= model.config.attention_window
    return visible.to(patterns.device)


def _by_distance(
    patterns: Tensor, visible: Tensor, max_distance: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Mass at each distance ``[loop, batch, layer, head, distance]``, and its even control."""
    n_pos = patterns.shape[-1]
    even = visible / visible.sum(-1, keepdim=True)
    mass, control, distances = [], [], []
    for distance in range(-max_distance, max_distance + 1):
        seen = visible.diagonal(-distance) if abs(distance) < n_pos else visible[:0, 0]
        if not seen.any():
            continue
        diagonal = patterns.diagonal(-distance, dim1=-2, dim2=-1)
        mass.append(diagonal[..., seen].mean(-1))
        control.append(even.diagonal(-distance)[seen].mean())
        distances.append(distance)
    return torch.stack(mass, -1), torch.stack(control), distances


def _entropy(patterns: Tensor) -> Tensor:
    return -torch.special.xlogy(patterns, patterns).sum(-1) / np.log(2)


def place(distance: int) -> str:
    """A distance in words."""
    if distance == 0:
        return "the position itself"
    side = "left" if distance > 0 else "right"
    if abs(distance) == 1:
        return f"the {side} neighbour"
    return f"{abs(distance)} positions to the {side}"
