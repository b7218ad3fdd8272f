"""The verdict on which program a model runs, and the rule behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loopinterp.intervals import wilson_estimate
from loopinterp.results import percent

THRESHOLD = 0.9
"""Least lower end of the interval of a named program's accuracy, wherever it is asked."""

DELAY_PAIRS = 60
"""Delays at which something happens in fewer pairs are taken together with the next ones."""

STRATUM_PAIRS = 36
"""Least pairs of a stratum of which something can be said: 36 of 36 have a lower end of .90."""

ALL = "all"
NONE = "none of these"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What can be said of which program a model runs.

    Attributes:
        winner: The program that is named; None if none is.
        nearest: The program that is followed most often over whole runs after an exchange.
        undisturbed: The programs whose answers the model gives at every loop when left alone.
        followed_for: The nearest program is followed at every delay from 0 to so many loops
            after an exchange; -1 if not even at once.
        longest: The longest delay that was looked at.
        tied: Programs that no pair tells from the nearest.
        reasons: Why none is named; empty if one is.
        untested: Strata with too few pairs to say anything.
        statement: All of it in words.
    """

    winner: str | None
    nearest: str
    undisturbed: list[str] = field(default_factory=list)
    followed_for: int = -1
    longest: int = 0
    tied: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    statement: str = ""

    @property
    def named(self) -> bool:
        """Whether a program is named."""
        return self.winner is not None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts on which a verdict rests, for one model.

    ``right`` and ``active`` count pairs: those on which something happens (the program or the
    model changes an answer), and those of them whose whole answer is the one the program says.

    Attributes:
        programs: Names of the programs.
        right: By delay [program, delay].
        active: By delay [program, delay].
        run_right: Over whole runs after the exchange (right at every delay), by stratum
            [program, stratum]; the first stratum is all pairs.
        run_active: The same.
        strata: Names of the strata.
        prefix_right: Right at every delay up to this one [program, delay].
        prefix_active: The same.
        duel_right: Of two programs, pairs on which they differ and the first is followed
            [program, rival, delay].
        apart: Pairs on which they differ.
        undisturbed: Runs without exchange whose loops are the program's [program], of ``n_runs``;
            a run counts by the share of its loops.
        decided: Share of their answers of which the program says something [program].
        n_runs: How many.
        random_right: Whole runs after a random change that look as the program says, of those in
            which it says that something changes [program].
        swap_right: The same after the exchange itself.
        random_active: How many.
        unchanged: Runs that a donor with the same values leaves as they are.
        n_same: How many such donors.
        solved: Share of inputs answered right.
    """

    programs: Sequence[str]
    right: np.ndarray
    active: np.ndarray
    run_right: np.ndarray
    run_active: np.ndarray
    strata: Sequence[str]
    prefix_right: np.ndarray
    prefix_active: np.ndarray
    duel_right: np.ndarray
    apart: np.ndarray
    undisturbed: np.ndarray
    decided: np.ndarray
    n_runs: int
    random_right: np.ndarray
    swap_right: np.ndarray
    random_active: np.ndarray
    unchanged: int
    n_same: int
    solved: float

    def only(self, programs: Sequence[str]) -> Counts:
        """The same counts for some of the programs: the evidence of a shorter list."""
        at = [list(self.programs).index(p) for p in programs]
        by_program = {
            name: getattr(self, name)[at]
            for name in (
                "right",
                "active",
                "run_right",
                "run_active",
                "prefix_right",
                "prefix_active",
                "undisturbed",
                "decided",
                "random_right",
                "swap_right",
                "random_active",
            )
        }
        by_two = {name: getattr(self, name)[np.ix_(at, at)] for name in ("duel_right", "apart")}
        return dataclasses.replace(self, programs=list(programs), **by_program, **by_two)


