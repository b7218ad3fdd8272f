"""Mutations of how variables are stored: negated, doubled, copied to those who read them.

Left alone, all of these do at every loop what the original does. Another code of a position's own
variables is the same program as an abstraction of whole positions; a copy that another position
keeps is not, as a change at one position no longer reaches the others in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.rasp.language import larger, smaller, var
from loopinterp.rasp.mutations.rewriting import (
    after_a_step,
    at_the_start,
    changed,
    substituted,
)

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Seq
    from loopinterp.rasp.program import LoopProgram


def negated(program: LoopProgram, name: str) -> LoopProgram:
    """The variable is kept as 1 - v.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> negated(get_program("ripple"), "carry").finish
        tok_map(tokens, {1: 1, 2: 1}, default=0, name='propagate') ^ (full(1) - var('carry'))
    """
    read = {var(name): 1 - var(name)}
    step = {v: substituted(x, read) for v, x in program.step.items()}
    if name in step:
        step[name] = 1 - step[name]
    return changed(
        program,
        f"{name} negated",
        prepare={name: 1 - program.prepare[name]},
        step=step,
        finish=substituted(program.finish, read),
    )


def doubled(program: LoopProgram, name: str) -> LoopProgram:
    """Two copies of the variable: each is computed from the other, and one is answered from."""
    copy = program.unused_name(f"{name}_copy")
    other = {var(name): var(copy)}
    return changed(
        program,
        f"{name} doubled",
        prepare={copy: program.prepare[name]},
        step={name: substituted(program.step[name], other), copy: program.step[name]},
        finish=substituted(program.finish, other),
    )


def read_from_a_copy(program: LoopProgram, read: Seq, *, trust: str) -> LoopProgram:
    """What is read from other positions is also kept by the reader, a step ahead.

    The copy is the read of the values that all variables are about to take, so that left alone it
    always equals the read itself.

    Args:
        program: The program.
        read: An expression of a step that reads other positions.
        trust: ``copy``, or the ``larger`` or the ``smaller`` of copy and read.
    """
    copy = program.unused_name("copied")
    by_trust = {"copy": var(copy), "larger": larger(var(copy), read)}
    trusted = by_trust.get(trust, smaller(var(copy), read))
    step = {v: substituted(x, {read: trusted}) for v, x in program.step.items()}
    prepare = {copy: at_the_start(read, program)}
    step[copy] = after_a_step(read, changed(program, "", prepare=prepare, step=step))
    how = f" or the others, the {trust}" if trust != "copy" else ""
    what = f"{' and '.join(sorted(read.variables))} read from a copy{how}"
    return changed(program, what, prepare=prepare, step=step)
