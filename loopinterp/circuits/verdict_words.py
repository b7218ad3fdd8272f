"""A verdict in words: the statement, and each reason why no program is identified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.circuits.comparison_evidence import Untried
from loopinterp.circuits.evidence_counts import ALL
from loopinterp.circuits.verdict import Reason, Verdict
from loopinterp.intervals import wilson_estimate
from loopinterp.rasp.program_alignment import Alignment, spell_loops
from loopinterp.results import percent

if TYPE_CHECKING:
    import xarray as xr

_MOST_NAMED = 5


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


def quoted(programs: list[str]) -> str:
    """Names of programs in quotes; of many the first few.

    Example:
        >>> quoted(["ripple", "late_ripple"])
        '“ripple” and “late ripple”'
    """
    names = [f"“{plain(name)}”" for name in programs[:_MOST_NAMED]]
    if more := len(programs) - len(names):
        names.append(f"{more} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def reason_in_words(reason: Reason) -> str:
    """Why no program is identified."""
    values = dict(reason.values)
    of = {k: percent(float(values[k])) for k in ("value", "low", "worst") if k in values}
    match reason.code:
        case "no_effect":
            return "no interchange changes an answer of the model or of the program"
        case "delay":
            first, last = int(values["first"]), int(values["last"])
            when = in_loops(first) if first == last else f"{first} to {last} loops later"
            return (
                f"{when} it is right in {of['value']} of pairs (95% interval from {of['low']}), "
                f"and fails at {values['failed']} of {values['delays']} delays"
            )
        case "stratum":
            if not values["pairs"]:
                return "no pair has an effect over the whole run"
            where = f"worst in the stratum “{values['stratum']}”"
            if values["stratum"] == ALL:
                where = "over all pairs"
            return (
                f"{where} it is right over the whole run in {of['value']} of {values['pairs']} "
                f"pairs (95% interval from {of['low']})"
            )
        case "clean_runs":
            text = (
                f"without intervention, the model's whole answer is its own at {of['value']} of "
                f"loops (95% interval from {of['low']})"
            )
            if "worst" in values:
                text += f", but at the worst loop of one length in {of['worst']} of runs"
            return text
        case "exceptions":
            count = f"{values['exceptions']} of {values['runs']} runs"
            more = f"after an interchange it does not in {count}"
            if "value" not in values:
                return f"without intervention it answers exactly as the program, but {more}"
            return (
                f"without intervention it answers as the program but in {of['value']} of runs; "
                f"{more}, which is more than that can explain"
            )
        case "silent":
            return (
                f"it decides the answers after only {values['decided']} of {values['effective']} "
                "effective interchanges"
            )
        case "no_pair_separates":
            return f"no pair separates it from “{plain(str(values['program']))}”"
        case "not_separated":
            return f"the model does not separate it from “{plain(str(values['program']))}”"
        case "random_change":
            return f"a random change of the same norm does as well ({of['value']})"
        case "same_value":
            if not values["changed"]:
                return f"only {values['pairs']} same-value pairs were tried, too few to be sure"
            return (
                "the state holds more than the programs' variables: a source with the same values "
                f"changes an answer in {values['changed']} of {values['pairs']} pairs"
            )
        case "accuracy":
            return f"the model answers only {of['value']} of inputs right"
        case "models_differ":
            return "the models do not all run the same program, as far as can be said"
        case "no_model_identified":
            return "no program is identified for any of the models"
    raise AssertionError(f"no words for {reason.code}")


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


def statement(verdict: Verdict, counts: xr.Dataset, laid: str = str(Alignment())) -> str:
    """What a verdict says, with the numbers it rests on.

    Args:
        verdict: The verdict.
        counts: The counts of the model from which it was decided.
        laid: How the closest program lies over the model, in words.
    """
    own = counts.sel(program=verdict.nearest, stratum=ALL)
    rivals = counts.sizes["program"] - 1
    text = _identified(verdict, own) if verdict.named else _not_identified(verdict, counts, own)
    if verdict.reasons:
        text += f" Not identified, because {'; '.join(map(reason_in_words, verdict.reasons))}."
    if own.run_active:
        text += (
            f" {percent(verdict.off_distribution)} of these interchanges lead to states that no "
            "clean run reaches."
        )
    if laid != str(Alignment()):
        text += f" It lies over the model so: {laid}."
    return text if rivals else f"{text} It had no rival: no other program was compared."


def _rate(own: xr.Dataset) -> str:
    if not own.run_active:
        return "no interchange changes an answer"
    value, low, _ = wilson_estimate(own.run_right, own.run_active, independent=own.run_inputs)
    return (
        f"whole runs after an interchange: {percent(value)} of {int(own.run_active)}, from "
        f"{int(own.run_inputs)} inputs, 95% interval from {percent(low)}"
    )


def _identified(verdict: Verdict, own: xr.Dataset) -> str:
    text = (
        f"The model runs “{plain(verdict.nearest)}”: at every delay from 0 to {verdict.longest} "
        "loops after an interchange, in every stratum with enough inputs, and without "
        f"intervention ({_rate(own)})."
    )
    if count := len(verdict.untested):
        text += f" Too few inputs to say in {count} {'strata' if count > 1 else 'stratum'}."
    return text


def _not_identified(verdict: Verdict, counts: xr.Dataset, own: xr.Dataset) -> str:
    name, n_programs = plain(verdict.nearest), counts.sizes["program"]
    if not own.run_active:
        text = "No program can be identified: no interchange changes an answer."
    elif verdict.indistinguishable:
        tied = [verdict.nearest, *verdict.indistinguishable]
        start = "No program can be identified."
        if verdict.refuted:
            start = f"None of the {n_programs} candidate programs predicts this model."
        shares = counts.sel(program=tied, stratum=ALL)
        rates = (shares.run_right / shares.run_active).values
        low, high = percent(float(rates.min())), percent(float(rates.max()))
        share = high if low == high else f"{low} to {high}"
        text = (
            f"{start} {quoted(tied)} predict {share} of whole runs after an interchange and "
            "cannot be told apart."
        )
        if verdict.equivalent:
            text += f" No interchange at all separates the first from {quoted(verdict.equivalent)}."
    elif verdict.refuted and n_programs == 1:
        text = f"It is not “{name}” ({_rate(own)})."
    else:
        start = (
            "It is none of these programs" if verdict.refuted else "No program can be identified"
        )
        text = f"{start}; the closest is “{name}” ({_rate(own)})."
    holds = []
    if verdict.undisturbed:
        # Of programs that answer alike in clean runs, the closest is as good a name as any.
        known = min(verdict.undisturbed, key=lambda p: (p != verdict.nearest, p))
        share = percent(float(counts.undisturbed.sel(program=known) / counts.n_runs))
        others = len(verdict.undisturbed) - 1
        also = f" (as {others} other{'s' if others > 1 else ''} of them would)" if others else ""
        holds.append(
            f"without intervention, the model answers as “{plain(known)}” at {share} of loops{also}"
        )
    if verdict.followed_for == 0:
        holds.append(f"after an interchange it follows “{name}” at once, and no longer")
    elif verdict.followed_for > 0:
        held = spell_loops(verdict.followed_for)
        holds.append(f"after an interchange it follows “{name}” for {held}")
    if held := "; ".join(holds):
        text += f" {held[0].upper()}{held[1:]}."
    return text
