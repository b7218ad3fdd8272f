"""Addition by a front that starts at BOS and leaves known carries behind it.

The variable ``carry`` is the carry INTO each position: unknown (-1), 0 or 1. At first only BOS
is known. A position is unknown until its left neighbour is known; then it takes the carry out of
that neighbour, and holds it:

    carry_i  <-  carry_i                                    if it is known
                 g_{i-1} OR (p_{i-1} AND carry_{i-1})       else, if carry_{i-1} is known
                 unknown                                    else

The front passes one position a loop whatever the bits are, so position i is known after i loops.
A carry that is changed behind the front stays changed, and touches nothing else; one that is
changed at the front is taken over by all positions that its chain feeds.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import UNKNOWN, eq, indices, ne, shift_right, var, where
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

carry = var("carry")
known = ne(carry, UNKNOWN)
carry_out = where(known, generate | (propagate & carry), UNKNOWN)

program = addition_program(
    name="latched_ripple",
    prepare={"carry": where(eq(indices, 0), 0, UNKNOWN)},
    step={"carry": where(known, carry, shift_right(carry_out, default=UNKNOWN))},
    finish=where(known, propagate ^ carry, UNKNOWN),
    n_loops=Linear(),
    doc="A front from BOS: a position is unknown until its left neighbour is known, then holds.",
)
