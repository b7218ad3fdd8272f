"""Results are saved with a run's model, and taken back as long as they are of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from loopinterp.errors import CheckpointError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule, describe_model
from loopinterp.models.pretrained import write_model
from loopinterp.report import read_run
from loopinterp.run_seal import Seal
from loopinterp.saved_results import Owner, load_result
from loopinterp.storage import write_json
from loopinterp.studied_model import StudiedModel, open_run
from loopinterp.studies import STUDIES
from loopinterp.study_examples import examples_for
from loopinterp.tasks import Addition, get_task
from loopinterp.training import Run, evaluate
from loopinterp.workflow import analyze_run


def small(seed: int) -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config, seed=seed)


@pytest.fixture
def model(tmp_path: Path) -> StudiedModel:
    task = get_task("addition")
    run = Run.from_model(small(0), task, tmp_path / "run", max_n=2, origin="made up")
    # As of a run whose weights go on changing.
    write_json(run.folder / "config.json", run.config.replace(weights_sha256=None).to_dict())
    put_weights(run.folder, small(0))
    return open_run(tmp_path / "run")


def put_weights(run: Path, model: LoopedTransformer) -> None:
    """Later weights of the same run."""
    write_model(model, run / "model", Seal(Owner.of_run(run).config).texts())


def measured(model: StudiedModel) -> Path:
    """An evaluation among the run's results."""
    result = evaluate(model.model, model.task, [2], distributions=["uniform"], n_samples=2)
    return model.save(result, "generalisation")


def test_a_result_says_whose_it_is_and_is_taken_back(model: StudiedModel) -> None:
    provenance = load_result(measured(model)).provenance
    described = describe_model(model.model)
    assert isinstance(described, dict)
    assert provenance.weights == [described["weights_sha256"]] == [model.owner.weights]
    assert provenance.run == model.owner.config
    assert model.own_file("generalisation").is_file()
    assert list(read_run(model.folder).results) == ["generalisation"]


def test_after_other_weights_a_result_is_neither_taken_back_nor_shown(model: StudiedModel) -> None:
    measured(model)
    put_weights(model.folder, small(1))
    with pytest.raises(CheckpointError, match=r"of other weights .* Run the study 'generalis"):
        open_run(model.folder).own_file("generalisation")
    record = read_run(model.folder)
    assert not record.results and len(record.problems) == 1
    measured(open_run(model.folder))
    assert list(read_run(model.folder).results) == ["generalisation"]


def test_results_of_another_run_are_not_shown(model: StudiedModel, tmp_path: Path) -> None:
    other = Run.from_model(small(0), model.task, tmp_path / "other", max_n=3, origin="made up")
    path = measured(open_run(other.folder))  # the same weights, made for other lengths
    model.results.mkdir()
    path.rename(model.results / path.name)
    record = read_run(model.folder)
    assert not record.results
    assert record.problems[0].startswith("generalisation.safetensors is of a run of another conf")


def test_a_study_does_not_start_from_a_result_of_other_weights(
    model: StudiedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(model).rename(model.results / "programs.safetensors")
    put_weights(model.folder, small(1))
    (subspaces,) = [study for study in STUDIES if study.name == "subspaces"]
    monkeypatch.setattr(type(subspaces), "unsaid", lambda *_: "")
    monkeypatch.setattr(type(subspaces), "run", lambda *_: pytest.fail("started"), raising=False)
    with pytest.raises(CheckpointError, match="of other weights"):
        analyze_run(model.folder, studies=["subspaces"], progress=False)


def test_examples_are_of_the_distribution_asked_for_else_of_the_runs_own(
    model: StudiedModel,
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
