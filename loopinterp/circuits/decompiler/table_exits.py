"""Where runs leave a table: the cells whose steps it does not say, counted.

A *kind* of step is a pair of neighbours: left token and value, own token and value. A run leaves
the table at a step after which a position has another value than the table says, though it and its
left neighbour had the values that the table said until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from loopinterp.circuits.decompiler.counted_table import CountedTable, Said, beside, kinds_of

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.cell_automaton import Cell
    from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns
    from loopinterp.circuits.decompiler.state_regions import StateRegions

Kind = tuple[int, int, int, int]
"""Left token (-1 for none), left value, own token, own value."""

KIND = ("left", "left_value", "token", "value")


def exits_of(
    table: CountedTable,
    runs: ExchangeRuns,
    values: Sequence[Tensor],
    said: Said,
) -> Int[Tensor, "left_token left_value token value"]:
    """How often runs leave a table at each kind of step.

    Only runs about whose answers the table is wrong, and steps before it is.

    Args:
        table: The table.
        runs: Undisturbed and exchanged runs.
        values: What each of them has [time, run, pos].
        said: What the table says of them.
    """
    times = torch.arange(len(said.right))[:, None]
    first_wrong = (~said.right).int().argmax(0)
    wrong = (
        (~said.undisturbed).any(0).expand(len(said.undisturbed), -1),
        (~said.right).any(0) & said.matters & (times <= first_wrong) & runs.exchanged.within,
    )
    shape = tuple(table.step.shape)
    exits = torch.zeros(table.step.numel(), dtype=torch.long)
    for of, true, told, counted in zip(runs.both, values, said.values, wrong):
        off = true != told
        on = ~off[:-1] & ~torch.nn.functional.pad(off[:-1, :, :-1], (1, 0))
        leaving = on & off[1:] & counted[1:, :, None]
        kind = kinds_of(of.tokens, true, shape)[:-1][leaving]
        exits += kind.bincount(minlength=len(exits))
    return exits.view(shape)


def most_common_kinds(
    counts: Int[Tensor, "left_token left_value token value"], most: int
) -> list[tuple[Kind, int]]:
    """The kinds of the highest counts, highest first; none that is 0."""
    flat, edge = counts.flatten(), len(counts) - 1
    order = flat.argsort(descending=True, stable=True)[:most]
    found = []
    for at in order[flat[order] > 0]:
        left, left_value, token, value = (int(x) for x in torch.unravel_index(at, counts.shape))
        found.append(((-1 if left == edge else left, left_value, token, value), int(flat[at])))
    return found


def unexplained_steps(
    table: CountedTable,
    regions: StateRegions,
    runs: Sequence[ExchangeRuns],
    names: Mapping[Cell, int],
) -> pd.DataFrame:
    """Cell by cell, what a table does not explain of runs.

    Args:
        table: The table.
        regions: Which value a state has.
        runs: Runs that the table was not made from, of each length.
        names: Cell -> number of its value as it is shown; cells of one number are one.

    Returns:
        A row for each kind of step at which runs leave the table, the most frequent first. Columns
        ``left`` (token, -1 for none), ``left_value``, ``token``, ``value``; ``exits``: how often
        runs whose answers the table does not say leave it there; ``steps``: how many steps of that
        kind all runs have; ``otherwise``: the share of them after which the value is another than
        the table says.
    """
    shape = tuple(table.step.shape)
    exits = torch.zeros(shape, dtype=torch.long)
    steps, otherwise = torch.zeros_like(exits).flatten(), torch.zeros_like(exits).flatten()
    shown = torch.arange(shape[3]).repeat(shape[2], 1)
    for (token, value), name in names.items():
        shown[token, value] = name
    for each in runs:
        values = [
            regions.values(of.tokens.expand_as(of.answers), of.states, of.answers)
            for of in each.both
        ]
        exits += exits_of(table, each, values, Said.of(table, each))
        for of, own in zip(each.both, values):
            kind = kinds_of(of.tokens, own, shape)[:-1]
            tokens, told = of.tokens.expand_as(own)[1:], table.step[beside(of.tokens, own)][:-1]
            other = shown[tokens, told] != shown[tokens, own[1:]]
            within = of.within[1:]
            steps += kind[within].flatten().bincount(minlength=len(steps))
            otherwise += kind[other & within[..., None]].bincount(minlength=len(steps))
    rows = []
    for kind, number in most_common_kinds(exits, exits.numel()):
        left, left_value, token, value = kind
        left_name = 0 if left < 0 else names[left, left_value]
        rows.append(
            {
                **dict(zip(KIND, (left, left_name, token, names[token, value]))),
                "exits": number,
                "steps": int(steps.view(shape)[kind]),
                "off": int(otherwise.view(shape)[kind]),
            }
        )
    columns = [*KIND, "exits", "steps", "off"]
    found: Any = pd.DataFrame(rows, columns=columns).groupby([*KIND], as_index=False).sum()
    found["otherwise"] = found.pop("off") / found["steps"]
    return found.sort_values("exits", ascending=False, kind="stable", ignore_index=True)
