"""The verdict on which program a model runs, and the rule behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from loopinterp.circuits.comparison_evidence import Untried
from loopinterp.circuits.evidence_counts import ALL, END, MANIFOLD, UNREACHED
from loopinterp.intervals import wilson_estimate
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    import xarray as xr

THRESHOLD = 0.9
"""Least lower end of the interval of a named program's accuracy, wherever it is asked."""

LEAST_INPUTS = 36
"""Least inputs of which something can be said: 36 of 36 have a lower end of .90. Strata with fewer
are not tested; delays with fewer are taken together with the next ones."""


ReasonCode = Literal[
    "no_effect",
    "delay",
    "stratum",
    "clean_runs",
    "exceptions",
    "silent",
    "no_pair_separates",
    "not_separated",
    "random_change",
    "same_value",
    "accuracy",
    "models_differ",
    "no_model_identified",
]
"""Why no program is identified; :func:`~loopinterp.circuits.verdict_words.reason_in_words` says it
in words."""


@dataclass(frozen=True)
class Reason:
    """Why no program is identified, with the numbers it rests on.

    ============================ ===============================================================
    ``no_effect``                no interchange changes an answer
    ``delay``                    accuracy too low at ``failed`` of ``delays`` delays; ``value`` and
                                 ``low`` (end of its interval) at the first, ``first`` to ``last``
    ``stratum``                  whole-run accuracy too low in ``stratum``, the worst: ``value``,
                                 ``low``, of ``pairs``
    ``clean_runs``               accuracy too low without intervention: ``value``, ``low``; at the
                                 ``worst`` loop of one length
    ``exceptions``               ``exceptions`` of ``runs`` after an interchange, more than the
                                 share of clean runs (``value``) explains; none there if it is left
                                 out
    ``silent``                   it decides only ``decided`` of ``effective`` interchanges
    ``no_pair_separates``        no pair separates it from ``program``
    ``not_separated``            the model follows neither it nor ``program`` more often
    ``random_change``            a random change does as well (``value``)
    ``same_value``               a same-value source changes an answer in ``changed`` of ``pairs``
    ``accuracy``                 the model solves a share ``value`` of the inputs
    ``models_differ``            of several models: not all run one program
    ``no_model_identified``      of several models: none has an identified program
    ============================ ===============================================================
    """

    code: ReasonCode
    values: dict[str, int | float | str] = field(default_factory=dict)

    @classmethod
    def of(cls, code: ReasonCode, **values: Any) -> Reason:
        """With numbers as Python has them."""
        plain = {k: x if isinstance(x, (str, int)) else float(x) for k, x in values.items()}
        return cls(code, plain)


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict(ShortRepr):
    """What can be said of which program a model runs.

    Attributes:
        winner: The identified program; None if none is.
        nearest: The closest program: with the highest whole-run accuracy after an interchange.
        undisturbed: The programs whose answers the model gives at every loop of clean runs.
        followed_for: The closest program is followed at every delay from 0 to so many loops
            after an interchange; -1 if not even at once.
        longest: The longest delay that was looked at.
        indistinguishable: Where none is identified, other programs that cannot be told from the
            closest: whose whole-run intervals overlap with its own, or that no pair separates.
        tied: Those of them that no pair separates.
        equivalent: Those of these that no interchange separates
            (:func:`loopinterp.rasp.mutations.equivalence`).
        refuted: No program is identified, and what was seen rules the closest out: it is neither
            tied nor a matter of more data.
        reasons: Why none is identified; empty if one is.
        untested: Strata with too few inputs to say anything.
        untried: Codes of the kinds of interchange that were not tried.
        off_distribution: Share of the effective interchanges that lead to a state of the closest
            program that no clean run reaches; NaN if nothing happened.
        statement: All of it in words.
    """

    winner: str | None
    nearest: str
    undisturbed: list[str] = field(default_factory=list)
    followed_for: int = -1
    longest: int = 0
    indistinguishable: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    equivalent: list[str] = field(default_factory=list)
    refuted: bool = False
    reasons: list[Reason] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    off_distribution: float = math.nan
    statement: str = ""

    @property
    def named(self) -> bool:
        """Whether a program is named."""
        return self.winner is not None


