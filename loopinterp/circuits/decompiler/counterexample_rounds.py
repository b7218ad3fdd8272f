"""Exchanges that a table of regions gets wrong, looked for and learnt from until there are none.

What inputs give is mostly what is common, so a table that is right about nearly all of it may be
wrong wherever a rare state comes beside another. Here states are *planted*: of any loop, each kind
as often as any other. Runs that the table gets wrong are gathered, and its entries are mended
(:mod:`~loopinterp.circuits.decompiler.table_repair`), until none of a fresh draw is wrong. Where
some remain, values are missing: regions are cut anew, with planted states among the runs that they
are made from, and that table is mended.

Source: counterexamples as equivalence queries (Angluin 1987), on regions of states (Clarke et al.,
CAV 2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.counted_table import CountedTable, Said
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns, planted, to_cut
from loopinterp.circuits.decompiler.region_refinement import Refinement, refine
from loopinterp.circuits.decompiler.table_repair import n_wrong, repaired

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.behaviour import Runs

ROUNDS = 6
"""Draws, at most."""

HOPELESS, FEW = 0.25, 0.02
"""Share of wrong runs above which no entry is mended; the same where regions can be cut anew."""

Draw = Callable[[int], Sequence["Runs"]]
"""Undisturbed runs of new inputs, of each length, by a number."""


def against_counterexamples(
    found: Refinement,
    runs: Sequence[ExchangeRuns],
    others: Sequence[ExchangeRuns],
    draw: Draw,
    *,
    number: int,
    most_values: int,
    generator: torch.Generator,
) -> tuple[Refinement, list[ExchangeRuns], list[ExchangeRuns]]:
    """Mend a refinement's table; where that is not enough, refine again and mend that.

    Args:
        found: A first refinement.
        runs: Runs that it was made from.
        others: Runs that were held back from it.
        draw: Gives inputs to plant states in.
        number: States planted at each length, each time.
        most_values: Of a token.
        generator: Of what is planted.

    Returns:
        The refinement whose table leaves fewer runs of a fresh draw wrong, with the runs that it
        was made from and those held back.
    """
    table, wrong = mended(found.table, draw, number=number, generator=generator, most_wrong=FEW)
    first = replace(found, table=table), [*runs], [*others]
    if not wrong:
        return first
    more, held_back = (
        [ExchangeRuns.after(of, planted(of.batch, _values(found, of), size, generator))
         for of in draw(ROUNDS + turn)]
        for turn, size in enumerate((number, number // 2))
    )  # fmt: skip
    again = refine([*runs, *more], [*others, *held_back], most_values=most_values)
    table, still_wrong = mended(again.table, draw, number=number, generator=generator)
    if still_wrong >= wrong:
        return first
    return replace(again, table=table), [*runs, *more], [*others, *held_back]


def mended(
    table: CountedTable,
    draw: Draw,
    *,
    number: int,
    generator: torch.Generator,
    most_wrong: float = HOPELESS,
) -> tuple[CountedTable, int]:
    """Mend a table until no state that is planted in new inputs leaves it, or it helps no more.

    Args:
        table: The table.
        draw: Gives inputs to plant states in.
        number: States planted in each round, at each length.
        generator: Of what is planted.
        most_wrong: Share of wrong runs above which nothing is tried.

    Returns:
        The table, and how many runs of the last draw left it.
    """
    gathered: list[ExchangeRuns] = []
    wrong = 0
    for turn in range(ROUNDS):
        drawn = []
        for of in draw(turn):
            tokens = of.batch.inputs
            values = table.follow(tokens, table.start[tokens], of.n_loops)
            made = ExchangeRuns.after(of, planted(of.batch, values, number, generator))
            drawn.append(_without_states(made))
        gathered += drawn
        wrong = sum(n_wrong(Said.of(table, of)) for of in drawn)
        if wrong > most_wrong * sum(len(of.pairs) for of in drawn):
            break
        before, table = table, repaired(table, gathered)
        if not wrong or torch.equal(before.step, table.step):
            break
    return table, wrong


def _values(found: Refinement, runs: Runs) -> Int[Tensor, "loops input pos"]:
    """Regions of the states of undisturbed runs."""
    tokens = runs.batch.inputs
    answers = runs.answers(runs.inputs, runs.states).cpu()
    return found.regions.values(tokens.expand_as(answers), to_cut(runs.states), answers)


def _without_states(runs: ExchangeRuns) -> ExchangeRuns:
    """Answers alone, which is what a table is held against."""
    return replace(
        runs,
        undisturbed=replace(runs.undisturbed, states=runs.undisturbed.states[..., :0]),
        exchanged=replace(runs.exchanged, states=runs.exchanged.states[..., :0]),
    )
