"""Rules that are not told n: against loops made one by one in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, put
from analyses.unknown_loops import (
    CHOICES,
    FILE,
    MODELS,
    MOVEMENT,
    Cell,
    best_shift,
    by_cell,
    calibrate,
    cell,
    draw,
    measure,
    one_bit,
    outcome,
    picked,
    tables,
)
from loopinterp.models import MaxConfidence, run_rules
from loopinterp.models.stopped_run import first_ready
from loopinterp.tasks import IGNORE, Batch
from loopinterp.training import evaluate
from loopinterp.zoo import pretrained_run

STORED = pd.read_csv(FILE)
N_LOOPS = 24
CLAIMED = (
    *(
        "parity",
        "parity-finite",
        "parity-seed-1",
        "parity-seed-2",
        "parity-drawn",
        "parity-drawn-seed-1",
    ),
    *("addition", "addition-seed-1", "addition-seed-2", "addition-seed-3", "addition-seed-4"),
    *("addition-finite", "addition-drawn"),
)


@pytest.fixture(scope="module", params=["parity", "addition", "copy"])
def model_and_batch(request: pytest.FixtureRequest) -> tuple[object, Batch]:
    run = pretrained_run(request.param)
    model = run.model()
    return model, draw(model, run.task, run.task.distributions[-1], 6, 12, "test")


Views = list[tuple[Tensor, Tensor]]  # after each loop: states [pos, d_model], logits [pos, vocab]


def by_hand(model: object, batch: Batch) -> Iterator[Views]:
    """Every example by itself, loop by loop."""
    with torch.no_grad():
        for tokens in batch.inputs:
            e = model.embed(tokens[None])  # type: ignore[attr-defined]
            h, views = model.initial_state(e), []  # type: ignore[attr-defined]
            for loop in range(N_LOOPS + 1):
                h = model.step(h, e) if loop else h  # type: ignore[attr-defined]
                views.append((h[0], model.readout(h)[0]))  # type: ignore[attr-defined]
            yield views


def residual(views: Views, loop: int, pos: int) -> float:
    now, before = views[loop][0][pos], views[loop - 1][0][pos]
    return math.dist(now.tolist(), before.tolist()) / math.hypot(*now.tolist())


def divergence(views: Views, loop: int, pos: int) -> float:
    now, before = (views[k][1][pos].double().softmax(-1).tolist() for k in (loop, loop - 1))
    return sum(p * math.log(p / q) for p, q in zip(now, before))


def same_answers(views: Views, loop: int, pos: int) -> int:
    answers = [int(views[k][1][pos].argmax()) for k in range(loop + 1)]
    n_same = 0
    while n_same < loop and answers[loop - n_same - 1] == answers[loop]:
        n_same += 1
    return -n_same


@pytest.fixture(scope="module")
def found(model_and_batch: tuple[object, Batch]) -> tuple[Cell, list[Views]]:
    """What the script and plain Python see of one model."""
    model, batch = model_and_batch
    return cell(model, batch, N_LOOPS), [*by_hand(model, batch)]


@pytest.mark.parametrize(
    ("rule", "number", "threshold", "by_cell"),
    [
        ("residual", residual, 0.02, 0.02),
        ("residual", residual, 0.3, 0.3),
        ("readout-kl", divergence, 1e-3, 1e-3),
        ("answer-held", same_answers, -3, 21.0),
        ("answer-held", same_answers, -6, 18.0),
    ],
)
@pytest.mark.parametrize("scope", ["answer", "state"])
def test_a_rule_stops_where_plain_python_does(
    model_and_batch: tuple[object, Batch],
    found: tuple[Cell, list[Views]],
    rule: str,
    number: Callable[[Views, int, int], float],
    threshold: float,
    by_cell: float,
    scope: str,
) -> None:
    (_, batch), (each, by_example) = model_and_batch, found
    stops = first_ready(each.scores[rule, scope], by_cell).tolist()
    for stop, views, targets, wrong in zip(
        stops, by_example, batch.targets.tolist(), each.wrong.T.tolist()
    ):
        asked = [pos for pos, right in enumerate(targets) if right != IGNORE]
        places = asked if scope == "answer" else range(len(targets))
        loop = 1
        while loop < N_LOOPS and any(number(views, loop, pos) > threshold for pos in places):
            loop += 1
        assert stop == loop
        said = views[loop][1].argmax(-1).tolist()
        assert wrong[loop] == any(said[pos] != targets[pos] for pos in asked)


def test_inputs_of_a_single_bit_are_those_and_odd() -> None:
    run = pretrained_run("parity")
    batch = one_bit(draw(run.model(), run.task, "biased", 4, 4, "test"))
    assert batch.inputs[:, 1:5].tolist() == torch.eye(4).long().tolist()
    other = draw(run.model(), run.task, "uniform", 4, 64, "test")
    [odd] = other.targets[other.inputs[:, 1:5].sum(1) % 2 == 1].unique(dim=0).tolist()
    assert batch.targets.tolist() == [odd] * 4


def test_the_most_confident_loop_is_the_librarys(model_and_batch: tuple[object, Batch]) -> None:
    model, batch = model_and_batch
    doubt = cell(model, batch, N_LOOPS).scores["max-confidence", "answer"]
    mask = batch.targets != IGNORE
    [stops] = run_rules(model, batch.inputs, [MaxConfidence()], max_loops=N_LOOPS, mask=mask)
    reached = doubt.gather(0, stops[None])[0]
    torch.testing.assert_close(reached, doubt[1:].amin(0), rtol=1e-3, atol=1e-6)


def made_cell(scores: list[list[float]], wrong: list[list[int]], n_loops: list[int]) -> Cell:
    """A cell whose rules all have the same scores, ``[loop][example]``."""
    values = torch.tensor(scores)
    by_rule = {(rule, scope): values for rule in MOVEMENT for scope in ("answer", "state")}
    by_rule |= {
        (rule, s): values for rule in ("entropy", "confidence") for s in ("answer", "state")
    }
    return Cell(by_rule, torch.tensor(wrong).bool(), torch.tensor(n_loops), 3)


def test_what_is_lost_by_stopping_is_counted() -> None:
    wrong = [[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]  # [loop][example]
    each = made_cell([[1.0] * 4] * 4, wrong, [2, 2, 2, 2])
    found = outcome(each, torch.tensor([1, 1, 1, 3]), torch.tensor(wrong) == 1)
    assert found["exact_match"] == 0.25  # the second alone
    assert (found["early"], found["late"], found["loops"]) == (0.75, 0.25, 1.5)
    assert found["early_lost"] == 0.25  # the first: the third is wrong at T(n) as well
    assert found["late_lost"] == 0.25  # the last
    assert found["moving"] == 1.0
    assert found["another"] == 0.75  # stops 3, 1, 1, 1: only the third is wrong
    assert math.isnan(outcome(each, 4)["exact_match"])


def test_thresholds_are_those_that_are_right_and_stop() -> None:
    scores = [[2.0, 2.0], [0.5, 0.5], [1e-3, 1e-2], [1e-5, 1e-5]]
    wrong = [[1, 1], [1, 1], [0, 0], [0, 0]]
    chosen = calibrate([made_cell(scores, wrong, [2, 2])])
    assert chosen["residual", "state", "loosest"] == 10**-0.5  # 10**-.25 stops after one loop
    assert chosen["residual", "state", "strictest"] == 10**-5  # 10**-5.25 never stops
    assert 10**-5 < chosen["residual", "state", "middle"] < 10**-0.5
    never = made_cell([[2.0, 2.0]] * 4, wrong, [2, 2])
    assert ("residual", "state", "middle") not in calibrate([never])


def test_a_small_measurement_agrees_with_evaluate() -> None:
    whole = pretrained_run("parity-finite")
    # As if it had been trained at lengths up to 6.
    run: Any = SimpleNamespace(model=whole.model, task=whole.task, cutoff=6)
    found = by_cell(measure(run, 16, times=(1, 2), trained=4, cap=24))
    result = evaluate(run.model(), run.task, [6, 12], n_samples=16, extra_loops=(-1, 0, 1))
    for distribution in run.task.distributions:
        for n in (6, 12):
            exact = result.data["exact_match"].sel(
                distribution=distribution, length=n, estimate="value"
            )
            for k in (-1, 0, 1):
                share = picked(found, f"T(n){k:+d}").loc[(distribution, n), "exact_match"]
                assert share == float(exact.sel(extra_loop=k))
    # States between loops are codes: where all rest, the answer is that of any later loop.
    rest = picked(found, "residual", "state", "strictest")
    last = picked(found, "last")
    assert (rest["exact_match"] == last["exact_match"]).all()
    assert (rest["loops"] < 24).all()


def test_the_page_is_what_is_stored() -> None:
    page = (PAGES / "results" / "unknown-loops.md").read_text()
    assert put(page, tables(STORED)) == page
    assert set(MODELS) <= set(STORED["model"])


@pytest.mark.parametrize("model", CLAIMED)
def test_no_state_rule_loses_more_than_the_page_says(model: str) -> None:
    """On every distribution, at every length; residual and held answer with each threshold."""
    each = by_cell(STORED.loc[STORED["model"] == model])
    best = best_shift(each)
    for rule in MOVEMENT:
        for choice in CHOICES if rule in ("residual", "answer-held") else ("middle",):
            reached = picked(each, rule, "state", choice)["exact_match"]
            assert len(reached) == len(best) > 0
            assert (best - reached).max() <= 0.05
