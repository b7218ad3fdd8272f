"""Prefix sums mod 2: each position adds its own bit to its left neighbour's prefix.

    prefix_i  <-  b_i XOR prefix_{i-1}

recomputed in every loop: after t loops it is the XOR of the last t bits up to the position.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import full, shift_right, tok_map, tokens, var
from loopinterp.rasp.program import LoopProgram

INPUTS = ("0", "1", "BOS", "PAD")

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")

program = LoopProgram(
    name="prefix_xor",
    task="prefix_sum",
    inputs=INPUTS,
    prepare={"prefix": full(0)},
    step={"prefix": bit ^ shift_right(var("prefix"))},
    finish=var("prefix"),
    n_loops=Linear(),
    doc="Each loop recomputes a position's prefix from its left neighbour's.",
)
