"""The facts that head a report: generalisation, convergence, movement of information, program.

A fact is a code with values from saved results, rendered as a value and a detail for a card, and as
a sentence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loopinterp.comparison.words import plain, share_range
from loopinterp.core.run_files import IN_MEMORY
from loopinterp.core.text import percent
from loopinterp.tasks import get_task, list_tasks

if TYPE_CHECKING:
    from loopinterp.core.results import Result
    from loopinterp.pages.run_record import RunRecord

_RIGHT = 0.95
"""A length is solved if exact match on the hardest distribution is at least this."""


class Topic(Enum):
    GENERALISATION = ("Generalisation", "generalisation")
    CONVERGENCE = ("Convergence", "convergence")
    MOVEMENT = ("Movement", "wavefront")
    PROGRAM = ("Program", "program")


class _Words(NamedTuple):
    """Texts of a fact: two for a card, and a sentence in which the model is "it"."""

    value: str
    detail: str
    sentence: str
    title: str = ""  # the topic's by default


class Code(Enum):
    """The kinds of fact, with texts that a fact's values complete."""

    # generalisation
    RIGHT_BEYOND = _Words(
        "{factor}× its training length",
        "{share} right at length {longest}",
        "It works at length {longest}, {factor}× its training length.",
    )
    RIGHT_THROUGHOUT = _Words(
        "right at every length tried",
        "{share} right up to length {longest}",
        "It is right at every length tried, up to {longest}.",
    )
    RIGHT_UP_TO = _Words(
        "right up to length {reach}",
        "{share} right at length {longest}",
        "It works up to length {reach}, and gets {share} right at length {longest}.",
    )
    RIGHT_AT = _Words(
        "right at length {longest}",
        "{share} right, no other length tried",
        "It is right at length {longest}, the only one tried.",
    )
    WRONG = _Words(
        "{share} right at length {longest}",
        "the shortest tried",
        "It gets {share} of inputs right at length {longest}.",
    )
    # convergence
    CONVERGES = _Words(
        "{share} of positions",
        "half of them by loop {median}",
        "Its state converges, at half of the positions by loop {median}.",
    )
    CONVERGES_WRONG = _Words(
        "{share} of positions",
        "{right} of the answers are right there",
        "Its state converges, with {right} of the answers right.",
    )
    CONVERGES_PARTLY = _Words(
        "{share} of positions",
        "commonest late behaviour: {common}",
        "{share} of the positions converge.",
    )
    # movement
    CARRY_MOVES = _Words(
        "{speed} per loop",
        "linear probe, {read} of {distances} distances",
        "The carry moves {speed} per loop.",
        "Carry",
    )
    AT_ONCE = _Words(
        "at every distance at once",
        "linear probe, {read} of {distances} distances",
        "A linear probe reads the carry at every distance after the same number of loops.",
        "Carry",
    )
    NO_WAVEFRONT = _Words(
        "no wavefront",
        "linear probe, {read} of {distances} distances",
        "A linear probe finds no moving carry.",
        "Carry",
    )
    ATTENDS = _Words(
        "{share} on {place}",
        "{head}{over}",
        "{head} puts {share} of its attention on {place}.",
        "Attention",
    )
    # program
    EXACT = _Words(
        "“{program}”",
        "exact: all {transitions} transitions checked",
        "It runs the program “{program}”: all of its {transitions} transitions were checked.",
    )
    IDENTIFIED = _Words(
        "“{program}”",
        "predicts {share} of {runs:,} interventions",
        "It runs the program “{program}”: of {candidates} candidates, it alone predicts the model "
        "under intervention.",
    )
    CONFIRMED = _Words(
        "“{program}”",
        "predicts {share} of {runs:,} interventions",
        "It runs the program “{program}”, the only candidate, which predicts it under "
        "intervention.",
    )
    OF_SEVERAL = _Words(
        "identified in {identified} of {models} models",
        "{programs}",
        "A program is identified in {identified} of {models} models ({programs}).",
    )
    REFUTED = _Words(
        "none of {candidates} candidates",
        "{best}: {range} of {runs:,} interventions{off}",
        "None of {candidates} candidate programs predicts it under intervention.",
    )
    REFUTED_ONE = _Words(
        "not “{program}”",
        "predicts {share} of {runs:,} interventions{off}",
        "It does not run the program “{program}”, the only candidate.",
    )
    UNDECIDED = _Words(
        "not decided",
        "closest: “{program}”, {share} of {runs:,} interventions",
        "Whether it runs one of {candidates} candidate programs is not decided.",
    )
    UNDECIDED_ONE = _Words(
        "not decided",
        "“{program}” predicts {share} of {runs:,} interventions",
        "Whether it runs the program “{program}”, the only candidate, is not decided.",
    )
    NO_EFFECT = _Words(
        "not decided",
        "no interchange changes an answer",
        "No interchange changes an answer, so no program can be identified.",
    )
    EXACT_TABLE = _Words(
        "a program of {cells} cells",
        "exact: all {transitions} transitions checked",
        "It runs a program of {cells} cells: all of its {transitions} transitions were checked.",
    )
    READ_OFF = _Words(
        "a program of {cells} cells",
        "predicts {share} of whole runs",
        "A transition table recovered from it predicts {share} of its runs after an interchange.",
    )
    NOT_READ = _Words(
        "no program read off",
        "closest table: {share} of whole runs",
        "The closest transition table predicts {share} of its runs after an interchange.",
    )
    NO_TABLE = _Words(
        "no program read off",
        "{reason}",
        "No program could be recovered from it: {reason}.",
    )


