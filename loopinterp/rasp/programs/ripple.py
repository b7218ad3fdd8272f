"""Addition by a ripple that is recomputed in every loop.

The variable ``carry`` is the carry INTO each position, guessed 0 at first. Every loop computes it
anew from the left neighbour (the less significant bit):

    carry_i  <-  g_{i-1} OR (p_{i-1} AND carry_{i-1})

so that it is right after k + 1 loops where k propagating bits feed it. Nothing is held: a carry
that is changed at one position is mended there in the next loop, and the change runs on to the
right, one position a loop, as far as the chain of propagating bits reaches.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import full, shift_right, var
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

carry = var("carry")

program = addition_program(
    name="ripple",
    prepare={"carry": full(0)},
    step={"carry": shift_right(generate | (propagate & carry))},
    finish=propagate ^ carry,
    n_loops=Linear(offset=-1),
    doc="Each loop recomputes the carry into a position from its left neighbour.",
)
