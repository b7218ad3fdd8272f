"""A loop program with some of its expressions exchanged, always or under a condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from loopinterp.rasp.expr import Aggregate, Select, SelWidth, Seq, ShiftRight, Var
from loopinterp.rasp.language import where
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


@dataclass(frozen=True)
class Condition:
    """A condition on positions and loops, with the variables it needs.

    Attributes:
        label: How the name of a mutation says it; empty for the one that always holds.
        holds: 1 where it holds; None if it always does.
        prepare: Variables it needs, before the first loop.
        step: The same, after a loop.
    """

    label: str = ""
    holds: Seq | None = None
    prepare: Mapping[str, Seq] = field(default_factory=dict)
    step: Mapping[str, Seq] = field(default_factory=dict)

    def choose(self, inside: Seq, outside: Seq) -> Seq:
        """One expression where the condition holds, the other elsewhere."""
        return inside if self.holds is None else where(self.holds, inside, outside)

    def __and__(self, other: Condition) -> Condition:
        if self.holds is None or other.holds is None:
            return other if self.holds is None else self
        return Condition(
            f"{self.label} {other.label}",
            self.holds & other.holds,
            {**self.prepare, **other.prepare},
            {**self.step, **other.step},
        )


ALWAYS = Condition()


def changed(
    program: LoopProgram,
    what: str,
    when: Condition = ALWAYS,
    *,
    prepare: Mapping[str, Seq] | None = None,
    step: Mapping[str, Seq] | None = None,
    finish: Seq | None = None,
) -> LoopProgram:
    """The program under a name that says what is changed, with variables added or another step.

    The variables of the condition are added; the expressions that are given say what it decides.

    Example:
        >>> from loopinterp.rasp import get_program, var
        >>> still = {"carry": var("carry")}
        >>> changed(get_program("ripple"), "carry never moves", step=still).name
        'ripple, carry never moves'
    """
    name = f"{program.name}, {what} {when.label}".rstrip()
    return replace(
        program,
        name=name,
        prepare={**program.prepare, **(prepare or {}), **when.prepare},
        step={**program.step, **(step or {}), **when.step},
        finish=program.finish if finish is None else finish,
        doc=f"A mutation: {name}.",
    )