@dataclass(frozen=True)
class Fact:
    """One of the report's main findings.

    Attributes:
        good: Whether this is the hoped-for outcome, if there is one.
        values: For the texts of the code.
        section: Section with the evidence; the topic's by default.
    """

    topic: Topic
    code: Code
    good: bool | None
    values: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""

    @property
    def title(self) -> str:
        """The heading of its card."""
        return self.code.value.title or self.topic.value[0]

    @property
    def value(self) -> str:
        """The large text of its card."""
        return self.code.value.value.format(**self.values)

    @property
    def detail(self) -> str:
        """The small text of its card."""
        return self.code.value.detail.format(**self.values)

    @property
    def sentence(self) -> str:
        """The fact as a sentence in which the model is "it"."""
        text = self.code.value.sentence.format(**self.values)
        return text[:1].upper() + text[1:]

    @property
    def anchor(self) -> str:
        """The report section with the evidence."""
        return self.section or self.topic.value[1]


def facts_of(results: Mapping[str, Result]) -> list[Fact]:
    """One fact for each topic with a saved result, in the order of topics."""
    by_kind = {result.kind: result for result in reversed([*results.values()])}
    facts = []
    for read in (_generalisation, _convergence, _movement, _program):
        try:
            fact = read(by_kind)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue  # a damaged value: the section that it belongs to names the problem
        if fact is not None:
            facts.append(fact)
    return facts


def story(record: RunRecord, facts: list[Fact]) -> list[str]:
    """The sentences that head a report: the model, then each fact but convergence."""
    others = [fact.sentence for fact in facts if fact.topic is not Topic.CONVERGENCE]
    return [introduction(record), *others]


def story_of_runs(facts_by_run: Mapping[str, list[Fact]]) -> list[str]:
    """For each topic but convergence, how many of several runs share each value.

    Example:
        >>> fact = Fact(Topic.PROGRAM, Code.UNDECIDED, None)
        >>> story_of_runs({"a": [fact], "b": [fact]})
        ['Program: not decided in 2 of 2 runs.']
    """
    n_runs, sentences = len(facts_by_run), []
    for topic in (Topic.GENERALISATION, Topic.MOVEMENT, Topic.PROGRAM):
        facts = [fact for facts in facts_by_run.values() for fact in facts if fact.topic is topic]
        counts = Counter(fact.value for fact in facts)
        parts = [f"{value} in {count} of {n_runs}" for value, count in counts.items()]
        if parts:
            if len(facts) < n_runs:
                parts.append(f"not measured in {n_runs - len(facts)} of {n_runs}")
            sentences.append(f"{title_of(facts)}: {', '.join(parts)} runs.")
    return sentences


def title_of(facts: Sequence[Fact]) -> str:
    """The heading that facts on one topic share, or else the topic's."""
    titles = {fact.title for fact in facts}
    return titles.pop() if len(titles) == 1 else facts[0].topic.value[0]


def introduction(record: RunRecord) -> str:
    """The model and the task it was trained on, in a sentence.

    Example:
        >>> from loopinterp.pages.run_record import RunRecord
        >>> introduction(RunRecord(name="x", config={"task": "addition"}, n_parameters=50_766))
        'A 51k-parameter looped transformer, trained to add binary numbers.'
    """
    # Whatever has the four methods, or one that the package built.
    built = record.config.get(IN_MEMORY, "LoopedTransformer") == "LoopedTransformer"
    kind = ("" if record.depth == 1 else "looped ") + ("transformer" if built else "model")
    size = _in_thousands(record.n_parameters)
    start = f"A {size}-parameter {kind}" if size else f"A {kind}"
    # What a model of the task learns to do; a task of a user's own may need settings.
    goal = f"solve the task “{record.task.replace('_', ' ')}”" if record.task else ""
    if record.task in list_tasks():
        with suppress(Exception):
            goal = str(getattr(get_task(record.task), "goal", "")) or goal
    if record.origin.startswith("compiled") or (record.origin and not goal):
        return f"{start}, {record.origin}."
    if record.origin and not record.origin.startswith("trained"):
        return f"{start}, {record.origin}, built to {goal}."
    return f"{start}, trained to {goal}." if goal else f"{start}, opened loop by loop."


