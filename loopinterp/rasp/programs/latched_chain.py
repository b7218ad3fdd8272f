"""Addition by fronts that start wherever a bit decides its own carry, and hold what is known.

The variable ``carry`` is the carry INTO each position: unknown (-1), 0 or 1. At first only BOS
is known. Where the left neighbour generates or kills, the carry is known after one loop; where it
propagates, the position waits until that neighbour is known. Once known, it is held:

    carry_i  <-  carry_i            if it is known
                 g_{i-1}            else, if the left neighbour does not propagate
                 carry_{i-1}        else (unknown as long as that is)

So a carry that k propagating bits feed is known after k + 1 loops, wherever it stands: all chains
are filled at the same time. A carry that is changed once its right neighbour is known stays
changed and touches nothing else.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import UNKNOWN, eq, indices, ne, shift_right, var, where
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

carry = var("carry")
known = ne(carry, UNKNOWN)
carry_out = where(propagate, carry, generate)

program = addition_program(
    name="latched_chain",
    prepare={"carry": where(eq(indices, 0), 0, UNKNOWN)},
    step={"carry": where(known, carry, shift_right(carry_out, default=0))},
    finish=where(known, propagate ^ carry, UNKNOWN),
    n_loops=Linear(),
    doc="Fronts from every generating or killing bit; a propagating bit waits; known is held.",
)
