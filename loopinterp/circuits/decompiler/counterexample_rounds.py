"""Exchanges that a table of regions gets wrong, looked for and learnt from until there are none.

What inputs give is mostly what is common, so a table that is right about nearly all of it may be
wrong wherever a rare state comes beside another. Here states are *planted*: of any loop, each kind
as often as any other. First regions are cut anew with such runs among those that they are made
from. Then those that the table still gets wrong are gathered, and its entries are mended
(:mod:`~loopinterp.circuits.decompiler.table_repair`), until none of a fresh draw is wrong.

Source: counterexamples as equivalence queries (Angluin 1987), on regions of states (Clarke et al.,
CAV 2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.counted_table import CountedTable, Said
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns, planted
from loopinterp.circuits.decompiler.region_refinement import Refinement, refine
from loopinterp.circuits.decompiler.table_repair import n_wrong, repaired

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.behaviour import Runs

ROUNDS = 6
"""Draws, at most."""

HOPELESS = 0.1
"""Share of wrong runs above which no entry is mended."""

Draw = Callable[[int], Sequence["Runs"]]
"""Undisturbed runs of new inputs, of each length, by a number."""


def refine_planted(
    found: Refinement,
    runs: Sequence[ExchangeRuns],
    others: Sequence[ExchangeRuns],
    draw: Draw,
    *,
    number: int,
    most_values: int,
    generator: torch.Generator,
) -> tuple[Refinement, list[ExchangeRuns], list[ExchangeRuns]]:
    """Refine from the beginning, with planted states among the runs.

    Args:
        found: A first refinement, which says which states are rare.
        runs: Runs that it was made from.
        others: Runs that were held back from it.
        draw: Gives inputs to plant states in.
        number: States planted at each length, and half as many for what is held back.
        most_values: Of a token.
        generator: Of what is planted.

    Returns:
        The better refinement, of all runs; with the runs and those held back.
    """
    more, held_back = (
        [ExchangeRuns.after(of, planted(of.batch, _values(found, of), size, generator))
         for of in draw(turn)]
        for turn, size in enumerate((number, number // 2))
    )  # fmt: skip
    runs, others = [*runs, *more], [*others, *held_back]
    return refine(runs, others, most_values=most_values), runs, others


def mended(
    table: CountedTable, draw: Draw, *, number: int, generator: torch.Generator
) -> CountedTable:
    """Mend a table until no state that is planted in new inputs leaves it, or it helps no more.

    Args:
        table: The table.
        draw: Gives inputs to plant states in.
        number: States planted in each round, at each length.
        generator: Of what is planted.
    """
    gathered: list[ExchangeRuns] = []
    for turn in range(ROUNDS):
        drawn = []
        for of in draw(turn):
            tokens = of.batch.inputs
            values = table.follow(tokens, table.start[tokens], of.n_loops)
            made = ExchangeRuns.after(of, planted(of.batch, values, number, generator))
            drawn.append(_without_states(made))
        gathered += drawn
        wrong = sum(n_wrong(Said.of(table, of)) for of in drawn)
        if wrong > HOPELESS * sum(len(of.pairs) for of in drawn):
            break
        table = repaired(table, gathered)
        if not wrong:
            break
    return table


def _values(found: Refinement, runs: Runs) -> Int[Tensor, "loops input pos"]:
    """Regions of the states of undisturbed runs."""
    tokens = runs.batch.inputs
    answers = torch.stack([runs.read(h.flatten(0, 1)).view(h.shape[:2]) for h in runs.states]).cpu()
    return found.regions.values(tokens.expand_as(answers), runs.states.cpu(), answers)


def _without_states(runs: ExchangeRuns) -> ExchangeRuns:
    """Answers alone, which is what a table is held against."""
    return replace(
        runs,
        undisturbed=replace(runs.undisturbed, states=runs.undisturbed.states[..., :0]),
        exchanged=replace(runs.exchanged, states=runs.exchanged.states[..., :0]),
    )
