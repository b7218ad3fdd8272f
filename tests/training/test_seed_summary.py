"""Mean and standard error over seeds, against NumPy and SciPy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import sem

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.models import Fixed, LoopedTransformer
from loopinterp.tasks import Addition, NextToken
from loopinterp.training import EvaluationResult, SeedSummary, evaluate, summarise_seeds
from tests.refusals import naming
from tests.training.tiny_run import TINY

OPTIONS = {"n_samples": 12, "loops": [1], "trained_up_to": 3}


def seeds(lengths: tuple[int, ...] = (1, 3), n: int = 3, **options) -> list[EvaluationResult]:
    results = []
    for seed in range(n):
        model = LoopedTransformer(TINY.model, seed=seed)
        results.append(evaluate(model, Addition(), lengths, **OPTIONS | options))
    return results


@pytest.mark.parametrize("name", ["exact_match", "bit_accuracy", "loop_exact_match"])
def test_every_cell_has_the_mean_and_its_standard_error(name: str) -> None:
    results = seeds()
    summary = summarise_seeds(results)
    values = np.stack([result.data[name].sel(estimate="value").values for result in results])
    assert values.std() > 0
    np.testing.assert_allclose(summary.data[name], values.mean(0))
    np.testing.assert_allclose(summary.data[f"{name}_se"], sem(values))


def test_a_perplexity_has_the_geometric_mean() -> None:
    results = seeds()
    summary = summarise_seeds(results)
    logs = np.log([result.data["perplexity"].sel(estimate="value").values for result in results])
    np.testing.assert_allclose(summary.data["perplexity"], np.exp(logs.mean(0)))
    np.testing.assert_allclose(summary.data["perplexity_se"], sem(logs))


def test_stopping_rules_are_summarised_too() -> None:
    results = seeds(stopping={"two": Fixed(2)})
    summary = summarise_seeds(results)
    at = summary.data.sel(rule="two")
    assert (at["stopped_at"] == 2).all() and (at["stopped_at_se"] == 0).all()
    # Loops that a length was not run for have no mean.
    assert summary.data["loop_exact_match"].sel(length=1, loop=27 + 1).isnull().all()


def test_a_summary_goes_to_disk_and_back_and_shows_itself(tmp_path: Path) -> None:
    summary = summarise_seeds(seeds())
    loaded = load_result(summary.save(tmp_path))
    assert isinstance(loaded, SeedSummary) and loaded.data.identical(summary.data)
    assert len(loaded.provenance.weights) == 3
    (figure,) = loaded.figures()
    assert figure.section == "generalisation" and figure.data is not None
    assert {"exact_match", "exact_match_se", "bit_accuracy_se"} <= set(figure.data.columns)
    assert "3 seeds" in loaded.findings()[1].text
    assert loaded.findings()[0].value == f"{loaded.data['exact_match'].min():.2f} exact match"
    assert len(loaded.to_dataframe("exact_match", "exact_match_se")) == 2 * 3


def test_other_cells_and_single_seeds_are_refused() -> None:
    one, two = seeds(n=2)
    with naming("results"):
        summarise_seeds([one])
    with naming("results"):
        summarise_seeds([one, one])
    with pytest.raises(InputError, match="another length"):
        summarise_seeds([one, seeds((1, 2), n=2)[1]])
    with pytest.raises(InputError, match="another loop"):
        summarise_seeds([one, seeds(n=2, loops=[2])[1]])
    with pytest.raises(InputError, match="another n_samples"):
        summarise_seeds([one, dataclasses.replace(two, n_samples=7)])
    with pytest.raises(InputError, match="another answered_after"):
        summarise_seeds([one, dataclasses.replace(two, answered_after="T(n) + 1")])


def test_other_settings_of_a_task_are_no_other_seed() -> None:
    results = []
    for seed, name in enumerate(("copy", "parity")):
        task = NextToken(of=name)
        config = TINY.model.replace(d_vocab=task.d_vocab, d_vocab_out=task.d_vocab_out)
        results.append(evaluate(LoopedTransformer(config, seed=seed), task, [2], n_samples=4))
    with naming(r"results\[1\]"):
        summarise_seeds(results)
