"""Parity by a running XOR: each position adds its own bit to its left neighbour's parity.

    parity_i  <-  b_i XOR parity_{i-1}

recomputed in every loop: after t loops it is the XOR of the last t + 1 symbols up to the position.
The ``=`` adds nothing, so it has the parity of all n bits after n loops. One bit per position is
all that it keeps.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.program import LoopProgram

INPUTS = ("0", "1", "=", "EOS", "BOS")
EOS, EOS_OUT = 3, 2

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")

program = LoopProgram(
    name="parity_scan",
    task="parity",
    inputs=INPUTS,
    prepare={"parity": bit},
    step={"parity": bit ^ shift_right(var("parity"))},
    finish=where(eq(tokens, EOS), EOS_OUT, var("parity")),
    n_loops=Linear(),
    doc="Each loop recomputes a position's parity from its left neighbour's.",
)
