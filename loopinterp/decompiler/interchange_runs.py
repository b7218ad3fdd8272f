"""Runs after an interchange at one position, and what a transition table predicts of them.

A run leaves the table where a position first gets another value than the table says after it and
its left neighbour had the predicted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch.nn.functional import pad

from loopinterp.core.text import ShortRepr
from loopinterp.decompiler.transition_table import EDGE, Cell, TransitionTable
from loopinterp.interventions.engine import answer, decided
from loopinterp.interventions.pairs import balanced_pairs, drawn_pairs
from loopinterp.models import bind, device_of, iterate
from loopinterp.programs.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch


@dataclass(frozen=True, eq=False)
class Runs:
    """A model's clean runs on inputs of one length, kept on the CPU."""

    model: LoopedModel | Any
    batch: Batch
    n_loops: int

    @cached_property
    @torch.no_grad()
    def states(self) -> Float[Tensor, "loops input pos d_model"]:
        return torch.stack([h for _, h in iterate(self.model, self.inputs, self.n_loops)])

    @property
    def inputs(self) -> Int[Tensor, "input pos"]:
        return self.batch.inputs.to(device_of(self.model))

    @cached_property
    def tokens(self) -> list[int]:
        return self.batch.inputs.unique().tolist()

    def trajectories(self) -> Trajectories:
        answers = self.answers(self.inputs, self.states).cpu()
        always = torch.ones(answers.shape[:2], dtype=torch.bool)
        return Trajectories(self.batch.inputs, _to_cut(self.states), answers, always)

    @torch.no_grad()
    def answers(
        self, inputs: Int[Tensor, "run pos"], states: Float[Tensor, "time run pos d_model"]
    ) -> Int[Tensor, "time run pos"]:
        bound = bind(self.model, inputs)
        return torch.stack([read_answers(bound.readout(h)) for h in states])


def read_answers(logits: Float[Tensor, "batch pos d_vocab_out"]) -> Int[Tensor, "batch pos"]:
    return torch.where(decided(logits), answer(logits).long(), UNKNOWN)


@torch.no_grad()
def depends_elsewhere(
    runs: Runs, classify: Callable[[int, Tensor], Tensor], generator: torch.Generator
) -> float:
    """Share of positions whose next value depends on more than they and their left neighbour."""
    n_places, (size, n_pos) = 256, runs.batch.inputs.shape
    rows, others = torch.randint(size, (2, n_places), generator=generator)
    at = torch.randint(n_pos, (n_places,), generator=generator)
    loops = torch.randint(max(runs.n_loops, 1), (n_places,), generator=generator)
    positions = torch.arange(n_pos)
    near = (positions == at[:, None]) | (positions == at[:, None] - 1)  # [place, pos]
    tokens = runs.inputs[rows].where(near.to(runs.inputs.device), runs.inputs[others])
    h = runs.states[loops, rows].clone()  # [place, pos, d_model]
    mixed = h.where(near[..., None].to(h.device), runs.states[loops, others])
    each = torch.arange(n_places)
    before = bind(runs.model, runs.inputs[rows]).step(h)[each, at]
    after = bind(runs.model, tokens).step(mixed)[each, at]
    changed, token_of = 0, runs.batch.inputs[rows, at]
    for token in runs.tokens:
        chosen = token_of == token
        if chosen.any():
            # Classified in one call, so that both see the same values.
            first, second = classify(token, torch.cat([before[chosen], after[chosen]])).chunk(2)
            changed += int((first != second).sum())
    return changed / n_places


