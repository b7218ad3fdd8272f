"""Mutations of when things happen: several steps a loop, pauses, answers by another loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.rasp.language import full, larger, var, where
from loopinterp.rasp.mutations.rewriting import Condition, after_a_step, changed, substituted

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Seq
    from loopinterp.rasp.program import LoopProgram

NUMBERS = {2: "two", 3: "three"}


def several_steps(program: LoopProgram, steps: int, when: Condition) -> LoopProgram:
    """So many steps in every loop.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> from loopinterp.rasp.mutations.rewriting import ALWAYS
        >>> import torch
        >>> tokens = torch.tensor([[2, 1, 0, 1, 1]])
        >>> fast = several_steps(get_program("prefix_xor"), 2, ALWAYS)
        >>> fast.trace(tokens, 2).outputs[:, 0, 1:].tolist()
        [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    step = dict(program.step)
    for _ in range(steps - 1):
        step = {name: after_a_step(x, program) for name, x in step.items()}
    chosen = {name: when.choose(x, program.step[name]) for name, x in step.items()}
    return changed(program, f"{NUMBERS[steps]} steps a loop", when, step=chosen)


def every_other_loop(program: LoopProgram, when: Condition) -> LoopProgram:
    """Every second loop does nothing: half the speed."""
    resting = program.unused_name("resting")
    paused = {
        name: when.choose(where(var(resting), var(name), x), x) for name, x in program.step.items()
    }
    step = {**paused, resting: ~var(resting)}
    return changed(program, "a step every other loop", when, step=step, prepare={resting: full(0)})


def worked_out_from_before(program: LoopProgram, read: Seq, when: Condition) -> LoopProgram:
    """What is read of other positions is worked out, a step further, from a loop ago.

    Left alone it is the same at every loop; a change comes to others a loop later, and two
    positions further.

    Args:
        program: The program.
        read: An expression of a step that reads other positions.
        when: When it acts.
    """
    begun = program.unused_name("begun")
    reading = after_a_step(read, program)
    before = {name: program.unused_name(f"{name}_before") for name in sorted(reading.variables)}
    old = substituted(reading, {var(name): var(was) for name, was in before.items()})
    known = when.choose(where(var(begun), old, read), read)
    return changed(
        program,
        f"{' and '.join(sorted(read.variables))} worked out from a loop ago",
        when,
        prepare={was: program.prepare[name] for name, was in before.items()} | {begun: full(0)},
        step={name: substituted(x, {read: known}) for name, x in program.step.items()}
        | {was: var(name) for name, was in before.items()}
        | {begun: full(1)},
    )


def answers_by_the_larger(program: LoopProgram, name: str) -> LoopProgram:
    """The answer reads the larger of what a variable is and what it was a loop before."""
    before = program.unused_name(f"{name}_before")
    return changed(
        program,
        f"answers by the larger {name} of two loops",
        prepare={before: program.prepare[name]},
        step={before: var(name)},
        finish=substituted(program.finish, {var(name): larger(var(name), var(before))}),
    )


def answers_ahead(program: LoopProgram) -> LoopProgram:
    """The answer is what the variables will say a loop later."""
    return changed(program, "answers a loop ahead", finish=after_a_step(program.finish, program))
