"""Stage 1, validate: is this a program that can be compiled, and in which words?

What a later stage would trip over is refused here, and shorthands are written out: from here on
a program is made of tokens, indices, constants, variables, tables, elementwise operations,
selections, aggregates and widths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from loopinterp.errors import check_integer
from loopinterp.rasp.expr import Select, Seq, ShiftRight, Var, selects
from loopinterp.rasp.node import Expr, postorder, rewritten
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.program_registry import get_program

MAX_LENGTH = 512
"""Longest sequence a model is compiled for: each position has a direction of its own."""


@dataclass(frozen=True)
class ValidatedProgram:
    """A program ready for the compiler: every variable has a step, and no shorthand is left.

    ``selects`` are its selections -> those that the program has in their place, whose names traces
    know; where all are ``causal``, the model's attention can be.
    """

    program: LoopProgram
    prepare: dict[str, Seq]
    step: dict[str, Seq]
    finish: Seq
    selects: dict[Select, Select]
    max_length: int
    causal: bool

    @property
    def roots(self) -> dict[str, Iterable[Seq]]:
        """The expressions of each part."""
        parts = {"prepare": self.prepare.values(), "step": self.step.values()}
        return {**parts, "finish": [self.finish]}

    def where(self, node: Expr) -> str:
        """A node, and the part of the program it stands in: for error messages."""
        part = next((f" in {part}" for part, x in self.roots.items() if node in postorder(x)), "")
        return f"{node!r}{part} of program {self.program.name}"


def validate(program: LoopProgram | str, max_length: int) -> ValidatedProgram:
    """Check what was given, and write the shorthands out.

    Raises:
        InputError: no loop program, or a length out of range.
    """
    program = get_program(program)
    fix = "Pass the longest sequence that the model shall read, BOS and padding included."
    check_integer("max_length", max_length, least=1, most=MAX_LENGTH, fix=fix)
    plain = written_out(program.expressions)
    found = selects(program.expressions)
    return ValidatedProgram(
        program=program,
        prepare={name: cast(Seq, plain[x]) for name, x in program.prepare.items()},
        step={
            name: cast(Seq, plain[program.step[name]]) if name in program.step else Var(name)
            for name in program.prepare
        },
        finish=cast(Seq, plain[program.finish]),
        selects={cast(Select, plain.get(node, node)): node for node in found[::-1]},
        max_length=max_length,
        causal=all(select.causal for select in found),
    )


def written_out(roots: Iterable[Seq]) -> dict[Expr, Expr]:
    """Every node below the roots, with every shift in it replaced by what it stands for.

    Example:
        >>> from loopinterp.rasp import shift_right, tokens
        >>> x = shift_right(tokens)
        >>> written_out([x])[x]
        aggregate(select(indices, indices - 1, '==', name='shift_1'), tokens, 'mean', default=0)
    """
    return rewritten(roots, lambda _, new: new.expanded if isinstance(new, ShiftRight) else new)
