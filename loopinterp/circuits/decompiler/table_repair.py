"""Single entries of a table changed, where that makes it right about more runs.

A counted table follows what most states of a region do. Where a region has states of its neighbour
too, or a pair of neighbours is rare, most may say the wrong thing, and no finer cut is needed: the
table has the right values, and one wrong entry. What a table says of answers depends on its entries
alone and on no region, so an entry is tried by following the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.counted_table import CountedTable, Said, kinds_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns

_ENTRIES, _CHANGES = 16, 40
"""Entries of which each other value is tried before a change; changes, at most."""

_RIGHT = 500
"""Runs that were right of each draw, in a first look at a change."""


def repaired(table: CountedTable, runs: Sequence[ExchangeRuns]) -> CountedTable:
    """Change one entry after another, as long as fewer runs are wrong than before.

    Those are tried that wrong runs use most, compared with all runs. Every entry that the table
    comes to in these runs counts as seen afterwards.

    Args:
        table: The table.
        runs: What it should say.
    """
    for _ in range(_CHANGES):
        said = [Said.of(table, of) for of in runs]
        wrong = sum(map(n_wrong, said))
        if not wrong:
            break
        few = [_to_look_at(of, each) for of, each in zip(runs, said)]
        before = _wrong(table, few)
        tried = [
            (_wrong(changed, few), changed)
            for entry in _suspects(table, runs, said)
            for changed in _others(table, entry)
        ]
        hopeful = sorted((one for one in tried if one[0] < before), key=lambda one: one[0])[:4]
        better = (changed for _, changed in hopeful if _wrong(changed, runs) < wrong)
        found = next(better, None)
        if found is None:
            break
        table = found
    return replace(table, seen=table.seen | (_used(table, runs, [None] * len(runs)) > 0))


def n_wrong(said: Said) -> int:
    """Runs, undisturbed and exchanged, of which some answer is not as the table says."""
    return int((~said.undisturbed).any(0).sum() + (~said.right).any(0).sum())


def _wrong(table: CountedTable, runs: Sequence[ExchangeRuns]) -> int:
    return sum(n_wrong(Said.of(table, of)) for of in runs)


def _to_look_at(runs: ExchangeRuns, said: Said) -> ExchangeRuns:
    """All runs that are wrong, and some that are right."""
    right = said.right.all(0)
    return runs[torch.cat([(~right).nonzero().squeeze(1), right.nonzero().squeeze(1)[:_RIGHT]])]


def _suspects(
    table: CountedTable, runs: Sequence[ExchangeRuns], said: Sequence[Said]
) -> list[Tensor]:
    """Entries as indices, those first that wrong runs use most for their number of uses."""
    # What comes after the first wrong answer cannot be what is wrong.
    until = [(_until_wrong(of.undisturbed), _until_wrong(of.right)) for of in said]
    bad, every = _used(table, runs, until), _used(table, runs, [None] * len(runs))
    score = (bad.double() ** 1.5 / (every + 1)).flatten()
    best = score.argsort(descending=True, stable=True)[:_ENTRIES]
    shape = tuple(table.step.shape)
    return [torch.stack(torch.unravel_index(at, shape)) for at in best if score[at]]


def _until_wrong(right: Bool[Tensor, "time run"]) -> Bool[Tensor, "time run"]:
    times = torch.arange(len(right))[:, None]
    return (~right).any(0) & (times <= (~right).int().argmax(0))


def _used(
    table: CountedTable,
    runs: Sequence[ExchangeRuns],
    when: Sequence[tuple[Tensor, Tensor] | None],
) -> Int[Tensor, "left_token left_value token value"]:
    """How often the table comes to each entry, undisturbed and after exchanges, at some times."""
    shape = tuple(table.step.shape)
    counts = torch.zeros(table.step.numel(), dtype=torch.long)
    for of, chosen in zip(runs, when):
        within = [each.within for each in of.both]
        masks = within if chosen is None else [a & b for a, b in zip(chosen, within)]
        for each, values, mask in zip(of.both, Said.of(table, of).values, masks):
            kinds = kinds_of(each.tokens, values, shape)[:-1]
            counts += kinds[mask[1:]].flatten().bincount(minlength=len(counts))
    return counts.view(shape)


def _others(table: CountedTable, entry: Int[Tensor, " axis"]) -> list[CountedTable]:
    """The table with each other value of one entry that its token has."""
    at = tuple(entry.tolist())
    token = at[2]
    known = {int(table.start[token]), *table.step[:, :, token][table.seen[:, :, token]].tolist()}
    found = []
    for value in sorted(known - {int(table.step[at])}):
        step = table.step.clone()
        step[at] = value
        found.append(replace(table, step=step))
    return found
