"""Programs are read off models that run them; what is no such program is not given one."""

from __future__ import annotations

import dataclasses
import functools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.benchmark import TRAINED, benchmark_models
from loopinterp.compiler import (
    Compiled,
    add_noise,
    compile_program,
    distract,
    near_misses_by_kind,
    rotate,
)
from loopinterp.core.errors import InputError
from loopinterp.decompiler import EXACT, decompile, program_writing
from loopinterp.decompiler.evidence import TRAJECTORY, judged_lengths
from loopinterp.programs import LoopProgram, get_program
from loopinterp.programs import equivalence as every_equivalence
from loopinterp.programs.addition_programs import generate, propagate
from loopinterp.programs.language import full, indices, shift_right, tok_map, tokens, var, where
from loopinterp.tasks import Addition, Task, get_task
from loopinterp.training import Run

SMALL = {"n": 4, "examples": 16, "contexts": 8, "tries": 2, "tolerances": (0,)}
TOLERANCES = (0, 0.2)
BRIEFLY = {**SMALL, "lengths": (5,)}
DISGUISES = {
    "rotated": partial(rotate, seed=0),
    "with distractors": partial(distract, seed=0),
    "noisy": partial(add_noise, relative=0.01, seed=0),
}


near_misses = functools.cache(near_misses_by_kind)
# Every interchange at a length at which a value can pass three positions on.
equivalence = functools.partial(every_equivalence, lengths=(4,))


