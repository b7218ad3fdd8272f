"""Programs that are nearly a stock program, each made to slip through a part of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from loopinterp.comparison import ProgramComparison, SpreadPairs, compare_programs
from loopinterp.compiler import compile_program
from loopinterp.programs import (
    UNKNOWN,
    LoopProgram,
    eq,
    equivalence,
    full,
    get_program,
    indices,
    kqv,
    larger,
    ne,
    shift_right,
    smaller,
    tokens,
    var,
    where,
)
from loopinterp.programs.mutations import changed, forgotten_the_second_time, held_out_of_phase
from loopinterp.tasks import Addition, get_task

RIPPLE = get_program("ripple")
CARRY, NEW = var("carry"), RIPPLE.step["carry"]


def compared(
    program: LoopProgram, listed: Sequence[str | LoopProgram], lengths: Sequence[int]
) -> ProgramComparison:
    """A model of one program held against others, 64 inputs of each length."""
    generator = torch.Generator().manual_seed(0)
    data = [Addition().sample(n, batch_size=64, generator=generator) for n in lengths]
    model = compile_program(program, max_length=max(lengths) + 1).model
    return compare_programs(model, list(listed), data)


@pytest.mark.parametrize(
    ("name", "variable", "n", "mutation"),
    [
        ("ripple", "carry", 6, held_out_of_phase),
        ("copy", "symbol", 4, forgotten_the_second_time),  # of twice as many positions
    ],
)
def test_what_shows_after_states_of_another_loop_or_a_second_interchange_only(
    name, variable, n, mutation
):
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(0)
    data = task.sample(n, batch_size=128, generator=generator)
    near_miss = mutation(program, variable)
    model = compile_program(near_miss, max_length=data.inputs.shape[1]).model
    found = compare_programs(model, [program, near_miss], data, pairs=SpreadPairs()).verdict
    # Of two that few interchanges tell apart none may be identified, but never the wrong one.
    assert found.closest == near_miss.name
    assert found.identified == near_miss.name or "not_separated" in [r.code for r in found.reasons]
    assert compare_programs(model, [program], data).verdict.identified is None
    # Single interchanges between runs at the same loop do not show it.
    alone = SpreadPairs(other_loops=0, repeated=0)
    blind = compare_programs(model, [program], data, pairs=alone)
    assert blind.verdict.identified == name
    run_right = blind.data["whole_run"].sel(program=name, stratum="all", estimate="value")
    assert float(run_right.item()) == 1


def token_left(places: int, token: int):
    return shift_right(eq(tokens, token), places)


@pytest.mark.parametrize("n", [19, 20])
def test_an_exchange_that_is_mended_late_after_even_loops_only(n):
    """Loops evenly spaced could all be odd."""
    disturbed = ne(var("memo"), shift_right(var("before"))) & eq(var("clock"), 0)
    program = changed(
        RIPPLE,
        "mends late after even loops",
        step={
            "carry": where(disturbed, CARRY, NEW),
            "before": CARRY,
            "memo": shift_right(CARRY),
            "clock": eq(var("clock"), 0),
        },
        prepare={"before": full(0), "memo": full(0), "clock": full(0)},
    )
    verdict = compared(program, ["ripple", "sticky_ripple"], [n]).verdict
    assert verdict.identified is None, verdict


@pytest.mark.parametrize(("loop", "lengths"), [(2, [24]), (14, [8, 9, 14])])
def test_an_answer_that_is_wrong_at_one_loop_or_one_length(loop, lengths):
    """A share over all loops and lengths hides it."""
    program = changed(
        RIPPLE,
        "bit 1 wrong at one loop",
        step={"carry": NEW, "age": smaller(var("age") + 1, loop + (loop < 14))},
        prepare={"age": full(0)},
        finish=RIPPLE.finish ^ (eq(var("age"), loop) & eq(indices, 1)),
    )
    result = compared(program, ["ripple", "sticky_ripple"], lengths)
    assert result.verdict.closest == "ripple" and result.verdict.identified is None
    assert result.data["undisturbed"].sel(program="ripple", estimate="value").item() > 0.95
    assert any("worst" in r.values for r in result.verdict.reasons)


def test_a_state_that_holds_more_which_matters_rarely():
    """What the two tokens before were: wrong, it flips the carry for a loop."""
    context = token_left(2, 3) & token_left(3, 0)
    glitch = eq(var("left"), 0) & ne(var("context"), context) & eq(CARRY, NEW)
    program = changed(
        RIPPLE,
        "flips in a wrong context",
        step={
            "carry": NEW ^ glitch,
            "context": context,
            "left": larger(var("left") - 1, 0),
        },
        prepare={"context": context, "left": indices},
    )
    verdict = compared(program, ["ripple", "ripple_held_2", "sticky_ripple"], [8, 12]).verdict
    assert verdict.identified is None, verdict
    assert "same_value" in [reason.code for reason in verdict.reasons]


@pytest.mark.parametrize("run", ["sticky_ripple", "ripple"])
def test_a_program_that_falls_silent_when_disturbed(run):
    """It is the ripple while nothing happens, and says nothing of anything that does."""
    first = eq(var("begun"), 0) | eq(indices, 0)
    propagated = shift_right(eq(tokens, 1) | eq(tokens, 2)) & var("memo")
    consistent = eq(CARRY, where(first, 0, shift_right(eq(tokens, 3)) | propagated))
    bad = ne(var("memo"), shift_right(var("before"))) | eq(consistent, 0) | var("flag")
    anywhere = kqv(bad, 1, 1, "==", mode="max", default=0)
    silent = changed(
        RIPPLE,
        "says nothing when disturbed",
        step={
            "carry": NEW,
            "before": CARRY,
            "memo": shift_right(CARRY),
            "begun": full(1),
            "flag": anywhere,
        },
        prepare={name: full(0) for name in ("before", "memo", "begun", "flag")},
        finish=where(anywhere, UNKNOWN, RIPPLE.finish),
    )
    verdict = compared(get_program(run), [silent], [8, 10]).verdict
    assert verdict.identified is None, verdict


def clocked(name: str, trigger, held=None) -> LoopProgram:
    """The ripple with a clock that stops at 3; where a trigger holds, the carry is another."""
    return replace(
        RIPPLE,
        name=name,
        prepare={**RIPPLE.prepare, "clock": full(0)},
        step={
            "carry": where(trigger, CARRY if held is None else held, NEW),
            "clock": smaller(var("clock") + 1, 3),
        },
    )


def test_a_state_of_the_start_put_into_a_later_loop():
    """It holds the carry where its own clock is at the start, and three to its left are old."""
    clock = var("clock")
    old = [eq(shift_right(clock, k), 3) for k in (1, 2, 3)]
    program = clocked("young among old", eq(clock, 0) & old[0] & old[1] & old[2])
    assert not equivalence("ripple", program, lengths=(5,)).equivalent
    verdict = compared(program, ["ripple", "sticky_ripple"], [8]).verdict
    assert verdict.identified is None and "from_initial_state" not in verdict.untried


def test_the_first_position_of_another_loop():
    """Position 4 holds a carry where the clock of position 0 is not that of all others."""
    clock = var("clock")
    alike = [eq(shift_right(clock, k), clock) for k in (1, 2, 3)]
    apart = eq(indices, 4) & ne(shift_right(clock, 4), clock) & alike[0] & alike[1] & alike[2]
    program = clocked("first position", apart, held=full(1))
    assert not equivalence("ripple", program, lengths=(5,)).equivalent
    verdict = compared(program, ["ripple", "sticky_ripple"], [6]).verdict
    assert verdict.identified is None and "first_position" not in verdict.untried
