"""Verdicts in words: the statement, reasons, untried interchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from loopinterp.comparison.counts import ALL
from loopinterp.comparison.evidence import Untried
from loopinterp.comparison.rule import Reason, Verdict
from loopinterp.core.errors import check_choice
from loopinterp.core.text import percent
from loopinterp.programs.program import ProgramOffset, spell_loops

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from loopinterp.comparison.program_comparison import ProgramComparison

_NUMBERS = dict(enumerate(("two", "three", "four", "five", "six", "seven", "eight", "nine"), 2))


def statement(comparison: ProgramComparison, model: str | None = None) -> str:
    """The verdict in words, with its numbers; of one model or of all."""
    if model is not None:
        check_choice("model of the comparison", model, comparison.verdicts)
    names = comparison.verdicts if model is None else [model]
    texts = {name: " ".join(filter(None, parts(comparison, name))) for name in names}
    several = model is None and len(texts) > 1
    return " ".join(f"{name}: {text}" if several else text for name, text in texts.items())


def parts(comparison: ProgramComparison, model: str) -> tuple[str, str, str]:
    """The headline, the details, and why no program is identified ("" if one is)."""
    verdict, data = comparison.verdicts[model], comparison.data.sel(model=model)
    number = data["program"].values.tolist().index(verdict.closest)
    offset = comparison.alignments[model][number]
    rest = " ".join(details(verdict, data, offset))
    return headline(verdict, data), rest, why_none(verdict)


def headline(verdict: Verdict, data: xr.Dataset) -> str:
    """The verdict on one model, with off-distribution interventions."""
    name, n_programs = plain(verdict.closest), data.sizes["program"]
    best = data.sel(program=verdict.closest, stratum=ALL)
    n = int(best.whole_run_effective)
    if not n:
        return "No program can be identified: no interchange changes an answer."
    of = f"of {n} interventions on {int(best.whole_run_inputs)} inputs"
    rate = f"{with_interval(best.whole_run.values)} {of}"
    if verdict.identified:
        text = f"The model runs “{name}”, which predicts {rate} at every delay."
    elif verdict.refuted and n_programs == 1:
        text = f"The model does not run “{name}”, which predicts {rate}."
    else:
        text = "No program can be identified."
        if verdict.refuted:
            text = f"None of the {n_programs} candidate programs predicts this model."
        if verdict.indistinguishable:
            candidates = [verdict.closest, *verdict.indistinguishable]
            at = data.sel(program=candidates, stratum=ALL)
            rates = at.whole_run.sel(estimate="value").values
            # What counts as effective depends on the program, so that numbers differ a little.
            most = int(at.whole_run_effective.max())
            upto = "up to " if int(at.whole_run_effective.min()) < most else ""
            best_few = _NUMBERS.get(len(candidates), len(candidates))
            names = f", {quoted(candidates)}," if len(candidates) <= 3 else ""
            text += (
                f" The best {best_few}{names} predict {share_range(rates)} of {upto}{most} "
                "interventions and are indistinguishable."
            )
        else:
            text += f" The closest, “{name}”, predicts {rate}."
    if not math.isnan(verdict.off_distribution):
        off = round(verdict.off_distribution * n)
        count = f"{off} of {n}" if off else f"None of the {n}"
        text += (
            f" {count} interventions lead to off-distribution states, which no clean run reaches."
        )
    return text


def details(verdict: Verdict, data: xr.Dataset, offset: ProgramOffset | str) -> Iterator[str]:
    name = plain(verdict.closest)
    if verdict.identified:
        yield (
            f"The program fits at delays from 0 to {spell_loops(verdict.longest_delay)}, in every "
            "stratum with enough inputs, and in clean runs."
        )
        if count := len(verdict.untested):
            strata = f"{count} strata have" if count > 1 else "1 stratum has"
            yield f"{strata} too few inputs for a test."
    # Those that no pair separates are among the reasons.
    if overlapping := [q for q in verdict.indistinguishable if q not in verdict.unseparated]:
        yield f"The interval of “{name}” overlaps with that of {quoted(overlapping)}."
    if verdict.equivalent:
        yield f"No interchange can separate “{name}” from {quoted(verdict.equivalent)}."
    if verdict.clean_fits and not verdict.identified:
        # Of programs that answer alike in clean runs, the closest is as good a name as any.
        fit = min(verdict.clean_fits, key=lambda p: (p != verdict.closest, p))
        share = percent(data.undisturbed.sel(program=fit, estimate="value"))
        others = len(verdict.clean_fits) - 1
        also = f"; {others} other candidate{'s fit' if others > 1 else ' fits'} too"
        yield f"Without intervention, “{plain(fit)}” fits {share} of loops{also if others else ''}."
    if verdict.followed_for >= 0 and not verdict.identified:
        k = verdict.followed_for
        until = f"for {spell_loops(k)}" if k else "at once but not one loop later"
        if k == verdict.longest_delay:
            until = "at every delay"
        yield f"After an interchange, “{name}” predicts the answer {until}."
    if str(offset) != str(ProgramOffset()):
        yield f"Program offset: {offset}."
    if data.sizes["program"] == 1:
        yield "No rival program was compared."


def verdict_table(verdict: Verdict) -> str:
    """A verdict as HTML: a row for each role that a program can have."""
    roles = {
        "identified": [verdict.identified] if verdict.identified else [],
        "closest": [verdict.closest],
        "fits clean runs": verdict.clean_fits,
        "indistinguishable from the closest": verdict.indistinguishable,
    }
    rows = {role: quoted(names, len(names)) if names else "none" for role, names in roles.items()}
    table = "".join(f"<tr><th>{a}</th><td>{escape(b)}</td></tr>" for a, b in rows.items())
    why = why_none(verdict) or f"Identified: {rows['identified']}."
    return f"<p>{escape(why)}</p><table>{table}</table>"


def why_none(verdict: Verdict) -> str:
    if not verdict.reasons:
        return ""
    against_rivals = ("no_pair_separates", "not_separated")
    clauses: dict[str, list[str]] = {}  # those of single reasons, or the rivals of one code
    for reason in verdict.reasons:
        rival = reason.values.get("program")
        clauses.setdefault(reason.code, []).append(str(rival or reason_in_words(reason)))
    texts = [
        _REASONS[code].format(program=quoted(each)) if code in against_rivals else each[0]
        for code, each in clauses.items()
    ]
    reasons = "".join(f" {text[0].upper()}{text[1:]}." for text in texts)
    return f"“{plain(verdict.closest)}” is not identified.{reasons}"


def reason_in_words(reason: Reason) -> str:
    """Why no program is identified, as a clause about the closest one."""
    values, form = dict(reason.values), reason.code
    if form == "delay":
        first, last = int(values["first"]), int(values["last"])
        values["when"] = in_loops(first) if first == last else f"{first} to {last} loops later"
    elif form == "stratum" and not values["pairs"]:
        form = "no_whole_run"
    elif form == "stratum" and values["stratum"] == ALL:
        form = "whole_run"
    elif form == "clean_runs" and "worst" in values:
        form = "worst_loop"
    elif form == "exceptions" and "value" not in values:
        form = "first_exceptions"
    elif form == "same_value" and not values["changed"]:
        form = "few_same_value"
    values |= {k: percent(float(values[k])) for k in ("value", "low", "worst") if k in values}
    if "program" in values:
        values["program"] = quoted([str(values["program"])])
    return _REASONS[form].format(**values)


_CLEAN = "in clean runs it matches {value} of loops (interval from {low})"
_REASONS = {
    "no_effect": "no interchange changes an answer of the model or of the program",
    "delay": "{when} it predicts {value} of interventions (interval from {low}), and it fails at "
    "{failed} of {delays} delays",
    "no_whole_run": "no pair changes an answer over the whole run",
    "whole_run": "it predicts {value} of all pairs over the whole run (interval from {low}, "
    "{pairs} pairs)",
    "stratum": "in the stratum “{stratum}” it predicts {value} (interval from {low}, {pairs} "
    "pairs)",
    "clean_runs": _CLEAN,
    "worst_loop": _CLEAN + ", and {worst} of runs at the worst loop and length",
    "first_exceptions": "it matches every clean run exactly, but {exceptions} of {runs} runs "
    "deviate after an interchange",
    "exceptions": "{exceptions} of {runs} runs deviate after an interchange, significantly more "
    "than the {value} of clean runs",
    "silent": "it decides an answer after only {decided} of {effective} effective interventions",
    "no_pair_separates": "no pair separates it from {program}",
    "not_separated": "the model does not favour it over {program} where they disagree",
    "random_change": "a random change of equal norm does as well ({value})",
    "few_same_value": "only {pairs} pairs test the same-value control",
    "same_value": "the same-value control fails in {changed} of {pairs} pairs, so that the state "
    "holds more than the programs' variables",
    "accuracy": "the model answers only {value} of inputs correctly",
    "models_differ": "the models do not share one identified program",
    "no_model_identified": "no model has an identified program",
}

UNTRIED: dict[Untried, str] = {
    "initial_state": "the state before the first loop",
    "from_initial_state": "a later state replaced by the one before the first loop",
    "first_position": "the state of the first position",
    "other_token": "states of another token",
    "several_positions": "several positions at once",
    "other_loop": "states of another loop",
    "repeated": "a second interchange in one run",
    "third_interchange": "a third interchange in one run",
    "part_of_state": "a part of the state of a position",
}
"""Untried kinds of interchange, in words."""


def with_interval(estimate: np.ndarray) -> str:
    """A share with its 95% interval.

    Example:
        >>> import numpy as np
        >>> with_interval(np.array([0.374, 0.314, 0.437]))
        '37% (31–44)'
    """
    value, *ends = map(percent, estimate)
    return f"{value} ({'–'.join(end.removesuffix('%') for end in ends)})"


def share_range(shares: np.ndarray) -> str:
    """The least and greatest share: "39–48%", or "50%"."""
    low, high = percent(shares.min()), percent(shares.max())
    return high if low == high else f"{low.removesuffix('%')}–{high}"


def plain(program: str) -> str:
    return program.replace("_", " ")


def in_loops(delay: int) -> str:
    """ "at once", "1 loop later", "3 loops later"."""
    return "at once" if delay == 0 else f"{spell_loops(delay)} later"


def quoted(programs: list[str], most: int = 5) -> str:
    names = [f"“{plain(name)}”" for name in programs[:most]]
    if more := len(programs) - len(names):
        names.append(f"{more} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
