"""Length generalisation: exact match and bit accuracy by length and distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.intervals import wilson_interval
from loopinterp.models.protocol import bind
from loopinterp.results import Figure, Finding, Result, study
from loopinterp.tasks.task import IGNORE
from loopinterp.training.seeding import stream

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task

_EXAMPLES_AT_ONCE = 32
"""Few enough that the activations stay in a CPU's cache."""

_CELL = ("extra_loop", "distribution", "length")


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Result):
    """How often a model is right, by length and distribution.

    Attributes:
        task: Name of the task.
        lengths: Problem lengths n.
        distributions: Input distributions.
        extra_loops: Loops beyond T(n): 0 is the task's own T(n).
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, or None if not known.
        exact_match: Share of examples that are right at every position that is asked for.
        exact_match_low: Lower end of its 95% Wilson interval.
        exact_match_high: Upper end.
        bit_accuracy: Share of positions that are right, each example counting the same.
        bit_accuracy_low: Lower end of its 95% Wilson interval, with the number of examples as
            sample size: bits of one example are not independent, so this is on the safe side.
        bit_accuracy_high: Upper end.
        constant_exact_match: Control: the best answer that is the same at every position.
        constant_bit_accuracy: Control: the same answer, by position. High bit accuracy beside a
            low exact match is what an answer without the hard part looks like.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "exact_match": _CELL,
        "exact_match_low": _CELL,
        "exact_match_high": _CELL,
        "bit_accuracy": _CELL,
        "bit_accuracy_low": _CELL,
        "bit_accuracy_high": _CELL,
        "constant_exact_match": _CELL[1:],
        "constant_bit_accuracy": _CELL[1:],
    }

    task: str
    lengths: list[int]
    distributions: list[str]
    extra_loops: list[int]
    n_samples: int
    trained_up_to: int | None
    exact_match: np.ndarray
    exact_match_low: np.ndarray
    exact_match_high: np.ndarray
    bit_accuracy: np.ndarray
    bit_accuracy_low: np.ndarray
    bit_accuracy_high: np.ndarray
    constant_exact_match: np.ndarray
    constant_bit_accuracy: np.ndarray

    def cell(self, length: int, distribution: str, *, extra_loop: int = 0) -> dict[str, float]:
        """The numbers of one cell, by name.

        Raises:
            InputError: If the length, distribution or number of loops was not evaluated.
        """
        place: list[int] = []
        for axis, value in zip(_CELL, (extra_loop, distribution, length)):
            known = getattr(self, f"{axis}s")
            if value not in known:
                raise InputError(
                    axis,
                    expected=f"one of {', '.join(map(str, known))}",
                    given=repr(value),
                    fix="Evaluate it, or ask for what was evaluated.",
                )
            place.append(known.index(value))
        at = {name: tuple(place[-len(axes) :]) for name, axes in self.AXES.items()}
        return {name: float(getattr(self, name)[index]) for name, index in at.items()}

    def figures(self) -> list[Figure]:
        from loopinterp.training.figures import evaluation_figures

        return evaluation_figures(self)

    def summary(self) -> list[Finding]:
        from loopinterp.training.figures import evaluation_summary

        return evaluation_summary(self)


@torch.no_grad()
def evaluate(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    *,
    distributions: Sequence[str] | None = None,
    extra_loops: Sequence[int] = (0,),
    n_samples: int = 300,
    trained_up_to: int | None = None,
    seed: int = 0,
) -> EvaluationResult:
    """Exact match and bit accuracy at T(n) loops, and at others if asked.

    The examples come from another random stream than those of training, whatever the seed.

    Args:
        model: Any looped model; the examples are moved to where its weights are.
        task: What to ask it.
        lengths: Problem lengths.
        distributions: Input distributions; all but the one made for training if None
            (see :func:`judged_distributions`).
        extra_loops: Loops more than T(n), or fewer where negative.
        n_samples: Examples for each length and distribution.
        trained_up_to: Greatest length seen in training, to be marked in the figures.
        seed: Seed of the examples.

    Raises:
        InputError: If a list is empty, a number is out of range, or a name is unknown.
    """
    names = list(judged_distributions(task) if distributions is None else distributions)
    extra, cells = sorted(set(extra_loops)), sorted(set(lengths))
    _check(task, cells, names, extra, n_samples)
    shape = (len(names), len(cells))
    exact, bits = (np.zeros((len(extra), *shape)) for _ in range(2))
    constant_exact, constant_bits = np.zeros(shape), np.zeros(shape)
    described = {"task": {"name": task.name, **task.config()}, "model": _describe(model)}
    with study(seed, **described, n_samples=n_samples) as watch:
        for d, distribution in enumerate(names):
            for k, length in enumerate(cells):
                generator = stream(seed, f"evaluation {distribution} {length}")
                batch = task.sample(
                    length, batch_size=n_samples, generator=generator, distribution=distribution
                )
                batch = batch.to(_device(model))
                constant_exact[d, k], constant_bits[d, k] = _constant(batch, task.d_vocab_out)
                exact[:, d, k], bits[:, d, k] = _score(model, batch, extra)
        (exact_low, exact_high), (bits_low, bits_high) = (
            wilson_interval(share * n_samples, n_samples) for share in (exact, bits)
        )
        return EvaluationResult(
            provenance=watch.provenance(),
            task=task.name,
            lengths=cells,
            distributions=names,
            extra_loops=extra,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
            exact_match=exact,
            exact_match_low=exact_low,
            exact_match_high=exact_high,
            bit_accuracy=bits,
            bit_accuracy_low=bits_low,
            bit_accuracy_high=bits_high,
            constant_exact_match=constant_exact,
            constant_bit_accuracy=constant_bits,
        )


def judged_distributions(task: Task) -> tuple[str, ...]:
    """The distributions a task is judged on: the plain one and the hardest, where it has both.

    Example:
        >>> from loopinterp.tasks import get_task
        >>> judged_distributions(get_task("addition"))
        ('uniform', 'chain')
    """
    judged = tuple(d for d in ("uniform", "chain") if d in task.distributions)
    return judged or task.distributions[:1]


def _score(
    model: LoopedModel | Any, batch: Batch, extra_loops: list[int]
) -> tuple[list[float], list[float]]:
    """Exact match and bit accuracy after T(n) + k loops, for each k, in one run."""
    wanted = [int(batch.n_loops[0]) + k for k in extra_loops]
    chunks = [_answers(model, inputs, wanted) for inputs in batch.inputs.split(_EXAMPLES_AT_ONCE)]
    scores = [shares_right(torch.cat(answers), batch.targets) for answers in zip(*chunks)]
    return [exact for exact, _ in scores], [bits for _, bits in scores]


def _answers(model: LoopedModel | Any, inputs: Tensor, loops: list[int]) -> list[Tensor]:
    """The most probable class at each position, after each of the numbers of loops."""
    iteration = bind(model, inputs)
    state, answers = iteration.h0, {}
    for loop in range(max(loops) + 1):
        state = iteration.step(state) if loop else state
        if loop in loops:
            answers[loop] = iteration.readout(state).argmax(-1)
    return [answers[loop] for loop in loops]


def shares_right(
    answer: Int[Tensor, "batch pos"], targets: Int[Tensor, "batch pos"]
) -> tuple[float, float]:
    """Share of examples that are wholly right, and mean share of right positions."""
    asked = targets != IGNORE
    right = (answer == targets) & asked
    exact = (right | ~asked).all(-1).double().mean()
    by_example = right.sum(-1).double() / asked.sum(-1).double()
    return float(exact), float(by_example.mean())


def _constant(batch: Batch, d_vocab_out: int) -> tuple[float, float]:
    """The best of the answers that say the same everywhere."""
    answers = (torch.full_like(batch.targets, token) for token in range(d_vocab_out))
    scores = [shares_right(answer, batch.targets) for answer in answers]
    return max(exact for exact, _ in scores), max(bits for _, bits in scores)


def _device(model: LoopedModel | Any) -> torch.device:
    return getattr(model, "device", torch.device("cpu"))


def _describe(model: LoopedModel | Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return config.to_dict() if config is not None else {"class": type(model).__name__}


def _check(
    task: Task, lengths: list[int], distributions: list[str], extra: list[int], n_samples: int
) -> None:
    for name, values in (
        ("lengths", lengths),
        ("distributions", distributions),
        ("extra_loops", extra),
    ):
        if not values:
            raise InputError(
                name, expected="at least one value", given="none", fix=f"Pass {name}=[…]."
            )
    if n_samples < 1:
        raise InputError(
            "n_samples", expected="an integer >= 1", given=str(n_samples), fix="Pass more."
        )
    fewest = min(task.n_loops(n) for n in lengths) + extra[0]
    if fewest < 0:
        raise InputError(
            "extra_loops",
            expected=f"at least -{task.n_loops(min(lengths))}, as length {min(lengths)} has "
            f"T(n) = {task.n_loops(min(lengths))} loops",
            given=str(extra[0]),
            fix="Take away fewer loops, or drop the short lengths.",
        )
