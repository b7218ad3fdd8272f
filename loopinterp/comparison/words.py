"""Verdicts in words: the statement, and each code of a reason or of an untried interchange."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loopinterp.comparison.counts import ALL
from loopinterp.comparison.evidence import Untried
from loopinterp.comparison.rule import Reason, Verdict
from loopinterp.core.errors import check_choice
from loopinterp.core.text import percent
from loopinterp.programs.program import ProgramOffset, spell_loops

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.comparison.program_comparison import ProgramComparison


def statement(comparison: ProgramComparison, model: str | None = None) -> str:
    """The verdict in words, with the numbers it rests on.

    Args:
        comparison: The comparison.
        model: Name of the model; by default each of them in turn.

    Raises:
        InputError: the comparison has no such model.
    """
    if model is not None:
        check_choice("model of the comparison", model, comparison.verdicts)
    programs = comparison.data["program"].values.tolist()
    texts = {}
    for name in comparison.verdicts if model is None else [model]:
        verdict = comparison.verdicts[name]
        offset = comparison.alignments[name][programs.index(verdict.closest)]
        texts[name] = verdict_in_words(verdict, comparison.data.sel(model=name), offset)
    several = model is None and len(texts) > 1
    return " ".join(f"{name}: {text}" if several else text for name, text in texts.items())


def verdict_in_words(verdict: Verdict, data: xr.Dataset, offset: ProgramOffset | str) -> str:
    """The statement on one model, from its arrays and the offset of the closest program."""
    whole_run = data.sel(program=verdict.closest, stratum=ALL)
    if verdict.identified:
        text = (
            f"The model runs “{plain(verdict.closest)}”: at every delay from 0 to "
            f"{verdict.longest_delay} loops after an interchange, in every stratum with enough "
            f"inputs, and without intervention ({_rate(whole_run)})."
        )
        if count := len(verdict.untested):
            text += f" Too few inputs to say in {count} {'strata' if count > 1 else 'stratum'}."
    else:
        text = _none(verdict, data)
        if holds := "; ".join(_what_holds(verdict, data)):
            text += f" {holds[0].upper()}{holds[1:]}."
    if verdict.reasons:
        text += f" Not identified, because {'; '.join(map(reason_in_words, verdict.reasons))}."
    if whole_run.whole_run_active and not math.isnan(verdict.off_distribution):
        text += (
            f" {percent(verdict.off_distribution)} of these interchanges lead to states that no "
            "clean run reaches."
        )
    if str(offset) != str(ProgramOffset()):
        text += f" Program offset: {offset}."
    if data.sizes["program"] == 1:
        text += " It had no rival: no other program was compared."
    return text


def _none(verdict: Verdict, data: xr.Dataset) -> str:
    """That no program is identified, and which are closest."""
    name, n_programs = plain(verdict.closest), data.sizes["program"]
    whole_run = data.sel(program=verdict.closest, stratum=ALL)
    if not whole_run.whole_run_active:
        return "No program can be identified: no interchange changes an answer."
    if verdict.indistinguishable:
        candidates = [verdict.closest, *verdict.indistinguishable]
        rates = data.whole_run.sel(program=candidates, stratum=ALL, estimate="value").values
        low, high = percent(rates.min()), percent(rates.max())
        text = "No program can be identified."
        if verdict.refuted:
            text = f"None of the {n_programs} candidate programs predicts this model."
        text += (
            f" {quoted(candidates)} predict {high if low == high else f'{low} to {high}'} of whole "
            "runs after an interchange and cannot be told apart."
        )
        if verdict.equivalent:
            text += f" No interchange at all separates the first from {quoted(verdict.equivalent)}."
        return text
    if verdict.refuted and n_programs == 1:
        return f"It is not “{name}” ({_rate(whole_run)})."
    start = "It is none of these programs" if verdict.refuted else "No program can be identified"
    return f"{start}; the closest is “{name}” ({_rate(whole_run)})."


def _what_holds(verdict: Verdict, data: xr.Dataset) -> Iterator[str]:
    if verdict.clean_fits:
        # Of programs that answer alike in clean runs, the closest is as good a name as any.
        fit = min(verdict.clean_fits, key=lambda p: (p != verdict.closest, p))
        share = percent(data.undisturbed.sel(program=fit, estimate="value"))
        others = len(verdict.clean_fits) - 1
        also = f" (as {others} other{'s' if others > 1 else ''} of them would)" if others else ""
        yield f"without intervention, the model answers as “{plain(fit)}” at {share} of loops{also}"
    if verdict.followed_for >= 0:
        loops = verdict.followed_for
        until = f"for {spell_loops(loops)}" if loops else "at once, and no longer"
        yield f"after an interchange it follows “{plain(verdict.closest)}” {until}"


def _rate(whole_run: xr.Dataset) -> str:
    value, low, _ = whole_run.whole_run.values
    return (
        f"whole runs after an interchange: {percent(value)} of {int(whole_run.whole_run_active)}, "
        f"from {int(whole_run.whole_run_inputs)} inputs, 95% interval from {percent(low)}"
    )


def reason_in_words(reason: Reason) -> str:
    """Why no program is identified."""
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


_RIGHT = "it is right over the whole run in {value} of {pairs} pairs (95% interval from {low})"
_CLEAN = (
    "without intervention, the model's whole answer is its own at {value} of loops (95% interval "
    "from {low})"
)
_REASONS = {
    "no_effect": "no interchange changes an answer of the model or of the program",
    "delay": "{when} it is right in {value} of pairs (95% interval from {low}), and fails at "
    "{failed} of {delays} delays",
    "no_whole_run": "no pair has an effect over the whole run",
    "whole_run": "over all pairs " + _RIGHT,
    "stratum": "worst in the stratum “{stratum}” " + _RIGHT,
    "clean_runs": _CLEAN,
    "worst_loop": _CLEAN + ", but at the worst loop of one length in {worst} of runs",
    "first_exceptions": "without intervention it answers exactly as the program, but after an "
    "interchange it does not in {exceptions} of {runs} runs",
    "exceptions": "without intervention it answers as the program but in {value} of runs; after "
    "an interchange it does not in {exceptions} of {runs} runs, which is more than that can "
    "explain",
    "silent": "it decides the answers after only {decided} of {effective} effective interchanges",
    "no_pair_separates": "no pair separates it from {program}",
    "not_separated": "the model does not separate it from {program}",
    "random_change": "a random change of the same norm does as well ({value})",
    "few_same_value": "only {pairs} same-value pairs were tried, too few to be sure",
    "same_value": "the state holds more than the programs' variables: a source with the same "
    "values changes an answer in {changed} of {pairs} pairs",
    "accuracy": "the model answers only {value} of inputs right",
    "models_differ": "the models do not all run the same program, as far as can be said",
    "no_model_identified": "no program is identified for any of the models",
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
"""Kinds of interchange that a comparison may not have tried, in words."""


def plain(program: str) -> str:
    """A program's name in words.

    Example:
        >>> plain("latched_chain")
        'latched chain'
    """
    return program.replace("_", " ")


def in_loops(delay: int) -> str:
    """A delay in words.

    Example:
        >>> in_loops(0), in_loops(1), in_loops(3)
        ('at once', '1 loop later', '3 loops later')
    """
    return "at once" if delay == 0 else f"{spell_loops(delay)} later"


def quoted(programs: list[str], most: int = 5) -> str:
    """Names of programs in quotes; of many the first few.

    Example:
        >>> quoted(["ripple", "late_ripple"])
        '“ripple” and “late ripple”'
    """
    names = [f"“{plain(name)}”" for name in programs[:most]]
    if more := len(programs) - len(names):
        names.append(f"{more} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
