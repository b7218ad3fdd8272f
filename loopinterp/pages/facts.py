"""The facts that head a report: generalisation, convergence, movement of information, program.

A fact is a code with its values, taken from the saved results of a run. It is rendered in three
lengths: a value and a detail for the page's cards, a sentence for the story and the terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loopinterp.core.text import percent
from loopinterp.tasks import get_task, list_tasks

if TYPE_CHECKING:
    from loopinterp.core.results import Result
    from loopinterp.pages.run_record import RunRecord

RIGHT = 0.95
"""Least exact match, on the hardest distribution, at which a length counts as solved."""

CONVERGED = 0.99
"""Least share of positions with which the state counts as converging."""


class Topic(Enum):
    """What a fact is about: its heading, and the section of the report with its evidence."""

    GENERALISATION = ("Generalisation", "generalisation")
    CONVERGENCE = ("Convergence", "convergence")
    MOVEMENT = ("Movement", "wavefront")
    PROGRAM = ("Program", "program")


class _Words(NamedTuple):
    """How a fact is said: on a card, large and small; and as a sentence about "it"."""

    value: str
    detail: str
    sentence: str
    title: str = ""  # the topic's by default


class Code(Enum):
    """What was found, with its words; values are filled in by name."""

    # generalisation
    RIGHT_BEYOND = _Words(
        "{factor}× its training length",
        "{share} right at length {longest}",
        "It works at length {longest}, {factor}× its training length.",
    )
    RIGHT_THROUGHOUT = _Words(
        "right at every length",
        "{share} right up to length {longest}",
        "It is right at every length tried, up to {longest}.",
    )
    RIGHT_UP_TO = _Words(
        "right up to length {reach}",
        "{share} right at length {longest}",
        "It works up to length {reach}, and gets {share} right at length {longest}.",
    )
    WRONG = _Words(
        "{share} right",
        "at length {longest}",
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
        "It runs the program “{program}”, which alone is not refuted under intervention.",
    )
    REFUTED = _Words(
        "none of {candidates} candidates",
        "{best}: {range} of {runs:,} interventions{off}",
        "None of {candidates} candidate programs predicts it under intervention.",
    )
    UNDECIDED = _Words(
        "not decided",
        "closest: “{program}”, {range} of {runs:,} interventions",
        "Which of {candidates} candidate programs it runs is not decided.",
    )
    READ_OFF = _Words(
        "a program of {cells} cells",
        "predicts {share} of whole runs",
        "A transition table read off it predicts {share} of its runs.",
    )
    NOT_READ = _Words(
        "no program read off",
        "closest table: {share} of whole runs",
        "The closest transition table read off it predicts {share} of its runs.",
    )


@dataclass(frozen=True)
class Fact:
    """A finding that a reader should know first.

    Attributes:
        topic: What it is about.
        code: What was found.
        good: Whether it is as hoped; None where nothing is hoped for.
        values: What the words of the code are filled with.
        section: Key of the section with the evidence; that of the topic by default.
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
        """The fact in a few words."""
        return self.code.value.value.format(**self.values)

    @property
    def detail(self) -> str:
        """The number behind it."""
        return self.code.value.detail.format(**self.values)

    @property
    def sentence(self) -> str:
        """The fact as a sentence, in which the model is "it"."""
        text = self.code.value.sentence.format(**self.values)
        return text[:1].upper() + text[1:]

    @property
    def anchor(self) -> str:
        """The section of the report that has the evidence."""
        return self.section or self.topic.value[1]


def facts_of(results: Mapping[str, Result]) -> list[Fact]:
    """One fact for each topic on which a saved result says something, in the order of topics.

    Example:
        >>> facts_of({})
        []
    """
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
    """The sentences that head a report: what the model is, and what was found.

    Convergence stays out of it: it is a property, not a result.
    """
    said = [fact.sentence for fact in facts if fact.topic is not Topic.CONVERGENCE]
    return [introduction(record), *said]