def decide(
    counts: xr.Dataset,
    *,
    threshold: float = THRESHOLD,
    untried: Sequence[Untried] = (),
    equivalent: Callable[[str, str], bool] | None = None,
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
        untried: Codes of the kinds of interchange that were not tried.
        equivalent: Whether no interchange separates two programs; asked of those that no pair does.
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
        *_clean_runs(own, threshold),
        *_exceptions(own),
        *_silence(own),
        *_against_rivals(counts, nearest, tied),
        *_against_controls(own, threshold),
    ]
    holds = wilson_estimate(counts.undisturbed, counts.n_runs)[:, 1] >= threshold
    # A program that leaves answers open is contradicted less: it counts if none says more.
    most = counts.decided.values[holds].max(initial=0.0)
    at_best = _whole_run(all_pairs)[2]
    return Verdict(
        winner=None if reasons else nearest,
        nearest=nearest,
        undisturbed=counts.program.values[holds & (counts.decided.values > most - 0.05)].tolist(),
        followed_for=_followed_for(own, threshold),
        longest=counts.sizes["delay"] - 1,
        indistinguishable=_indistinguishable(counts, nearest, tied) if reasons else [],
        tied=tied,
        equivalent=[q for q in tied if equivalent is not None and equivalent(nearest, q)],
        refuted=bool(reasons and not tied and at_best < threshold),
        reasons=reasons,
        untested=tested.stratum.values[tested < LEAST_INPUTS].tolist(),
        untried=list(untried),
        off_distribution=_off_distribution(own),
    )


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


class DelayShare(NamedTuple):
    """How often something is right at some delays: the first and the last of them, the share with
    its 95% interval, and the inputs that it is of."""

    first: int
    last: int
    value: float
    low: float
    high: float
    inputs: int


def delay_shares(
    right: np.ndarray,
    active: np.ndarray,
    inputs: np.ndarray,
    threshold: float,
    *,
    least_alone: int = 1,
) -> list[DelayShare]:
    """Shares at delays taken together (:func:`delay_groups`), and at those that clearly fail.

    A delay whose interval ends below the threshold is not made good by those it is taken together
    with.

    Args:
        right: Of each delay, how many pairs are right.
        active: How many count.
        inputs: Of how many inputs these are.
        threshold: What is asked of each.
        least_alone: Inputs of a delay that is looked at by itself.
    """
    found = []
    for first, last in delay_groups(inputs):
        part = slice(first, last + 1)
        most = inputs[part].max()
        share = wilson_estimate(right[part].sum(), active[part].sum(), independent=most)
        value, low, high = share.tolist()
        found.append(DelayShare(first, last, value, low, high, int(most)))
    each = wilson_estimate(right, active, independent=inputs).tolist()
    for delay, (value, low, high) in enumerate(each):
        alone = inputs[delay] >= least_alone and high < threshold
        if alone and not any(of[:2] == (delay, delay) for of in found):
            found.append(DelayShare(delay, delay, value, low, high, int(inputs[delay])))
    return found


def _by_delay(own: xr.Dataset, threshold: float) -> list[Reason]:
    """Delays at which it fails: the first of them [delay]."""
    right, active, inputs = own.right.values, own.active.values, own.active_inputs.values
    if not active.any():
        return [Reason("no_effect")]
    shares = delay_shares(right, active, inputs, threshold)
    failed: list[DelayShare] = []
    for of in shares:  # those taken together come first
        if not of.low >= threshold and not any(f.first <= of.first <= f.last for f in failed):
            failed.append(of)
    if not failed:
        return []
    first, last, value, low, *_ = min(failed)
    delays = sum(of.last - of.first + 1 for of in failed)
    return [
        Reason.of(
            "delay",
            value=value,
            low=low,
            first=first,
            last=last,
            failed=delays,
            delays=len(active),
        )
    ]


def _by_stratum(own: xr.Dataset, threshold: float) -> list[Reason]:
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
    return [Reason.of("stratum", stratum=name, value=value, low=low, pairs=n)]


def _whole_run(own: xr.Dataset) -> np.ndarray:
    """How often it is right at every delay."""
    return wilson_estimate(own.run_right, own.run_active, independent=own.run_inputs)


