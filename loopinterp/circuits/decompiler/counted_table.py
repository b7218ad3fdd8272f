"""The table of steps by counting what runs do, once each of their states has a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.cell_automaton import EDGE, CellAutomaton
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns

BEST_SCORE = 3.0
"""What :attr:`Said.score` is at most: a sum of three shares."""


@dataclass(frozen=True, eq=False)
class CountedTable(ShortRepr):
    """What most cells of each kind become, from their own value and the left neighbour's.

    The first position has token -1 to its left, which is the last row of ``step``.

    Attributes:
        step: [left token, left value, own token, own value] -> value after one loop; the same as
            before where no run has such a pair.
        seen: Where some run has.
        start: Own token -> value before the first loop.
        answers: [token, value] -> what is answered.
        consistency: Share of the steps that are as most of their kind.
    """

    step: Int[Tensor, "left_token left_value token value"] = field(repr=False)
    seen: Bool[Tensor, "left_token left_value token value"] = field(repr=False)
    start: Int[Tensor, " token"] = field(repr=False)
    answers: Int[Tensor, "token value"] = field(repr=False)
    consistency: float

    @classmethod
    def of(
        cls,
        runs: Sequence[ExchangeRuns],
        values: Sequence[Sequence[Tensor]],
        n_tokens: int,
        n_values: int,
    ) -> CountedTable:
        """Count the steps of all runs.

        Args:
            runs: The runs, of each length.
            values: Of the states of undisturbed and exchanged runs [time, run, pos], of each
                length.
            n_tokens: Tokens are below it.
            n_values: Values are below it.
        """
        shape = (n_tokens + 1, n_values, n_tokens, n_values)
        known = torch.cat([of.undisturbed.answers.unique() for of in runs]).unique()
        counts = torch.zeros(*shape, n_values, dtype=torch.long)
        n_answers = max(int(of.answers.max()) for each in runs for of in each.both) + 1
        said = torch.zeros(n_tokens, n_values, n_answers, dtype=torch.long)
        starts = torch.zeros(n_tokens, n_values, dtype=torch.long)
        pairs = [(o, v) for each, own in zip(runs, values) for o, v in zip(each.both, own)]
        for of, own in pairs:
            kind = kinds_of(of.tokens, own, shape)
            counts += _counted(kind[:-1] * n_values + own[1:], of.within[1:], counts)
            cell = (of.tokens * n_values + own) * n_answers + of.answers
            said += _counted(cell, of.within, said)
        # An answer that no undisturbed run gives counts as the next that one gives.
        next_known = torch.searchsorted(known, torch.arange(n_answers)).clamp(max=len(known) - 1)
        known_said = said.new_zeros(n_tokens, n_values, len(known)).index_add(2, next_known, said)
        seen, most = counts.sum(-1) > 0, counts.amax(-1)
        stay = torch.arange(n_values).expand(shape)
        for each, (alone, _) in zip(runs, values):
            first = (each.undisturbed.tokens * n_values + alone[0]).flatten()
            starts += first.bincount(minlength=starts.numel()).view_as(starts)
        return cls(
            step=counts.argmax(-1).where(seen, stay),
            seen=seen,
            start=starts.argmax(-1),
            answers=known[known_said.argmax(-1)],
            consistency=float(most.sum() / counts.sum()),
        )

    def follow(
        self, tokens: Int[Tensor, "run pos"], values: Int[Tensor, "run pos"], n_loops: int
    ) -> Int[Tensor, "time run pos"]:
        """Values after 0, 1, … loops, as the table says."""
        found, shape, step = [values], tuple(self.step.shape), self.step.flatten()
        for _ in range(n_loops):
            found.append(step[kinds_of(tokens, found[-1], shape)])
        return torch.stack(found)

    def automaton(self, sizes: Mapping[int, int], runs: Sequence[ExchangeRuns]) -> CellAutomaton:
        """The same as a table of the pairs that runs have."""
        edge = len(self.step) - 1
        tokens = [row for of in runs for row in of.undisturbed.tokens.tolist()]
        side_by_side = {pair for row in tokens for pair in zip([EDGE[0], *row], row)}
        step = {}
        for left, left_value, own, value in self.seen.nonzero().tolist():
            cell = EDGE if left == edge else (left, left_value)
            step[cell, (own, value)] = int(self.step[left, left_value, own, value])
        return CellAutomaton(
            sizes=sizes,
            start={pair: int(self.start[pair[1]]) for pair in sorted(side_by_side)},
            step=step,
            answers={(t, v): int(self.answers[t, v]) for t, n in sizes.items() for v in range(n)},
        )


@dataclass(frozen=True, eq=False)
class Said(ShortRepr):
    """What a table says of runs, and where that is right.

    Attributes:
        values: Those of undisturbed and of exchanged runs, as the table says.
        undisturbed: Whether the whole answer of an input is right at a loop.
        right: Whether that of an exchange is, at each time; true once the run is over. Where the
            exchange changes no answer of the table, it should change none of the model.
        matters: Whether an exchange changes an answer of the model or of the table.
    """

    values: tuple[Int[Tensor, "time input pos"], Int[Tensor, "time pair pos"]] = field(repr=False)
    undisturbed: Bool[Tensor, "time input"]
    right: Bool[Tensor, "time pair"]
    matters: Bool[Tensor, " pair"]

    @classmethod
    def of(cls, table: CountedTable, runs: ExchangeRuns) -> Said:
        """Follow the table through all runs."""
        alone, after, pairs = runs.undisturbed, runs.exchanged, runs.pairs
        n_loops = len(alone.states) - 1
        values = table.follow(alone.tokens, table.start[alone.tokens], n_loops)
        each, position = torch.arange(len(pairs)), pairs.positions[:, 0]
        changed = values[pairs.loop, pairs.base]
        changed[each, position] = values[pairs.source_loop, pairs.source, position]
        gone_on = table.follow(after.tokens, changed, len(after.states) - 1)
        n_values, of_cells = table.answers.shape[1], table.answers.flatten()
        answers = of_cells[alone.tokens * n_values + values]
        before, then = runs.at_base(answers), of_cells[after.tokens * n_values + gone_on]
        natural, counted = runs.natural, runs.counted
        changes = then != before
        claimed, moved = torch.where(changes, then, natural), changes | runs.felt
        return cls(
            values=(values, gone_on),
            undisturbed=((answers == alone.answers) | ~runs.asked).all(-1),
            right=((claimed == after.answers) | ~counted).all(-1),
            matters=(moved & counted).any(-1).any(0),
        )

    @property
    def score(self) -> Float[Tensor, ""]:
        """Shares of whole trajectories, and of whole answers after exchanges and undisturbed."""
        right = self.right[:, self.matters].double()
        if not right.numel():
            return self.undisturbed.double().mean()
        return right.prod(0).mean() + right.mean() + self.undisturbed.double().mean()


def beside(
    tokens: Int[Tensor, "run pos"], values: Int[Tensor, "*time run pos"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left token (-1 for none), left value, own token and own value of every place."""
    pad = torch.nn.functional.pad
    left = pad(tokens[:, :-1], (1, 0), value=EDGE[0])
    return left.expand_as(values), pad(values[..., :-1], (1, 0)), tokens.expand_as(values), values


def kinds_of(
    tokens: Int[Tensor, "run pos"], values: Int[Tensor, "*time run pos"], shape: tuple[int, ...]
) -> Int[Tensor, "*time run pos"]:
    """The place of what :func:`beside` says in a flattened table of such a shape.

    Its first axis, the left token, ends with the row of none.
    """
    n_left, n_values, n_tokens, _ = shape
    pad = torch.nn.functional.pad
    left = pad(tokens[:, :-1], (1, 0), value=n_left - 1)
    of_tokens = (left * (n_values * n_tokens) + tokens) * n_values
    return pad(values[..., :-1] * (n_tokens * n_values), (1, 0)) + of_tokens + values


def _counted(
    places: Int[Tensor, "time run pos"], within: Bool[Tensor, "time run"], table: Tensor
) -> Tensor:
    """How often each place of a table occurs before a run is over."""
    beyond = table.numel()
    if not within.all():
        places = places.masked_fill(~within[..., None], beyond)
    return places.flatten().bincount(minlength=beyond + 1)[:beyond].view_as(table)