def _to_cut(states: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
    """States on the CPU, at least in single precision, for cutting regions."""
    return states.to("cpu", torch.promote_types(states.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Trajectories(ShortRepr):
    """Runs; time counts the loops of each, and ``within`` marks those not yet over."""

    tokens: Int[Tensor, "run pos"]
    states: Float[Tensor, "time run pos d_model"] = field(repr=False)
    answers: Int[Tensor, "time run pos"] = field(repr=False)
    within: Bool[Tensor, "time run"] = field(repr=False)

    def __getitem__(self, rows: Tensor) -> Trajectories:
        return Trajectories(
            self.tokens[rows], self.states[:, rows], self.answers[:, rows], self.within[:, rows]
        )


@dataclass(frozen=True, eq=False)
class InterchangeTrajectories(ShortRepr):
    """Clean runs of all inputs, and ``changed`` ones from an interchange on."""

    clean: Trajectories
    changed: Trajectories
    pairs: InterchangePairs = field(repr=False)

    @classmethod
    @torch.no_grad()
    def drawn(
        cls, runs: Runs, number: int, generator: torch.Generator, *, across_loops: bool = False
    ) -> InterchangeTrajectories:
        """Draw as many ineffective interchanges as effective ones."""
        pairs = drawn_pairs(runs.batch, runs.n_loops, number, generator, across_loops=across_loops)
        every = cls.after(runs, pairs)
        effective = (every.differ & every.counted).any(-1).any(0)
        others = (~effective).nonzero().squeeze(1)[: max(int(effective.sum()), 1)]
        return every[torch.cat([effective.nonzero().squeeze(1), others])]

    @classmethod
    @torch.no_grad()
    def after(cls, runs: Runs, pairs: InterchangePairs) -> InterchangeTrajectories:
        rows, position = torch.arange(len(pairs)), pairs.positions[:, 0]
        # States of the bases at their loops [pair, pos, d_model], with the source's put in.
        changed = runs.states[pairs.loop, pairs.base].clone()
        changed[rows, position] = runs.states[pairs.source_loop, pairs.source, position]
        inputs = runs.inputs[pairs.base]
        run = iterate(runs.model, inputs, int(pairs.longest), state=changed)
        states = torch.stack([h for _, h in run])
        within = pairs.loop + torch.arange(len(states))[:, None] <= runs.n_loops  # [time, pair]
        answers = runs.answers(inputs, states).cpu()
        after = Trajectories(runs.batch.inputs[pairs.base], _to_cut(states), answers, within)
        return cls(runs.trajectories(), after, pairs)

    def __getitem__(self, rows: Tensor) -> InterchangeTrajectories:
        return replace(self, changed=self.changed[rows], pairs=self.pairs[rows])

    @property
    def both(self) -> tuple[Trajectories, Trajectories]:
        return self.clean, self.changed

    @cached_property
    def natural(self) -> Int[Tensor, "time pair pos"]:
        """Answers of each base's clean run at the same loops; past the end its last ones."""
        return self.at_base(self.clean.answers)

    @cached_property
    def counted(self) -> Bool[Tensor, "time pair pos"]:
        """Where an answer is scored, before a run is over."""
        return self.changed.within[..., None] & self.pairs.scored

    @cached_property
    def differ(self) -> Bool[Tensor, "time pair pos"]:
        return self.changed.answers != self.natural

    def at_base(self, of_runs: Int[Tensor, "loops input pos"]) -> Int[Tensor, "time pair pos"]:
        """Entries of clean runs at the loops of the changed runs."""
        times = torch.arange(len(self.changed.within))[:, None]
        loops = (self.pairs.loop + times).clamp(max=len(of_runs) - 1)
        # Rows of [loop * input]: index_select is much faster than two indices.
        rows = loops * of_runs.shape[1] + self.pairs.base
        return of_runs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)


ROUNDS = 6  # draws of new inputs to repair a table on, at most

DrawRuns = Callable[[int], "Sequence[Runs]"]  # clean runs of new inputs, by a number


def count_table(
    runs: Sequence[InterchangeTrajectories],
    values: Sequence[Sequence[Tensor]],
    sizes: Mapping[int, int],
) -> TransitionTable:
    """Count what most cells of each kind become.

    Args:
        values: For each length, values of clean and changed runs [time, run, pos].
        sizes: Token -> number of its values.
    """
    n_tokens, n_values = max(sizes) + 1, max(sizes.values())
    table = TransitionTable.from_entries(sizes, start={}, step={}, answers={})
    parts = [(part, v) for each, both in zip(runs, values) for part, v in zip(each.both, both)]
    # Undecided answers are counted too, as the first.
    n_answers = max(int(part.answers.max()) for part, _ in parts) + 1 - UNKNOWN
    # [left token, left value, token, value, value after]
    counts = torch.zeros(*table.step.shape, n_values, dtype=torch.long)
    read = torch.zeros(n_tokens, n_values, n_answers, dtype=torch.long)  # [token, value, answer]
    starts = torch.zeros(n_tokens, n_values, dtype=torch.long)
    for part, v in parts:
        steps = table.places(part.tokens, v[:-1]) * n_values + v[1:]
        counts += _counted(steps, part.within[1:], counts)
        cells = (part.tokens * n_values + v) * n_answers + part.answers - UNKNOWN
        read += _counted(cells, part.within, read)
    for each, (clean, _) in zip(runs, values):
        first = (each.clean.tokens * n_values + clean[0]).flatten()
        starts += first.bincount(minlength=starts.numel()).view_as(starts)
    # An answer that no clean run gives counts as the next that one gives.
    known = torch.cat([each.clean.answers.unique() for each in runs]).unique()
    answers = torch.arange(n_answers) + UNKNOWN
    next_known = torch.searchsorted(known, answers).clamp(max=len(known) - 1)
    read = read.new_zeros(n_tokens, n_values, len(known)).index_add(2, next_known, read)
    seen = counts.sum(-1) > 0
    return replace(
        table,
        start=starts.argmax(-1).repeat(n_tokens + 1, 1),  # for every left token
        step=counts.argmax(-1).where(seen, table.step),
        known=seen,
        answers=known[read.argmax(-1)],
        consistency=float(counts.amax(-1).sum() / counts.sum()),
    )


def _counted(
    places: Int[Tensor, "time run pos"], within: Bool[Tensor, "time run"], table: Tensor
) -> Tensor:
    beyond = table.numel()
    if not within.all():  # one place behind the table collects the others
        places = places.masked_fill(~within[..., None], beyond)
    return places.flatten().bincount(minlength=beyond + 1)[:beyond].view_as(table)


@dataclass(frozen=True, eq=False)
class TablePrediction(ShortRepr):
    """A table's prediction of some runs, and where it is right.

    Attributes:
        values: Predicted values of clean and of changed runs.
        clean: Whether the whole answer is right.
        changed: The same after an interchange; true once the run is over.
        effective: Whether an interchange changes an answer of the model or of the table.
    """

    table: TransitionTable = field(repr=False)
    runs: InterchangeTrajectories = field(repr=False)
    values: tuple[Int[Tensor, "time input pos"], Int[Tensor, "time pair pos"]] = field(repr=False)
    clean: Bool[Tensor, "time input"]
    changed: Bool[Tensor, "time pair"]
    effective: Bool[Tensor, " pair"]

    @classmethod
    def of(cls, table: TransitionTable, runs: InterchangeTrajectories) -> TablePrediction:
        clean, after, pairs = runs.clean, runs.changed, runs.pairs
        values = table.follow(clean.tokens, len(clean.states) - 1)
        rows, position = torch.arange(len(pairs)), pairs.positions[:, 0]
        # Values of the bases at their loops [pair, pos], with the source's put in.
        put_in = values[pairs.loop, pairs.base]
        put_in[rows, position] = values[pairs.source_loop, pairs.source, position]
        values_after = table.follow(after.tokens, len(after.states) - 1, put_in)
        answers = table.read(clean.tokens, values)
        answers_after = table.read(after.tokens, values_after)
        changes = answers_after != runs.at_base(answers)
        # An interchange without effect on the table should have none on the model.
        predicted = torch.where(changes, answers_after, runs.natural)
        effective = (changes | runs.differ) & runs.counted
        return cls(
            table,
            runs,
            values=(values, values_after),
            clean=((answers == clean.answers) | ~pairs.asked).all(-1),
            changed=((predicted == after.answers) | ~runs.counted).all(-1),
            effective=effective.any(-1).any(0),
        )

    @property
    def score(self) -> Float[Tensor, ""]:
        """Sum of the shares of whole trajectories, answers after interchanges and clean answers."""
        right = self.changed[:, self.effective].double()
        if not right.numel():
            return self.clean.double().mean()
        return right.prod(0).mean() + right.mean() + self.clean.double().mean()

    @property
    def n_wrong(self) -> int:
        return int((~self.clean).any(0).sum() + (~self.changed).any(0).sum())

    def exits(self, values: Sequence[Tensor]) -> Int[Tensor, " place"]:
        """How often runs leave the table, by place in the flattened table.

        Only runs with wrong predictions count, before the first wrong answer.
        """
        table = self.table
        in_time = _until_wrong(self.changed) & self.effective & self.runs.changed.within
        wrong_clean = (~self.clean).any(0).expand(len(self.clean), -1)
        exits = torch.zeros(table.step.numel(), dtype=torch.long)
        for part, true, predicted, counted in zip(
            self.runs.both, values, self.values, (wrong_clean, in_time)
        ):
            off = true != predicted
            # Position and left neighbour as predicted, and the position no longer after the loop.
            on = ~off[:-1] & ~pad(off[:-1, :, :-1], (1, 0))
            leaving = on & off[1:] & counted[1:, :, None]
            exits += table.places(part.tokens, true[:-1])[leaving].bincount(minlength=len(exits))
        return exits

    def uses(self, *, until_wrong: bool = False) -> Int[Tensor, " place"]:
        """How often each entry is used; with ``until_wrong``, before the first wrong answer."""
        counts = torch.zeros(self.table.step.numel(), dtype=torch.long)
        for part, values, right in zip(self.runs.both, self.values, (self.clean, self.changed)):
            mask = part.within & _until_wrong(right) if until_wrong else part.within
            places = self.table.places(part.tokens, values[:-1])  # [time, run, pos]
            counts += places[mask[1:]].flatten().bincount(minlength=len(counts))
        return counts


def n_wrong(table: TransitionTable, runs: Sequence[InterchangeTrajectories]) -> int:
    return sum(TablePrediction.of(table, each).n_wrong for each in runs)


def _until_wrong(right: Bool[Tensor, "time run"]) -> Bool[Tensor, "time run"]:
    """Times up to the first wrong answer, of runs that have one."""
    times = torch.arange(len(right))[:, None]
    return (~right).any(0) & (times <= (~right).int().argmax(0))


def most_common(counts: Int[Tensor, " place"], most: int) -> list[tuple[int, int]]:
    """The places of the highest counts above 0, highest first."""
    order = counts.argsort(descending=True, stable=True)[:most]
    return [(int(place), int(counts[place])) for place in order if counts[place] > 0]


def unexplained_steps(
    table: TransitionTable,
    values_of: Callable[[Trajectories], Tensor],
    runs: Sequence[InterchangeTrajectories],
    names: Mapping[Cell, int],
) -> pd.DataFrame:
    """The transitions of held-out runs that a table does not explain.

    Args:
        values_of: The value of each state.
        runs: Runs of each length.
        names: Cell -> number of its value in the result; cells of one number are merged.

    Returns:
        A row for each kind of transition at which runs leave the table, the most frequent first.
        Columns ``left`` (token, -1 for none), ``left_value``, ``token``, ``value``; ``exits``
        (of runs with wrong answers), ``steps`` (transitions of that kind in all runs),
        ``otherwise`` (share of these with another value than the table's).
    """
    exits, steps, otherwise = torch.zeros(3, table.step.numel(), dtype=torch.long)
    shown = torch.arange(table.answers.shape[1]).repeat(len(table.answers), 1)  # [token, value]
    for cell, name in names.items():
        shown[cell] = name
    for each in runs:
        values = list(map(values_of, each.both))
        exits += TablePrediction.of(table, each).exits(values)
        for part, v in zip(each.both, values):
            places = table.places(part.tokens, v[:-1])
            tokens, predicted = part.tokens.expand_as(places), table.step.flatten()[places]
            # Values that are shown as one count as equal.
            other = shown[tokens, predicted] != shown[tokens, v[1:]]
            within = part.within[1:]
            steps += places[within].flatten().bincount(minlength=len(steps))
            otherwise += places[other & within[..., None]].bincount(minlength=len(steps))
    rows = []
    for place, number in most_common(exits, len(exits)):
        left, cell = table.entry(place)
        kind = (left[0], 0 if left == EDGE else names[left], cell[0], names[cell])
        rows.append((*kind, number, int(steps[place]), int(otherwise[place])))
    kind_columns = ["left", "left_value", "token", "value"]
    frame = pd.DataFrame(rows, columns=[*kind_columns, "exits", "steps", "off"])
    merged: Any = frame.groupby(kind_columns, as_index=False).sum()
    merged["otherwise"] = merged.pop("off") / merged["steps"]
    return merged.sort_values("exits", ascending=False, kind="stable", ignore_index=True)


def repaired_on_draws(
    table: TransitionTable,
    draw: DrawRuns,
    *,
    number: int,
    generator: torch.Generator,
    most_wrong: float = 0.25,
) -> tuple[TransitionTable, int]:
    """Repair a table until no injected state of new inputs leaves it, or repair stops helping.

    Nothing is repaired if more than ``most_wrong`` of the runs are wrong. Also returns the number
    of runs of the last draw that left the table.
    """
    gathered: list[InterchangeTrajectories] = []
    wrong = 0
    for turn in range(ROUNDS):
        drawn = []
        for runs in draw(turn):
            values = table.follow(runs.batch.inputs, runs.n_loops)
            pairs = balanced_pairs(runs.batch, values, number, generator)
            one = InterchangeTrajectories.after(runs, pairs)
            # Only values and answers are compared: states would fill the memory.
            clean, changed = (replace(part, states=part.states[..., :0]) for part in one.both)
            drawn.append(replace(one, clean=clean, changed=changed))
        gathered += drawn
        wrong = n_wrong(table, drawn)
        if wrong > most_wrong * sum(len(each.pairs) for each in drawn):
            break
        before, table = table, repaired(table, gathered)
        if not wrong or torch.equal(before.step, table.step):
            break
    return table, wrong


def repaired(table: TransitionTable, runs: Sequence[InterchangeTrajectories]) -> TransitionTable:
    """Change one entry after another, as long as fewer runs are wrong than before.

    Entries used in the runs count as known afterwards.
    """
    n_changes, n_entries, n_right, n_promising = 40, 16, 500, 4
    for _ in range(n_changes):
        predictions = [TablePrediction.of(table, each) for each in runs]
        wrong = sum(prediction.n_wrong for prediction in predictions)
        if not wrong:
            break
        few = []  # in a first look: all wrong runs, and some that are right
        for each, prediction in zip(runs, predictions):
            right = prediction.changed.all(0)
            rows = (~right).nonzero().squeeze(1), right.nonzero().squeeze(1)[:n_right]
            few.append(each[torch.cat(rows)])
        before = n_wrong(table, few)
        by_wrong = torch.stack([each.uses(until_wrong=True) for each in predictions]).sum(0)
        by_all = torch.stack([each.uses() for each in predictions]).sum(0)
        # Often used by wrong runs, and mostly by them.
        score = by_wrong.double() ** 1.5 / (by_all + 1)
        suspects = score.argsort(descending=True, stable=True)[:n_entries]
        tried = [
            (n_wrong(changed, few), changed)
            for place in suspects
            if score[place]
            for changed in _other_values(table, int(place))
        ]
        better = sorted((each for each in tried if each[0] < before), key=lambda each: each[0])
        changes = (each for _, each in better[:n_promising] if n_wrong(each, runs) < wrong)
        change = next(changes, None)
        if change is None:
            break
        table = change
    used = torch.stack([TablePrediction.of(table, each).uses() for each in runs]).any(0)
    return replace(table, known=table.known | used.view_as(table.known))


def _other_values(table: TransitionTable, place: int) -> list[TransitionTable]:
    token = table.entry(place)[1][0]
    steps, known = table.step[:, :, token], table.known[:, :, token]  # [left..., value]
    values = {int(table.start[-1, token]), *steps[known].tolist()}
    changed = []
    for value in sorted(values - {int(table.step.flatten()[place])}):
        step = table.step.flatten().clone()
        step[place] = value
        changed.append(replace(table, step=step.view_as(table.step)))
    return changed
