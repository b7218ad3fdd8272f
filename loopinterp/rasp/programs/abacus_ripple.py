"""Decimal addition, next token by next token: columns by place, carries by a ripple.

With the least significant digit first, the ``=`` asks for digit 0 of the sum and the position k
behind it for digit k. Each gathers both operands' digits of its place, a number from 0 to 18, and
every loop computes the carry INTO a place anew from the place before it:

    carry_i  <-  column_{i-1} + carry_{i-1} > 9

so that it is right after as many loops as there are places before it. Behind the longer operand
a carry is the last digit of the sum, and no carry is its end. The sum that stands in the input is
not read: the program predicts every next token at once, whatever the tokens before it are.

Source: the format of arXiv 2405.17399.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, full, larger, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.library import index_select
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import place_behind, position_of

INPUTS = tuple("0123456789-+*=$")
PLUS, EQUALS, END = (INPUTS.index(symbol) for symbol in "+=$")
LAST, BEHIND = 19, 20
"""Columns of the place right behind the longer operand, and of all that follow."""

digit = tok_map(tokens, {d: d for d in range(10)}, default=0, name="digit_of")
plus, equals = position_of(PLUS, "plus"), position_of(EQUALS, "equals")
place = place_behind(equals)
length_of_a, length_of_b = plus, equals - plus - 1
digit_of_a = where(place < length_of_a, index_select(digit, place), 0)
digit_of_b = where(place < length_of_b, index_select(digit, plus + 1 + place), 0)
longer = larger(length_of_a, length_of_b)
behind = where(eq(place, longer), LAST, BEHIND)
column_here = where(place < longer, digit_of_a + digit_of_b, behind)

carry, column = var("carry"), var("column")
carry_out = (column < LAST) & (column + carry > 9)

program = LoopProgram(
    name="abacus_ripple",
    task="abacus_addition",
    inputs=INPUTS,
    prepare={"column": where(place >= 0, column_here, 0), "carry": full(0)},
    step={"carry": shift_right(carry_out)},
    finish=where(
        column < LAST,
        (column + carry) % 10,
        where(eq(column, LAST) & carry, 1, END),
    ),
    n_loops=Linear(),
    doc="Each place gathers its column; each loop recomputes its carry from the place before.",
)
