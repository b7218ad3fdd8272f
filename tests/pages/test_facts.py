from __future__ import annotations

import dataclasses
import string
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from loopinterp.comparison import SpreadPairs, compare_programs
from loopinterp.comparison.rule import Verdict
from loopinterp.compiler import compile_program
from loopinterp.core.results import Result
from loopinterp.decompiler.decompilation_study import Decompilation
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
from loopinterp.tasks import Addition, get_task, list_tasks, task_registry
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


def test_a_length_hardly_beyond_training_is_not_called_the_same(results: dict[str, Result]) -> None:
    fact = of(changed(results["generalisation"], [1, 1, 1], 8), Topic.GENERALISATION)
    whole: Any = changed(results["generalisation"], [1, 1, 1], 100)["g"]
    longer = dataclasses.replace(whole, data=whole.data.assign_coords(length=[50, 100, 103]))
    assert fact.code is Code.RIGHT_THROUGHOUT
    assert of({"g": longer}, Topic.GENERALISATION).values["factor"] == "1.03"


def test_a_failure_between_right_lengths_is_the_one_that_is_told(
    results: dict[str, Result],
) -> None:
    fact = of(changed(results["generalisation"], [1.0, 0.2, 1.0], 2), Topic.GENERALISATION)
    assert fact.sentence == "It works up to length 2, and gets 20% right at length 4."


def test_of_one_length_no_range_is_claimed(results: dict[str, Result]) -> None:
    whole: Any = changed(results["generalisation"], [1, 1, 1], None)["g"]
    one = dataclasses.replace(whole, data=whole.data.isel(length=[1]))
    fact = of({"g": one}, Topic.GENERALISATION)
    assert fact.code is Code.RIGHT_AT and "every" not in fact.sentence


def test_what_one_answer_solves_everywhere_is_no_generalisation(
    results: dict[str, Result],
) -> None:
    assert facts_of(changed(results["generalisation"], [1, 1, 1], 2, constant=1.0)) == []
    whole: Any = changed(results["generalisation"], [1, 1, 0.1], 2)["g"]
    whole.data["constant_exact_match"].loc[{"length": 2}] = 1.0  # the longer ones tell all the same
    fact = of({"g": whole}, Topic.GENERALISATION)
    assert (fact.code, fact.values["reach"]) == (Code.RIGHT_UP_TO, 4)


def test_even_attention_gives_no_fact(results: dict[str, Result]) -> None:
    whole: Any = results["attention"]
    even = whole.data["mass_even"] + 0.05
    data = whole.data.assign(mass=whole.data["mass"] * 0 + even)
    assert facts_of({"a": dataclasses.replace(whole, data=data)}) == []


def test_a_head_of_several_layers_is_named_with_its_layer(results: dict[str, Result]) -> None:
    whole: Any = results["attention"]
    assert whole.data.sizes["layer"] == 2  # the second one looks to the left
    assert " of layer 1 " in of({"a": whole}, Topic.MOVEMENT).sentence
    one = dataclasses.replace(whole, data=whole.data.isel(layer=[1]))
    assert "layer" not in of({"a": one}, Topic.MOVEMENT).sentence


@pytest.mark.parametrize(
    ("first_loop", "code"),
    [
        ([1.0, 2.0, 3.0, 4.0], Code.CARRY_MOVES),
        ([1.0, 1.0, 1.0, 1.0], Code.AT_ONCE),
        ([1.0, 1.0, 1.0, np.nan], Code.NO_WAVEFRONT),
        ([np.nan] * 4, Code.NO_WAVEFRONT),
        ([4.0, 3.0, 2.0, 1.0], Code.NO_WAVEFRONT),
        ([1.0, np.nan, np.nan, np.nan], Code.NO_WAVEFRONT),
    ],
)
def test_how_the_carry_moves(first_loop: list[float], code: Code) -> None:
    chains = xr.Dataset(coords={"chain_length": range(4)})
    rises = np.isfinite(first_loop).all() and first_loop[0] < first_loop[-1]
    speed = 1.0 if rises else np.inf if first_loop[2] == first_loop[2] else np.nan
    loops = xr.DataArray(first_loop, dims="chain_length")
    carry: Any = SimpleNamespace(
        kind="carry", data=chains, first_loop=loops, speed=speed, resolved=1.0
    )
    assert of({"w": carry}, Topic.MOVEMENT).code is code


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


@pytest.mark.parametrize(
    ("refuted", "code"), [(True, Code.REFUTED_ONE), (False, Code.UNDECIDED_ONE)]
)
def test_one_candidate_is_named(results: dict[str, Result], refuted: bool, code: Code) -> None:
    compared: Any = results["programs"]
    verdict = Verdict(identified=None, closest="ripple", refuted=refuted)
    data = compared.data.sel(program=["ripple"], rival=["ripple"])
    one = dataclasses.replace(compared, data=data, verdicts={"model": verdict})
    fact = of({"p": one}, Topic.PROGRAM)
    assert fact.code is code and "“ripple”" in fact.sentence


