"""Stock programs of aligned binary addition; they differ in when a carry is known and how long.

Position 0 is BOS, position i + 1 holds bit i of both operands, then padding; BOS and PAD count as
(0, 0). A bit *generates* a carry at (1, 1) (g), *propagates* one at (1, 0) and (0, 1) (p), and
*kills* it at (0, 0). ``carry`` is that into each position unless stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from loopinterp.core.errors import check_integer
from loopinterp.programs.expressions import Seq
from loopinterp.programs.language import (
    UNKNOWN,
    aggregate,
    eq,
    full,
    indices,
    kqv,
    larger,
    ne,
    select,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.program import CeilLog2, Linear, LoopProgram

_INPUTS = ("a=0 b=0", "a=1 b=0", "a=0 b=1", "a=1 b=1", "BOS", "PAD")
FOR_EVER = None  # the hold of a carry that stays until it is reset

generate = tok_map(tokens, {3: 1}, default=0, name="generate")
propagate = tok_map(tokens, {1: 1, 2: 1}, default=0, name="propagate")

_carry, _span, _makes, _passes = var("carry"), var("span"), var("makes"), var("passes")
# A carry of the left neighbour, which generates it or passes it on
_support = shift_right(generate | (propagate & _carry))
_known = ne(_carry, UNKNOWN)
_known_at_bos = where(eq(indices, 0), 0, UNKNOWN)
_carry_out = where(_known, generate | (propagate & _carry), UNKNOWN)
_arriving = shift_right(_carry)
_span_back = select(indices, indices - _span, "==", name="span_back")
_last_decided = kqv(propagate, 0, indices, "==", mode="max", name="last_decided")
_rippling = partial(
    LoopProgram,
    task="addition",
    inputs=_INPUTS,
    finish=propagate ^ _carry,
    n_loops=Linear(offset=-1),
)
_latching = partial(_rippling, finish=where(_known, propagate ^ _carry, UNKNOWN), n_loops=Linear())


def held_ripple(
    name: str, hold: Mapping[int, int | None] | int | None, *, doc: str, reset: Seq | None = None
) -> LoopProgram:
    """A ripple that keeps a carry for some loops after its support has ended::

        support_i  =   g_{i-1} OR (p_{i-1} AND carry_{i-1})
        carry_i    <-  support_i OR (carry_i AND age_i + 1 < hold_i AND NOT reset_i)
        age_i      <-  age_i + 1 while the carry stays without support, else 0

    ``hold`` is the persistence of an injected carry in loops (1: the plain ripple, ``FOR_EVER``:
    the sticky one), or a mapping from the position's token to it (default 1). ``reset`` removes a
    carry without support. Clean runs equal those of the plain ripple; only off-distribution states
    differ.
    """
    by_token = hold if isinstance(hold, Mapping) else dict.fromkeys(range(len(_INPUTS)), hold)
    for loops in by_token.values():
        if loops is not FOR_EVER:
            check_integer("hold", loops, least=1, fix="A hold of 1 is a plain ripple.")
    counted = {token: loops for token, loops in by_token.items() if loops is not None and loops > 1}
    endless = {token: 1 for token, loops in by_token.items() if loops is None}
    age = var("age")
    present = _carry if reset is None else _carry & ~reset
    everywhere = len(endless) == len(_INPUTS)
    stays = present if everywhere else present & tok_map(tokens, endless, default=0, name="stays")
    step = {"carry": _support | stays}
    if counted:
        lasts = present & (age + 1 < tok_map(tokens, counted, default=1, name="hold"))
        step["carry"] = _support | (lasts | stays if endless else lasts)
        step["age"] = where(~_support & lasts, age + 1, 0)
    return _rippling(name=name, prepare=dict.fromkeys(step, full(0)), step=step, doc=doc)


_HELD_RIPPLES = (
    *(
        held_ripple(f"ripple_held_{n}", n, doc=f"An unsupported carry lasts {n} loops.")
        for n in (2, 3)
    ),
    held_ripple(
        "ripple_held_by_token",
        {1: 2, 2: 3},
        doc="An unsupported carry lasts 2 loops at bits (1, 0), 3 at (0, 1), else 1.",
    ),
    held_ripple(
        "ripple_held_where_propagating",
        {1: FOR_EVER, 2: FOR_EVER},
        doc="Carries into propagating bits are never removed; all others are recomputed.",
    ),
    held_ripple(
        "ripple_held_until_kill",
        FOR_EVER,
        reset=shift_right(~(generate | propagate), default=1),
        doc="Carries are removed only where the left neighbour kills.",
    ),
    held_ripple(
        "sticky_ripple", FOR_EVER, doc="A ripple whose carries, once present, are never removed."
    ),
)
ADDITION_PROGRAMS = (
    #   carry_i  <-  g_{i-1} OR (p_{i-1} AND carry_{i-1})
    # It is right after k + 1 loops where k propagating bits feed it. A carry that is changed at one
    # position is repaired there in the next loop, and the change runs to the right, one position a
    # loop, as far as the chain of propagating bits reaches.
    _rippling(
        name="ripple",
        prepare={"carry": full(0)},
        step={"carry": _support},
        doc="Each loop recomputes the carry into a position from its left neighbour.",
    ),
    _rippling(
        name="late_ripple",
        prepare={"carry": full(0), "wait": full(2)},
        step={"carry": eq(var("wait"), 0) & _support, "wait": larger(var("wait") - 1, 0)},
        n_loops=Linear(offset=1),
        doc="A ripple that starts two loops late.",
    ),
    #   sum_i    <-  sum_i XOR carry_{i-1},    a XOR b at first
    #   carry_i  <-  sum_i AND carry_{i-1},    a AND b at first
    # ``carry`` is a carry pending OUT of each position: 1 only while it travels, one position a
    # loop. At every loop sum + 2 carry = a + b.
    _rippling(
        name="carry_save",
        prepare={"sum": propagate, "carry": generate},
        step={"sum": var("sum") ^ _arriving, "carry": var("sum") & _arriving},
        finish=var("sum"),
        doc="A partial sum and the carries still to be added, which each loop moves one position.",
    ),
    #   carry_i  <-  carry_i                                    if it is known (0 or 1, not -1)
    #                g_{i-1} OR (p_{i-1} AND carry_{i-1})       else, if carry_{i-1} is known
    #                unknown                                    else
    # A carry changed behind the front stays changed and affects no other; one changed at the front
    # is taken over by all positions that its chain feeds.
    _latching(
        name="latched_ripple",
        prepare={"carry": _known_at_bos},
        step={"carry": where(_known, _carry, shift_right(_carry_out, default=UNKNOWN))},
        doc="A front from BOS: a carry is known, and stays, once its left neighbour's is known.",
    ),
    #   carry_i  <-  carry_i            if it is known
    #                g_{i-1}            else, if the left neighbour does not propagate
    #                carry_{i-1}        else (unknown as long as that is)
    # A carry that k propagating bits feed is known after k + 1 loops: all chains fill at once. A
    # carry changed after its right neighbour is known affects no other.
    _latching(
        name="latched_chain",
        prepare={"carry": _known_at_bos},
        step={
            "carry": where(
                _known, _carry, shift_right(where(propagate, _carry, generate), default=0)
            )
        },
        doc="Fronts from every generating or killing bit; known carries stay.",
    ),
    # Of the ``span`` positions before position i, ``makes`` says that they generate a carry into i
    # by themselves, ``passes`` that they propagate one:
    #   makes_i   <-  makes_i OR (passes_i AND makes_{i - span})
    #   passes_i  <-  passes_i AND passes_{i - span}
    #   span_i    <-  2 span_i, at most i + 1
    # Once a span reaches BOS, ``makes`` is the carry, after a number of loops logarithmic in n.
    _rippling(
        name="lookahead",
        prepare={
            "makes": shift_right(generate),
            "passes": shift_right(propagate),
            "span": full(1),
        },
        step={
            "makes": _makes | (_passes & aggregate(_span_back, _makes)),
            "passes": _passes & aggregate(_span_back, _passes),
            "span": smaller(_span + _span, indices + 1),
        },
        finish=propagate ^ _makes,
        n_loops=CeilLog2(inside=-1),
        doc="Generate and propagate over spans that double in every loop.",
    ),
    #   last_i    =   the last j < i that does not propagate (BOS, if there is no other)
    #   carry_i   <-  g at last_i
    # Every carry is unknown before the loop and known after it.
    _latching(
        name="one_shot",
        prepare={"last": shift_right(_last_decided), "carry": full(UNKNOWN)},
        step={"carry": kqv(indices, var("last"), generate, "==", name="chain_start")},
        n_loops=Linear(slope=0, offset=1),
        doc="Attention to the last bit that does not propagate decides every carry at once.",
    ),
    *_HELD_RIPPLES,
)