def story_of_runs(facts_by_run: Mapping[str, list[Fact]]) -> list[str]:
    """For each topic but convergence, what was found in how many of several runs.

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
            sentences.append(f"{facts[0].title}: {', '.join(parts)} runs.")
    return sentences


def introduction(record: RunRecord) -> str:
    """What the model is, and what it learnt.

    Example:
        >>> from loopinterp.pages.run_record import RunRecord
        >>> introduction(RunRecord(name="x", config={"task": "addition"}, n_parameters=50_766))
        'A 51k-parameter looped transformer learnt to add binary numbers.'
    """
    kind = "transformer" if record.depth == 1 else "looped transformer"
    size = _in_thousands(record.n_parameters)
    start = f"A {size}-parameter {kind}" if size else f"A {kind}"
    goal = _goal(record.task)
    if record.origin.startswith("compiled") or (record.origin and not goal):
        return f"{start}, {record.origin}."
    if record.origin and not record.origin.startswith("trained"):
        return f"{start}, {record.origin}, built to {goal}."
    return f"{start} learnt to {goal}." if goal else f"{start}, opened loop by loop."


def _goal(task: str) -> str:
    """What a model of the task learns to do; its name where it says nothing itself."""
    if not task:
        return ""
    made = get_task(task) if task in list_tasks() else None
    return str(getattr(made, "goal", "")) or f"do {task.replace('_', ' ')}"


def _in_thousands(n: int | None) -> str:
    """A number of parameters: 812, 51k, 1.2M; "" if it is not known."""
    if n is None:
        return ""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.2g}{unit}" if n < 10 * size else f"{n / size:.0f}{unit}"
    return str(n)


def _generalisation(by_kind: Mapping[str, Any]) -> Fact | None:
    """Up to which length the hardest distribution is solved.

    A distribution that one fixed answer solves says nothing, so it is left out.
    """
    result = by_kind.get("evaluation")
    if result is None:
        return None
    exact = result.data["exact_match"].sel(estimate="value").sel(extra_loop=0, method="nearest")
    constant = result.data["constant_exact_match"].max("length")
    if bool((constant < RIGHT).any()):
        exact = exact.sel(distribution=constant["distribution"][(constant < RIGHT).values])
    share = exact.min("distribution")  # [length]
    lengths = share["length"].values.tolist()
    solved = np.cumprod(share.values >= RIGHT).astype(bool)
    values: dict[str, Any] = {"longest": lengths[-1], "share": percent(float(share[-1]))}
    cutoff = result.trained_up_to
    if not solved[0]:
        values |= {"longest": lengths[0], "share": percent(float(share[0]))}
        return Fact(Topic.GENERALISATION, Code.WRONG, False, values)
    reach = lengths[int(solved.sum()) - 1]
    if not solved[-1]:
        good = None if cutoff is None or reach > cutoff else False
        return Fact(Topic.GENERALISATION, Code.RIGHT_UP_TO, good, values | {"reach": reach})
    if cutoff is None or reach <= cutoff:
        return Fact(Topic.GENERALISATION, Code.RIGHT_THROUGHOUT, True, values)
    values["factor"] = f"{reach / cutoff:.2g}" if reach < 10 * cutoff else f"{reach / cutoff:.0f}"
    return Fact(Topic.GENERALISATION, Code.RIGHT_BEYOND, True, values)


def _convergence(by_kind: Mapping[str, Any]) -> Fact | None:
    result = by_kind.get("convergence")
    if result is None:
        return None
    share = result.settled_share()
    if share < CONVERGED:
        counts = result.regime_counts()
        common = max(counts, key=counts.__getitem__)
        values = {"share": percent(share), "common": common}
        return Fact(Topic.CONVERGENCE, Code.CONVERGES_PARTLY, None, values)
    times = result.settling_times()
    median = int(times.where((times >= 0) & result.data["counted"]).median())
    asked = bool((result.data["right"] >= 0).any())
    right = float(np.atleast_1d(result.exact_match()[-1])[0]) if asked else 1.0
    values = {"share": percent(share), "median": median, "right": percent(right)}
    if right < RIGHT:
        return Fact(Topic.CONVERGENCE, Code.CONVERGES_WRONG, False, values)
    return Fact(Topic.CONVERGENCE, Code.CONVERGES, True, values)


def _movement(by_kind: Mapping[str, Any]) -> Fact | None:
    result = by_kind.get("carry")
    if result is not None:
        values = {
            "read": int(result.first_loop.notnull().sum()),
            "distances": result.data.sizes["chain_length"],
        }
        if not np.isfinite(result.speed):
            return Fact(Topic.MOVEMENT, Code.NO_WAVEFRONT, None, values)
        speed = f"{result.speed:.1f}".removesuffix(".0")
        values["speed"] = "one position" if speed == "1" else f"{speed} positions"
        good = True if result.resolved >= 0.98 else None  # read wherever it can have arrived
        return Fact(Topic.MOVEMENT, Code.CARRY_MOVES, good, values)
    result = by_kind.get("attention")
    if result is None or "distance" not in result.data.dims:
        return None
    # Where a head looks most beyond an even spread: [head, distance], mean over loops.
    mass = result.data["mass"].sel(estimate="value").mean("loop")
    mass = mass.max("layer") if "layer" in mass.dims else mass
    beyond = (mass - result.data["mass_even"]).fillna(-np.inf)
    best = {str(k): int(v) for k, v in beyond.argmax(...).items()}
    distance = int(beyond["distance"][best["distance"]])
    place = {0: "its own position", 1: "the left neighbour"}.get(
        distance, f"the position {distance} to the left"
    )
    share = percent(float(mass.isel(best)))
    over = ", mean over loops" if result.data.sizes["loop"] > 1 else ""
    values = {"share": share, "place": place, "head": f"head {best['head']}", "over": over}
    return Fact(Topic.MOVEMENT, Code.ATTENDS, None, values, section="attention")


def _program(by_kind: Mapping[str, Any]) -> Fact | None:
    """The strongest of: identified, read off exactly, refuted, read off nearly, not read."""
    compared, read = by_kind.get("program-comparison"), by_kind.get("decompilation")
    exact = read is not None and read.given and bool(read.claim.transitions)
    if compared is not None:
        fact, identified = _verdict(compared), compared.verdict.identified
        if not exact or read is None:
            return fact
        # Read off exactly, it is the same program up to its first guess.
        if identified and read.identified.startswith(identified):
            values = {**fact.values, "transitions": read.claim.transitions}
            return Fact(Topic.PROGRAM, Code.EXACT, True, values)
        if identified:
            return fact
    if read is None:
        return None
    worst = read.worst()
    values = {
        "program": read.identified.replace("_", " ") or "its own",
        "transitions": read.claim.transitions,
        "share": percent(float(worst.sel(estimate="value"))),
        "cells": read.data.sizes["cell"],
    }
    if exact and read.identified:
        return Fact(Topic.PROGRAM, Code.EXACT, True, values)
    code, good = (Code.READ_OFF, True) if read.given else (Code.NOT_READ, None)
    return Fact(Topic.PROGRAM, code, good, values)


def _verdict(compared: Any) -> Fact:
    """What the comparison with programs says, of the one model or of all of them."""
    verdict, n_programs = compared.verdict, compared.data.sizes["program"]
    data = compared.data.sel(stratum="all").isel(model=0)
    shares = data["whole_run"].sel(estimate="value")
    best = [verdict.closest, *verdict.indistinguishable]
    low, high = (percent(float(f(shares.sel(program=best)))) for f in (np.min, np.max))
    off = verdict.off_distribution
    values = {
        "program": (verdict.identified or verdict.closest).replace("_", " "),
        "candidates": n_programs,
        "share": percent(float(shares.sel(program=verdict.closest))),
        "range": high if low == high else f"{low.removesuffix('%')}–{high}",
        "best": f"best {len(best)}" if len(best) > 1 else "best",
        # Most states that an interchange makes are reached by no clean run.
        "off": "" if math.isnan(off) else f", {percent(off)} off-distribution",
        "runs": int(data["whole_run_active"].sel(program=verdict.closest)),
    }
    if verdict.identified:
        code = Code.IDENTIFIED if n_programs > 1 else Code.CONFIRMED
        return Fact(Topic.PROGRAM, code, True, values)
    code, good = (Code.REFUTED, False) if verdict.refuted else (Code.UNDECIDED, None)
    return Fact(Topic.PROGRAM, code, good, values)