def _in_thousands(n: int | None) -> str:
    """A number of parameters: 812, 51k, 1.2M; "" if it is not known."""
    if n is None:
        return ""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.2g}{unit}" if n < 10 * size else f"{n / size:.0f}{unit}"
    return str(n)


def _generalisation(by_kind: Mapping[str, Any]) -> Fact | None:
    """The greatest length at which the hardest distribution (constants left out) is solved."""
    result = by_kind.get("evaluation")
    if result is None:
        return None
    exact = result.data["exact_match"].sel(estimate="value").sel(extra_loop=0, method="nearest")
    telling = exact.where(result.data["constant_exact_match"] < _RIGHT)
    share = telling.min("distribution").dropna("length")  # [length]
    if not share.size:
        return None
    lengths = share["length"].values.tolist()
    solved = np.cumprod(share.values >= _RIGHT).astype(bool)
    # A model that fails in between and is right at the end is shown where it is worst.
    shown = -1 if solved[-1] or share[-1] < _RIGHT else int(share.values.argmin())
    values: dict[str, Any] = {"longest": lengths[shown], "share": percent(float(share[shown]))}
    cutoff = result.trained_up_to
    if not solved[0]:
        values |= {"longest": lengths[0], "share": percent(float(share[0]))}
        return Fact(Topic.GENERALISATION, Code.WRONG, False, values)
    reach = lengths[int(solved.sum()) - 1]
    if not solved[-1]:
        good = None if cutoff is None or reach > cutoff else False
        return Fact(Topic.GENERALISATION, Code.RIGHT_UP_TO, good, values | {"reach": reach})
    if cutoff is None or reach <= cutoff:
        code = Code.RIGHT_THROUGHOUT if len(lengths) > 1 else Code.RIGHT_AT
        return Fact(Topic.GENERALISATION, code, True, values)
    factor = reach / cutoff
    digits = ".2g" if factor < 10 else ".0f"
    values["factor"] = f"{factor:{'.3g' if factor < 1.1 else digits}}"
    return Fact(Topic.GENERALISATION, Code.RIGHT_BEYOND, True, values)


def _convergence(by_kind: Mapping[str, Any]) -> Fact | None:
    result = by_kind.get("convergence")
    if result is None:
        return None
    share = result.settled_share()
    if share < 0.99:  # the state converges if it does so at this share of positions
        counts = result.regime_counts()
        common = max(counts, key=counts.__getitem__)
        values = {"share": percent(share), "common": common}
        return Fact(Topic.CONVERGENCE, Code.CONVERGES_PARTLY, None, values)
    times = result.settling_times()
    median = int(times.where((times >= 0) & result.data["counted"]).median())
    asked = bool((result.data["right"] >= 0).any())
    right = float(np.atleast_1d(result.exact_match()[-1])[0]) if asked else 1.0
    values = {"share": percent(share), "median": median, "right": percent(right)}
    if right < _RIGHT:
        return Fact(Topic.CONVERGENCE, Code.CONVERGES_WRONG, False, values)
    return Fact(Topic.CONVERGENCE, Code.CONVERGES, True, values)


