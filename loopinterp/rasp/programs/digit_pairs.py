"""Addition of a + b =, most significant bit first: the digit pairs pass by, lowest first.

Each position of b finds the digit of a that belongs to it, as far before it as the ``+`` is from
the start, and adds the two: 0 kills a carry, 1 passes it on, 2 makes one. Then the pairs move
right, one position a loop. They arrive at a position behind the ``=`` in the order in which
schoolbook addition wants them: the nearest, which is the lowest, first. So a position adds
what has passed, and answers with the pair that it has at hand:

    carry_i  <-  pair_i = 2 OR (pair_i = 1 AND carry_i)     while left_i > 0
    pair_i   <-  pair_{i-1}                                 while left_i > 0
    answer_i =   (pair_i + carry_i) mod 2

After n loops the position k behind the ``=`` has bit k at hand, and has added all that are lower.
From the ``+`` on, positions know n, count it down, and hold what they have then.

Source: the shift of arXiv 2409.15647; the clock, which keeps the answer after T(n), is ours.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import (
    eq,
    full,
    indices,
    kqv,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import countdown, position_of, running

INPUTS = ("0", "1", "+", "=", "EOS", "BOS")
PLUS, EQUALS, EOS, EOS_OUT = 2, 3, 4, 2
END = 3
"""The pair of the ``=`` and what follows it: no digits, but the end of the answer."""

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
is_bit = tok_map(tokens, {0: 1, 1: 1}, default=0, name="is_bit")
is_end = tok_map(tokens, {EQUALS: 1, EOS: 1}, default=0, name="is_end")
plus = position_of(PLUS, "plus", default=0)
bit_of_a = kqv(indices, indices - plus, bit, "==", name="digit_of_a")
pair_here = where(is_end, END, where(is_bit & plus, bit + bit_of_a, 0))

pair, carry = var("pair"), var("carry")

program = LoopProgram(
    name="token_addition",
    task="token_addition",
    inputs=INPUTS,
    prepare={"pair": shift_right(pair_here), "carry": full(0), "left": plus - 1},
    step={
        "carry": where(running, eq(pair, 2) | (eq(pair, 1) & carry), carry),
        "pair": where(running, shift_right(pair), pair),
        "left": countdown,
    },
    finish=where(eq(pair, END), EOS_OUT, (pair + carry) % 2),
    n_loops=Linear(),
    doc="Pairs of digits move right, lowest first, and each position adds up what passes it.",
)
