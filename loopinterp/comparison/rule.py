"""The rule of a comparison: the identified program, or all reasons against one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import AliasChoices

from loopinterp.comparison.counts import ALL, END, MANIFOLD, UNREACHED
from loopinterp.comparison.evidence import Untried
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    import xarray as xr

THRESHOLD = 0.9  # least lower end of an identified program's accuracy, wherever it is tested

LEAST_INPUTS = 36
"""Least inputs of a test: 36 of 36 have a lower end of .90.

Strata with fewer are not tested; delays with fewer are pooled with the next ones.
"""

ReasonCode = Literal[
    "no_effect",  # no interchange changes an answer
    # Accuracy too low at ``failed`` of ``delays`` delays: ``value`` and ``low`` (the lower end of
    # its interval) at the first of them, ``first`` to ``last``.
    "delay",
    "stratum",  # whole-run ``value`` and ``low`` in ``stratum``, the worst, of ``pairs``
    "clean_runs",  # ``value`` and ``low`` without intervention; at the ``worst`` loop of a length
    # ``exceptions`` of ``runs`` after an interchange, more than the share of clean runs, ``value``,
    # explains; clean runs have none where it is left out.
    "exceptions",
    "silent",  # it decides only ``decided`` of ``effective`` interchanges
    "no_pair_separates",  # from ``program``
    "not_separated",  # the model follows neither it nor ``program`` more often
    "random_change",  # does as well as the interchange (``value``)
    "same_value",  # a same-value source changes an answer in ``changed`` of ``pairs``
    "accuracy",  # the model solves a share ``value`` of the inputs
    "models_differ",  # of several models: not all run one program
    "no_model_identified",  # of several models: none has an identified program
]
"""Codes of reasons, with the names of their numbers."""


@dataclass(frozen=True)
class Reason:
    """Why no program is identified: a code, and by name the numbers behind it.

    :func:`~loopinterp.comparison.reason_in_words` renders it.
    """

    code: ReasonCode
    values: dict[str, int | float | str] = field(default_factory=dict)


def _renamed(old: str, new: str) -> dict[str, AliasChoices]:
    """Metadata of a field with another name in older files."""
    return {"validation_alias": AliasChoices(new, old)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict(ShortRepr):
    """Which program a model runs, as far as the evidence goes.

    Attributes:
        closest: The program with the highest whole-run accuracy.
        clean_fits: The programs that predict clean runs.
        followed_for: The closest program predicts every delay from 0 to this one; -1 if none.
        indistinguishable: If none is identified, programs whose whole-run intervals overlap the
            closest's, or that no pair separates from it.
        unseparated: Those of them that no pair separates.
        equivalent: Those of these that no interchange can separate
            (:func:`loopinterp.programs.equivalence`).
        refuted: The closest program's interval ends below the threshold, and some pair separates it
            from every rival.
        untested: Strata with too few inputs for a test.
        untried: Kinds of interchange that were not tried.
        off_distribution: Share of effective interventions that lead to off-distribution states of
            the closest program; NaN without any.
    """

    identified: str | None = field(metadata=_renamed("winner", "identified"))
    closest: str = field(metadata=_renamed("nearest", "closest"))
    clean_fits: list[str] = field(
        default_factory=list, metadata=_renamed("undisturbed", "clean_fits")
    )
    followed_for: int = -1
    longest_delay: int = field(default=0, metadata=_renamed("longest", "longest_delay"))
    indistinguishable: list[str] = field(default_factory=list)
    unseparated: list[str] = field(default_factory=list, metadata=_renamed("tied", "unseparated"))
    equivalent: list[str] = field(default_factory=list)
    refuted: bool = False
    reasons: list[Reason] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    off_distribution: float = math.nan

    def _repr_html_(self) -> str:
        # By name, as the words import this module.
        return importlib.import_module("loopinterp.comparison.words").verdict_table(self)


def decide(
    counts: xr.Dataset,
    *,
    threshold: float = THRESHOLD,
    untried: Sequence[Untried] = (),
    equivalent: Callable[[str, str], bool] | None = None,
) -> Verdict:
    """Identify the program that holds wherever it was tested, or give every reason why none is.

    The closest program is identified if the lower end of the 95% interval of its accuracy reaches
    ``threshold`` at every delay (pooled if inputs are few), over whole runs in every stratum with
    enough inputs, and over clean runs. Further,

    - clean runs reach it at every loop and length;
    - exceptions after interchanges are no more frequent than in clean runs;
    - it beats every rival where the two disagree, at the delay that separates them best;
    - it beats a random perturbation of equal norm, and same-value sources change nothing;
    - it decides the answers after most effective interventions;
    - the model answers right, at every length.

    Args:
        counts: Those of one model, by :func:`~loopinterp.comparison.counts.count_evidence`; for
            fewer programs, ``counts.sel(program=names, rival=names)``.
        equivalent: Whether no interchange separates two programs.
    """
    counts = counts.drop_sel(delay=END)  # it repeats one of the delays
    programs: list[str] = counts.program.values.tolist()
    rates = (counts.run_right / counts.run_effective).sel(stratum=ALL)
    closest = str(rates.fillna(-1).idxmax("program").item())
    its = counts.sel(program=closest)
    alike = its.rival.values[~its.apart.any("delay").values].tolist()  # this one included
    unseparated = [q for q in alike if q != closest]
    reasons = [
        *_fails_after_interchange(its, threshold),
        *_fails_clean_runs(its, threshold),
        *_fails_against_rivals(counts, closest, unseparated),
        *_fails_controls(its, threshold),
    ]
    fits = wilson_estimate(counts.undisturbed, counts.n_runs)[:, 1] >= threshold
    # A program that leaves answers open is contradicted less: it counts if none decides more.
    most = counts.decided.values[fits].max(initial=0.0)
    # Those whose whole-run intervals overlap with the closest's, or that no pair separates from it.
    ends = dict(zip(programs, _whole_run(counts.sel(stratum=ALL))))
    overlapping = [q for q in programs if q in unseparated or ends[q][2] >= ends[closest][1]]
    tested = its.run_inputs.where(its.run_inputs > 0, drop=True)
    n = int(its.run_effective.sel(stratum=ALL))
    unreached = its.run_effective.reindex(stratum=[f"{MANIFOLD}: {UNREACHED}"])
    return Verdict(
        identified=None if reasons else closest,
        closest=closest,
        clean_fits=counts.program.values[fits & (counts.decided.values > most - 0.05)].tolist(),
        followed_for=_followed_for(its, threshold),
        longest_delay=counts.sizes["delay"] - 1,
        indistinguishable=[q for q in overlapping if q != closest] if reasons else [],
        unseparated=unseparated,
        equivalent=[q for q in unseparated if equivalent is not None and equivalent(closest, q)],
        refuted=bool(reasons and not unseparated and ends[closest][2] < threshold),
        reasons=reasons,
        untested=tested.stratum.values[tested < LEAST_INPUTS].tolist(),
        untried=list(untried),
        off_distribution=float(unreached.item() / n) if n else math.nan,
    )


def _reason(code: ReasonCode, **values: Any) -> Reason:
    return Reason(
        code, {k: x if isinstance(x, (str, int)) else float(x) for k, x in values.items()}
    )


def _followed_for(its: xr.Dataset, threshold: float) -> int:
    """The last delay up to which the program predicts every one; -1 if none."""
    so_far = wilson_estimate(its.prefix_right, its.prefix_effective, independent=its.prefix_inputs)
    every = its.sel(stratum=ALL)
    there = wilson_estimate(every.right, every.effective, independent=every.effective_inputs)
    # Late delays at which few interchanges are effective do not end it; a clear failure does.
    followed = (so_far[:, 1] >= threshold) & ~(there[:, 2] < threshold)
    return int(followed.cumprod().sum()) - 1


def _whole_run(its: xr.Dataset) -> np.ndarray:
    """Whole-run accuracy [stratum, (value, low, high)]."""
    return wilson_estimate(its.run_right, its.run_effective, independent=its.run_inputs)


def _fails_after_interchange(its: xr.Dataset, threshold: float) -> Iterator[Reason]:
    every = its.sel(stratum=ALL)
    counted = every.right, every.effective, every.effective_inputs
    right, effective, inputs = (x.values for x in counted)
    failed: list[DelayShare] = []
    for share in delay_shares(right, effective, inputs, threshold):  # groups come first
        in_group = any(group.first <= share.first <= group.last for group in failed)
        if not share.low >= threshold and not in_group:
            failed.append(share)
    if not effective.any():
        yield Reason("no_effect")
    elif failed:
        first, last, value, low, *_ = min(failed)
        n = sum(share.last - share.first + 1 for share in failed)
        where = {"first": first, "last": last, "failed": n, "delays": len(effective)}
        yield _reason("delay", value=value, low=low, **where)
    worse = []
    columns = (its[name].values.tolist() for name in ("stratum", "run_inputs", "run_effective"))
    for (value, low, high), name, n_inputs, n in zip(_whole_run(its).tolist(), *columns):
        enough = n_inputs >= LEAST_INPUTS or name == ALL
        if (enough and not low >= threshold) or high < threshold:
            worse.append((high, value, low, name, int(n)))
    if worse:
        # The worst is the one that is surely low, not the one with the fewest pairs.
        _, value, low, name, n = min(worse)
        yield _reason("stratum", stratum=name, value=value, low=low, pairs=n)


def _fails_clean_runs(its: xr.Dataset, threshold: float) -> Iterator[Reason]:
    value, low, _ = wilson_estimate(its.undisturbed, its.n_runs)
    if not (low >= threshold and its.worst_loop >= threshold):
        worst = {"worst": its.worst_loop} if its.worst_loop < threshold <= value else {}
        yield _reason("clean_runs", value=value, low=low, **worst)
    every = its.sel(stratum=ALL)
    n, exceptions = int(every.run_effective), int(every.run_effective - every.run_right)
    clean = wilson_estimate(its.slipped, its.n_runs)
    low = wilson_estimate(exceptions, n, independent=every.run_inputs)[1]  # NaN without runs
    if not its.slipped and exceptions:
        yield _reason("exceptions", exceptions=exceptions, runs=n)
    elif its.slipped and low > clean[2]:
        yield _reason("exceptions", exceptions=exceptions, runs=n, value=clean[0])
    # An open answer is never wrong, so a program that leaves most open predicts nothing.
    if 2 * (decided := int(its.random_effective)) < n:
        yield _reason("silent", decided=decided, effective=n)


def _fails_against_rivals(
    counts: xr.Dataset, closest: str, unseparated: list[str]
) -> Iterator[Reason]:
    for name in unseparated:
        yield Reason("no_pair_separates", {"program": name})
    pairs = counts[["duel_right", "apart", "apart_inputs"]].sel(program=closest)
    # Intervals over the pairs that separate the two [rival, delay]; one clear delay is enough.
    trials = {"trials": pairs.apart, "independent": pairs.apart_inputs}
    low = wilson_estimate(pairs.duel_right, **trials)[..., 1]
    high = wilson_estimate(counts.duel_right.sel(rival=closest), **trials)[..., 2]
    for name in pairs.rival.values[~(low > high).any(-1)].tolist():
        if name != closest and name not in unseparated:
            yield Reason("not_separated", {"program": name})


def _fails_controls(its: xr.Dataset, threshold: float) -> Iterator[Reason]:
    if its.random_effective:
        trials = {"trials": its.random_effective, "independent": its.random_inputs}
        random = wilson_estimate(its.random_right, **trials)
        if not wilson_estimate(its.interchange_right, **trials)[1] > random[2]:
            yield _reason("random_change", value=random[0])
    if its.n_same:
        n, changed = int(its.n_same), int(its.n_same - its.unchanged)
        # A model that makes no mistake in clean runs has none to blame one on.
        low = wilson_estimate(its.unchanged, n, independent=its.same_inputs)[1]
        if low < threshold or (changed and not its.slipped):
            yield _reason("same_value", changed=changed, pairs=n)
    if its.solved < threshold:
        yield _reason("accuracy", value=its.solved)


class DelayShare(NamedTuple):
    """A share over some delays, with its 95% interval and inputs."""

    first: int
    last: int
    value: float
    low: float
    high: float
    inputs: int


def delay_groups(inputs: np.ndarray, least: int = LEAST_INPUTS) -> list[tuple[int, int]]:
    """Delays pooled as (first, last), each with enough inputs if any delay has.

    A group counts the inputs of its best delay.

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


def delay_shares(
    right: np.ndarray,
    effective: np.ndarray,
    inputs: np.ndarray,
    threshold: float,
    *,
    least_alone: int = 1,
) -> list[DelayShare]:
    """Shares at pooled delays (:func:`delay_groups`), and at single ones that clearly fail.

    Args:
        right: Right pairs at each delay, of ``effective`` ones.
        least_alone: Least inputs of a delay listed by itself.
    """
    shares = []
    for first, last in delay_groups(inputs):
        part = slice(first, last + 1)
        most = inputs[part].max()
        # Pairs add up over delays; inputs may be the same ones, so the best delay counts.
        share = wilson_estimate(right[part].sum(), effective[part].sum(), independent=most)
        value, low, high = share.tolist()
        shares.append(DelayShare(first, last, value, low, high, int(most)))
    grouped = {share[:2] for share in shares}
    each = wilson_estimate(right, effective, independent=inputs).tolist()
    for delay, (value, low, high) in enumerate(each):
        if inputs[delay] >= least_alone and high < threshold and (delay, delay) not in grouped:
            shares.append(DelayShare(delay, delay, value, low, high, int(inputs[delay])))
    return shares
