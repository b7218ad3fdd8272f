"""Scores of answers after any number of loops; a stopping rule learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import device_of, need_model
from loopinterp.models.stopping import LengthLine
from loopinterp.models.study_examples import fit_to_model, need_model_of
from loopinterp.tasks.sampling import check_size, need_task, pick_distribution
from loopinterp.tasks.task import IGNORE
from loopinterp.tasks.token_by_token import TokenByToken
from loopinterp.training.device import stream

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task

_TOLERANCE = 0.01  # exact match to give up for slack, or for the steeper of two lines


class Scores(NamedTuple):
    """The scores of each example, over its positions with a target.

    Attributes:
        exact: Whether all are right.
        share: Share that is right.
        cross_entropy: Mean negative log-probability of the right answer, in nats.
    """

    exact: Bool[Tensor, "*loop example"]
    share: Float[Tensor, "*loop example"]
    cross_entropy: Float[Tensor, "*loop example"]


class Lowest(NamedTuple):
    share: float
    distributions: tuple[str, ...]


def lowest_of(shares: Mapping[str, float]) -> Lowest:
    least = min(shares.values())
    return Lowest(least, tuple(name for name, share in shares.items() if share == least))


def scores_at(
    model: LoopedModel | Any, batch: Batch, loops: Collection[int], *, may_diverge: bool = False
) -> dict[int, Scores]:
    """The scores of a batch after some numbers of loops."""
    parts: dict[int, list[Scores]] = {loop: [] for loop in sorted(loops)}
    inputs, targets = (x.split(32) for x in (batch.inputs, batch.targets))
    for some, right in zip(inputs, targets):  # [example, pos] of some examples
        bound = bind(model, some)
        for loop, state in bound.run(max(parts), may_diverge=may_diverge):
            if loop in parts:
                parts[loop].append(score(bound.read(state, loop), right))
    return {loop: Scores(*map(torch.cat, zip(*some))) for loop, some in parts.items()}


def score(
    logits: Float[Tensor, "batch pos d_vocab_out"], targets: Int[Tensor, "batch pos"]
) -> Scores:
    has_target = targets != IGNORE
    exact, share = _right_by_example(logits.argmax(-1), targets)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # [batch, pos, 1]: class 0 stands in where there is no target, and is masked out below.
    right_class = targets.masked_fill(~has_target, 0)[..., None]
    # [batch, pos]: negative log-probability of the right class
    surprise = -logits.log_softmax(-1, dtype=dtype).gather(-1, right_class)[..., 0]
    total = surprise.masked_fill(~has_target, 0).sum(-1, dtype=torch.float64)
    return Scores(exact, share, total / has_target.sum(-1))


def _right_by_example(answer: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    has_target = targets != IGNORE
    right = (answer == targets) & has_target  # [batch, pos]
    return (right | ~has_target).all(-1), right.sum(-1).double() / has_target.sum(-1).double()


def perplexity_estimate(cross_entropy: Float[Tensor, " example"]) -> np.ndarray:
    """Perplexity of the right answer with its 95% interval: (value, low, high).

    ``exp(mean -+ 1.96 s / sqrt(n))`` of the cross-entropies of n examples, with standard deviation
    s.
    """
    mean, n = cross_entropy.double().mean(), len(cross_entropy)
    error = cross_entropy.double().std() / n**0.5 if n > 1 else mean.new_tensor(torch.inf)
    half = 1.959964 * error
    # value, low, high; a perplexity is at least 1
    ends = torch.stack([mean, (mean - half).clamp(min=0), mean + half])
    return ends.exp().cpu().numpy()


def constant_scores(targets: Int[Tensor, "batch pos"]) -> tuple[float, float]:
    """Exact match and share of right positions of the best answers that ignore the input.

    For the share, the most frequent class at each position with a target; for exact match, the most
    frequent whole answer, if that is right more often.

    Example:
        >>> constant_scores(torch.tensor([[IGNORE, 0, 2], [1, 2, IGNORE]]))
        (0.5, 0.75)
    """
    # [example, pos]: the targets of each example moved to its first columns, in their order.
    answers = targets.gather(1, (targets == IGNORE).int().argsort(dim=1, stable=True))
    has_target = answers != IGNORE  # from the first column on, wherever an answer starts
    weight = has_target.double() / has_target.sum(1, keepdim=True)
    # [class][position]: how often each class is right at the first position, the second, …
    votes = [(weight * (answers == token)).sum(0) for token in range(int(answers.max()) + 1)]
    likeliest = torch.stack(votes).argmax(0).expand_as(answers)
    exact, share = _right_by_example(likeliest, answers)
    commonest = int(answers.unique(dim=0, return_counts=True)[1].max()) / len(answers)
    return max(float(exact.double().mean()), commonest), float(share.mean())


def askable_distributions(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    n_samples: int,
    distributions: Sequence[str] | None = None,
) -> list[str]:
    """The distributions that a model is evaluated on; raise if it sees the answers."""
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    names = task.distributions if distributions is None else distributions
    names = [pick_distribution(task, name) for name in dict.fromkeys(names)]
    check_size(task, max(lengths), n_samples, "lengths, n_samples")
    sees_answers = isinstance(task, TokenByToken) and _sees_answers(task, model, min(lengths))
    expected = f"one that sees no later position: the input of {task.name!r} holds the answer"
    got = "logits that change with the tokens after their position"
    need(not sees_answers, "model", expected, got, "Use a causal mask.")
    return names


@torch.no_grad()
def _sees_answers(task: Task, model: LoopedModel | Any, n: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(n, batch_size=8, generator=generator).to(device_of(model))
    batch = fit_to_model(model, batch)
    has_target = batch.targets != IGNORE
    first, last = has_target.int().argmax(1), int(batch.n_loops.max())
    # The token after a position with a target is the answer to it: put another token there.
    written = torch.nn.functional.pad(has_target[:, :-1], (1, 0))
    tokens = batch.inputs[written].unique()
    other = batch.inputs.clone()
    other[written] = tokens[(torch.searchsorted(tokens, other[written]) + 1) % len(tokens)]
    logits = []  # [batch, d_vocab_out] where the first token of the answer is predicted
    for inputs in (batch.inputs, other):
        bound = bind(model, inputs)
        *_, (loop, state) = bound.run(last, may_diverge=True)
        logits.append(bound.read(state, loop)[torch.arange(8, device=inputs.device), first])
    change = (logits[1] - logits[0]).abs().max()
    return bool(change > 1e-3 * logits[0].abs().max())  # more than rounding


@torch.no_grad()
@checked
def calibrate_stopping(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    *,
    distributions: Sequence[str] | None = None,
    max_loops: PositiveInt | None = None,
    n_samples: PositiveInt = 100,
    seed: Seed = 0,
) -> LengthLine:
    """Learn from training lengths after how many loops to stop, as a line to extrapolate.

    Finds the lines ``T = slope * n_pos + offset``, slope >= 0, with the highest exact match on each
    distribution and on the worst of them at each length. Of those best on the worst, it returns the
    steepest. T(n) is not used. Where all inputs have one number of positions, the slope is 0.

    Args:
        lengths: At least two problem lengths seen in training.
        distributions: Input distributions; all of the task if None.
        max_loops: Loops to try; twice the positions of the longest input if None.
        n_samples: Examples for each length and distribution, unused in training and evaluation.
    """
    cells = sorted(set(lengths))
    fix = "Pass e.g. range(1, run.cutoff + 1)."
    need(len(cells) > 1, "lengths", "at least two", str(cells), fix)
    names = askable_distributions(model, task, cells, n_samples, distributions or None)
    n_positions = [task.n_positions(n) for n in cells]  # until batches say what they have
    last = 2 * n_positions[-1] if max_loops is None else max_loops
    # [distribution, length, loop]
    exact = np.zeros((len(names), len(cells), last + 1))
    for (d, name), (k, n) in track(list(product(enumerate(names), enumerate(cells))), "calibrate"):
        generator = stream(seed, f"calibration {name} {n}")
        batch = task.sample(n, batch_size=n_samples, generator=generator, distribution=name)
        batch = batch.to(device_of(model))
        n_positions[k] = batch.inputs.shape[1]
        for loop, scores in scores_at(model, batch, range(last + 1), may_diverge=True).items():
            exact[d, k, loop] = scores.exact.double().mean()
    worst = exact.min(0)  # [length, loop]
    lines = [_best_line(table, n_positions) for table in (*exact, worst)]
    stops = [[min(line.loops(n), last) for n in n_positions] for line in lines]
    # Mean exact match on the worst distribution, of each line at its own loops.
    reached = [float(worst[np.arange(len(cells)), loops].mean()) for loops in stops]
    good = [line for line, share in zip(lines, reached) if share >= max(reached) - _TOLERANCE]
    return max(good, key=lambda line: (line.slope, line.offset))


def _best_line(exact: np.ndarray, n_positions: Sequence[int]) -> LengthLine:
    """The line of loops against positions with the best exact match ``[length, loop]``."""
    from scipy.ndimage import minimum_filter1d

    first, span = n_positions[0], n_positions[-1] - n_positions[0]
    # Every line that does not fall, by the loops at its two ends.
    low, high = np.triu_indices(exact.shape[1])
    if not span:  # inputs that all have one size, such as sudokus, tell no slope
        low = high = np.arange(exact.shape[1])
    at = (np.asarray(n_positions) - first) / max(span, 1)
    loops = np.rint(low[:, None] + (high - low)[:, None] * at).astype(int)  # [line, length]
    # Lines that do as well with some loops more or fewer come first; then those of fewest loops.
    chosen, reached = None, -np.inf
    for slack in (2, 1, 0):
        # The worst of the loops within the slack; beyond the last loop the last one counts.
        lowest = minimum_filter1d(exact, 2 * slack + 1, axis=1, mode="nearest")
        score = lowest[np.arange(len(n_positions)), loops].mean(1)  # [line]: mean over lengths
        best = score.max()
        fewest = np.where(score >= best - 1e-9, loops.sum(1), np.inf).argmin()
        if chosen is None or best > reached + _TOLERANCE:
            chosen, reached = int(fewest), best
    assert chosen is not None
    slope = float(high[chosen] - low[chosen]) / max(span, 1)
    return LengthLine(slope, float(low[chosen]) - slope * first)
