"""Prefix sums mod m: each position adds its own digit to its left neighbour's prefix.

    prefix_i  <-  (d_i + prefix_{i-1}) mod m

recomputed in every loop: after t loops it is the sum of the last t digits up to the position.
"""

from __future__ import annotations

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import full, shift_right, tok_map, tokens, var
from loopinterp.rasp.program import LoopProgram


def prefix_mod(modulus: int) -> LoopProgram:
    """The program for one modulus, called ``prefix_mod_{modulus}``.

    Example:
        >>> prefix_mod(3).inputs
        ('0', '1', '2', 'BOS', 'PAD')
    """
    digit = tok_map(tokens, {d: d for d in range(1, modulus)}, default=0, name="digit_of")
    return LoopProgram(
        name=f"prefix_mod_{modulus}",
        task="prefix_sum",
        task_settings={"modulus": modulus},
        inputs=(*map(str, range(modulus)), "BOS", "PAD"),
        prepare={"prefix": full(0)},
        step={"prefix": (digit + shift_right(var("prefix"))) % modulus},
        finish=var("prefix"),
        n_loops=Linear(),
        doc="Each loop recomputes a position's prefix from its left neighbour's.",
    )


program = prefix_mod(5)
