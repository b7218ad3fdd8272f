"""The result of comparing rival programs with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.verdict import Verdict, in_words, plain
from loopinterp.results import Figure, Finding, Result, percent

if TYPE_CHECKING:
    import pandas as pd

ALL_PLACES = "all places"
ALL_MODELS = "all models"

_SCORE_AXES = ("model", "program", "place", "delay")
_CLAIM_AXES = ("model", "program", "place", "carry", "delay", "bit")


@dataclass(frozen=True, kw_only=True)
class CircuitComparison(Result):
    """What :func:`~loopinterp.circuits.compare_programs` returns.

    Attributes:
        iia: How often the model's whole output after a swap is the one the program says. The
            last place is the mean over places; with several models the last model pools them.
        iia_low: Lower end of its 95% interval over inputs (and models).
        iia_high: Upper end.
        control: The same where the swap is restricted to random directions.
        control_low: Lower end.
        control_high: Upper end.
        behaviour: How often the program's answer is the model's without a swap, short of T(n)
            loops and where the rivals differ [model, program].
        behaviour_low: Lower end.
        behaviour_high: Upper end.
        flips: Rate at which bits i, i + 1, i + 2 of the model's output flip, by the carry into
            bit i in the base.
        claims: Rate at which the program says they flip.
        n_pairs: Pairs behind them [model, place, carry].
        models: Name of each model.
        programs: Name of each rival.
        places: Places relative to the front.
        delays: Loops between the swap and the reading of the output, in words.
        alignments: How each program lies over each model, in words.
        control_ranks: Dimensions of the random control of each model.
        front_measured: Whether the front is each model's own (one position a loop otherwise).
        solved: Fraction of candidate pairs each model answers right.
        threshold: Least lower end of a winner's interval.
        verdicts: :class:`~loopinterp.circuits.Verdict` of each model, as dictionaries, by the
            output one loop after the swap.
        verdicts_later: The same by the output two loops after the swap. A model that answers a
            loop late shows there what it does.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "iia": _SCORE_AXES,
        "iia_low": _SCORE_AXES,
        "iia_high": _SCORE_AXES,
        "control": _SCORE_AXES,
        "control_low": _SCORE_AXES,
        "control_high": _SCORE_AXES,
        "behaviour": ("model", "program"),
        "behaviour_low": ("model", "program"),
        "behaviour_high": ("model", "program"),
        "flips": ("model", "place", "carry", "delay", "bit"),
        "claims": _CLAIM_AXES,
        "n_pairs": ("model", "place", "carry"),
    }

    iia: np.ndarray
    iia_low: np.ndarray
    iia_high: np.ndarray
    control: np.ndarray
    control_low: np.ndarray
    control_high: np.ndarray
    behaviour: np.ndarray
    behaviour_low: np.ndarray
    behaviour_high: np.ndarray
    flips: np.ndarray
    claims: np.ndarray
    n_pairs: np.ndarray
    models: list[str]
    programs: list[str]
    places: list[str]
    delays: list[str]
    alignments: list[list[str]]
    control_ranks: list[int]
    front_measured: list[bool]
    solved: list[float]
    threshold: float
    verdicts: list[dict[str, Any]]
    verdicts_later: list[dict[str, Any]]

    @property
    def verdict(self) -> Verdict:
        """The verdict on all models together (on the one, if there is one)."""
        return self.verdict_of(-1)

    def verdict_of(self, model: int | str, *, later: bool = False) -> Verdict:
        """The verdict on one model, by its number or name; ``later``: two loops after the swap."""
        row = self.models.index(model) if isinstance(model, str) else model
        found = (self.verdicts_later if later else self.verdicts)[row]
        return Verdict(**{**found, "reasons": tuple(found["reasons"])})

    def to_frame(self) -> pd.DataFrame:
        """One row for each model, program, place and delay: score and control with intervals."""
        import pandas as pd

        scores = [name for name, axes in self.AXES.items() if axes == _SCORE_AXES]
        axes = [self.models, self.programs, self.places, self.delays]
        index = pd.MultiIndex.from_product(axes, names=_SCORE_AXES)
        columns = {name: getattr(self, name).reshape(-1) for name in scores}
        return pd.DataFrame(columns, index=index).reset_index()

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.figures import comparison_figures

        return comparison_figures(self)

    def summary(self) -> list[Finding]:
        """The verdict, and what separates it from the next program."""
        verdict = self.verdict
        return [
            Finding(
                kind="verdict",
                text=verdict_text(self),
                value=plain(verdict.winner),
                good=verdict.named,
            ),
            Finding(kind="program", text=hold_text(self), value=percent(verdict.score)),
        ]


def verdict_text(result: CircuitComparison) -> str:
    """The verdict in a sentence or two, with its numbers."""
    v = result.verdict
    p = result.programs.index(v.nearest)
    control = result.control[-1, p, -1, 1]
    rival = (
        f", against {percent(v.rival_score)} ({_span(v.rival_low, v.rival_high)}) for the next "
        f"best, {plain(v.rival)}"
        if v.rival
        else ""
    )
    agrees = (
        f"{percent(v.score)} of swaps of one bit's state (95% interval {_span(v.low, v.high)})"
        f"{rival}"
    )
    if v.named:
        return (
            f"The circuit is the program “{plain(v.winner)}”: one loop after, the model answers as "
            f"the program says in {agrees}; random directions in its place: {percent(control)}."
        )
    return (
        f"The circuit is none of the {len(result.programs)} programs. The nearest is "
        f"“{plain(v.nearest)}”: one loop after, the model answers as it says in {agrees}; but "
        f"{'; '.join(v.reasons)}. It fails most {in_words(v.weakest_place)} "
        f"({percent(v.weakest_score)}).{_later_text(result)}"
    )


def _later_text(result: CircuitComparison) -> str:
    """What two loops say where one does not name a program."""
    later = result.verdict_of(-1, later=True)
    if not later.named:
        return ""
    return (
        f" Two loops after the swap it would be “{plain(later.winner)}” ({percent(later.score)}, "
        f"{_span(later.low, later.high)}): this model takes longer than a loop to answer."
    )


def hold_text(result: CircuitComparison) -> str:
    """How long the nearest program keeps predicting the model."""
    v = result.verdict
    p = result.programs.index(v.nearest)
    now, one, two, end = map(percent, result.iia[-1, p, -1])
    return (
        f"After a swap “{plain(v.nearest)}” says the model's whole answer in {now} of cases at "
        f"once, {one} one loop later, {two} two loops later and {end} at the end; "
        f"without a swap, short of T(n) loops and where the rivals differ, in "
        f"{percent(result.behaviour[-1, p])}."
    )


def _span(low: float, high: float) -> str:
    return f"{percent(low)}–{percent(high)}"
