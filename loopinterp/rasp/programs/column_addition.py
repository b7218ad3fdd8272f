"""Multiplication by a number of at most 2 bits: add up the columns, then let a front carry.

With the least significant bit first, column k of the product is a_0 b_k + a_1 b_{k-1}, a number
from 0 to 2, which the position k behind the ``=`` gathers at the start. Then a front runs from the
``=`` to the right, one position a loop, and leaves the carry INTO each column behind it:

    carry_i  <-  carry_i                                      if it is known
                 (column_{i-1} + carry_{i-1}) div 2           else, if carry_{i-1} is known
                 unknown                                      else

The product has n + 2 columns, so the last carry is known after n + 1 loops, never earlier.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import UNKNOWN, eq, ne, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.library import index_select
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import place_behind, position_of

INPUTS = ("0", "1", "*", "=", "EOS", "BOS")
TIMES, EQUALS, EOS_OUT = 2, 3, 2
END = 3
"""The column of positions behind the product."""

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
times, equals = position_of(TIMES, "times"), position_of(EQUALS, "equals")
place = place_behind(equals)
column_here = (index_select(bit, 1) & index_select(bit, times + 1 + place)) + (
    index_select(bit, 2) & index_select(bit, times + place)
)
is_digit = (place >= 0) & (place < equals - 2)

carry, column = var("carry"), var("column")
known = ne(carry, UNKNOWN)
carry_out = where(known, (column + carry) // 2, UNKNOWN)

program = LoopProgram(
    name="multiplication",
    task="multiplication",
    inputs=INPUTS,
    prepare={
        "column": where(is_digit, column_here, END),
        "carry": where(eq(place, 0), 0, UNKNOWN),
    },
    step={"carry": where(known, carry, shift_right(carry_out, default=UNKNOWN))},
    finish=where(eq(column, END), EOS_OUT, where(known, (column + carry) % 2, UNKNOWN)),
    n_loops=Linear(offset=1),
    doc="Columns of the product are gathered at the start; a front from the '=' carries them.",
)
