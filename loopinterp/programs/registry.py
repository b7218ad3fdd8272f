"""Loop programs by name."""

from __future__ import annotations

from loopinterp.core.errors import InputError, check_new_name, unknown_name
from loopinterp.programs.addition_programs import ADDITION_PROGRAMS
from loopinterp.programs.prefix_programs import PREFIX_PROGRAMS
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.sequence_programs import SEQUENCE_PROGRAMS

_PROGRAMS: dict[str, LoopProgram] = {
    program.name: program for program in (*ADDITION_PROGRAMS, *SEQUENCE_PROGRAMS, *PREFIX_PROGRAMS)
}


def list_programs(task: str | None = None) -> list[str]:
    """Names of the programs, of one task or of all.

    Example:
        >>> list_programs(task="prefix_sum")
        ['prefix_mod_5', 'prefix_xor']

    Raises:
        InputError: no program solves that task.
    """
    names = sorted(n for n, program in _PROGRAMS.items() if task in (None, program.task))
    if not names:
        raise unknown_name("task of a program", str(task), {p.task for p in _PROGRAMS.values()})
    return names


def get_program(name: str | LoopProgram) -> LoopProgram:
    """The program of that name; a program itself is returned as it is.

    Raises:
        InputError: there is none.

    Example:
        >>> print(get_program("prefix_xor"))
        program prefix_xor for prefix_sum: T(n) = n
          bit_of: {1: 1}, otherwise 0
          prepare
            prefix = full(0)
          loop
            prefix = bit_of ^ shift_right(prefix, 1, default=0)
          finish
            prefix
    """
    if isinstance(name, LoopProgram):
        return name
    if not isinstance(name, str):
        raise _no_program("a LoopProgram, or the name of a registered one", name)
    if name not in _PROGRAMS:
        raise unknown_name("program", name, _PROGRAMS)
    return _PROGRAMS[name]


def register_program(program: LoopProgram, *, replace: bool = False) -> LoopProgram:
    """Make a program known by its name, and return it.

    Args:
        program: The program.
        replace: Allow the name of a program that is registered already.

    Raises:
        InputError: the name is taken, or it is no loop program.
    """
    if not isinstance(program, LoopProgram):
        raise _no_program("a LoopProgram", program)
    if not replace:
        check_new_name("program name", program.name, _PROGRAMS)
    _PROGRAMS[program.name] = program
    return program


def _no_program(expected: str, x: object) -> InputError:
    fix = "Build one with LoopProgram(name=..., task=..., prepare=..., step=..., finish=..., ...)."
    return InputError("program", expected=expected, given=type(x).__name__, fix=fix)
