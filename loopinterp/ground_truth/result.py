"""The result of scoring tools on models whose circuit is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.errors import unknown_name
from loopinterp.ground_truth.checks import BY_KEY, SECTION
from loopinterp.results import Figure, Finding, Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class GroundTruth(Result):
    """What :func:`ground_truth_study` returns. NaN where a model cannot be asked.

    Attributes:
        value: Score of each model in each check.
        control: The control beside it.
        models: The program of each model, with its disguises.
        programs: The program of each model.
        disguises: What was done to each model, step by step.
        checks: The checks, as :data:`loopinterp.ground_truth.CHECKS` has them.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "value": ("model", "check"),
        "control": ("model", "check"),
    }

    value: np.ndarray
    control: np.ndarray
    models: list[str]
    programs: list[str]
    disguises: list[list[str]]
    checks: list[str]

    @property
    def passed(self) -> np.ndarray:
        """1 where a check is passed, 0 where it is not, NaN where it was not asked."""
        limits = np.array([BY_KEY[key].limit for key in self.checks])
        upper = np.array([BY_KEY[key].highest for key in self.checks])
        good = np.where(upper, self.value <= limits, self.value >= limits)
        return np.where(np.isnan(self.value), np.nan, good)

    @property
    def missed(self) -> list[tuple[str, str, float, float]]:
        """Checks that were not passed: (model, check, score, control)."""
        return [
            (self.models[m], self.checks[c], float(self.value[m, c]), float(self.control[m, c]))
            for m, c in np.argwhere(self.passed == 0)
        ]

    def score(self, model: str, check: str) -> float:
        """The score of one model in one check.

        Raises:
            InputError: there is no such model or check.
        """
        for what, name, known in (("model", model, self.models), ("check", check, self.checks)):
            if name not in known:
                raise unknown_name(what, name, known)
        return float(self.value[self.models.index(model), self.checks.index(check)])

    def table(self) -> pd.DataFrame:
        """Scores, a row for each model and a column for each check."""
        import pandas as pd

        return pd.DataFrame(self.value, index=self.models, columns=self.checks)

    def figures(self) -> list[Figure]:
        from loopinterp.ground_truth.figures import ground_truth_figures

        return ground_truth_figures(self)

    def summary(self) -> list[Finding]:
        """How many checks are passed, and the first that is not."""
        passed = self.passed
        right, asked = int(np.nansum(passed)), int((~np.isnan(passed)).sum())
        text = (
            f"On {len(self.models)} models whose circuit is known, the tools give the right answer "
            f"in {right} of {asked} checks."
        )
        if self.missed:
            model, check, value, _ = self.missed[0]
            text += f" Not in: {check} on {model} ({value:.3g})"
            text += f", and {len(self.missed) - 1} more." if len(self.missed) > 1 else "."
        value = f"{right} of {asked}"
        return [Finding(kind=SECTION, text=text, value=value, good=right == asked)]
