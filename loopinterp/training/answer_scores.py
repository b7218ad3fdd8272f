"""How right an answer is: exact match, share of right positions, cross-entropy; by example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loopinterp.models.looped_model import bind
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.task import Batch

_EXAMPLES_AT_ONCE = 32
"""Few enough that the activations stay in a CPU's cache."""

_Z = 1.959964


class Scores(NamedTuple):
    """Of each example, after each of some numbers of loops.

    Attributes:
        exact: Whether every position that is asked for is right.
        share: Share of those positions that are right.
        cross_entropy: Mean over them of the right answer's negative log-probability, in nats.
    """

    exact: Bool[Tensor, "*loop example"]
    share: Float[Tensor, "*loop example"]
    cross_entropy: Float[Tensor, "*loop example"]


class Lowest(NamedTuple):
    """The lowest share over the input distributions of a task: what the task as a whole is given.

    Attributes:
        share: That share.
        distributions: Those that have it, in the task's order; several where they tie.
    """

    share: float
    distributions: tuple[str, ...]


def lowest_of(shares: Mapping[str, float]) -> Lowest:
    """The lowest of the shares by distribution, and all distributions that have it.

    Example:
        >>> lowest_of({"uniform": 1.0, "biased": 0.5, "mixed": 0.5})
        Lowest(share=0.5, distributions=('biased', 'mixed'))
    """
    least = min(shares.values())
    return Lowest(least, tuple(name for name, share in shares.items() if share == least))


def scores_at(
    model: LoopedModel | Any, batch: Batch, loops: Collection[int], *, may_diverge: bool = False
) -> dict[int, Scores]:
    """The scores of a batch after each of some numbers of loops, from one run of a few examples
    at a time; no state outlives its loop, and of the answers only their scores do.
    """
    parts: dict[int, list[Scores]] = {loop: [] for loop in sorted(loops)}
    inputs, targets = (x.split(_EXAMPLES_AT_ONCE) for x in (batch.inputs, batch.targets))
    for some, right in zip(inputs, targets):
        bound = bind(model, some)
        for loop, state in bound.run(max(parts), may_diverge=may_diverge):
            if loop in parts:
                parts[loop].append(score(bound.read(state, loop), right))
    return {loop: Scores(*map(torch.cat, zip(*some))) for loop, some in parts.items()}


def score(
    logits: Float[Tensor, "batch pos d_vocab_out"], targets: Int[Tensor, "batch pos"]
) -> Scores:
    """The scores of one readout."""
    exact, share = right_by_example(logits.argmax(-1), targets)
    asked = targets != IGNORE
    dtype = torch.promote_types(logits.dtype, torch.float32)
    of_right = targets.masked_fill(~asked, 0)[..., None]
    doubt = -logits.log_softmax(-1, dtype=dtype).gather(-1, of_right)[..., 0]
    total = doubt.masked_fill(~asked, 0).sum(-1, dtype=torch.float64)
    return Scores(exact, share, total / asked.sum(-1))


def right_by_example(
    answer: Int[Tensor, "batch pos"], targets: Int[Tensor, "batch pos"]
) -> tuple[Bool[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Whether each example is wholly right, and the share of its positions that are."""
    asked = targets != IGNORE
    right = (answer == targets) & asked
    return (right | ~asked).all(-1), right.sum(-1).double() / asked.sum(-1).double()


def shares_right(
    answer: Int[Tensor, "batch pos"], targets: Int[Tensor, "batch pos"]
) -> tuple[float, float]:
    """Share of examples that are wholly right, and mean share of right positions."""
    exact, share = right_by_example(answer, targets)
    return float(exact.double().mean()), float(share.mean())


def perplexity_estimate(cross_entropy: Float[Tensor, " example"]) -> np.ndarray:
    """Perplexity of the right answer with its 95% interval: (value, low, high).

    ``exp(mean of the examples' cross-entropies)``, the geometric mean of their perplexities; its
    ends are those of ``mean -+ 1.96 s / sqrt(examples)``, with s their standard deviation.

    Example:
        >>> perplexity_estimate(torch.log(torch.tensor([2.0, 8.0]))).round(1).tolist()
        [4.0, 1.0, 15.6]
    """
    mean, n = cross_entropy.double().mean(), len(cross_entropy)
    error = cross_entropy.double().std() / n**0.5 if n > 1 else mean.new_tensor(torch.inf)
    ends = torch.stack([mean, (mean - _Z * error).clamp(min=0), mean + _Z * error])
    return ends.exp().cpu().numpy()


def constant_scores(targets: Int[Tensor, "batch pos"]) -> tuple[float, float]:
    """Exact match and share of right positions of the best answers that read nothing of the input.

    For the share that is the likeliest class at the first position that is asked for, at the
    second, and so on; for exact match the commonest whole answer, if that is more often right.

    Example:
        >>> constant_scores(torch.tensor([[IGNORE, 0, 2], [1, 2, IGNORE]]))
        (0.5, 0.75)
    """
    answers = targets.gather(1, (targets == IGNORE).int().argsort(dim=1, stable=True))
    asked = answers != IGNORE  # from the first position on, wherever an example's answer starts
    weight = asked.double() / asked.sum(1, keepdim=True)
    votes = [(weight * (answers == token)).sum(0) for token in range(int(answers.max()) + 1)]
    likeliest = torch.stack(votes).argmax(0).expand_as(answers)
    exact, share = shares_right(likeliest, answers)
    commonest = int(answers.unique(dim=0, return_counts=True)[1].max()) / len(answers)
    return max(exact, commonest), share
