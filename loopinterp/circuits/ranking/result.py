"""The result of ranking rival programs of any task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.verdict import Verdict, plain
from loopinterp.errors import unknown_name
from loopinterp.results import Figure, Finding, Result, percent

if TYPE_CHECKING:
    import pandas as pd

_LOOP = ("program", "loop")
_PROGRAM = ("program",)
_DUEL = ("program", "rival")


@dataclass(frozen=True, kw_only=True)
class ProgramRanking(Result):
    """What :func:`~loopinterp.circuits.rank_programs` returns.

    Attributes:
        followed: Share of swaps after which the model's whole output is the one the program says,
            at once, one and two loops later. NaN after loops of which there are no swaps.
        followed_low: Lower end of its 95% interval over swaps.
        followed_high: Upper end.
        control: The same where the swap is restricted to random directions.
        control_low: Lower end.
        control_high: Upper end.
        score: Mean of ``followed`` over loops.
        score_low: Lower end of its 95% interval.
        score_high: Upper end.
        control_score: Mean of ``control`` over loops.
        control_score_low: Lower end.
        control_score_high: Upper end.
        behaviour: How often the program's answer is the model's without a swap, short of T(n)
            loops and where the rivals differ; NaN where they never do.
        behaviour_low: Lower end.
        behaviour_high: Upper end.
        by_delay: Agreement at each delay alone, mean over loops.
        duels: How often the program is followed by those swaps on which it and the rival
            disagree.
        duels_control: The same in random directions.
        common: How often it is followed by those swaps on which the two agree.
        common_control: The same in random directions.
        n_apart: Swaps on which the two disagree.
        n_swaps: Swaps after each loop.
        programs: Name of each rival.
        loops: Loops after which the swap is made.
        delays: Loops between the swap and the reading of the output, in words.
        alignments: How each program lies over the model, in words.
        control_rank: Dimensions of the random control.
        solved: Share of the inputs that the model answers right.
        threshold: Least lower end of a winner's interval.
        verdict_fields: The :class:`~loopinterp.circuits.Verdict`, as a dictionary.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "followed": _LOOP,
        "followed_low": _LOOP,
        "followed_high": _LOOP,
        "control": _LOOP,
        "control_low": _LOOP,
        "control_high": _LOOP,
        "score": _PROGRAM,
        "score_low": _PROGRAM,
        "score_high": _PROGRAM,
        "control_score": _PROGRAM,
        "control_score_low": _PROGRAM,
        "control_score_high": _PROGRAM,
        "behaviour": _PROGRAM,
        "behaviour_low": _PROGRAM,
        "behaviour_high": _PROGRAM,
        "by_delay": ("program", "delay"),
        "duels": _DUEL,
        "duels_control": _DUEL,
        "common": _DUEL,
        "common_control": _DUEL,
        "n_apart": _DUEL,
        "n_swaps": ("loop",),
    }

    followed: np.ndarray
    followed_low: np.ndarray
    followed_high: np.ndarray
    control: np.ndarray
    control_low: np.ndarray
    control_high: np.ndarray
    score: np.ndarray
    score_low: np.ndarray
    score_high: np.ndarray
    control_score: np.ndarray
    control_score_low: np.ndarray
    control_score_high: np.ndarray
    behaviour: np.ndarray
    behaviour_low: np.ndarray
    behaviour_high: np.ndarray
    by_delay: np.ndarray
    duels: np.ndarray
    duels_control: np.ndarray
    common: np.ndarray
    common_control: np.ndarray
    n_apart: np.ndarray
    n_swaps: np.ndarray
    programs: list[str]
    loops: list[int]
    delays: list[str]
    alignments: list[str]
    control_rank: int
    solved: float
    threshold: float
    verdict_fields: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """The program that is named, or none of these."""
        fields = self.verdict_fields
        return Verdict(**{**fields, "reasons": tuple(fields["reasons"])})

    @property
    def rivals(self) -> list[str]:
        """The programs, along the second axis of a duel."""
        return self.programs

    def table(self) -> pd.DataFrame:
        """One row for each program, best first: score, control and behaviour with intervals."""
        import pandas as pd

        names = [name for name, axes in self.AXES.items() if axes == _PROGRAM]
        columns = {name: getattr(self, name) for name in names}
        frame = pd.DataFrame({"program": self.programs, **columns})
        return frame.sort_values("score", ascending=False, ignore_index=True)

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.ranking.figures import ranking_figures

        return ranking_figures(self)

    def summary(self) -> list[Finding]:
        """The verdict, and the duel with the next best rival."""
        verdict = self.verdict
        found = [
            Finding(
                kind="verdict",
                text=self._verdict_text(),
                value=plain(verdict.winner),
                good=verdict.named,
            )
        ]
        text = self.duel_text(verdict.nearest, verdict.rival)
        found.append(Finding(kind="program", text=text))
        if not np.isnan(self.behaviour).all():
            said = zip(self.behaviour.tolist(), map(plain, self.programs))
            shares = [f"{name} {percent(share)}" for share, name in sorted(said, reverse=True)]
            text = (
                "Without a swap, short of T(n) loops and where the rivals differ, the model "
                f"answers as {', '.join(shares)}."
            )
            found.append(Finding(kind="program", text=text))
        return found

    def duel_text(self, first: str, second: str) -> str:
        """Two rivals against one another: where they disagree, and where they agree.

        Raises:
            InputError: one of them is no rival.
        """
        for name in (first, second):
            if name not in self.programs:
                raise unknown_name("rival", name, self.programs)
        i, j = map(self.programs.index, (first, second))
        apart, total = int(self.n_apart[i, j]), int(self.n_swaps.sum())
        if not apart:
            return f"No swap of these inputs tells “{plain(first)}” from “{plain(second)}”."

        def shares(scores: np.ndarray, control: np.ndarray) -> str:
            a, b, random = scores[i, j], scores[j, i], max(control[i, j], control[j, i])
            return f"{percent(a)} and {percent(b)} (random directions at most {percent(random)})"

        text = (
            f"Where “{plain(first)}” and “{plain(second)}” disagree ({apart} swaps), the model "
            f"follows them in {shares(self.duels, self.duels_control)}"
        )
        if apart < total:
            text += (
                f"; where they agree ({total - apart} swaps), in "
                f"{shares(self.common, self.common_control)}"
            )
        return f"{text}."

    def _verdict_text(self) -> str:
        v = self.verdict
        p = self.programs.index(v.nearest)
        share = (
            f"{percent(v.score)} of {int(self.n_swaps.sum())} swaps of one position's state (95% "
            f"interval {percent(v.low)}–{percent(v.high)}), against {percent(v.rival_score)} "
            f"({percent(v.rival_low)}–{percent(v.rival_high)}) for the next best, "
            f"{plain(v.rival)}; random directions in their place: "
            f"{percent(self.control_score[p])}"
        )
        if v.named:
            return (
                f"The circuit is the program “{plain(v.winner)}”: the model follows it in {share}."
            )
        return (
            f"The circuit is none of the {len(self.programs)} programs. The nearest is "
            f"“{plain(v.nearest)}”: the model follows it in {share}. But {'; '.join(v.reasons)}. "
            f"It fails most {v.weakest_place} ({percent(v.weakest_score)})."
        )
