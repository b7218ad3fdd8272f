"""Addition by carry lookahead: spans of bits that double in every loop.

For the ``span`` positions before position i, ``makes`` says that they make a carry into i by
themselves, ``passes`` that they pass a carry on. Two neighbouring spans make one twice as long:

    makes_i   <-  makes_i OR (passes_i AND makes_{i - span})
    passes_i  <-  passes_i AND passes_{i - span}
    span_i    <-  2 span_i, at most i + 1

At first a span is the left neighbour alone; once it reaches BOS, ``makes`` is the carry into
the position. So the loops needed grow with the logarithm of the length.
"""

from loopinterp.rasp.counts import CeilLog2
from loopinterp.rasp.language import aggregate, full, indices, select, shift_right, smaller, var
from loopinterp.rasp.programs.addition_tokens import addition_program, generate, propagate

before = select(indices, indices - var("span"), "==", name="span_back")
makes_before = aggregate(before, var("makes"))
passes_before = aggregate(before, var("passes"))

program = addition_program(
    name="lookahead",
    prepare={
        "makes": shift_right(generate),
        "passes": shift_right(propagate),
        "span": full(1),
    },
    step={
        "makes": var("makes") | (var("passes") & makes_before),
        "passes": var("passes") & passes_before,
        "span": smaller(var("span") + var("span"), indices + 1),
    },
    finish=propagate ^ var("makes"),
    n_loops=CeilLog2(inside=-1),
    doc="Generate and propagate over spans that double in every loop.",
)
