"""Addition by ripples that hold a carry for a while after nothing makes it any more.

The variable ``carry`` is the carry INTO each position, 0 at first. It is *supported* where the left
neighbour makes or passes one on; without support it stays for a while:

    support_i  =   g_{i-1} OR (p_{i-1} AND carry_{i-1})
    carry_i    <-  support_i OR (carry_i AND age_i + 1 < hold_i AND NOT reset_i)
    age_i      <-  age_i + 1 while the carry stays without support, else 0

So a carry that is planted lives ``hold`` loops and is then mended, unless it is supported. A hold
of 1 is the plain ripple; a hold for ever is the sticky ripple, and needs no ``age``. Started from
0, a true carry only ever appears and is supported from then on: left alone, all of them do at every
loop what the plain ripple does, and only states that no run visits tell them apart. A carry that is
taken away is filled in again at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from loopinterp.errors import check_integer
from loopinterp.rasp.counts import Linear
from loopinterp.rasp.expr import Seq
from loopinterp.rasp.language import full, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.addition_tokens import INPUTS, addition_program, generate, propagate

FOR_EVER = None
"""The hold of a carry that stays until it is reset."""

carry, age = var("carry"), var("age")
support = shift_right(generate | (propagate & carry))
killed_beside = shift_right(~(generate | propagate), default=1)
"""Whether the left neighbour kills: then no carry comes from there."""


def held_ripple(
    name: str, hold: Mapping[int, int | None] | int | None, *, doc: str, reset: Seq | None = None
) -> LoopProgram:
    """A ripple that holds carries.

    Args:
        name: What it is called.
        hold: Loops that a planted carry lives without support, ``FOR_EVER`` if it stays; or a
            mapping from the position's own token to that, 1 for the tokens that it lacks.
        doc: The idea, in a sentence.
        reset: Where a carry without support is taken back whatever its hold.

    Raises:
        InputError: a hold below 1.

    Example:
        >>> held_ripple("held_4", 4, doc="Held for 4 loops.").variables
        ('carry', 'age')
    """
    by_token = hold if isinstance(hold, Mapping) else dict.fromkeys(range(len(INPUTS)), hold)
    for loops in by_token.values():
        if loops is not FOR_EVER:
            check_integer(f"hold of {name}", loops, least=1, fix="A hold of 1 is a plain ripple.")
    counted = {token: loops for token, loops in by_token.items() if loops is not None and loops > 1}
    endless = {token: 1 for token, loops in by_token.items() if loops is None}
    present = carry if reset is None else carry & ~reset
    everywhere = len(endless) == len(INPUTS)
    stays = present if everywhere else present & tok_map(tokens, endless, default=0, name="stays")
    step = {"carry": support | stays}
    if counted:
        lasts = present & (age + 1 < tok_map(tokens, counted, default=1, name="hold"))
        step["carry"] = support | (lasts | stays if endless else lasts)
        step["age"] = where(~support & lasts, age + 1, 0)
    return addition_program(
        name=name,
        prepare=dict.fromkeys(step, full(0)),
        step=step,
        finish=propagate ^ carry,
        n_loops=Linear(offset=-1),
        doc=doc,
    )


programs = (
    held_ripple("ripple_held_2", 2, doc="A ripple whose carries live 2 loops without support."),
    held_ripple("ripple_held_3", 3, doc="A ripple whose carries live 3 loops without support."),
    held_ripple(
        "ripple_held_by_token",
        {1: 2, 2: 3},
        doc="Carries live 2 loops without support at bits (1, 0), 3 at (0, 1), else 1.",
    ),
    held_ripple(
        "ripple_held_where_propagating",
        {1: FOR_EVER, 2: FOR_EVER},
        doc="Carries into propagating bits are never taken back; all others are recomputed.",
    ),
    held_ripple(
        "ripple_held_until_kill",
        FOR_EVER,
        reset=killed_beside,
        doc="Carries are taken back only where the left neighbour kills.",
    ),
    held_ripple(
        "sticky_ripple", FOR_EVER, doc="A ripple whose carries, once seen, are never taken back."
    ),
)
