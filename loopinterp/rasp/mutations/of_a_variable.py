"""Mutations of how one variable is kept: held, one-sided, delayed, forgotten, recomputed.

Each leaves a program that is the original until a value changes where, under the condition, it
should not: so whether left alone it still answers right is found by running it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.errors import InputError
from loopinterp.rasp.expr import Elementwise
from loopinterp.rasp.language import full, larger, ne, smaller, var, where
from loopinterp.rasp.mutations.rewriting import (
    Condition,
    changed,
    reads_of_other_positions,
    substituted,
)
from loopinterp.rasp.program_alignment import spell_loops

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Seq
    from loopinterp.rasp.program import LoopProgram


def held(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """A change of the variable comes only when it was due for ``loops`` loops: it lives so long.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> from loopinterp.rasp.mutations.rewriting import ALWAYS
        >>> held(get_program("ripple"), "carry", ALWAYS, loops=2).name
        'ripple, carry held 2 loops'
    """
    value, due = var(name), program.step[name]
    waited = program.unused_name(f"{name}_waited")
    waits = when.choose(ne(value, due) & (var(waited) < loops - 1), full(0))
    step = {name: where(waits, value, due), waited: where(waits, var(waited) + 1, 0)}
    what = f"{name} held {spell_loops(loops)}"
    return changed(program, what, when, step=step, prepare={waited: full(0)})


def held_for_ever(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable never changes."""
    step = {name: when.choose(var(name), program.step[name])}
    return changed(program, f"{name} held for ever", when, step=step)


def only_grows(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable takes larger values only, as the carry of a sticky ripple does."""
    due = program.step[name]
    step = {name: when.choose(larger(var(name), due), due)}
    return changed(program, f"{name} only grows", when, step=step)


def only_falls(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable takes smaller values only."""
    due = program.step[name]
    step = {name: when.choose(smaller(var(name), due), due)}
    return changed(program, f"{name} only falls", when, step=step)


def delayed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """What the variable becomes is put off by a loop."""
    due, pending = program.step[name], program.unused_name(f"{name}_pending")
    step = {name: when.choose(var(pending), due), pending: due}
    prepare = {pending: program.prepare[name]}
    return changed(program, f"{name} delayed", when, step=step, prepare=prepare)


def forgetting(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """Where the variable is not confirmed by what it becomes, it falls back to its first value."""
    due = program.step[name]
    lost = where(ne(var(name), due), program.prepare[name], due)
    return changed(program, f"{name} forgotten", when, step={name: when.choose(lost, due)})


def kept_shorter(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """A value that the program keeps is kept so many loops, and then computed anew.

    Raises:
        InputError: the step of the variable is no choice between keeping it and computing it.
    """
    choice = kept_or_computed(program, name)
    if choice is None:
        raise InputError(
            f"variable {name!r} of {program.name}",
            expected="a step such as where(condition, variable, expression)",
            given=repr(program.step[name]),
            fix="Choose a variable that is kept at some positions only.",
        )
    keeps, anew = choice
    kept = program.unused_name(f"{name}_kept")
    limited = when.choose(keeps & (var(kept) < loops), full(0))
    step = {
        name: when.choose(where(limited, var(name), anew), program.step[name]),
        kept: where(limited, smaller(var(kept) + 1, loops), 0),
    }
    what = f"{name} kept {spell_loops(loops)}"
    return changed(program, what, when, step=step, prepare={kept: full(0)})


def kept_or_computed(program: LoopProgram, name: str) -> tuple[Seq, Seq] | None:
    """Where a step keeps the variable, and what it computes elsewhere, if it is such a choice."""
    due, value = program.step[name], var(name)
    if not isinstance(due, Elementwise) or due.op not in ("or", "where"):
        return None
    if due.op == "or":  # a truth value that is not taken back
        condition, inside, outside = value, *sorted(due.args, key=lambda x: x is not value)
    else:
        condition, inside, outside = due.args
    keeps, anew = (condition, outside) if inside is value else (~condition, inside)
    # A counter goes on from its own value: that is not to compute it anew.
    of_itself = substituted(anew, dict.fromkeys(reads_of_other_positions(program), full(0)))
    if value not in (inside, outside) or name in of_itself.variables:
        return None
    return (keeps & ~anew if due.op == "or" else keeps), anew


def recomputed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """A variable that the program only keeps is computed from the tokens in every loop."""
    step = {name: when.choose(program.prepare[name], var(name))}
    return changed(program, f"{name} recomputed", when, step=step)


def reading_old(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """Other positions see the value that the variable had a loop before."""
    before = program.unused_name(f"{name}_before")
    old = {
        read: substituted(read, {var(name): var(before)})
        for read in reads_of_other_positions(program)
    }
    step = {v: when.choose(substituted(x, old), x) for v, x in program.step.items()}
    return changed(
        program,
        f"{name} of a loop ago read by others",
        when,
        step={**step, before: var(name)},
        prepare={before: program.prepare[name]},
    )
