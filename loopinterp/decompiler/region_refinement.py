"""Values of a trained model as regions of states, split where a run leaves the table.

Where that happens, pairs of neighbours with the same values become different ones. Planes in
either's states that separate the two cases are candidates; the one that makes the table right about
most runs is taken.
Source: counterexample-guided abstraction refinement (Clarke et al., CAV 2000) on interchange
interventions (arXiv 2106.02997); counterexamples as equivalence queries (Angluin 1987).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from loopinterp.core.text import ShortRepr, track
from loopinterp.decompiler.interchange_runs import (
    ROUNDS,
    DrawRuns,
    InterchangeTrajectories,
    TablePrediction,
    Trajectories,
    count_table,
    most_common,
    repaired_on_draws,
)
from loopinterp.decompiler.transition_table import EDGE, TransitionTable
from loopinterp.interventions.pairs import balanced_pairs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.decompiler.interchange_runs import Runs


@dataclass(frozen=True, eq=False)
class Cut(ShortRepr):
    """Splits a value of a token: states with ``state @ normal + offset > 0`` get a new value."""

    token: int
    value: int
    new: int
    normal: Float[Tensor, " d_model"] = field(repr=False)
    offset: float = field(repr=False)

    def __call__(
        self, values: Int[Tensor, "time run pos"], runs: Trajectories
    ) -> Int[Tensor, "time run pos"]:
        cut = ((runs.tokens == self.token) & (values == self.value)).flatten().nonzero().squeeze(1)
        # Rows of a matrix are taken many times faster than places along several axes.
        rows = runs.states.reshape(-1, runs.states.shape[-1]).index_select(0, cut)
        beyond = cut[rows @ self.normal + self.offset > 0]
        return values.flatten().index_fill(0, beyond, self.new).view(values.shape)


@dataclass(frozen=True)
class _StateRegions(ShortRepr):
    """Where the states of each value lie: by the answer read there, then by the cuts in turn.

    The first values of a token are its ``answers``.
    """

    answers: Mapping[int, tuple[int, ...]]
    cuts: tuple[Cut, ...] = field(default=(), repr=False)

    @property
    def sizes(self) -> dict[int, int]:
        sizes = {token: len(each) for token, each in self.answers.items()}
        for cut in self.cuts:
            sizes[cut.token] += 1
        return sizes

    def values(self, runs: Trajectories) -> Int[Tensor, "time run pos"]:
        """The value of each state; 0 for an answer that is new for the token."""
        values = torch.zeros_like(runs.answers)
        for token, each in self.answers.items():
            for value, answer in enumerate(each):
                values[(runs.tokens == token) & (runs.answers == answer)] = value
        for cut in self.cuts:
            values = cut(values, runs)
        return values


@dataclass(frozen=True)
class _Refinement(ShortRepr):
    """The result of :func:`refine`; ``scores`` are held out, after 0, 1, … cuts."""

    regions: _StateRegions
    table: TransitionTable
    scores: tuple[float, ...] = field(repr=False)


def refine(
    runs: Sequence[InterchangeTrajectories],
    others: Sequence[InterchangeTrajectories],
    *,
    most_values: int,
) -> _Refinement:
    """Split states into values until the table predicts the model.

    Cuts are fitted on ``runs``. The fewest are kept that score, on ``others``, as well as any
    number does, within 0.005 (mean over lengths) or a tenth of the distance to a perfect score,
    whichever is less.
    """
    seen: dict[int, set[int]] = {}
    for clean in (each.clean for each in runs):
        for token in clean.tokens.unique().tolist():
            answers = clean.answers[:, clean.tokens == token].unique().tolist()
            seen.setdefault(token, set()).update(answers)
    regions = _StateRegions({token: tuple(sorted(seen[token])) for token in sorted(seen)})
    stages = [_Stage.of(runs, regions, [list(map(regions.values, each.both)) for each in runs])]
    for _ in track(range(len(seen) * most_values), "cut"):
        further = _further(stages[-1], most_values)
        if not further:
            break
        stages += further
    scores = tuple(
        _mean_score([TablePrediction.of(stage.table, each) for each in others]) for stage in stages
    )
    # The greatest score is 3. Where hardly anything is left to explain, the gain of one cut is no
    # noise.
    enough = max(scores) - min(0.005, max(3.0 - max(scores), 0) / 10)
    chosen = next(stage for stage, score in zip(stages, scores) if score >= enough)
    return _Refinement(chosen.regions, chosen.table, scores)


def against_counterexamples(
    refinement: _Refinement,
    runs: Sequence[InterchangeTrajectories],
    others: Sequence[InterchangeTrajectories],
    draw: DrawRuns,
    *,
    number: int,
    most_values: int,
    generator: torch.Generator,
) -> tuple[_Refinement, list[InterchangeTrajectories], list[InterchangeTrajectories]]:
    """Repair a refinement's table on states of any loop; if that is not enough, refine again on
    them.

    Returns the refinement with fewer wrong runs in a fresh draw, the runs it was made from, and
    those held out (``others``). At each length ``number`` states are put in.
    """
    # With a larger share of wrong runs, regions are cut anew and no entry is repaired.
    table, wrong = repaired_on_draws(
        refinement.table, draw, number=number, generator=generator, most_wrong=0.02
    )
    first = replace(refinement, table=table), [*runs], [*others]
    if not wrong:
        return first

    def injected(clean: Runs, size: int) -> InterchangeTrajectories:
        values = refinement.regions.values(clean.trajectories())
        pairs = balanced_pairs(clean.batch, values, size, generator)
        return InterchangeTrajectories.after(clean, pairs)

    more = [injected(clean, number) for clean in draw(ROUNDS)]
    held_back = [injected(clean, number // 2) for clean in draw(ROUNDS + 1)]
    again = refine([*runs, *more], [*others, *held_back], most_values=most_values)
    table, still_wrong = repaired_on_draws(again.table, draw, number=number, generator=generator)
    if still_wrong >= wrong:
        return first
    return replace(again, table=table), [*runs, *more], [*others, *held_back]


def _mean_score(predictions: Sequence[TablePrediction]) -> float:
    return sum(float(each.score) for each in predictions) / len(predictions)


@dataclass(frozen=True)
class _Stage:
    runs: Sequence[InterchangeTrajectories]
    regions: _StateRegions
    values: Sequence[Sequence[Tensor]]  # of clean and of changed runs, [time, run, pos]
    table: TransitionTable
    predictions: Sequence[TablePrediction]

    @classmethod
    def of(
        cls,
        runs: Sequence[InterchangeTrajectories],
        regions: _StateRegions,
        values: Sequence[Sequence[Tensor]],
    ) -> _Stage:
        table = count_table(runs, values, regions.sizes)
        return cls(runs, regions, values, table, [TablePrediction.of(table, x) for x in runs])

    def after(self, cut: Cut) -> _Stage:
        values = [
            [cut(v, part) for part, v in zip(each.both, both)]
            for each, both in zip(self.runs, self.values)
        ]
        regions = _StateRegions(self.regions.answers, (*self.regions.cuts, cut))
        return self.of(self.runs, regions, values)

    @property
    def score(self) -> float:
        return _mean_score(self.predictions)


def _further(stage: _Stage, most_values: int) -> list[_Stage]:
    """The best next stage, or the next two if no single cut helps; none if neither does."""
    least_gain = 0.003
    tried = [(kind, stage.after(cut)) for kind, cut in _cuts(stage, 6, most_values)]
    tried.sort(key=lambda each: -each[1].score)
    if not tried:
        return []
    if tried[0][1].score >= stage.score + least_gain:
        return [tried[0][1]]
    # A carry that is held for two more loops needs two more values, of which one is no use.
    firsts: dict[tuple[int, int, int], _Stage] = {}
    for kind, after in tried:
        cut = after.regions.cuts[-1]
        firsts.setdefault((kind, cut.token, cut.value), after)
    pairs = [
        (first, first.after(cut))
        for first in list(firsts.values())[:5]
        for _, cut in _cuts(first, 4, most_values)
    ]
    if not pairs:
        return []
    first, second = max(pairs, key=lambda pair: pair[1].score)
    return [first, second] if second.score >= stage.score + 2 * least_gain else []


def _cuts(stage: _Stage, most: int, most_values: int) -> Iterator[tuple[int, Cut]]:
    """Cuts at the ``most`` frequent kinds of exits, with the number of the kind."""
    sizes = stage.regions.sizes
    # Over all lengths, by place in the flattened table.
    each = zip(stage.predictions, stage.values)
    exits = torch.stack([prediction.exits(values) for prediction, values in each]).sum(0)
    for number, (place, _) in enumerate(most_common(exits, most)):
        left_states, states, differs = _examples(stage, place)
        if int(differs.sum()) < 3:
            continue
        left, cell = stage.table.entry(place)
        sides = [(cell, states)]
        if left != EDGE:
            sides.append((left, left_states))
        candidates = [(side, *_plane(x, differs)) for side, x in sides]
        if len(sides) == 2:
            # Both together decide; each is cut in between, where their sum turns.
            normal, _ = _plane(torch.cat([states, left_states], dim=1), differs)
            for (side, x), part in zip(sides, normal.chunk(2)):
                along = (x @ part)[differs]  # where examples with a rarer value lie
                candidates += [(side, part, -float(along.quantile(q))) for q in (0.15, 0.5, 0.85)]
        for (token, value), normal, offset in candidates:
            if sizes[token] < most_values:
                yield number, Cut(token, value, sizes[token], normal, offset)


def _examples(
    stage: _Stage, place: int
) -> tuple[Float[Tensor, "example d_model"], Float[Tensor, "example d_model"], Bool[Tensor, " _"]]:
    """States of the left and own position; whether another value than the usual one follows."""
    lefts, states, nexts = [], [], []
    for each, both in zip(stage.runs, stage.values):
        for part, values in zip(each.both, both):
            is_kind = stage.table.places(part.tokens, values[:-1]) == place
            # Transitions of the kind before a run is over, [time, run, pos].
            time, run, position = (is_kind & part.within[1:, :, None]).nonzero(as_tuple=True)
            states.append(part.states[time, run, position])
            lefts.append(part.states[time, run, (position - 1).clamp(min=0)])
            nexts.append(values[time + 1, run, position])
    after = torch.cat(nexts)
    # As many as a plane is fitted to.
    some = torch.randperm(len(after), generator=torch.Generator().manual_seed(0))[:3000]
    after = after[some]
    return torch.cat(lefts)[some], torch.cat(states)[some], after != after.mode().values


def _plane(
    states: Float[Tensor, "example d_model"], beyond: Bool[Tensor, " example"]
) -> tuple[Float[Tensor, " d_model"], float]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, scale = states.mean(0), states.std() + 1e-9
    model = LogisticRegression(C=30.0, max_iter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(((states - mean) / scale).numpy(), beyond.numpy())  # any good plane will do
    # In the states' own units again.
    normal = torch.from_numpy(model.coef_[0]).to(states) / scale
    return normal, float(torch.as_tensor(model.intercept_)[0] - mean @ normal)
