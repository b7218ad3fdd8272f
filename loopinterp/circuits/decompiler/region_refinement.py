"""Values of a trained model by counterexamples: a value is cut where a run leaves its table.

A trained model's states are not alike, and no two need do the same for ever. What is looked for
is the coarsest cut of them into values with which a table says what the model does. It begins
with the answers as values. Where a run leaves the table, there is a pair of neighbours whose states
become different values though they have the same; a plane through either's states that tells
the two cases apart is a candidate. Of all candidates the one is taken that makes the table right
about most of the model's runs, until none makes it better.

Source: abstraction refinement guided by counterexamples (Clarke et al., CAV 2000), on interchange
interventions (arXiv 2106.02997).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.counted_table import BEST_SCORE, CountedTable, Said, beside
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns
from loopinterp.circuits.decompiler.state_regions import Cut, StateRegions
from loopinterp.circuits.decompiler.table_exits import exits_of, most_common_kinds
from loopinterp.progress import track
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

GAIN = 0.003
"""What a cut must add to the score (:attr:`Said.score`) to be made, and so must each of two."""

_KINDS, _KINDS_AHEAD, _AHEAD = 6, 4, 5
"""Kinds of pairs whose cuts are tried; of those after a first cut; first cuts that are tried."""

_FITTED = 3000
"""Examples that a plane is fitted to."""

_QUANTILES = (0.15, 0.5, 0.85)
_WITHIN_NOISE = 0.005


@dataclass(frozen=True)
class Refinement(ShortRepr):
    """What :func:`refine` returns.

    Attributes:
        regions: Where the states of each value lie.
        table: What cells become.
        scores: Of the table after 0, 1, … cuts, on the runs that it was not made from.
    """

    regions: StateRegions
    table: CountedTable
    scores: tuple[float, ...] = field(repr=False)


def refine(
    runs: Sequence[ExchangeRuns], others: Sequence[ExchangeRuns], *, most_values: int
) -> Refinement:
    """Cut states into values until the table says what the model does.

    Cuts are made by what ``runs`` say; the fewest are kept with which the table is as right about
    ``others`` as with any number, to :math:`0.005` of the score, which is the mean over lengths, or
    to a tenth of what lacks to the best score there could be, where that is less.

    Args:
        runs: Which the table is made from, of each length.
        others: Which say how many cuts are worth it, of each length.
        most_values: Of a token.
    """
    answers = _answers_of(runs)
    n_tokens = max(answers) + 1
    stages = [_Stage.first(tuple(runs), StateRegions(answers), n_tokens)]
    for _ in track(range(len(answers) * most_values), "cut"):
        further = _further(stages[-1], most_values)
        if not further:
            break
        stages += further
    scores = tuple(_mean_score([Said.of(stage.table, of) for of in others]) for stage in stages)
    # Where hardly anything is left unsaid, what one cut adds is no noise.
    enough = max(scores) - min(_WITHIN_NOISE, max(BEST_SCORE - max(scores), 0) / 10)
    chosen = next(stage for stage, score in zip(stages, scores) if score >= enough)
    return Refinement(chosen.regions, chosen.table, scores)


def _answers_of(runs: Sequence[ExchangeRuns]) -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {}
    for alone in (of.undisturbed for of in runs):
        for token in alone.tokens.unique().tolist():
            found.setdefault(token, set()).update(
                alone.answers[:, alone.tokens == token].unique().tolist()
            )
    return {token: tuple(sorted(found[token])) for token in sorted(found)}


def _mean_score(said: Sequence[Said]) -> float:
    return sum(float(of.score) for of in said) / len(said)


_Values = tuple[torch.Tensor, ...]
"""Of undisturbed and of exchanged runs."""


@dataclass(frozen=True)
class _Stage:
    """Some cuts, and what comes of them; values and what is said are of each length."""

    runs: tuple[ExchangeRuns, ...]
    regions: StateRegions
    values: tuple[_Values, ...]
    table: CountedTable
    said: tuple[Said, ...]

    @classmethod
    def first(cls, runs: tuple[ExchangeRuns, ...], regions: StateRegions, n_tokens: int) -> _Stage:
        values = tuple(
            tuple(
                regions.values(of.tokens.expand_as(of.answers), of.states, of.answers)
                for of in each.both
            )
            for each in runs
        )
        return cls.of(runs, regions, values, n_tokens)

    @classmethod
    def of(
        cls,
        runs: tuple[ExchangeRuns, ...],
        regions: StateRegions,
        values: tuple[_Values, ...],
        n_tokens: int,
    ) -> _Stage:
        table = CountedTable.of(runs, values, n_tokens, max(regions.sizes.values()))
        return cls(runs, regions, values, table, tuple(Said.of(table, of) for of in runs))

    def after(self, cut: Cut) -> _Stage:
        """The same with one more cut."""
        values = tuple(
            tuple(cut(v, of.tokens.expand_as(v), of.states) for of, v in zip(each.both, own))
            for each, own in zip(self.runs, self.values)
        )
        n_tokens = len(self.table.start)
        return _Stage.of(self.runs, self.regions.and_cut(cut), values, n_tokens)

    @property
    def score(self) -> float:
        return _mean_score(self.said)


def _further(stage: _Stage, most_values: int) -> list[_Stage]:
    """The best next stage, or the next two where no single cut is any good; none if neither is."""
    tried = [(kind, stage.after(cut)) for kind, cut in _cuts(stage, _KINDS, most_values)]
    tried.sort(key=lambda one: -one[1].score)
    if not tried:
        return []
    if tried[0][1].score >= stage.score + GAIN:
        return [tried[0][1]]
    # A carry that is held for two more loops needs two more values, of which one alone is no use.
    firsts: dict[tuple[int, int, int], _Stage] = {}
    for kind, one in tried:
        cut = one.regions.cuts[-1]
        firsts.setdefault((kind, cut.token, cut.value), one)
    pairs = [
        (first, first.after(cut))
        for first in list(firsts.values())[:_AHEAD]
        for _, cut in _cuts(first, _KINDS_AHEAD, most_values)
    ]
    if not pairs:
        return []
    first, second = max(pairs, key=lambda pair: pair[1].score)
    return [first, second] if second.score >= stage.score + 2 * GAIN else []


def _cuts(stage: _Stage, most: int, most_values: int) -> Iterator[tuple[int, Cut]]:
    """Candidates: the number of the kind of pair that each comes from, and the cut."""
    sizes = stage.regions.sizes
    for number, kind in enumerate(_counterexamples(stage, most)):
        left, own, other = _examples(stage, kind)
        if int(other.sum()) < 3:
            continue
        left_token, left_value, token, value = kind
        sides = [(token, value, own)]
        if left_token >= 0:
            sides.append((left_token, left_value, left))
        planes = [_plane(states, other) for *_, states in sides]
        found = [(*side[:2], *plane) for side, plane in zip(sides, planes)]
        if len(sides) == 2:
            # Both together decide; each is cut in between, where their sum turns.
            normal, _ = _plane(torch.cat([own, left], dim=1), other)
            for (t, v, states), part in zip(sides, normal.chunk(2)):
                along = (states @ part)[other]
                found += [(t, v, part, -float(along.quantile(q))) for q in _QUANTILES]
        for t, v, normal, offset in found:
            if sizes[t] < most_values:
                yield number, Cut(t, v, sizes[t], normal, offset)


def _counterexamples(stage: _Stage, most: int) -> list[tuple[int, int, int, int]]:
    """Kinds of pairs (left token, value, own token, value) at which runs leave the table first."""
    each = zip(stage.runs, stage.values, stage.said)
    exits = torch.stack([exits_of(stage.table, *of) for of in each]).sum(0)
    return [kind for kind, _ in most_common_kinds(exits, most)]


def _examples(
    stage: _Stage, kind: tuple[int, int, int, int]
) -> tuple[Float[Tensor, "example d_model"], Float[Tensor, "example d_model"], Bool[Tensor, " _"]]:
    """States of the left and the own position of a kind of pair; whether another value follows.

    Another one than most often.
    """
    lefts, owns, nexts = [], [], []
    pairs = [(o, v) for runs, own in zip(stage.runs, stage.values) for o, v in zip(runs.both, own)]
    for of, values in pairs:
        here = torch.stack([at == k for at, k in zip(beside(of.tokens, values), kind)]).all(0)
        here = here[:-1] & of.within[1:, :, None]
        time, run, position = here.nonzero(as_tuple=True)
        owns.append(of.states[time, run, position])
        lefts.append(of.states[time, run, (position - 1).clamp(min=0)])
        nexts.append(values[time + 1, run, position])
    left, own, after = torch.cat(lefts), torch.cat(owns), torch.cat(nexts)
    some = torch.randperm(len(after), generator=torch.Generator().manual_seed(0))[:_FITTED]
    after = after[some]
    return left[some], own[some], after != after.mode().values


def _plane(
    states: Float[Tensor, "example d_model"], beyond: Bool[Tensor, " example"]
) -> tuple[Float[Tensor, " d_model"], float]:
    """The plane that tells the examples apart best: logistic regression."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, scale = states.mean(0), states.std() + 1e-9
    model = LogisticRegression(C=30.0, max_iter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(((states - mean) / scale).numpy(), beyond.numpy())  # any good plane will do
    normal = torch.from_numpy(model.coef_[0]).to(states) / scale
    return normal, float(torch.as_tensor(model.intercept_)[0] - mean @ normal)
