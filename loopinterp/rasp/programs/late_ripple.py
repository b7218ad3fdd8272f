"""Addition by a ripple that waits two loops before it starts.

    carry_i  <-  wait_i = 0 AND (g_{i-1} OR (p_{i-1} AND carry_{i-1}))
    wait_i   <-  wait_i - 1, down to 0

From then on it is the plain ripple, two loops late.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, full, larger, shift_right, var
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

LATE = 2
"""Loops that it waits."""

carry, wait = var("carry"), var("wait")

program = addition_program(
    name="late_ripple",
    prepare={"carry": full(0), "wait": full(LATE)},
    step={
        "carry": eq(wait, 0) & shift_right(generate | (propagate & carry)),
        "wait": larger(wait - 1, 0),
    },
    finish=propagate ^ carry,
    n_loops=Linear(offset=LATE - 1),
    doc="A ripple that starts two loops late.",
)
