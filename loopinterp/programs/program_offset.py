"""The program offset: which loop and position of a program stand for those of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from loopinterp.programs.language import UNKNOWN, full, var
from loopinterp.programs.program import LoopProgram


@dataclass(frozen=True)
class ProgramOffset:
    """Which part of a program stands for the state of the model at one position and loop.

    Attributes:
        shift: The state after t loops of the model stands for the program after t + shift.
        offset: The state at position p stands for the program's variables at p - offset (1 for
            a program whose variables are the carries OUT of each position).
        lag: The model answers by what the program knew so many loops before.
    """

    shift: int = 0
    offset: int = 0
    lag: int = 0

    def __str__(self) -> str:
        parts = []
        if self.shift:
            side = "ahead of" if self.shift > 0 else "behind"
            parts.append(f"program {spell_loops(abs(self.shift))} {side} the model")
        if self.offset:
            parts.append(f"variables {self.offset} position to the left")
        if self.lag:
            parts.append(f"answers {spell_loops(self.lag)} late")
        return ", ".join(parts) or "loop by loop, position by position"


def alignments(
    shifts: tuple[int, ...] = (0, -1, 1), offsets: tuple[int, ...] = (0, 1), lags: int = 1
) -> Iterator[ProgramOffset]:
    """All program offsets in a range, that of zeros first."""
    for lag, offset, shift in product(range(lags + 1), offsets, shifts):
        yield ProgramOffset(shift, offset, lag)


def with_output_lag(program: LoopProgram, lag: int) -> LoopProgram:
    """The same program, answering by what it knew ``lag`` loops before.

    The pending answers become variables, so that an interchange moves them with the state.
    """
    for _ in range(lag):
        name = program.unused_name("answer")
        program = replace(
            program,
            prepare={**program.prepare, name: full(UNKNOWN)},
            step={**program.step, name: program.finish},
            finish=var(name),
        )
    return program


def spell_loops(n: int) -> str:
    """``1 loop``, ``2 loops``."""
    return "1 loop" if n == 1 else f"{n} loops"