@pytest.fixture(autouse=True)
def briefly_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long expressions stay tables: how a program is written is tested in test_program_writing."""
    brief = functools.partial(program_writing.shortest_expression, largest=4)
    monkeypatch.setattr(program_writing, "shortest_expression", brief)


def compiled(name: str, disguise: str = "") -> tuple[LoopProgram, Task, Compiled]:
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    made = compile_program(program, max_length=task.n_positions(6))
    return program, task, DISGUISES[disguise](made) if disguise else made


@pytest.mark.parametrize(
    ("name", "disguise"),
    [
        ("carry_save", "noisy"),
        ("parity", "with distractors"),
        ("ripple_held_by_token", "rotated"),
    ],
)
def test_the_program_of_a_compiled_model_is_read(name: str, disguise: str) -> None:
    program, task, made = compiled(name, disguise)
    found = decompile(made.model, task, **SMALL)
    assert found.program is not None, found.reason
    assert equivalence(found.program, program).equivalent
    assert (found.evidence["agree"] == found.evidence["of"]).all()
    assert found.claim.grade == EXACT and found.claim.checked_to == 6
    assert found.claim.lengths == (3, 4, 6) and re.search("exact.*3, 4, 6", str(found))
    again = compile_program(found.program, max_length=task.n_positions(4))
    batch = task.sample(4, batch_size=16, generator=torch.Generator().manual_seed(3))
    right = again.model(batch.inputs, n_loops=program.n_loops(4)).argmax(-1)
    asked = batch.targets >= 0
    assert torch.equal(right[asked], batch.targets[asked])  # compiled, it solves the task


def test_programs_that_differ_under_interventions_alone_are_told_apart() -> None:
    # A carry that is held for two loops never lapses in an undisturbed run.
    held, plain = get_program("ripple_held_2"), get_program("ripple")
    _, task, made = compiled("ripple_held_2")
    found = decompile(made.model, task, **BRIEFLY)
    assert found.program is not None
    assert equivalence(found.program, held).equivalent
    assert not equivalence(found.program, plain).equivalent


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ripple", "second change"),
        ("ripple", "doubled"),
        ("ripple", "answers by the larger"),
        ("prefix_xor", "one-sided"),
        ("prefix_xor", "old value read"),
        ("prefix_xor", "out of phase"),
        ("prefix_xor", "read from a copy"),
    ],
)
def test_a_near_miss_is_never_called_exact_but_as_what_it_is(name: str, kind: str) -> None:
    miss = near_misses(name, most=16)[kind][0]  # of 16, one or two are of each kind
    task = get_task(miss.task)
    model = compile_program(miss, max_length=task.n_positions(6)).model
    found = decompile(model, task, **{**BRIEFLY, "tolerances": TOLERANCES})
    if found.claim.grade == EXACT:
        assert found.program is not None
        assert equivalence(found.program, miss).equivalent
    else:
        assert not equivalence(name, miss).equivalent


def test_what_reads_farther_than_its_neighbour_is_not_decompiled() -> None:
    _, task, made = compiled("lookahead")
    found = decompile(made.model, task, **BRIEFLY)
    assert found.program is None and found.refusal is not None
    assert found.refusal.code == "reads-farther" and found.refusal.value > 0
    assert str(found).startswith("not decompiled: ")


def test_what_has_too_many_values_is_not_decompiled() -> None:
    _, task, made = compiled("copy")
    found = decompile(made.model, task, most_values=3, **BRIEFLY)
    assert found.program is None and found.refusal is not None
    assert (found.refusal.code, found.refusal.line) == ("many-values", 3)


def test_a_model_that_is_no_automaton_is_given_no_program(barely_trained: Path) -> None:
    model = Run.load(barely_trained).model()
    found = decompile(model, Addition(), n=4, tolerances=(0.3,), contexts=8, tries=2)
    assert found.program is None and found.reason
    if found.closest is not None:
        assert not found.evidence.loc[found.evidence["what"] == TRAJECTORY, "low"].min() >= 0.9


def test_numbers_that_make_no_sense_are_refused() -> None:
    _, task, made = compiled("prefix_xor")
    cases: list[dict[str, Any]] = [
        {"tries": 1}, {"tolerances": (1.0,)}, {"tolerances": ()}, {"n": 1}, {"n": []},
    ]  # fmt: skip
    for wrong in cases:
        with pytest.raises(InputError) as caught:
            decompile(made.model, task, **wrong)
        assert [caught.value.what] == [*wrong]


def test_the_program_of_a_trained_model_is_read_from_exchanges_across_loops() -> None:
    (about,) = (m for m in benchmark_models(["carry_save"]) if m.disguise == TRAINED)
    model, everything = about.compiled.model, {"lengths": (3,), "interventions": None}
    settings = {"n": 4, "lengths": (4,), "n_exchanges": 2000, "examples": 32, "most_values": 4}
    found = decompile(model, about.task, **settings, sharp=False, across_loops=True)
    assert found.program is not None and found.claim.grade == EXACT
    # Single interchanges are what it was read from; two at once reach cells that none shows.
    same = equivalence(found.program, about.program, **everything)
    assert same.natural_share == 0 and same.every_single == (3,)
    assert same.interventions["changes"].any() and not same.interventions["differ"].any()
    assert same.repeated.differ <= 0.01 * same.repeated.number


def ripple_to(last: int) -> LoopProgram:
    """A ripple whose carries are dropped at every other loop from a position on."""
    carry = var("carry")
    support = shift_right(generate | (propagate & carry))
    step = where(indices <= last, support, support & ~carry)
    return dataclasses.replace(get_program("ripple"), name="ripple_to", step={"carry": step})


def test_a_program_that_differs_beyond_the_lengths_read_is_not_called_exact_there() -> None:
    program, task = ripple_to(7), get_task("addition")
    model = compile_program(program, max_length=task.n_positions(9)).model
    found = decompile(model, task, **BRIEFLY)
    assert found.claim.grade == EXACT and found.claim.checked_to == 5
    longer = decompile(model, task, **{**BRIEFLY, "lengths": (9,)})
    assert longer.program is None and longer.refusal is not None
    assert longer.refusal.code == "below-line" and longer.refusal.n == 9


def test_a_longer_length_is_checked_where_the_model_takes_one() -> None:
    task = get_task("addition")
    for most, expected in ((13, [5, 6, 9]), (9, [5, 6, 8]), (7, [5, 6])):
        model = compile_program("ripple", max_length=most).model
        assert judged_lengths(model, task, [6]) == expected


def faded(*, from_the_left: bool) -> LoopProgram:
    """A carry whose level counts down, 2 loops at bits (1, 0) and 3 at (0, 1)."""
    level, life = var("level"), tok_map(tokens, {1: 2, 2: 3}, default=1, name="life")
    support = shift_right(generate | (propagate & (level > 0)))
    return dataclasses.replace(
        get_program("ripple"),
        name="fade_23",
        prepare={"level": where(shift_right(generate), life, 0) if from_the_left else full(0)},
        step={"level": where(support, life, where(level > 0, level - 1, 0))},
        finish=propagate ^ (level > 0),
    )


@pytest.mark.parametrize("from_the_left", [False, True])
def test_values_that_fade_are_read_also_where_the_left_neighbour_starts_them(
    from_the_left: bool,
) -> None:
    program, task = faded(from_the_left=from_the_left), get_task("addition")
    model = compile_program(program, max_length=task.n_positions(6)).model
    found = decompile(model, task, **BRIEFLY)
    assert found.program is not None and found.claim.grade == EXACT, found.reason
    assert equivalence(found.program, program).equivalent


def test_starts_that_differ_are_refused_before_any_step_is_tried(monkeypatch) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("a step was tried")

    monkeypatch.setattr("loopinterp.decompiler.sharp_values.Experiments.tabulate", never)
    count = var("count")
    program = dataclasses.replace(
        get_program("ripple"),
        name="counted",
        prepare={"count": indices},
        step={"count": where(count > 0, count - 1, 0)},
        finish=count > 3,
    )
    task = get_task("addition")
    model = compile_program(program, max_length=task.n_positions(6)).model
    found = decompile(model, task, **BRIEFLY)
    assert found.refusal is not None and found.refusal.code == "starts-differ"
