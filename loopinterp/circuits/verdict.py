"""The verdict on which program a model runs, and the rule behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.evidence_counts import ALL, END
from loopinterp.intervals import wilson_estimate
from loopinterp.rasp.program_alignment import Alignment, spell_loops
from loopinterp.results import percent
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    import xarray as xr

THRESHOLD = 0.9
"""Least lower end of the interval of a named program's accuracy, wherever it is asked."""

LEAST_INPUTS = 36
"""Least inputs of which something can be said: 36 of 36 have a lower end of .90. Strata with fewer
are not tested; delays with fewer are taken together with the next ones."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict(ShortRepr):
    """What can be said of which program a model runs.

    Attributes:
        winner: The program that is named; None if none is.
        nearest: The program that is followed most often over whole runs after an exchange.
        undisturbed: The programs whose answers the model gives at every loop when left alone.
        followed_for: The nearest program is followed at every delay from 0 to so many loops
            after an exchange; -1 if not even at once.
        longest: The longest delay that was looked at.
        tied: Programs that no pair tells from the nearest.
        refuted: No program is named, and what was seen rules the nearest out: it is neither
            tied nor a matter of more data.
        reasons: Why none is named; empty if one is.
        untested: Strata with too few inputs to say anything.
        statement: All of it in words.
    """

    winner: str | None
    nearest: str
    undisturbed: list[str] = field(default_factory=list)
    followed_for: int = -1
    longest: int = 0
    tied: list[str] = field(default_factory=list)
    refuted: bool = False
    reasons: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    statement: str = ""

    @property
    def named(self) -> bool:
        """Whether a program is named."""
        return self.winner is not None


def decide(
    counts: xr.Dataset, *, threshold: float = THRESHOLD, laid: Sequence[str] = ()
) -> Verdict:
    """Name the program that holds wherever it was asked, or say what holds.

    A program is named if the lower end of the 95% interval of its accuracy, over pairs on which
    something happens, reaches ``threshold`` (pairs that change the run of one input are alike, so
    that intervals count inputs)

    - at every delay from the exchange to the end of the run (neighbouring delays at which little
      happens are taken together);
    - over whole runs, in every stratum of which something can be said;
    - over whole runs that nothing disturbs, and of these ``threshold`` is reached at every loop and
      for every length by itself;

    where exchanges make no more exceptions than there are in runs left alone (none at all in a
    model that makes no mistake there: it has no noise to blame them on);
    and if it beats every other program where the two say different things, at the delay that
    separates them best; does so too against a random change of the same norm; and a donor with
    the same values in another context changes nothing. It must say of most exchanges of which
    something comes what comes of them, and the model must answer right, for every length.

    Args:
        counts: Those of one model, of :func:`~loopinterp.circuits.evidence_counts.count_evidence`;
            of a shorter list of programs, ``counts.sel(program=names, rival=names)``.
        threshold: Least lower end.
        laid: How each program lies over the model, in words that the statement then has.
    """
    counts = counts.drop_sel(delay=END)  # no delay of its own
    programs: list[str] = counts.program.values.tolist()
    rates = (counts.run_right / counts.run_active).sel(stratum=ALL)
    nearest = str(rates.fillna(-1).idxmax("program").item())
    own = counts.sel(program=nearest)
    all_pairs = own.sel(stratum=ALL)
    tied = [q for q in programs if q != nearest and not own.apart.sel(rival=q).any()]
    tested = own.run_inputs.where(own.run_inputs > 0, drop=True)
    reasons = [
        *_by_delay(all_pairs, threshold),
        *_by_stratum(own, threshold),
        *_left_alone(own, threshold),
        *_exceptions(own),
        *_silence(own),
        *_against_rivals(counts, nearest, tied),
        *_against_controls(own, threshold),
    ]
    holds = wilson_estimate(counts.undisturbed, counts.n_runs)[:, 1] >= threshold
    # A program that leaves answers open is contradicted less: it counts if none says more.
    most = counts.decided.values[holds].max(initial=0.0)
    at_best = _whole_run(all_pairs)[2]
    verdict = Verdict(
        winner=None if reasons else nearest,
        nearest=nearest,
        undisturbed=counts.program.values[holds & (counts.decided.values > most - 0.05)].tolist(),
        followed_for=_followed_for(own, threshold),
        longest=counts.sizes["delay"] - 1,
        tied=tied,
        refuted=bool(reasons and not tied and at_best < threshold),
        reasons=reasons,
        untested=tested.stratum.values[tested < LEAST_INPUTS].tolist(),
    )
    statement = _statement(verdict, counts)
    if laid and (how := laid[programs.index(nearest)]) != str(Alignment()):
        statement += f" It lies over the model so: {how}."
    return dataclasses.replace(verdict, statement=statement)


def plain(program: str) -> str:
    """A program's name in words.

    Example:
        >>> plain("latched_chain")
        'latched chain'
    """
    return program.replace("_", " ")


def delay_groups(inputs: np.ndarray, least: int = LEAST_INPUTS) -> list[tuple[int, int]]:
    """Delays taken together, (first, last), so that each group has enough inputs if any has.

    Inputs of several delays may be the same ones, so that a group has as many as its best delay.

    Example:
        >>> delay_groups(np.array([80, 70, 30, 40, 0, 5]))
        [(0, 0), (1, 1), (2, 5)]
    """
    groups: list[tuple[int, int]] = []
    first = 0
    for delay, n in enumerate(inputs.tolist()):
        if n >= least:
            groups.append((first, delay))
            first = delay + 1
    if first < len(inputs):
        first, _ = groups.pop() if groups else (0, 0)
        groups.append((first, len(inputs) - 1))
    return groups


def in_loops(delay: int) -> str:
    """A delay in words.

    Example:
        >>> in_loops(0), in_loops(1), in_loops(3)
        ('at once', '1 loop later', '3 loops later')
    """
    return "at once" if delay == 0 else f"{spell_loops(delay)} later"


def _by_delay(own: xr.Dataset, threshold: float) -> list[str]:
    """Delays at which it fails, the first of them in words [delay]."""
    right, active, inputs = own.right.values, own.active.values, own.active_inputs.values
    if not active.any():
        return ["no exchange changes an answer of the model or of the program"]
    failed = []
    for first, last in delay_groups(inputs):
        part = slice(first, last + 1)
        value, low, _ = wilson_estimate(
            right[part].sum(), active[part].sum(), independent=inputs[part].max()
        )
        if not low >= threshold:
            failed.append((value, low, first, last))
    # A delay at which it clearly fails is not made good by those it is taken together with.
    estimates = wilson_estimate(right, active, independent=inputs)
    for delay, (value, low, high) in enumerate(estimates):
        if high < threshold and not any(f <= delay <= t for _, _, f, t in failed):
            failed.append((value, low, delay, delay))
    if not failed:
        return []
    value, low, first, last = min(failed, key=lambda found: found[2])
    when = in_loops(first) if first == last else f"{first} to {last} loops later"
    delays = sum(last - first + 1 for _, _, first, last in failed)
    return [
        f"{when} it is right in {percent(value)} of pairs (95% interval from {percent(low)}), and "
        f"fails at {delays} of {len(active)} delays"
    ]


def _by_stratum(own: xr.Dataset, threshold: float) -> list[str]:
    failed = [
        (float(high), float(value), float(low), name, int(own.run_active.sel(stratum=name)))
        for name, n, (value, low, high) in zip(
            own.stratum.values.tolist(), own.run_inputs.values, _whole_run(own)
        )
        if ((n >= LEAST_INPUTS or name == ALL) and not low >= threshold) or high < threshold
    ]
    if not failed:
        return []
    # The worst is the one that is surely low, not the one with the fewest pairs.
    _, value, low, name, n = min(failed)
    where = "over all pairs" if name == ALL else f"worst in the stratum “{name}”"
    return [
        f"{where} it is right over the whole run in {percent(value)} of {n} pairs (95% "
        f"interval from {percent(low)})"
    ]


def _whole_run(own: xr.Dataset) -> np.ndarray:
    """How often it is right at every delay."""
    return wilson_estimate(own.run_right, own.run_active, independent=own.run_inputs)


def _left_alone(own: xr.Dataset, threshold: float) -> list[str]:
    value, low, _ = wilson_estimate(own.undisturbed, own.n_runs)
    if low >= threshold and own.worst_loop >= threshold:
        return []
    text = (
        f"left alone, the model's whole answer is its own at {percent(value)} of loops (95% "
        f"interval from {percent(low)})"
    )
    if own.worst_loop < threshold <= value:
        text += f", but at the worst loop of one length in {percent(float(own.worst_loop))} of runs"
    return [text]


def _exceptions(own: xr.Dataset) -> list[str]:
    """A model has its mistakes when left alone, and no more, to blame exceptions on."""
    n = int(own.run_active.sel(stratum=ALL))
    exceptions = n - int(own.run_right.sel(stratum=ALL))
    more = f"after an exchange it does not in {exceptions} of {n} runs"
    if not own.slipped:
        return [f"left alone it answers exactly as the program, but {more}"] if exceptions else []
    alone = wilson_estimate(own.slipped, own.n_runs)
    inputs = int(own.run_inputs.sel(stratum=ALL))
    if n and wilson_estimate(exceptions, n, independent=inputs)[1] > alone[2]:
        return [
            f"left alone it answers as the program but in {percent(alone[0])} of runs; {more}, "
            "which is more than that can explain"
        ]
    return []


def _silence(own: xr.Dataset) -> list[str]:
    """Answers left open are never wrong, so a program that leaves most open says nothing."""
    n, says = int(own.run_active.sel(stratum=ALL)), int(own.random_active)
    if 2 * says >= n:
        return []
    return [f"it says of {says} of {n} exchanges only what answers they change"]


def _against_rivals(counts: xr.Dataset, nearest: str, tied: list[str]) -> list[str]:
    reasons = []
    if tied:
        names = " and ".join(f"“{plain(name)}”" for name in tied)
        reasons.append(f"no pair tells it from {names}")
    for name in counts.program.values.tolist():
        own, rival = (
            counts.sel(program=first, rival=second)
            for first, second in ((nearest, name), (name, nearest))
        )
        if name == nearest or not own.apart.any():
            continue
        low = wilson_estimate(own.duel_right, own.apart, independent=own.apart_inputs)[:, 1]
        high = wilson_estimate(rival.duel_right, own.apart, independent=own.apart_inputs)[:, 2]
        if not (low > high).any():
            reasons.append(f"it is not told from “{plain(name)}” by the model")
    return reasons


def _against_controls(own: xr.Dataset, threshold: float) -> list[str]:
    reasons = []
    if own.random_active:
        of = {"trials": own.random_active, "independent": own.random_inputs}
        exchange = wilson_estimate(own.exchange_right, **of)
        random = wilson_estimate(own.random_right, **of)
        if not exchange[1] > random[2]:
            reasons.append(f"a random change of the same norm does as well ({percent(random[0])})")
    if own.n_same:
        n, changed = int(own.n_same), int(own.n_same - own.unchanged)
        # A model that makes no mistake when left alone has none to blame one on.
        low = wilson_estimate(own.unchanged, n, independent=own.same_inputs)[1]
        if low < threshold or (changed and not own.slipped):
            reasons.append(
                "the state holds more than the programs' variables: a donor with the same values "
                f"changes an answer in {changed} of {n} pairs"
            )
    if own.solved < threshold:
        reasons.append(f"the model answers only {percent(float(own.solved))} of inputs right")
    return reasons


def _followed_for(own: xr.Dataset, threshold: float) -> int:
    """The last delay up to which it is followed at each; -1 if it is not at once."""
    whole = own.sel(stratum=ALL)
    so_far = wilson_estimate(own.prefix_right, own.prefix_active, independent=own.prefix_inputs)
    there = wilson_estimate(whole.right, whole.active, independent=whole.active_inputs)
    # Late delays at which little happens are no evidence against it; a clear failure is.
    followed = (so_far[:, 1] >= threshold) & ~(there[:, 2] < threshold)
    return int(followed.cumprod().sum()) - 1


def _statement(verdict: Verdict, counts: xr.Dataset) -> str:
    name, rivals = plain(verdict.nearest), counts.sizes["program"] - 1
    whole = counts.sel(program=verdict.nearest, stratum=ALL)
    value, low, _ = _whole_run(whole)
    rate = "no exchange changes an answer"
    if whole.run_active:
        rate = (
            f"whole runs after an exchange: {percent(value)} of {int(whole.run_active)}, from "
            f"{int(whole.run_inputs)} inputs, 95% interval from {percent(low)}"
        )
    alone = "" if rivals else " It had no rival: no other program was compared."
    if verdict.named:
        text = (
            f"The model runs “{name}”: at every delay from 0 to {verdict.longest} loops after an "
            f"exchange, in every stratum with enough inputs, and when left alone ({rate})."
        )
        if count := len(verdict.untested):
            text += f" Too few inputs to say in {count} {'strata' if count > 1 else 'stratum'}."
        return text + alone
    holds = []
    if verdict.undisturbed:
        # Of programs that answer alike when left alone, the nearest is as good a name as any.
        known = min(verdict.undisturbed, key=lambda p: (p != verdict.nearest, p))
        share = percent(float(counts.undisturbed.sel(program=known) / counts.n_runs))
        others = len(verdict.undisturbed) - 1
        also = f" (as {others} other{'s' if others > 1 else ''} of them would)" if others else ""
        holds.append(f"left alone, the model answers as “{plain(known)}” at {share} of loops{also}")
    if verdict.followed_for == 0:
        holds.append(f"after an exchange it follows “{name}” at once, and no longer")
    elif verdict.followed_for > 0:
        held = spell_loops(verdict.followed_for)
        holds.append(f"after an exchange it follows “{name}” for {held}")
    text = "No program can be named; the nearest is"
    if verdict.refuted:
        text = "It is none of these programs; the nearest is" if rivals else "It is not"
    text += f" “{name}” ({rate})."
    if said := "; ".join(holds):
        text += f" {said[0].upper()}{said[1:]}."
    if verdict.reasons:
        text += f" Not named, because {'; '.join(verdict.reasons)}."
    return text + alone