def decide(counts: Counts, *, threshold: float = THRESHOLD) -> Verdict:
    """Name the program that holds wherever it was asked, or say what holds.

    A program is named if the lower end of the 95% interval of its accuracy, over pairs on which
    something happens, reaches ``threshold``

    - at every delay from the exchange to the end of the run (neighbouring delays at which little
      happens are taken together);
    - over whole runs, in every stratum of which something can be said;
    - over whole runs that nothing disturbs; where those are its own without exception, whole runs
      after an exchange must be so as well: such a model has no noise to blame exceptions on;

    and if it beats every other program where the two say different things, at the delay that
    separates them best; does so too against a random change of the same norm; and a donor with
    the same values in another context changes nothing. The model must answer right, too.

    Args:
        counts: The evidence, counted.
        threshold: Least lower end.
    """
    rates = _rate(counts.run_right[:, 0], counts.run_active[:, 0])
    nearest = int(np.argmax(np.nan_to_num(rates, nan=-1.0)))
    tied = [
        q
        for q in range(len(counts.programs))
        if q != nearest and not counts.apart[nearest, q].any()
    ]
    untested = [
        name for name, n in zip(counts.strata, counts.run_active[nearest]) if 0 < n < STRATUM_PAIRS
    ]
    reasons = [
        *_by_delay(counts, nearest, threshold),
        *_by_stratum(counts, nearest, threshold),
        *_left_alone(counts, nearest, threshold),
        *_exceptions(counts, nearest),
        *_against_rivals(counts, nearest, tied),
        *_against_controls(counts, nearest, threshold),
    ]
    name = counts.programs[nearest]
    holds = wilson_estimate(counts.undisturbed, counts.n_runs)[:, 1] >= threshold
    # A program that leaves answers open is contradicted less: it counts if none says more.
    most = counts.decided[holds].max(initial=0.0)
    left_alone = [
        p for k, p in enumerate(counts.programs) if holds[k] and counts.decided[k] > most - 0.05
    ]
    verdict = Verdict(
        winner=None if reasons else name,
        nearest=name,
        undisturbed=left_alone,
        followed_for=_followed_for(counts, nearest, threshold),
        longest=counts.right.shape[1] - 1,
        tied=[counts.programs[q] for q in tied],
        reasons=reasons,
        untested=untested,
    )
    # Of programs that answer alike when left alone, the nearest is as good a name as any.
    known = nearest if holds[nearest] else int(holds.argmax())
    alone = float(counts.undisturbed[known] / counts.n_runs)
    return _with_statement(verdict, float(rates[nearest]), alone, rivals=len(counts.programs) - 1)


def plain(program: str) -> str:
    """A program's name in words.

    Example:
        >>> plain("latched_chain")
        'latched chain'
    """
    return program.replace("_", " ")


def delay_groups(active: np.ndarray, least: int = DELAY_PAIRS) -> list[tuple[int, int]]:
    """Delays taken together, (first, last), so that each group has enough pairs if any has.

    Example:
        >>> delay_groups(np.array([80, 70, 30, 40, 0, 5]))
        [(0, 0), (1, 1), (2, 5)]
    """
    groups: list[tuple[int, int]] = []
    first, total = 0, 0
    for delay, n in enumerate(active.tolist()):
        total += n
        if total >= least:
            groups.append((first, delay))
            first, total = delay + 1, 0
    if first < len(active):
        if groups:
            groups[-1] = (groups[-1][0], len(active) - 1)
        else:
            groups.append((0, len(active) - 1))
    return groups


def in_loops(delay: int) -> str:
    """A delay in words.

    Example:
        >>> in_loops(0), in_loops(1), in_loops(3)
        ('at once', '1 loop later', '3 loops later')
    """
    return "at once" if delay == 0 else f"{delay} loop{'s' if delay > 1 else ''} later"


def _rate(right: np.ndarray, active: np.ndarray) -> np.ndarray:
    return np.where(active > 0, right / np.maximum(active, 1), np.nan)


def _by_delay(counts: Counts, p: int, threshold: float) -> list[str]:
    if not counts.active[p].any():
        return ["no exchange changes an answer of the model or of the program"]
    failed = []
    for first, last in delay_groups(counts.active[p]):
        right = counts.right[p, first : last + 1].sum()
        active = counts.active[p, first : last + 1].sum()
        value, low, _ = wilson_estimate(right, active)
        if not low >= threshold:
            failed.append((value, low, first, last))
    # A delay at which it clearly fails is not made good by those it is taken together with.
    for delay in range(counts.active.shape[1]):
        value, low, high = wilson_estimate(counts.right[p, delay], counts.active[p, delay])
        if high < threshold and not any(f <= delay <= t for _, _, f, t in failed):
            failed.append((value, low, delay, delay))
    if not failed:
        return []
    value, low, first, last = min(failed, key=lambda found: found[2])
    when = in_loops(first) if first == last else f"{first} to {last} loops later"
    return [
        f"{when} it is right in {percent(value)} of pairs (95% interval from {percent(low)}), and "
        f"fails at {_span(counts, failed)}"
    ]


def _span(counts: Counts, failed: list[tuple[float, float, int, int]]) -> str:
    delays = sum(last - first + 1 for _, _, first, last in failed)
    return f"{delays} of {counts.active.shape[1]} delays"


def _by_stratum(counts: Counts, p: int, threshold: float) -> list[str]:
    failed = []
    for name, right, active in zip(counts.strata, counts.run_right[p], counts.run_active[p]):
        if not active:
            continue
        value, low, high = wilson_estimate(right, active)
        enough = active >= STRATUM_PAIRS
        if (enough and not low >= threshold) or high < threshold:
            failed.append((float(high), float(value), float(low), name, int(active)))
    if not failed:
        return []
    # The worst is the one that is surely low, not the one with the fewest pairs.
    _, value, low, name, active = min(failed)
    where = "over all pairs" if name == ALL else f"worst in the stratum “{name}”"
    return [
        f"{where} it is right over the whole run in {percent(value)} of {active} pairs (95% "
        f"interval from {percent(low)})"
    ]


