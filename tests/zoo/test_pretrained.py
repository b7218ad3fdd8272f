"""The zoo: every model loads, is what its card says, and is only read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy.stats import fisher_exact

import loopinterp
from analyses.make_zoo import baselines_table, zoo_table
from analyses.tables_in_pages import put
from loopinterp.adapters import PublishedModel
from loopinterp.app import workflow
from loopinterp.core.results import config_hash
from loopinterp.core.storage import digest_tensors, read_json, read_tensors
from loopinterp.pages import write_report
from loopinterp.training import (
    RECIPES,
    apply_settings,
    evaluate,
    get_recipe,
    list_recipes,
    train,
)
from loopinterp.training.run import CONFIG, WEIGHTS, RunFault
from loopinterp.zoo import get_card, list_pretrained, pretrained_run
from loopinterp.zoo.pretrained import THIS
from tests.cli.test_cli import contents
from tests.refusals import naming
from tests.training.tiny_run import refused

PACKAGE = Path(loopinterp.__file__).parent
NAMES = sorted(list_pretrained().index)
SAMPLES = 8


@pytest.mark.parametrize("name", NAMES)
def test_a_model_does_what_its_card_says(name: str) -> None:
    """New examples: as many right as on the card, as far as chance allows."""
    run, card = pretrained_run(name), get_card(name)
    measured = next(iter(card.exact_match.values()))
    lengths = [n for n in (run.cutoff, 2 * run.cutoff) if n in measured]
    extra = [-1, 0, 12]
    result = evaluate(
        run.model(), run.task, lengths, extra_loops=extra, n_samples=SAMPLES, seed=card.seed + 1
    )
    shares = result.data["exact_match"].sel(estimate="value")
    for distribution, by_length in card.exact_match.items():
        for n in lengths:
            for k in extra:
                right = round(
                    float(shares.sel(distribution=distribution, length=n, extra_loop=k)) * SAMPLES
                )
                on_card = round(by_length[n][k] * card.samples)
                table = [[right, SAMPLES - right], [on_card, card.samples - on_card]]
                chance = float(fisher_exact(table)[1])  # type: ignore[arg-type]
                assert chance > 1e-4, (distribution, n, k, table)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_of_the_files_beside_it(name: str) -> None:
    run, card = pretrained_run(name), get_card(name)
    assert digest_tensors(read_tensors(run.folder / WEIGHTS)) == card.weights_sha256
    if card.baselines:  # of the same examples
        exact = {d: shares["exact match"] for d, shares in card.baselines[THIS].items()}
        assert exact == {d: shares[run.cutoff][0] for d, shares in card.exact_match.items()}
    assert config_hash(read_json(run.folder / CONFIG)) == card.config_sha256
    assert sum(p.numel() for p in run.model().parameters()) == card.weights
    assert {p.dtype for p in run.model().parameters()} == {torch.float32}
    if card.recipe is None:
        assert not run.is_trained and run.metrics().empty and card.minutes is None
        return
    changed = [f"{key}={value}" for key, value in card.changes.items()]
    assert apply_settings(RECIPES[card.recipe], [*changed, "device=cpu"]) == run.config
    assert len(run.metrics()) == run.config.to_dict()["steps"] // run.config.to_dict()["log_every"]


def test_the_list_is_that_of_the_cards() -> None:
    table = list_pretrained()
    assert {"addition", "parity"} <= set(table.index)
    assert table.loc["parity", "exact_2x"] == get_card("parity").exact_match["uniform"][24][0]
    assert table.loc["addition", "exact_8x"] == min(
        shares[96][0] for shares in get_card("addition").exact_match.values()
    )
    with naming("pretrained model"):
        pretrained_run("nothing")


def test_the_page_has_the_table_of_the_cards() -> None:
    page = (PACKAGE.parent / "docs" / "zoo.md").read_text()
    # Python -m analyses.make_zoo --add.
    assert put(page, {"zoo": zoo_table(), "zoo-baselines": baselines_table()}) == page


def test_every_card_and_recipe_has_all_distributions_of_its_task() -> None:
    for name in NAMES:
        assert set(get_card(name).exact_match) == set(pretrained_run(name).task.distributions)
    for name in list_recipes():
        recipe = get_recipe(name)
        known = recipe.config.make_task().distributions
        assert set(recipe.measured.exact_match) == set(known), name


def test_a_copy_is_a_run_as_any_other(tmp_path: Path) -> None:
    before = contents(PACKAGE / "zoo")
    run = pretrained_run("parity", tmp_path / "mine")
    workflow.evaluate_run(run.folder, lengths=[4], samples=8, progress=False)
    workflow.analyze_run(run.folder, studies=["attention"], progress=False)
    page = write_report(run.folder).read_text()
    assert "cannot be shown" not in page
    command = "loopinterp zoo parity --out NEW"
    assert command in page
    results = contents(run.folder / "results")
    assert set(results) == {"attention.safetensors", "generalisation.safetensors"}
    again = pretrained_run("parity", tmp_path / "mine")
    assert again == run
    # What was found in it stays.
    assert contents(run.folder / "results") == results
    assert contents(PACKAGE / "zoo") == before


def test_a_copy_goes_where_nothing_is_lost(tmp_path: Path, barely_trained: Path) -> None:
    with refused(RunFault.TAKEN):
        pretrained_run("parity", barely_trained)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with naming("output .*"):
        pretrained_run("parity", tmp_path)
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    (tmp_path / "file").touch()
    with naming("output .*"):
        pretrained_run("parity", tmp_path / "file")


def test_nothing_is_written_into_the_package() -> None:
    before = contents(PACKAGE / "zoo")
    folder = pretrained_run("parity").folder
    with naming("output .*"):
        workflow.evaluate_run(folder, progress=False)
    with naming("output .*"):
        workflow.analyze_run(folder, progress=False)
    with naming("output .*"):
        write_report(folder)
    with naming("output .*"):
        train(RECIPES["parity"], PACKAGE / "zoo" / "new", progress=False)
    with naming("output .*"):
        pretrained_run("addition", PACKAGE / "zoo" / "new")
    assert contents(PACKAGE / "zoo") == before


def test_a_copy_is_not_trained_anew(tmp_path: Path) -> None:
    """It has no state to go on from, so its weights would be lost."""
    run = pretrained_run("parity", tmp_path / "mine")
    before = contents(run.folder)
    with refused(RunFault.NOT_RESUMABLE):
        train(RECIPES["parity"].replace(device="cpu"), run.folder, progress=False)
    assert contents(run.folder) == before


def test_a_model_of_the_zoo_has_its_task_and_is_that_of_its_run() -> None:
    model, run = loopinterp.load_pretrained("parity"), pretrained_run("parity")
    assert model.task == run.task and not model.training
    ours, theirs = model.state_dict(), run.model().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    batch = model.task.encode("1 0 1 1")
    answered = model(batch.inputs).argmax(-1)[batch.targets >= 0]
    assert torch.equal(answered, batch.targets[batch.targets >= 0])


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_licence_and_the_origin_of_the_weights(name: str) -> None:
    card = get_card(name)
    assert card.licence == "MIT"
    assert (card.recipe is None) == bool(card.origin and card.command)


ADAPTED = [name for name in NAMES if get_card(name).baselines]


def test_the_zoo_has_models_in_a_published_architecture() -> None:
    assert {"ouro-small", "ouro-small-ahead", "trm-small", "hrm-small"} <= {*ADAPTED}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapted_model_is_better_than_its_baselines_and_says_where_it_comes_from(
    name: str,
) -> None:
    card, model = get_card(name), loopinterp.load_pretrained(name)
    assert isinstance(model, PublishedModel)
    assert card.recipe is None
    this = card.baselines[THIS]
    assert {"untrained"} < {*card.baselines}
    for other in card.baselines.keys() - {THIS}:
        for distribution, shares in card.baselines[other].items():
            assert shares["answers right"] < this[distribution]["answers right"], other


def test_an_adapted_model_is_copied_and_studied_as_any_other(tmp_path: Path) -> None:
    run = pretrained_run("ouro-small", tmp_path / "ouro")
    workflow.evaluate_run(run.folder, lengths=[8], samples=8, progress=False)
    studies = ["attention", "exits", "explorer"]
    done = workflow.analyze_run(run.folder, studies=studies, length=8, progress=False)
    assert {*done.results} == {*studies}
    page = write_report(run.folder).read_text()
    assert "cannot be shown" not in page and "is not shown" not in page


def test_a_mistyped_model_gets_the_nearest_name() -> None:
    with naming("pretrained model") as caught:
        loopinterp.load_pretrained("adition")
    assert "'addition'" in caught.value.fix


def test_the_list_is_whole_in_a_terminal_of_eighty_columns() -> None:
    lines = repr(list_pretrained()).splitlines()
    assert max(map(len, lines)) <= 80 and not any("..." in line for line in lines)
    assert {line.split()[0] for line in lines} >= set(list_pretrained().index)
