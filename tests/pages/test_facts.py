from __future__ import annotations

import dataclasses
import string
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.comparison import SpreadPairs, compare_programs
from loopinterp.compiler import compile_program
from loopinterp.core.results import Result
from loopinterp.dynamics import convergence_study
from loopinterp.lenses import attention_study
from loopinterp.pages import RunRecord
from loopinterp.pages.facts import (
    Code,
    Fact,
    Topic,
    facts_of,
    introduction,
    story,
    story_of_runs,
)
from loopinterp.tasks import Addition, get_task, list_tasks, register_task, task_registry
from loopinterp.training import evaluate


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Studies of a compiled ripple: it is right, converges, looks left, and runs the ripple."""
    torch.manual_seed(0)
    model, task = compile_program("ripple", max_length=9).model, Addition()
    batch = task.sample(6, batch_size=96, generator=torch.Generator().manual_seed(0))
    pairs = SpreadPairs(pairs=128, same_value=16)
    return {
        "generalisation": evaluate(model, task, [2, 4, 8], n_samples=32),
        "convergence": convergence_study(model, batch),
        "attention": attention_study(model, batch),
        "programs": compare_programs(model, ["ripple", "lookahead"], batch, pairs=pairs),
    }


def of(results: dict[str, Result], topic: Topic) -> Fact:
    (fact,) = (fact for fact in facts_of(results) if fact.topic is topic)
    return fact


def test_each_topic_has_one_fact_in_order(results: dict[str, Result]) -> None:
    facts = facts_of(results)
    assert [fact.topic for fact in facts] == list(Topic)
    assert [fact.code for fact in facts[:2]] == [Code.RIGHT_THROUGHOUT, Code.CONVERGES]
    assert facts[2].code is Code.ATTENDS and facts[2].anchor == "attention"
    assert facts[3].values["candidates"] == 2
    assert [fact.good for fact in facts[:3]] == [True, True, None]
    assert facts_of(dict(reversed(results.items()))) == facts


def changed(result: Any, share: list[float], trained_up_to: int | None, constant: float = 0.0):
    """The evaluation with other scores at its lengths 2, 4, 8."""
    data = result.data.copy(deep=True)
    data["exact_match"][:] = np.array(share)[None, None, :, None]
    data["constant_exact_match"][:] = constant
    return {"g": dataclasses.replace(result, data=data, trained_up_to=trained_up_to)}


@pytest.mark.parametrize(
    ("share", "cutoff", "code", "good"),
    [
        ([1.0, 1.0, 1.0], 2, Code.RIGHT_BEYOND, True),
        ([1.0, 1.0, 1.0], 8, Code.RIGHT_THROUGHOUT, True),
        ([1.0, 1.0, 1.0], None, Code.RIGHT_THROUGHOUT, True),
        ([1.0, 0.97, 0.2], 2, Code.RIGHT_UP_TO, None),
        ([1.0, 0.2, 1.0], 2, Code.RIGHT_UP_TO, False),
        ([0.9, 1.0, 1.0], 2, Code.WRONG, False),
    ],
)
def test_how_far_a_model_generalises(
    results: dict[str, Result], share: list[float], cutoff: int | None, code: Code, good: bool
) -> None:
    fact = of(changed(results["generalisation"], share, cutoff), Topic.GENERALISATION)
    assert (fact.code, fact.good) == (code, good)


def test_the_factor_is_that_of_the_training_length(results: dict[str, Result]) -> None:
    fact = of(changed(results["generalisation"], [1, 1, 1], 2), Topic.GENERALISATION)
    assert fact.values["factor"] == "4" and fact.values["longest"] == 8


def test_a_distribution_that_one_answer_solves_says_nothing(results: dict[str, Result]) -> None:
    whole: Any = results["generalisation"]
    data = whole.data.copy(deep=True)
    data["exact_match"].loc[{"distribution": "uniform"}] = 0.1
    data["constant_exact_match"].loc[{"distribution": "uniform"}] = 1.0
    fact = of({"g": dataclasses.replace(whole, data=data)}, Topic.GENERALISATION)
    assert fact.code is Code.RIGHT_THROUGHOUT
    data["constant_exact_match"].loc[{"distribution": "uniform"}] = 0.0
    fact = of({"g": dataclasses.replace(whole, data=data)}, Topic.GENERALISATION)
    assert fact.code is Code.WRONG


@pytest.mark.parametrize(
    ("identified", "refuted", "code", "good"),
    [
        ("ripple", False, Code.IDENTIFIED, True),
        (None, True, Code.REFUTED, False),
        (None, False, Code.UNDECIDED, None),
    ],
)
def test_what_the_comparison_says(
    results: dict[str, Result], identified: str | None, refuted: bool, code: Code, good: bool | None
) -> None:
    compared: Any = results["programs"]
    verdict = dataclasses.replace(
        compared.verdict, identified=identified, closest="ripple", refuted=refuted
    )
    fact = of(
        {"p": dataclasses.replace(compared, verdicts={"model": verdict})},
        Topic.PROGRAM,
    )
    assert (fact.code, fact.good) == (code, good)


def test_a_damaged_result_gives_no_fact(results: dict[str, Result]) -> None:
    whole: Any = results["generalisation"]
    damaged = dataclasses.replace(whole, trained_up_to="12")
    assert facts_of({"g": damaged}) == []


def test_every_code_is_rendered_with_nothing_left_open() -> None:
    for code in Code:
        fields = {
            name for text in code.value for _, name, _, _ in string.Formatter().parse(text) if name
        }
        fact = Fact(Topic.PROGRAM, code, None, dict.fromkeys(fields, 7))
        assert all("{" not in text for text in (fact.value, fact.detail, fact.sentence))
        assert fact.sentence[0] in "7“" + string.ascii_uppercase and fact.sentence.endswith(".")


def test_the_story_leaves_no_hole(results: dict[str, Result]) -> None:
    record = RunRecord(name="x", config={"task": "addition"}, n_parameters=812)
    assert story(record, []) == [introduction(record)]
    told = story(record, facts_of(results))
    assert len(told) == 4 and "812-parameter" in told[0]


@pytest.mark.parametrize("task", list_tasks())
def test_every_task_says_what_a_model_of_it_learns(task: str) -> None:
    goal = getattr(get_task(task), "goal", "")
    assert goal and introduction(RunRecord(name="x", config={"task": task})).endswith(f"{goal}.")


def test_a_registered_task_that_needs_settings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_registry, "_FACTORIES", dict(task_registry._FACTORIES))
    register_task("my_own", lambda size: Addition())
    assert "my own" in introduction(RunRecord(name="x", config={"task": "my_own"}))


def test_a_task_that_is_not_known_is_named() -> None:
    assert "my own" in introduction(RunRecord(name="x", config={"task": "my own"}))


@pytest.mark.parametrize(
    ("n", "size"), [(812, "812"), (50_766, "51k"), (1_234_567, "1.2M"), (2_600_000_000, "2.6B")]
)
def test_sizes(n: int, size: str) -> None:
    assert f"A {size}-parameter" in introduction(RunRecord(name="x", config={}, n_parameters=n))


def test_of_several_runs_equal_facts_are_counted(results: dict[str, Result]) -> None:
    facts = facts_of(results)
    told = story_of_runs({"a": facts, "b": facts, "c": []})
    assert len(told) == 3 and all("in 2 of 3 runs" in text for text in told)
