"""Mutations of when things happen: several steps a loop, pauses, answers by another loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.rasp.language import full, larger, var, where
from loopinterp.rasp.mutations.rewriting import after_a_step, changed, fresh, substituted

if TYPE_CHECKING:
    from loopinterp.rasp.mutations.conditions import Condition
    from loopinterp.rasp.program import LoopProgram

NUMBERS = {2: "two", 3: "three"}


def several_steps(program: LoopProgram, steps: int, when: Condition) -> LoopProgram:
    """So many steps in every loop.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> from loopinterp.rasp.mutations.conditions import ALWAYS
        >>> several_steps(get_program("prefix_xor"), 2, ALWAYS).step["prefix"]
        bit_of ^ shift_right(bit_of ^ shift_right(prefix, 1, default=0), 1, default=0)
    """
    step = dict(program.step)
    for _ in range(steps - 1):
        step = {name: after_a_step(x, program) for name, x in step.items()}
    return changed(
        program,
        f"{NUMBERS[steps]} steps a loop {when.label}".rstrip(),
        doc=f"Each loop makes {NUMBERS[steps]} steps.",
        prepare=when.prepare,
        step={name: when.choose(x, program.step[name]) for name, x in step.items()} | when.step,
    )


def every_other_loop(program: LoopProgram, when: Condition) -> LoopProgram:
    """Every second loop does nothing: half the speed."""
    resting = fresh(program, "resting")
    paused = {
        name: when.choose(where(var(resting), var(name), x), x) for name, x in program.step.items()
    }
    return changed(
        program,
        f"a step every other loop {when.label}".rstrip(),
        doc="Every second loop does nothing.",
        prepare={resting: full(0), **when.prepare},
        step={**paused, resting: ~var(resting), **when.step},
    )


def answers_by_the_larger(program: LoopProgram, name: str) -> LoopProgram:
    """The answer reads the larger of what a variable is and what it was a loop before."""
    before = fresh(program, f"{name}_before")
    return changed(
        program,
        f"answers by the larger {name} of two loops",
        doc=f"The answer reads the larger of the {name} now and a loop before.",
        prepare={before: program.prepare[name]},
        step={before: var(name)},
        finish=substituted(program.finish, {var(name): larger(var(name), var(before))}),
    )


def answers_ahead(program: LoopProgram) -> LoopProgram:
    """The answer is what the variables will say a loop later."""
    return changed(
        program,
        "answers a loop ahead",
        doc="The answer is computed from what the variables are about to become.",
        finish=after_a_step(program.finish, program),
    )