def _movement(by_kind: Mapping[str, Any]) -> Fact | None:
    result = by_kind.get("carry")
    if result is not None:
        values = {
            "read": int(result.first_loop.notnull().sum()),
            "distances": result.data.sizes["chain_length"],
        }
        if len(np.unique(result.first_loop)) == 1 and values["read"]:
            return Fact(Topic.MOVEMENT, Code.AT_ONCE, None, values)
        if not np.isfinite(result.speed):
            return Fact(Topic.MOVEMENT, Code.NO_WAVEFRONT, None, values)
        speed = f"{result.speed:{'.1g' if result.speed < 0.1 else '.1f'}}".removesuffix(".0")
        values["speed"] = "one position" if speed == "1" else f"{speed} positions"
        good = True if result.resolved >= 0.98 else None  # read wherever it can have arrived
        return Fact(Topic.MOVEMENT, Code.CARRY_MOVES, good, values)
    result = by_kind.get("attention")
    if result is None or "distance" not in result.data.dims:
        return None
    # Where a head looks most beyond an even spread: [layer, head, distance], mean over loops.
    mass = result.data["mass"].sel(estimate="value").mean("loop")
    beyond = (mass - result.data["mass_even"]).fillna(-np.inf)
    best = {str(k): int(v) for k, v in beyond.argmax(...).items()}
    if not float(beyond.isel(best)) >= 0.1:  # below that a head prefers no distance
        return None
    distance = int(beyond["distance"][best["distance"]])
    side = f"{abs(distance)} to the {'left' if distance > 0 else 'right'}"
    named = {0: "its own position", 1: "the left neighbour", -1: "the right neighbour"}
    head = f"head {best['head']}"
    if mass.sizes.get("layer", 1) > 1:
        head += f" of layer {int(mass['layer'][best['layer']])}"
    values = {
        "share": percent(float(mass.isel(best))),
        "place": named.get(distance, f"the position {side}"),
        "head": head,
        "over": ", mean over loops" if result.data.sizes["loop"] > 1 else "",
    }
    return Fact(Topic.MOVEMENT, Code.ATTENDS, None, values, section="attention")


def _program(by_kind: Mapping[str, Any]) -> Fact | None:
    """The strongest of: read off exactly, identified, refuted, read off approximately, not read."""
    compared, read = by_kind.get("program-comparison"), by_kind.get("decompilation")
    exact = read is not None and read.given and bool(read.claim.transitions)
    # Read off exactly, it is the registered program up to its first guess.
    program = read.registered[0] if read is not None and exact else ""
    if compared is not None and len(compared.verdicts) > 1:
        names = [plain(v.identified) for v in compared.verdicts.values() if v.identified]
        n_models, n_candidates = len(compared.verdicts), compared.data.sizes["program"]
        candidates = f"{n_candidates} candidate{'s' if n_candidates > 1 else ''}"
        programs = ", ".join(f"“{name}” in {n}" for name, n in Counter(names).items())
        values = {"identified": len(names), "models": n_models, "programs": programs or candidates}
        good = True if len(names) == n_models else None
        return Fact(Topic.PROGRAM, Code.OF_SEVERAL, good, values)
    if compared is not None and not program and (not exact or compared.verdict.identified):
        return _verdict(compared)
    if read is None:
        return None
    values = {
        "program": plain(program),
        "transitions": read.claim.transitions,
        "cells": read.data.sizes["cell"],
    }
    if exact:
        return Fact(Topic.PROGRAM, Code.EXACT if program else Code.EXACT_TABLE, True, values)
    share = float(read.worst().sel(estimate="value")) if read.code else math.nan
    if math.isnan(share):
        values = {"reason": read.reason or "no interchange changes an answer"}
        return Fact(Topic.PROGRAM, Code.NO_TABLE, None, values)
    values["share"] = percent(share)
    code, good = (Code.READ_OFF, True) if read.given else (Code.NOT_READ, None)
    return Fact(Topic.PROGRAM, code, good, values)


def _verdict(compared: Any) -> Fact:
    verdict, several = compared.verdict, compared.data.sizes["program"] > 1
    data = compared.data.sel(stratum="all").isel(model=0)
    n_runs = int(data["whole_run_effective"].sel(program=verdict.closest))
    if not n_runs:
        return Fact(Topic.PROGRAM, Code.NO_EFFECT, None)
    shares = data["whole_run"].sel(estimate="value")
    best = [verdict.closest, *verdict.indistinguishable]
    off = verdict.off_distribution
    values = {
        "program": plain(verdict.identified or verdict.closest),
        "candidates": compared.data.sizes["program"],
        "share": percent(float(shares.sel(program=verdict.closest))),
        "range": share_range(shares.sel(program=best).values),
        "best": f"best {len(best)}" if len(best) > 1 else "best",
        # Most states that an interchange makes are reached by no clean run.
        "off": "" if math.isnan(off) else f", {percent(off)} off-distribution",
        "runs": n_runs,
    }
    if verdict.identified:
        return Fact(Topic.PROGRAM, Code.IDENTIFIED if several else Code.CONFIRMED, True, values)
    if verdict.refuted:
        code = Code.REFUTED if several else Code.REFUTED_ONE
        return Fact(Topic.PROGRAM, code, False, values)
    code = Code.UNDECIDED if several else Code.UNDECIDED_ONE
    return Fact(Topic.PROGRAM, code, None, values)
