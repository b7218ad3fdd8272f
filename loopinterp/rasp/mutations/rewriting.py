"""A loop program with some of its expressions exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from loopinterp.rasp.expr import Aggregate, Select, SelWidth, Seq, ShiftRight, Var
from loopinterp.rasp.node import Expr, postorder, rewritten

if TYPE_CHECKING:
    from loopinterp.rasp.program import LoopProgram


def substituted(root: Seq, exchange: Mapping[Seq, Seq]) -> Seq:
    """An expression with every node that is a key replaced by its value, all at once.

    A selection that changes loses its name: the name is that of the selection as it was.

    Example:
        >>> from loopinterp.rasp import shift_right, tokens, var
        >>> substituted(shift_right(var("x") & tokens), {var("x"): tokens + 1})
        shift_right((tokens + 1) & tokens, 1, default=0)
    """

    def change(old: Expr, new: Expr) -> Expr:
        if isinstance(old, Seq) and old in exchange:
            return exchange[old]
        return replace(new, name=None) if isinstance(new, Select) and new is not old else new

    return cast(Seq, rewritten([root], change)[root])


def after_a_step(root: Seq, program: LoopProgram) -> Seq:
    """An expression as it will be one loop later, in terms of the variables now."""
    return substituted(root, {Var(name): x for name, x in program.step.items()})


def at_the_start(root: Seq, program: LoopProgram) -> Seq:
    """An expression as it is before the first loop, in terms of the tokens."""
    return substituted(root, {Var(name): x for name, x in program.prepare.items()})


def reads_of_other_positions(program: LoopProgram) -> list[Seq]:
    """What a step gathers of the variables of other positions: the outermost such expressions."""
    found = dict.fromkeys(
        node
        for node in postorder(program.step.values())
        if isinstance(node, (Aggregate, ShiftRight, SelWidth)) and node.variables
    )
    inner = {below for read in found for below in postorder(read.children)}
    return [read for read in found if read not in inner]


def changed(
    program: LoopProgram,
    name: str,
    *,
    doc: str,
    prepare: Mapping[str, Seq] | None = None,
    step: Mapping[str, Seq] | None = None,
    finish: Seq | None = None,
) -> LoopProgram:
    """The program under another name, with variables added or given another step.

    Example:
        >>> from loopinterp.rasp import get_program, var
        >>> still = {"carry": var("carry")}
        >>> changed(get_program("ripple"), "still", doc="It never moves.", step=still).name
        'ripple, still'
    """
    return replace(
        program,
        name=f"{program.name}, {name}",
        prepare={**program.prepare, **(prepare or {})},
        step={**program.step, **(step or {})},
        finish=program.finish if finish is None else finish,
        doc=doc,
    )


def fresh(program: LoopProgram, name: str) -> str:
    """A name that no variable of the program has.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> fresh(get_program("ripple"), "carry"), fresh(get_program("ripple"), "age")
        ('carry_', 'age')
    """
    while name in program.prepare:
        name += "_"
    return name
