"""A loop program with some of its expressions exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loopinterp.rasp.expr import Aggregate, Select, SelWidth, Seq, ShiftRight, Var
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr

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
    new: dict[Expr, Expr] = {}

    def renewed(x: object) -> object:
        if isinstance(x, tuple):
            return tuple(map(renewed, x))
        return new[x] if isinstance(x, Expr) else x

    for node in postorder([root]):
        old = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}  # type: ignore[arg-type]
        fields = {name: renewed(x) for name, x in old.items()}
        if isinstance(node, Select) and fields != old:
            fields["name"] = None
        exchanged = exchange.get(node) if isinstance(node, Seq) else None
        new[node] = type(node)(**fields) if exchanged is None else exchanged
    result = new[root]
    assert isinstance(result, Seq)  # what replaces a sequence is one
    return result


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
    return dataclasses.replace(
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
