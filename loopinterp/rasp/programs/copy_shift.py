"""Copying by shifting: the bits move right, and stop where they are asked for.

Bit k stands n positions before the position that must answer it, whatever k is. So every loop
moves all symbols one position to the right, and after n loops all of them are in place. From the
``=`` on, positions know n (it is the distance between BOS and ``=``, less one): they count it
down, and hold what they have when it is 0:

    symbol_i  <-  symbol_{i-1}  while left_i > 0
    left_i    <-  left_i - 1    while left_i > 0

The ``=`` itself counts as the end of the answer, and so comes to stand where that belongs.

Source: the shift of arXiv 2409.15647; the clock, which keeps the answer after T(n), is ours.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import indices, kqv, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import countdown, running

INPUTS = ("0", "1", "=", "EOS", "BOS")
EQUALS, EOS_OUT = 2, 2

program = LoopProgram(
    name="copy",
    task="copy",
    inputs=INPUTS,
    prepare={
        "symbol": tok_map(tokens, {0: 0, 1: 1}, default=EOS_OUT, name="symbol_of"),
        "left": kqv(tokens, EQUALS, indices - 1, "==", default=-1, name="equals"),
    },
    step={
        "symbol": where(running, shift_right(var("symbol")), var("symbol")),
        "left": countdown,
    },
    finish=var("symbol"),
    n_loops=Linear(),
    doc="The symbols move right one position a loop, and are held after n loops.",
)
