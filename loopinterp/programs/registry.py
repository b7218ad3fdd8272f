"""Loop programs by name."""

from __future__ import annotations

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_new_name, unknown_name
from loopinterp.programs.addition_programs import ADDITION_PROGRAMS
from loopinterp.programs.prefix_programs import PREFIX_PROGRAMS
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.sequence_programs import SEQUENCE_PROGRAMS

_PROGRAMS: dict[str, LoopProgram] = {
    program.name: program for program in (*ADDITION_PROGRAMS, *SEQUENCE_PROGRAMS, *PREFIX_PROGRAMS)
}


@checked
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
        raise unknown_name("task of a program", task, {p.task for p in _PROGRAMS.values()})
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
    if not isinstance(name, str):
        return _need_program(name)
    if name not in _PROGRAMS:
        raise unknown_name("program", name, _PROGRAMS)
    return _PROGRAMS[name]


def register_program(program: LoopProgram, *, replace: bool = False) -> LoopProgram:
    """Make a program known by its name, and return it.

    Raises:
        InputError: the name is taken, and ``replace`` does not allow that; or it is no program.
    """
    _need_program(program)
    if not replace:
        check_new_name("program name", program.name, _PROGRAMS)
    _PROGRAMS[program.name] = program
    return program


def _need_program(program: object) -> LoopProgram:
    if isinstance(program, LoopProgram):
        return program
    got, fix = type(program).__name__, "Build one with LoopProgram(name=..., task=..., ...)."
    raise InputError("program", expected="a LoopProgram", given=got, fix=fix)
