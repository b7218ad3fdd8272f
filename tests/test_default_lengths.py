"""Lengths that commands choose by themselves are lengths of the task, and take bounded work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopinterp import workflow
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.saved_results import Owner
from loopinterp.studied_model import MOST_LOOPS, MOST_WORK, StudiedModel, open_run
from loopinterp.tasks import Task, get_task, list_tasks
from loopinterp.tasks.sampling import longest_length
from loopinterp.tasks.token_by_token import TokenByToken
from loopinterp.training import Run

PUZZLES = Path(__file__).parent / "tasks" / "rook_mates.csv"
TASKS = [
    *(get_task(name) for name in list_tasks() if name != "chess_puzzles"),
    get_task("chess_puzzles", csv=str(PUZZLES)),
    get_task("sudoku", box=3),
]


def _model_of(task: Task, *, n_ctx: int | None = None) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=task.d_vocab,
        d_features=task.d_features,
        d_vocab_out=task.d_vocab_out,
        causal=isinstance(task, TokenByToken),
        positions="none" if n_ctx is None else "absolute",
        n_ctx=n_ctx,
    )
    return LoopedTransformer(config, seed=0)


def _studied(task: Task, cutoff: int) -> StudiedModel:
    owner = Owner(config="")
    return StudiedModel(model=_model_of(task), task=task, folder=Path(), owner=owner, cutoff=cutoff)


def _can_draw(task: Task, n: int) -> bool:
    try:
        task.sample(n, batch_size=2, generator=torch.Generator().manual_seed(0))
    except InputError:
        return False
    return True


@pytest.mark.parametrize("cutoff", [1, 8, 100])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_has_the_lengths_that_commands_ask(task: Task, cutoff: int) -> None:
    model = _studied(task, cutoff)
    asked = [*workflow._calibration_lengths(model), *workflow._lengths(model)]
    shortest = longest_length(task, 1)
    for n in asked:
        work = task.n_loops(n) * task.n_positions(n) ** 2
        assert _can_draw(task, n) and (work <= MOST_WORK or n == shortest)
    for k in (1, 2, 4):
        n = model.length(k * cutoff)
        assert _can_draw(task, n) and (task.n_loops(n) <= MOST_LOOPS or n == shortest)


@pytest.mark.parametrize(
    ("task", "n", "longest"),
    [
        (get_task("sudoku", box=2), 500, 12),
        (get_task("sudoku", box=3), 500, 54),
        (get_task("sudoku", box=2), 3, 3),
        (get_task("abacus_sorting"), 500, 52),
        (get_task("addition"), 500, 500),
    ],
)
def test_the_longest_length_of_a_task(task: Task, n: int, longest: int) -> None:
    assert longest_length(task, n) == longest and _can_draw(task, longest)


def test_a_sudoku_run_is_evaluated_and_analysed_at_its_lengths(tmp_path: Path) -> None:
    task = get_task("sudoku", box=2)
    folder = tmp_path / "run"
    Run.from_model(_model_of(task, n_ctx=16), task, folder, max_n=8, origin="made up")
    result = workflow.evaluate_run(folder, samples=2, progress=False)
    assert result.data["length"].max() == 12
    found = workflow.analyze_run(folder, studies=["convergence"], progress=False)
    assert found.files["convergence"].is_file()


def test_analyze_takes_a_length_that_the_task_has(tmp_path: Path) -> None:
    task = get_task("sudoku", box=2)
    folder = tmp_path / "run"
    Run.from_model(_model_of(task, n_ctx=16), task, folder, max_n=8, origin="made up")
    asked = open_run(folder).at_length(5)
    assert {asked.length(n) for n in (1, 5, 100)} == {5}
    workflow.analyze_run(folder, studies=["convergence"], length=5, progress=False)
    for wrong in (0, 13, 10**20):
        with pytest.raises(InputError):
            workflow.analyze_run(folder, studies=["convergence"], length=wrong, progress=False)
