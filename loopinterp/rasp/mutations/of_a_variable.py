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
    changed,
    fresh,
    reads_of_other_positions,
    substituted,
)

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Seq
    from loopinterp.rasp.mutations.conditions import Condition
    from loopinterp.rasp.program import LoopProgram


def held(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """A change of the variable comes only when it was due for ``loops`` loops: it lives so long.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> from loopinterp.rasp.mutations.conditions import ALWAYS
        >>> held(get_program("ripple"), "carry", ALWAYS, loops=2).name
        'ripple, carry held 2 loops'
    """
    value, due = var(name), program.step[name]
    waited = fresh(program, f"{name}_waited")
    waits = ne(value, due) & (var(waited) < loops - 1)
    waits = when.choose(waits, full(0))
    return _kept(
        program,
        f"{name} held {_loops(loops)}",
        when,
        step={name: where(waits, value, due), waited: where(waits, var(waited) + 1, 0)},
        prepare={waited: full(0)},
        doc=f"The {name} takes a new value only when that was due for {_loops(loops)}.",
    )


def held_for_ever(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable never changes."""
    return _kept(
        program,
        f"{name} held for ever",
        when,
        step={name: when.choose(var(name), program.step[name])},
        doc=f"The {name} never changes.",
    )


def only_grows(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable takes larger values only, as the carry of a sticky ripple does."""
    return _one_sided(program, name, when, "only grows", larger(var(name), program.step[name]))


def only_falls(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """The variable takes smaller values only."""
    return _one_sided(program, name, when, "only falls", smaller(var(name), program.step[name]))


def delayed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """What the variable becomes is put off by a loop."""
    due = program.step[name]
    pending = fresh(program, f"{name}_pending")
    return _kept(
        program,
        f"{name} delayed",
        when,
        step={name: when.choose(var(pending), due), pending: due},
        prepare={pending: program.prepare[name]},
        doc=f"What the {name} becomes is put off by a loop.",
    )


def forgetting(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """Where the variable is not confirmed by what it becomes, it falls back to its first value."""
    due = program.step[name]
    lost = where(ne(var(name), due), program.prepare[name], due)
    return _kept(
        program,
        f"{name} forgotten",
        when,
        step={name: when.choose(lost, due)},
        doc=f"A {name} that is not confirmed falls back to its first value.",
    )


def kept_shorter(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """A value that the program keeps is kept so many loops, and then computed anew.

    Raises:
        InputError: the step of the variable is no choice between keeping it and computing it.
    """
    choice = _kept_or_computed(program, name)
    if choice is None:
        raise InputError(
            f"variable {name!r} of {program.name}",
            expected="a step such as where(condition, variable, expression)",
            given=repr(program.step[name]),
            fix="Choose a variable that is kept at some positions only.",
        )
    keeps, anew = choice
    kept = fresh(program, f"{name}_kept")
    limited = when.choose(keeps & (var(kept) < loops), full(0))
    return _kept(
        program,
        f"{name} kept {_loops(loops)}",
        when,
        step={
            name: when.choose(where(limited, var(name), anew), program.step[name]),
            kept: where(limited, smaller(var(kept) + 1, loops), 0),
        },
        prepare={kept: full(0)},
        doc=f"A {name} that is kept is computed anew after {_loops(loops)}.",
    )


def _kept_or_computed(program: LoopProgram, name: str) -> tuple[Seq, Seq] | None:
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


def is_kept_at_times(program: LoopProgram, name: str) -> bool:
    """Whether a step chooses between keeping the variable and computing it."""
    return _kept_or_computed(program, name) is not None


def recomputed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """A variable that the program only keeps is computed from the tokens in every loop."""
    return _kept(
        program,
        f"{name} recomputed",
        when,
        step={name: when.choose(program.prepare[name], var(name))},
        doc=f"The {name} is not kept but computed from the tokens in every loop.",
    )


def reading_old(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """Other positions see the value that the variable had a loop before."""
    before = fresh(program, f"{name}_before")
    old = {
        read: substituted(read, {var(name): var(before)})
        for read in reads_of_other_positions(program)
    }
    step = {v: when.choose(substituted(x, old), x) for v, x in program.step.items()}
    return _kept(
        program,
        f"{name} of a loop ago read by others",
        when,
        step={**step, before: var(name)},
        prepare={before: program.prepare[name]},
        doc=f"Other positions see the {name} as it was a loop before.",
    )


def _loops(number: int) -> str:
    return "1 loop" if number == 1 else f"{number} loops"


def _one_sided(
    program: LoopProgram, name: str, when: Condition, how: str, value: Seq
) -> LoopProgram:
    return _kept(
        program,
        f"{name} {how}",
        when,
        step={name: when.choose(value, program.step[name])},
        doc=f"The {name} {how}.",
    )


def _kept(
    program: LoopProgram,
    what: str,
    when: Condition,
    *,
    step: dict[str, Seq],
    doc: str,
    prepare: dict[str, Seq] | None = None,
) -> LoopProgram:
    """The mutated program, with the variables of the condition, under a name that says it."""
    return changed(
        program,
        f"{what} {when.label}".rstrip(),
        doc=doc,
        prepare={**(prepare or {}), **when.prepare},
        step={**step, **when.step},
    )
