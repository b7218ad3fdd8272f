"""Mutations that only a state of another loop, or a second change of one run, brings out.

Clean runs and single interchanges between runs at the same loop leave each of them the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.rasp.language import full, indices, larger, ne, shift_right, smaller, var, where
from loopinterp.rasp.mutations.rewriting import ALWAYS, Condition, changed

if TYPE_CHECKING:
    from loopinterp.rasp.program import LoopProgram

PERIOD = 4
"""Loops after which the clock of :func:`held_out_of_phase` begins anew."""


def held_out_of_phase(program: LoopProgram, name: str, when: Condition = ALWAYS) -> LoopProgram:
    """The variable never changes where a clock differs from the clock to the left.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> held_out_of_phase(get_program("ripple"), "carry").name
        'ripple, carry held where out of phase'
    """
    clock = program.unused_name("clock")
    tick = where(var(clock) < PERIOD - 1, var(clock) + 1, full(0))
    apart = ne(var(clock), shift_right(var(clock))) & ne(indices, 0)
    step = {name: when.choose(where(apart, var(name), program.step[name]), program.step[name])}
    return changed(
        program,
        f"{name} held where out of phase",
        when,
        step={**step, clock: tick},
        prepare={clock: full(0)},
    )


def forgotten_the_second_time(
    program: LoopProgram, name: str, when: Condition = ALWAYS
) -> LoopProgram:
    """The variable is what it was at first, for ever, where it was interfered with twice.

    Each position remembers the variable of the loop before, its own and that to the left: where
    the two memories of neighbours differ, one of their states is of another run. A count of that
    spreads to the right.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> forgotten_the_second_time(get_program("ripple"), "carry").name
        'ripple, carry forgotten after the second change'
    """
    own, left, times = (
        program.unused_name(f"{name}_{of}") for of in ("before", "left_before", "times")
    )
    inside = ne(indices, 0)
    disturbed = ne(var(left), shift_right(var(own))) & inside
    spread = larger(var(times), shift_right(var(times)))
    count = smaller(spread + disturbed, 2)
    first = program.prepare[name]
    forgotten = where(count < 2, program.step[name], first)
    return changed(
        program,
        f"{name} forgotten after the second change",
        when,
        step={
            name: when.choose(forgotten, program.step[name]),
            own: var(name),
            left: shift_right(var(name)),
            times: count,
        },
        prepare={own: first, left: shift_right(first), times: full(0)},
    )
