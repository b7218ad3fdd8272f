"""The result of interchange interventions on the variables of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loopinterp.circuits.verdict import plain
from loopinterp.intervals import wilson_interval
from loopinterp.results import Figure, Finding, Result, percent

VARIABLE = "the variable"
RANDOM = "random directions"
OTHER_LOOP = "another loop"
OTHER_VARIABLE = "another variable"
NOTHING = "nothing"

SWAPS = (VARIABLE, RANDOM, OTHER_LOOP, OTHER_VARIABLE, NOTHING)
"""What is put into the base's state: the first is the intervention, the others its controls."""

_CELL = ("variable", "loop", "delay")
_SCORE = ("swap", *_CELL)


@dataclass(frozen=True, kw_only=True)
class InterchangeResult(Result):
    """What :func:`interchange_study` returns.

    A cell is a variable, the number of loops after which it is swapped, and when the answer is
    read. Cells without pairs are NaN.

    Attributes:
        agreement: How often the model's whole output is the program's counterfactual, by what was
            swapped (:data:`SWAPS`): the source's part of the state in the variable's subspace;
            as many random directions; the same subspace with the source's state after another
            loop, at which it has another value; another variable's subspace; or nothing. The
            last is what the model does anyway, and so the chance level of the others.
        low: Lower end of its 95% interval (Wilson) over pairs.
        high: Upper end.
        n_pairs: Pairs behind it. Some have no other loop or variable that would be a control.
        behaviour: How often the model's whole output without a swap is the program's, on the same
            pairs.
        chance: How often the program itself answers without the swap as it does with it: what a
            swap that does nothing would score in a model that behaves like the program. 0, as
            pairs are chosen for that.
        random_ranks: Dimensions of the random control.
        swaps: What is swapped.
        variables: The program's variables.
        loops: Loops after which the swap is made; 0 is the initial state.
        delays: When the answer is read, in words.
        ranks: Dimensions of each variable's subspace; all of the state's if it has none, and then
            the program's counterfactual takes all variables.
        whole: Whether the whole state is swapped for each variable.
        program: The program.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "agreement": _SCORE,
        "low": _SCORE,
        "high": _SCORE,
        "n_pairs": _SCORE,
        "behaviour": _CELL,
        "chance": _CELL,
        "random_ranks": _CELL,
    }

    agreement: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_pairs: np.ndarray
    behaviour: np.ndarray
    chance: np.ndarray
    random_ranks: np.ndarray
    swaps: list[str]
    variables: list[str]
    loops: list[int]
    delays: list[str]
    ranks: list[int]
    whole: list[bool]
    program: str

    @property
    def iia(self) -> np.ndarray:
        """Interchange intervention accuracy [variable, loop, delay]."""
        return self.of(VARIABLE)

    def of(self, swap: str) -> np.ndarray:
        """The agreement of one kind of swap [variable, loop, delay]."""
        return self.agreement[self.swaps.index(swap)]

    def pooled(self, swap: str) -> tuple[float, float, float, int]:
        """Agreement over all pairs of one kind of swap, its 95% interval, and how many they are."""
        k = self.swaps.index(swap)
        n = int(self.n_pairs[k].sum())
        right = float(np.nansum(self.agreement[k] * self.n_pairs[k]))
        low, high = share_interval(right, n)
        return (right / n if n else float("nan")), float(low), float(high), n

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.interchange.figures import interchange_figures

        return interchange_figures(self)

    def summary(self) -> list[Finding]:
        """Whether the variables are where they are said to be, against the controls."""
        score, low, high, n = self.pooled(VARIABLE)
        if not n:
            text = (
                f"No two of these inputs differ in a variable of “{plain(self.program)}” that "
                "changes its answer, so nothing was swapped."
            )
            if any(self.whole):
                text += (
                    " Whole states are swapped only where both have the same token; give the "
                    "variables' subspaces to swap elsewhere."
                )
            return [Finding(kind="program", text=text)]
        controls = {swap: self.pooled(swap) for swap in self.swaps if swap != VARIABLE}
        shown = [f"{swap} {percent(c[0])}" for swap, c in controls.items() if c[3]]
        text = (
            f"Where a variable of “{plain(self.program)}” is taken from another input's run, the "
            f"model's whole answer becomes the program's in {percent(score)} of {n} swaps (95% "
            f"interval {percent(low)}–{percent(high)}). Put in its place: {', '.join(shown)}."
        )
        good = all(low > c[2] for c in controls.values() if c[3])
        found = [Finding(kind="program", text=text, value=percent(score), good=good)]
        if score < 1:
            found.append(self._weakest())
        return found

    def _weakest(self) -> Finding:
        """The cell at which the model does least of what the program says."""
        v, t, d = np.unravel_index(int(np.nanargmin(self.iia)), self.iia.shape)
        after = "1 loop" if self.loops[t] == 1 else f"{self.loops[t]} loops"
        text = (
            f"The model follows “{plain(self.program)}” least when “{plain(self.variables[v])}” "
            f"is swapped after {after} and the answer read {self.delays[d]}: in "
            f"{percent(self.iia[v, t, d])} of {self.n_pairs[0, v, t, d]} swaps. Without a swap it "
            f"answers as the program there in {percent(self.behaviour[v, t, d])}."
        )
        return Finding(kind="program", text=text, value=percent(self.iia[v, t, d]))


def share_interval(right: np.ndarray | float, n: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's interval of ``right`` out of ``n``; NaN where n is 0."""
    some = np.asarray(n) > 0
    low, high = wilson_interval(right, np.where(some, n, 1))
    return np.where(some, low, np.nan), np.where(some, high, np.nan)