def _left_alone(counts: Counts, p: int, threshold: float) -> list[str]:
    value, low, _ = wilson_estimate(counts.undisturbed[p], counts.n_runs)
    if low >= threshold:
        return []
    return [
        f"left alone, the model's whole answer is its own at {percent(value)} of loops (95% "
        f"interval from {percent(low)})"
    ]


def _exceptions(counts: Counts, p: int) -> list[str]:
    """A model that makes no mistake when left alone has none to blame exceptions on."""
    exceptions = int(counts.run_active[p, 0] - counts.run_right[p, 0])
    if counts.undisturbed[p] < counts.n_runs or not exceptions:
        return []
    return [
        f"left alone it answers exactly as the program, but after an exchange it does not in "
        f"{exceptions} of {int(counts.run_active[p, 0])} runs"
    ]


def _against_rivals(counts: Counts, p: int, tied: list[int]) -> list[str]:
    reasons = []
    if tied:
        names = " and ".join(f"“{plain(counts.programs[q])}”" for q in tied)
        reasons.append(f"no pair tells it from {names}")
    for q in range(len(counts.programs)):
        n = counts.apart[p, q]
        if q == p or not n.any():
            continue
        own = wilson_estimate(counts.duel_right[p, q], n)
        rival = wilson_estimate(counts.duel_right[q, p], n)
        if not bool((np.nan_to_num(own[:, 1] - rival[:, 2], nan=-1.0) > 0).any()):
            reasons.append(f"it is not told from “{plain(counts.programs[q])}” by the model")
    return reasons


def _against_controls(counts: Counts, p: int, threshold: float) -> list[str]:
    reasons = []
    n = counts.random_active[p]
    if n:
        own = wilson_estimate(counts.swap_right[p], n)
        random = wilson_estimate(counts.random_right[p], n)
        if not own[1] > random[2]:
            reasons.append(f"a random change of the same norm does as well ({percent(random[0])})")
    if counts.n_same:
        value, low, _ = wilson_estimate(counts.unchanged, counts.n_same)
        if low < threshold:
            reasons.append(
                "the state holds more than the programs' variables: a donor with the same values "
                f"changes an answer in {percent(1 - value)} of pairs"
            )
    if counts.solved < threshold:
        reasons.append(f"the model answers only {percent(counts.solved)} of inputs right")
    return reasons


def _followed_for(counts: Counts, p: int, threshold: float) -> int:
    kept = -1
    for delay, (right, active) in enumerate(zip(counts.prefix_right[p], counts.prefix_active[p])):
        if not wilson_estimate(right, active)[1] >= threshold:
            break
        kept = delay
    return kept


def _with_statement(verdict: Verdict, rate: float, alike: float, *, rivals: int) -> Verdict:
    name = plain(verdict.nearest)
    alone = "" if rivals else " It had no rival: no other program was compared."
    if verdict.named:
        text = (
            f"The model runs “{name}”: at every delay from 0 to {verdict.longest} loops after an "
            f"exchange, in every stratum with enough pairs, and when left alone (whole runs after "
            f"an exchange: {percent(rate)})."
        )
        if verdict.untested:
            text += f" Too few pairs to say in {len(verdict.untested)} strata."
        return dataclasses.replace(verdict, statement=text + alone)
    parts = []
    if verdict.undisturbed:
        known = sorted(verdict.undisturbed, key=lambda p: (p != verdict.nearest, p))
        others = len(known) - 1
        parts.append(
            f"left alone, the model answers as “{plain(known[0])}” at {percent(alike)} of loops"
        )
        if others:
            parts[-1] += f" (as {others} other{'s' if others > 1 else ''} of them would)"
    if verdict.followed_for == 0:
        parts.append(f"after an exchange it follows “{name}” at once, and no longer")
    elif verdict.followed_for > 0:
        loops = f"{verdict.followed_for} loop{'s' if verdict.followed_for > 1 else ''}"
        parts.append(f"after an exchange it follows “{name}” for {loops}")
    said = "; ".join(parts)
    followed = f"“{name}” (whole runs after an exchange: {percent(rate)})."
    if not rivals:
        text = f"It is not {followed}"
    elif verdict.tied:
        text = f"No one program can be named; the nearest is {followed}"
    else:
        text = f"It is none of these programs; the nearest is {followed}"
    if said:
        text += f" {said[0].upper()}{said[1:]}."
    if verdict.reasons:
        text += f" Not named, because {'; '.join(verdict.reasons)}."
    return dataclasses.replace(verdict, statement=text + alone)
