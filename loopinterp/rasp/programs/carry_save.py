"""Addition by carry-save: keep a partial sum and the carries that are still to be added.

    sum_i    <-  sum_i XOR carry_{i-1}
    carry_i  <-  sum_i AND carry_{i-1}

with sum = a XOR b and carry = a AND b at first. Here ``carry`` is a carry still pending OUT of
each position: 1 only while it travels, one position a loop. At every loop
sum + 2 carry = a + b, and the sum is right once no carry is left within the operands.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import shift_right, var
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

arriving = shift_right(var("carry"))

program = addition_program(
    name="carry_save",
    prepare={"sum": propagate, "carry": generate},
    step={"sum": var("sum") ^ arriving, "carry": var("sum") & arriving},
    finish=var("sum"),
    n_loops=Linear(offset=-1),
    doc="A partial sum and the carries still to be added, which each loop moves one position.",
)
