"""A batch is what its fields say: parts of one size, of their types, and in their ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopinterp import circuits, lenses
from loopinterp.errors import MOST_LOOPS, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, Batch, as_batch, get_task, list_tasks
from loopinterp.tasks.task import IGNORE

GOOD = as_batch(Addition(), n=4, batch_size=8)
FEATURES = as_batch(Addition(format="features"), n=4, batch_size=8)

WRONG: dict[str, tuple[str, Callable[[], Batch]]] = {
    "a task's name": ("task", lambda: replace(GOOD, task="addition")),  # type: ignore[arg-type]
    "narrow targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[:, 1:])),
    "few targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[1:])),
    "flat targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[:, 0])),
    "float targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets.float())),
    "bool targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets > 0)),
    "listed targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets.tolist())),
    "target beyond": ("targets", lambda: replace(GOOD, targets=GOOD.targets.clamp(min=2))),
    "target below": ("targets", lambda: replace(GOOD, targets=GOOD.targets - 1, task=None)),
    "token beyond": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs + 2)),
    "token below": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs - 9, task=None)),
    "float tokens": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs.float())),
    "one example": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs[0])),
    "nan features": ("inputs", lambda: replace(FEATURES, inputs=FEATURES.inputs * torch.nan)),
    "no length": ("n", lambda: replace(GOOD, n=GOOD.n * 0)),
    "one length": ("n", lambda: replace(GOOD, n=GOOD.n[:1])),
    "number of loops": ("n_loops", lambda: replace(GOOD, n_loops=5)),  # type: ignore[arg-type]
    "float loops": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops.double())),
    "loops below": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops - 9)),
    "loops beyond": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops + MOST_LOOPS)),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", WRONG)
def test_a_batch_of_wrong_make_is_refused_by_the_part_that_is_wrong(name: str) -> None:
    part, make = WRONG[name]
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.what == f"{part} of a batch"


@pytest.mark.parametrize("name", [name for name in list_tasks() if name != "chess_puzzles"])
def test_what_a_task_draws_is_a_batch_and_so_is_any_part_of_it(name: str) -> None:
    batch = get_task(name).sample(3, batch_size=4, generator=torch.Generator().manual_seed(0))
    for part in (batch[:0], batch[1:], batch[batch.n > 5], batch.to("cpu")):
        assert isinstance(part, Batch)


def _model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config).eval()


def _unasked() -> Batch:
    targets = GOOD.targets.clone()
    targets[0] = IGNORE
    return replace(GOOD, targets=targets)


JUDGES: dict[str, Callable[[Batch], Any]] = {
    "ablation": lambda batch: circuits.ablation_study(_model(), batch, kinds=("zero",)),
    "comparison": lambda batch: circuits.compare_programs(_model(), ["ripple", "lookahead"], batch),
    "interchange": lambda batch: circuits.interchange_study(_model(), batch, "ripple"),
    "exits": lambda batch: lenses.exit_study(_model(), batch),
}
UNJUDGED = {
    "nothing is asked of one example": _unasked(),
    "nothing is asked": replace(GOOD, targets=torch.full_like(GOOD.targets, IGNORE)),
    "asked before the first loop": replace(GOOD, n_loops=GOOD.n_loops * 0),
    "no examples": GOOD[:0],
}


@pytest.mark.parametrize("kind", UNJUDGED)
@pytest.mark.parametrize("name", JUDGES)
def test_a_study_that_judges_answers_refuses_what_it_cannot_judge(name: str, kind: str) -> None:
    with pytest.raises(InputError):
        JUDGES[name](UNJUDGED[kind])


def test_a_lens_reads_what_nothing_is_asked_of() -> None:
    result = lenses.attention_study(_model(), _unasked())
    assert result.findings()


def test_an_ablation_refuses_classes_that_the_model_has_not() -> None:
    beyond = replace(GOOD, targets=torch.full_like(GOOD.targets, 2), task=None)
    with pytest.raises(InputError):
        JUDGES["ablation"](beyond)
