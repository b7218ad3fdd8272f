"""Distinct symbols: every position reads the prompt in order, and keeps the one it must answer.

A symbol counts where it appears first. In every loop all positions look at the next position of
the prompt; the position k behind the ``=`` keeps the symbol that is new when k others were found:

    answer_i  <-  symbol at at_i, if it is new and found_i = place_i
    found_i   <-  found_i + 1, if it is new
    at_i      <-  at_i + 1

Where no symbol was kept, the answer is at its end.
"""

from __future__ import annotations

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, full, indices, kqv, ne, smaller, tokens, var, where
from loopinterp.rasp.library import firsts
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.programs.answer_places import place_behind, position_of


def unique_set(n_symbols: int) -> LoopProgram:
    """The program for an alphabet of that size.

    Example:
        >>> unique_set(3).inputs
        ('s0', 's1', 's2', '=', 'EOS', 'BOS')
    """
    equals = nothing = n_symbols
    is_new = eq(firsts(tokens, tokens), indices) & (tokens < n_symbols)
    at, found, answer = var("at"), var("found"), var("answer")
    here = kqv(indices, at, var("offered"), "==", default=nothing, name="next_symbol")
    new_here = ne(here, nothing)
    return LoopProgram(
        name="unique_set",
        task="unique_set",
        task_settings={"n_symbols": n_symbols},
        inputs=(*(f"s{i}" for i in range(n_symbols)), "=", "EOS", "BOS"),
        prepare={
            "offered": where(is_new, tokens, nothing),
            "at": full(1),
            "found": full(0),
            "place": place_behind(position_of(equals, "equals")),
            "answer": full(nothing),
        },
        step={
            "answer": where(new_here & eq(found, var("place")), here, answer),
            "found": smaller(found + new_here, indices),
            "at": smaller(at + 1, indices + 1),
        },
        finish=answer,
        n_loops=Linear(),
        doc="Every position reads the prompt in order and keeps the new symbol of its place.",
    )


program = unique_set(50)
