from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import loopinterp
from loopinterp.app import session, workflow
from loopinterp.app.catalogue import STUDIES
from loopinterp.app.session import MOST_LOOPS, MOST_WORK, Session, open_run
from loopinterp.app.workflow import analyze_run
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import load_result
from loopinterp.core.run_files import Mismatch, Owner, Seal
from loopinterp.core.storage import write_json
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule, describe_model
from loopinterp.models.checkpoints import write_model
from loopinterp.models.stopping import LengthLine
from loopinterp.models.study_examples import examples_for
from loopinterp.pages import read_run
from loopinterp.tasks import Addition, Task, get_task, list_tasks
from loopinterp.tasks.sampling import longest_length
from loopinterp.tasks.token_by_token import TokenByToken
from loopinterp.training import Run, evaluate
from tests.refusals import naming


def small(seed: int) -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config, seed=seed)


@pytest.fixture
def model(tmp_path: Path) -> Session:
    task = get_task("addition")
    run = Run.from_model(small(0), task, tmp_path / "run", max_n=2, origin="made up")
    # As of a run whose weights go on changing.
    write_json(run.folder / "config.json", run.config.replace(weights_sha256=None).to_dict())
    put_weights(run.folder, small(0))
    return open_run(tmp_path / "run")


def put_weights(run: Path, model: LoopedTransformer) -> None:
    """Later weights of the same run."""
    write_model(model, run / "model", Seal(Owner.of_run(run).config).texts())


def measured(model: Session) -> Path:
    """An evaluation among the run's results."""
    result = evaluate(model.model, model.task, [2], distributions=["uniform"], n_samples=2)
    return model.save(result, "generalisation")


def test_a_result_says_whose_it_is_and_is_taken_back(model: Session) -> None:
    provenance = load_result(measured(model)).provenance
    described = describe_model(model.model)
    assert isinstance(described, dict)
    assert provenance.weights == [described["weights_sha256"]] == [model.owner.weights]
    assert provenance.run == model.owner.config
    assert model.own_file("generalisation").is_file()
    assert list(read_run(model.folder).results) == ["generalisation"]


def test_after_other_weights_a_result_is_neither_taken_back_nor_shown(model: Session) -> None:
    measured(model)
    put_weights(model.folder, small(1))
    with pytest.raises(CheckpointError, match=r"^result 'generalisation':"):
        open_run(model.folder).own_file("generalisation")
    record = read_run(model.folder)
    assert not record.results and len(record.problems) == 1
    measured(open_run(model.folder))
    assert list(read_run(model.folder).results) == ["generalisation"]


def test_results_of_another_run_are_not_shown(model: Session, tmp_path: Path) -> None:
    other = Run.from_model(small(0), model.task, tmp_path / "other", max_n=3, origin="made up")
    path = measured(open_run(other.folder))  # the same weights, made for other lengths
    model.results.mkdir()
    path.rename(model.results / path.name)
    record = read_run(model.folder)
    assert not record.results
    (problem,) = record.problems
    assert (problem.name, problem.detail) == ("generalisation.safetensors", Mismatch.OTHER_RUN)


def test_a_study_does_not_start_from_a_result_of_other_weights(
    model: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(model).rename(model.results / "programs.safetensors")
    put_weights(model.folder, small(1))
    (subspaces,) = [study for study in STUDIES if study.name == "subspaces"]
    monkeypatch.setattr(type(subspaces), "skipped", lambda *_: None)
    monkeypatch.setattr(type(subspaces), "run", lambda *_: pytest.fail("started"), raising=False)
    with pytest.raises(CheckpointError, match=r"^result"):
        analyze_run(model.folder, studies=["subspaces"], progress=False)


def test_examples_are_of_the_distribution_asked_for_else_of_the_runs_own(
    model: Session,
) -> None:
    chains = dataclasses.replace(model, distribution="chain")
    for batch in (chains.sample(5, 9), model.sample(5, 9, distribution="chain")):
        assert Addition().carries(batch)[:, 1:].all()
    drawn = [m.sample(5, 9, distribution="uniform").inputs for m in (model, chains)]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], chains.sample(5, 9).inputs)


def test_a_model_of_a_fixed_depth_is_long_no_longer_than_others(tmp_path: Path) -> None:
    own = small(0)
    own.loop_rule = LoopRule(3)
    Run.from_model(own, Addition(), tmp_path / "run", max_n=2, origin="made up")
    model = open_run(tmp_path / "run")
    assert (model.n_loops(500), model.length(500)) == (3, 500)  # it stays quick
    batch = model.sample(5, 2)
    assert batch.n_loops.tolist() == [6, 6] and batch.task == Addition()
    assert examples_for(model.model, batch).n_loops.tolist() == [3, 3]


PUZZLES = Path(__file__).parent.parent / "tasks" / "rook_mates.csv"

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


def _studied(task: Task, cutoff: int) -> Session:
    owner = Owner(config="")
    return Session(model=_model_of(task), task=task, folder=Path(), owner=owner, cutoff=cutoff)


def _can_draw(task: Task, n: int) -> bool:
    try:
        task.sample(n, batch_size=2, generator=torch.Generator().manual_seed(0))
    except InputError:
        return False
    return True


@pytest.mark.parametrize("cutoff", [1, 8, 100])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_has_the_lengths_that_commands_ask(
    task: Task, cutoff: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _studied(task, cutoff)
    fitted_at: list[int] = []

    def fit(_: Any, __: Any, lengths: list[int], *, seed: int) -> LengthLine:
        fitted_at.extend(lengths)
        return LengthLine(1.0, 0.0)

    monkeypatch.setattr(session.training, "calibrate_stopping", fit)
    session.calibrate_stopping(model)
    asked = [*fitted_at, *workflow._lengths(model)]
    assert fitted_at
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


def test_a_loaded_run_has_its_task_as_the_run_has_it(model: Session) -> None:
    run, loaded = Run.load(model.folder), loopinterp.load(model.folder)
    assert loaded.task == run.task == run.model().task
    assert torch.equal(next(loaded.parameters()), next(run.model().parameters()))


@pytest.mark.parametrize("opened", [loopinterp.load, open_run])
def test_the_name_of_a_model_of_the_zoo_is_no_folder(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with naming("run addition", CheckpointError) as caught:
        opened("addition")
    assert "load_pretrained('addition')" in caught.value.fix
    with naming("run nothing", CheckpointError) as caught:
        opened("nothing")
    assert "load_pretrained" not in caught.value.fix
