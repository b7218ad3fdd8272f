"""Parity by shifting: the bits pass by the ``=`` sign, one a loop.

Every loop moves all bits one position to the right, and each position adds the bit that arrives
to its running parity. After n loops all n bits have passed the ``=``:

    bit_i     <-  bit_{i-1}
    parity_i  <-  parity_i XOR bit_{i-1}

Source: arXiv 2409.15647.
"""

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, full, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.program import LoopProgram

INPUTS = ("0", "1", "=", "EOS", "BOS")
EOS, EOS_OUT = 3, 2

bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
arriving = shift_right(var("bit"))

program = LoopProgram(
    name="parity",
    task="parity",
    inputs=INPUTS,
    prepare={"bit": bit, "parity": full(0)},
    step={"bit": arriving, "parity": var("parity") ^ arriving},
    finish=where(eq(tokens, EOS), EOS_OUT, var("parity")),
    n_loops=Linear(),
    doc="The bits move right one position a loop; each position adds what arrives.",
)
