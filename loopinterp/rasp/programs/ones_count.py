"""Counting ones: every position looks at bit 1, then bit 2, and so on, and keeps the count.

    count_i  <-  count_i + bit at position at_i
    at_i     <-  at_i + 1

After n loops all bits are counted; what follows them counts as 0. A position k behind the ``=``
answers with binary digit k of the count, or with the end if the count has no such digit. Both
variables stay below what a position can see, so that they take finitely many values.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import (
    full,
    indices,
    kqv,
    larger,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import place_behind, position_of

INPUTS = ("0", "1", "=", "EOS", "BOS")
EQUALS, EOS_OUT = 2, 2
MOST_DIGITS = 20

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
at, count = var("at"), var("count")
next_bit = kqv(indices, at, bit, "==", name="next_bit")
powers = {place: 2**place for place in range(MOST_DIGITS)}
power = tok_map(var("place"), powers, default=2**MOST_DIGITS, name="power_of_2")

program = LoopProgram(
    name="binary_sum",
    task="binary_sum",
    inputs=INPUTS,
    prepare={
        "at": full(1),
        "count": full(0),
        "place": place_behind(position_of(EQUALS, "equals")),
    },
    step={
        "count": smaller(count + next_bit, indices),
        "at": smaller(at + 1, indices + 1),
    },
    finish=where(power > larger(count, 1), EOS_OUT, count // power % 2),
    n_loops=Linear(),
    doc="Every position reads the bits one by one and keeps the count of ones.",
)
