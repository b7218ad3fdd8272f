"""What the studies of circuits are given, checked where it enters."""

from __future__ import annotations

from collections.abc import Sequence

from loopinterp.errors import InputError
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.registry import get_program
from loopinterp.tasks.task import Batch


def several_programs(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    """Programs out of a list of programs and names.

    Raises:
        InputError: a single name in place of a list, or what is no program.

    Example:
        >>> [program.name for program in several_programs(["ripple", "copy"])]
        ['ripple', 'copy']
    """
    if isinstance(programs, (str, LoopProgram)) or not isinstance(programs, Sequence):
        raise InputError(
            "programs",
            expected="a list of programs or of their names",
            given=repr(programs) if isinstance(programs, str) else type(programs).__name__,
            fix=f"Pass [{programs!r}]." if isinstance(programs, str) else "Put it into a list.",
        )
    return [one_program(program) for program in programs]


def one_program(program: str | LoopProgram) -> LoopProgram:
    """A program, or the one of that name.

    Raises:
        InputError: it is neither.
    """
    if isinstance(program, str):
        return get_program(program)
    if not isinstance(program, LoopProgram):
        raise InputError(
            "program",
            expected="a LoopProgram, or the name of a registered one",
            given=type(program).__name__,
            fix="Pass get_program('ripple'), or one of your own.",
        )
    return program


def need_batch(batch: object) -> Batch:
    """A batch with examples in it.

    Raises:
        InputError: it is none, or empty.
    """
    if not isinstance(batch, Batch) or not len(batch):
        raise InputError(
            "batch",
            expected="a Batch of at least one example",
            given="an empty one" if isinstance(batch, Batch) else type(batch).__name__,
            fix="Draw one with task.sample(n, batch_size=..., generator=...).",
        )
    return batch


def check_positive(what: str, value: object) -> None:
    """Check that a number of things is an integer of at least 1.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            what, expected="an integer >= 1", given=repr(value), fix=f"Pass e.g. {what}=64."
        )