def test_without_an_effective_interchange_nothing_is_predicted(results: dict[str, Result]) -> None:
    compared: Any = results["programs"]
    data = compared.data.assign(whole_run_effective=compared.data["whole_run_effective"] * 0)
    fact = of({"p": dataclasses.replace(compared, data=data)}, Topic.PROGRAM)
    assert fact.code is Code.NO_EFFECT and "nan" not in fact.detail


def test_models_that_run_different_programs_are_counted(results: dict[str, Result]) -> None:
    compared: Any = results["programs"]
    verdicts = {
        name: Verdict(identified=program, closest="ripple")
        for name, program in (("a", "ripple"), ("b", "lookahead"), ("c", None))
    }
    fact = of({"p": dataclasses.replace(compared, verdicts=verdicts)}, Topic.PROGRAM)
    assert fact.value == "identified in 2 of 3 models" and fact.good is None
    assert fact.detail == "“ripple” in 1, “lookahead” in 1"


def decompiled(**changes: Any) -> dict[str, Any]:
    """A decompilation with a program of 73 transitions that predicts 90% of whole trajectories."""
    worst = xr.DataArray(
        [changes.pop("share", 0.9), 0.8, 1.0], {"estimate": ["value", "low", "high"]}
    )
    fields = {"given": True, "identified": "", "code": "x", "reason": "", "transitions": 0}
    fields |= changes
    claim = SimpleNamespace(transitions=fields.pop("transitions"))
    data = xr.Dataset(coords={"cell": range(5)})
    one = SimpleNamespace(
        kind="decompilation", data=data, claim=claim, worst=lambda: worst, **fields
    )
    separate: Any = Decompilation.registered
    one.registered = separate.__get__(one)
    return {"d": one}


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        ({"transitions": 73, "identified": "ripple from carry = 1"}, Code.EXACT, "“ripple”"),
        ({"transitions": 73, "share": np.nan}, Code.EXACT_TABLE, "a program of 5 cells"),
        ({}, Code.READ_OFF, "a program of 5 cells"),
        ({"given": False}, Code.NOT_READ, "no program read off"),
        ({"given": False, "code": "", "reason": "too many tokens"}, Code.NO_TABLE, "no program"),
        ({"given": False, "share": np.nan, "reason": "nothing"}, Code.NO_TABLE, "no program"),
    ],
)
def test_what_a_decompilation_says(changes: dict[str, Any], code: Code, value: str) -> None:
    fact = of(decompiled(**changes), Topic.PROGRAM)
    assert fact.code is code and value in fact.value
    assert "nan" not in fact.detail + fact.sentence


def test_an_exact_reading_goes_before_a_comparison_that_names_another(
    results: dict[str, Result],
) -> None:
    compared: Any = results["programs"]
    verdict = Verdict(identified="ripple", closest="ripple")
    both = decompiled(transitions=73, identified="ripple_held_2")
    both["p"] = dataclasses.replace(compared, verdicts={"model": verdict})
    assert of(both, Topic.PROGRAM).value == "“ripple held 2”"


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


def test_a_task_of_ones_own_that_needs_settings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_settings(size: int) -> None: ...

    monkeypatch.setitem(task_registry._FACTORIES, "sorting", needs_settings)  # type: ignore[arg-type]
    assert "“sorting”" in introduction(RunRecord(name="x", config={"task": "sorting"}))


def test_a_task_that_is_not_known_is_named() -> None:
    assert "my own" in introduction(RunRecord(name="x", config={"task": "my own"}))


@pytest.mark.parametrize(
    ("in_memory", "kind"),
    [("LoopedTransformer", "looped transformer"), ("Wrapped", "looped model")],
)
def test_a_model_of_another_class_may_be_no_transformer(in_memory: str, kind: str) -> None:
    config = {"in_memory": in_memory, "origin": "made by hand", "task": "parity"}
    assert introduction(RunRecord(name="x", config=config)).startswith(f"A {kind}, made by hand")


@pytest.mark.parametrize(
    ("n", "size"), [(812, "812"), (50_766, "51k"), (1_234_567, "1.2M"), (2_600_000_000, "2.6B")]
)
def test_sizes(n: int, size: str) -> None:
    assert f"A {size}-parameter" in introduction(RunRecord(name="x", config={}, n_parameters=n))


def test_facts_of_different_studies_stand_under_their_topic() -> None:
    runs = {
        "a": [Fact(Topic.MOVEMENT, Code.NO_WAVEFRONT, None)],
        "b": [Fact(Topic.MOVEMENT, Code.ATTENDS, None, {"share": "84%", "place": "itself"})],
    }
    (text,) = story_of_runs(runs)
    assert text.startswith("Movement: ")


def test_of_several_runs_equal_facts_are_counted(results: dict[str, Result]) -> None:
    facts = facts_of(results)
    told = story_of_runs({"a": facts, "b": facts, "c": []})
    assert len(told) == 3 and all("in 2 of 3, not measured in 1 of 3 runs" in text for text in told)
