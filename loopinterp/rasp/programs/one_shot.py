"""Addition in one step: the carry is made where a bit last decided one by itself.

Positions that propagate only pass a carry on. So the carry into a position is what the last
position before it that does not propagate generates, and attention can find that position at
once, however far away:

    last_i    =   the last j < i that does not propagate (BOS, if there is no other)
    carry_i   <-  g at last_i

Nothing runs along the chain: every carry is unknown before the loop and known after it.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import UNKNOWN, full, indices, kqv, ne, shift_right, var, where
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

last_decided = kqv(propagate, 0, indices, "==", mode="max", name="last_decided")
carry = var("carry")

program = addition_program(
    name="one_shot",
    prepare={"last": shift_right(last_decided), "carry": full(UNKNOWN)},
    step={"carry": kqv(indices, var("last"), generate, "==", name="chain_start")},
    finish=where(ne(carry, UNKNOWN), propagate ^ carry, UNKNOWN),
    n_loops=Linear(slope=0, offset=1),
    doc="Attention to the last bit that does not propagate decides every carry at once.",
)
