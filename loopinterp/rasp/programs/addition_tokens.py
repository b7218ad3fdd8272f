"""What the programs of aligned addition share: their tokens, and generate and propagate.

They read the tokens of the task's pairs format: position 0 is BOS, position i + 1 holds bit i of
both operands, and padding follows. BOS and PAD count as the bits (0, 0).
"""

from functools import partial

from loopinterp.rasp.language import tok_map, tokens
from loopinterp.rasp.program import LoopProgram

INPUTS = ("a=0 b=0", "a=1 b=0", "a=0 b=1", "a=1 b=1", "BOS", "PAD")
BOS = 4

generate = tok_map(tokens, {3: 1}, default=0, name="generate")
propagate = tok_map(tokens, {1: 1, 2: 1}, default=0, name="propagate")

addition_program = partial(LoopProgram, task="addition", inputs=INPUTS)
"""A :class:`LoopProgram` that reads those tokens and adds."""