def _clean_runs(own: xr.Dataset, threshold: float) -> list[Reason]:
    value, low, _ = wilson_estimate(own.undisturbed, own.n_runs)
    if low >= threshold and own.worst_loop >= threshold:
        return []
    worst = {"worst": own.worst_loop} if own.worst_loop < threshold <= value else {}
    return [Reason.of("clean_runs", value=value, low=low, **worst)]


def _exceptions(own: xr.Dataset) -> list[Reason]:
    """A model has its mistakes in clean runs, and no more, to blame exceptions on."""
    n = int(own.run_active.sel(stratum=ALL))
    exceptions = n - int(own.run_right.sel(stratum=ALL))
    if not own.slipped:
        return [Reason.of("exceptions", exceptions=exceptions, runs=n)] if exceptions else []
    clean = wilson_estimate(own.slipped, own.n_runs)
    inputs = int(own.run_inputs.sel(stratum=ALL))
    if n and wilson_estimate(exceptions, n, independent=inputs)[1] > clean[2]:
        return [Reason.of("exceptions", exceptions=exceptions, runs=n, value=clean[0])]
    return []


def _silence(own: xr.Dataset) -> list[Reason]:
    """Answers left open are never wrong, so a program that leaves most open says nothing."""
    n, says = int(own.run_active.sel(stratum=ALL)), int(own.random_active)
    return [] if 2 * says >= n else [Reason.of("silent", decided=says, effective=n)]


def _against_rivals(counts: xr.Dataset, nearest: str, tied: list[str]) -> list[Reason]:
    reasons = [Reason.of("no_pair_separates", program=name) for name in tied]
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
            reasons.append(Reason.of("not_separated", program=name))
    return reasons


def _against_controls(own: xr.Dataset, threshold: float) -> list[Reason]:
    reasons = []
    if own.random_active:
        of = {"trials": own.random_active, "independent": own.random_inputs}
        exchange = wilson_estimate(own.exchange_right, **of)
        random = wilson_estimate(own.random_right, **of)
        if not exchange[1] > random[2]:
            reasons.append(Reason.of("random_change", value=random[0]))
    if own.n_same:
        n, changed = int(own.n_same), int(own.n_same - own.unchanged)
        # A model that makes no mistake in clean runs has none to blame one on.
        low = wilson_estimate(own.unchanged, n, independent=own.same_inputs)[1]
        if low < threshold or (changed and not own.slipped):
            reasons.append(Reason.of("same_value", changed=changed, pairs=n))
    if own.solved < threshold:
        reasons.append(Reason.of("accuracy", value=own.solved))
    return reasons


def _indistinguishable(counts: xr.Dataset, nearest: str, tied: list[str]) -> list[str]:
    """Other programs whose whole-run intervals overlap with the closest's, or that no pair tells
    from it; in the order of the list."""
    estimates = {
        name: _whole_run(counts.sel(program=name, stratum=ALL))
        for name in counts.program.values.tolist()
    }
    low = estimates[nearest][1]
    return [
        name
        for name, (_, _, high) in estimates.items()
        if name != nearest and (name in tied or high >= low)
    ]


def _off_distribution(own: xr.Dataset) -> float:
    """Share of the effective interchanges that lead to a state that no clean run reaches."""
    unreached, n = f"{MANIFOLD}: {UNREACHED}", int(own.run_active.sel(stratum=ALL))
    if unreached not in own.stratum.values or not n:
        return math.nan
    return float(own.run_active.sel(stratum=unreached) / n)


def _followed_for(own: xr.Dataset, threshold: float) -> int:
    """The last delay up to which it is followed at each; -1 if it is not at once."""
    whole = own.sel(stratum=ALL)
    so_far = wilson_estimate(own.prefix_right, own.prefix_active, independent=own.prefix_inputs)
    there = wilson_estimate(whole.right, whole.active, independent=whole.active_inputs)
    # Late delays at which little happens are no evidence against it; a clear failure is.
    followed = (so_far[:, 1] >= threshold) & ~(there[:, 2] < threshold)
    return int(followed.cumprod().sum()) - 1
