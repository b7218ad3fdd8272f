"""Addition by a ripple that is never taken back: a carry that was seen once stays.

The variable ``carry`` is the carry INTO each position, 0 at first, which means "none seen yet":

    carry_i  <-  carry_i OR g_{i-1} OR (p_{i-1} AND carry_{i-1})

At T(n) it says what the plain ripple says, and on its way there too: started from 0, a true
carry only ever appears. The two differ when a carry is put in by hand. A 1 stays and runs on,
here as if it had always been there, while the plain ripple mends it; a 0 is filled in again.
"""

from __future__ import annotations

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import full, shift_right, var
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.addition import INPUTS, generate, propagate

carry = var("carry")

program = LoopProgram(
    name="sticky_ripple",
    task="addition",
    inputs=INPUTS,
    prepare={"carry": full(0)},
    step={"carry": carry | shift_right(generate | (propagate & carry))},
    finish=propagate ^ carry,
    n_loops=Linear(offset=-1),
    doc="A ripple whose carries, once seen, are never taken back.",
)
