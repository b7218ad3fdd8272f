"""The grid by operand lengths: exact match for every pair, after several numbers of loops.

An answer that is written symbol by symbol is wholly right by greedy generation exactly if every
symbol is the most probable one after the right symbols before it: up to the first mistake the
generated prefix is the right one. So one pass over the right answers scores generation, as long as
the model cannot see what stands after a position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.intervals import ESTIMATE, wilson_estimate
from loopinterp.models.iteration import check_increasing
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.progress import track
from loopinterp.results import Result, config_hash, study
from loopinterp.storage import read_arrays, write_arrays
from loopinterp.study_examples import need_model_of
from loopinterp.tasks.sampling import check_size
from loopinterp.tasks.study_data import need_task
from loopinterp.training.answer_scores import scores_at
from loopinterp.training.seeding import stream
from loopinterp.training.unseen_answers import need_unseen_answers

if TYPE_CHECKING:
    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.task import Task

_MADE = "made"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class OperandGrid(Result, kind="operand-grid"):
    """How often a model is right, by the lengths of both operands and the number of loops.

    Arrays:
        exact_match: Share of answers that are wholly right, with its 95% Wilson interval.

    Attributes:
        task: Name of the task.
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, or None if not known.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {"exact_match": f"loop n_a n_b {ESTIMATE}"}

    task: str
    n_samples: int
    trained_up_to: int | None = None


@torch.no_grad()
def operand_grid(
    model: LoopedModel | Any,
    task: Task | Any,
    to: int,
    *,
    loops: Sequence[int] = (1, 2, 4, 8, 16, 32),
    n_samples: int = 100,
    trained_up_to: int | None = None,
    unfinished: str | Path | None = None,
    seed: int = 0,
) -> OperandGrid:
    """Exact match for all pairs of operand lengths from 1 to N, after several numbers of loops.

    Args:
        model: Any looped model; one that sees what stands after a position is refused where the
            answer stands in the input.
        task: One with ``sample_operands(n_a, n_b, batch_size=, generator=)``.
        to: N.
        loops: Numbers of loops, increasing.
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, to be said in the figure.
        unfinished: A file of the cells that are done, complete or absent; a grid that was stopped
            goes on from it with the same numbers. Remove it once the result is saved.
        seed: Seed of the examples; those of a cell do not depend on the other cells.

    Raises:
        InputError: If the task cannot draw operands of given lengths, the model is of another
            task or sees the answers, or a number is out of range.
    """
    need_model(model)
    need_task(task)
    draw = _operand_sampler(task)
    need_model_of(task, model)
    need_unseen_answers(task, model, 1)
    check_integer("to", to, least=1)
    check_integer("n_samples", n_samples, least=1)
    check_size(task, to, n_samples, "to, n_samples")
    asked = check_increasing(loops)
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    made = described | {"to": to, "loops": asked, "n_samples": n_samples, "seed": seed}
    file = None if unfinished is None else Path(unfinished)
    exact = _resumed(file, made, (len(asked), to, to))
    with study(seed, **described, n_samples=n_samples) as watch:
        for n_a, n_b in track(list(product(range(1, to + 1), repeat=2)), "grid"):
            at = (slice(None), n_a - 1, n_b - 1)
            if not np.isnan(exact[at]).any():
                continue
            generator = stream(seed, f"operands {n_a} {n_b}")
            batch = draw(n_a, n_b, batch_size=n_samples, generator=generator)
            found = scores_at(model, batch.to(device_of(model)), asked)
            exact[at] = [float(found[loop].exact.double().mean()) for loop in asked]
            if file is not None:
                write_arrays(file, {"exact": exact}, {_MADE: json.dumps(config_hash(made))})
        return OperandGrid.of(
            watch,
            coords={"loop": asked, "n_a": range(1, to + 1), "n_b": range(1, to + 1)},
            exact_match=wilson_estimate(exact * n_samples, n_samples),
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
        )


def _resumed(file: Path | None, made: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """The cells that are done, NaN where none is; those of another grid are left alone."""
    if file is None or not file.exists():
        return np.full(shape, np.nan)
    arrays, texts = read_arrays(file)
    if texts.get(_MADE) != json.dumps(config_hash(made)) or arrays["exact"].shape != shape:
        return np.full(shape, np.nan)
    return arrays["exact"].copy()


def _operand_sampler(task: Any) -> Callable[..., Any]:
    sampler: Any = getattr(task, "sample_operands", None)
    if not callable(sampler):
        raise InputError(
            "task",
            expected="one that draws operands of given lengths (sample_operands)",
            given=f"{task.name!r}, which does not",
            fix="Take a task of two operands, or evaluate it by length.",
        )
    return sampler
