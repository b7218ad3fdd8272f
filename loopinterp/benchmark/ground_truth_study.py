"""Every tool of the library on models whose circuit is known: does it find what is there?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.benchmark.ablation_scores import score_ablation
from loopinterp.benchmark.dynamics_scores import score_dynamics
from loopinterp.benchmark.ground_truth_checks import BY_KEY, CHECKS, Score
from loopinterp.benchmark.head_scores import score_heads
from loopinterp.benchmark.interchange_scores import score_interchange
from loopinterp.benchmark.known_models import KnownModel
from loopinterp.benchmark.patching_scores import score_patching
from loopinterp.benchmark.probe_scores import score_probes
from loopinterp.benchmark.verdict_scores import score_verdict
from loopinterp.benchmark.wavefront_scores import score_wavefront
from loopinterp.errors import InputError, check_choice
from loopinterp.progress import track
from loopinterp.results import Result, study

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

SCORERS: dict[str, Callable[..., dict[str, Score]]] = {
    "probes": score_probes,
    "interchange interventions": score_interchange,
    "heads against selectors": score_heads,
    "patching sweeps": score_patching,
    "ablation": score_ablation,
    "dynamics": score_dynamics,
    "carry study": score_wavefront,
    "comparison of programs": score_verdict,
}
"""Tool -> how it is scored on one model."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GroundTruth(Result, kind="ground-truth"):
    """What :func:`ground_truth_study` returns. NaN where a model cannot be asked.

    Arrays:
        value: Score of each model in each check.
        control: The control beside it.

    Attributes:
        programs: The program of each model.
        disguises: What was done to each model, step by step.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {"value": "model check", "control": "model check"}

    programs: list[str]
    disguises: list[list[str]]

    @property
    def models(self) -> list[str]:
        """The program of each model, with its disguises."""
        return self.data["model"].values.tolist()

    @property
    def checks(self) -> list[str]:
        """Keys of the checks, as :data:`CHECKS` has them."""
        return self.data["check"].values.tolist()

    @property
    def passed(self) -> xr.DataArray:
        """1 where a check is passed, 0 where it is not, NaN where it was not asked."""
        value = self.data["value"]
        checks = [BY_KEY[key] for key in self.checks]
        limits = np.array([check.limit for check in checks])
        upper = [check.highest for check in checks]
        good = np.where(upper, value <= limits, value >= limits)
        return value.copy(data=good).where(value.notnull())

    @property
    def missed(self) -> list[tuple[str, str, float, float]]:
        """Checks that were not passed: (model, check, score, control)."""
        rows = self.data.where(self.passed == 0).to_dataframe().dropna(subset="value")
        return [
            (model, check, float(row.value), float(row.control))
            for (model, check), row in rows.iterrows()
        ]

    def table(self) -> pd.DataFrame:
        """Scores, a row for each model and a column for each check."""
        return self.data["value"].to_dataset("check").to_dataframe()


def ground_truth_study(
    models: Sequence[KnownModel],
    *,
    tools: Sequence[str] | None = None,
    seed: int = 0,
) -> GroundTruth:
    """Score tools on compiled models, by questions whose answers are known.

    :data:`~loopinterp.benchmark.CHECKS` lists the questions, the control of each, and the score
    that passes. A question that a model cannot be asked is NaN: a program without variables that
    change, a head whose selector selects nothing, the carry study on a task other than addition.

    Args:
        models: Models with their inputs, from :func:`known_models`.
        tools: Tools to score; by default all.
        seed: Seed of the tools.

    Raises:
        InputError: no model, two of one name, no tool, or an unknown one.

    Example:
        >>> from loopinterp.benchmark import known_models
        >>> models = known_models(["prefix_xor"], n=4, examples=64)
        >>> result = ground_truth_study(models, tools=["interchange interventions"])
        >>> float(result.data["value"].sel(model="prefix_xor", check="interchange"))
        1.0
    """
    if isinstance(models, KnownModel) or not all(isinstance(m, KnownModel) for m in models):
        raise InputError(
            "models",
            expected="a list of models whose circuit is known",
            given=type(models).__name__,
            fix="Make them with known_models(['ripple']).",
        )
    names = [known.name for known in models]
    if not names or len(set(names)) < len(names):
        raise InputError(
            "models",
            expected="at least one, each of another name",
            given=", ".join(names) or "none",
            fix="Give each program once, or tell disguises apart with known_models(label=...).",
        )
    if isinstance(tools, str) or (tools is not None and not len(tools)):
        raise InputError(
            "tools",
            expected=f"a list of tools: {', '.join(SCORERS)}",
            given=repr(tools),
            fix="Leave it out for all of them.",
        )
    chosen = [check_choice("tool", tool, SCORERS) for tool in (SCORERS if tools is None else tools)]
    with study(seed, study="ground truth", models=names, tools=chosen) as watch:
        found: dict[tuple[str, str], Score] = {}
        for known, tool in track(list(product(models, chosen)), "tools on known models"):
            scores = SCORERS[tool](known, seed=seed)
            found |= {(known.name, key): score for key, score in scores.items()}
        unasked = Score(float("nan"))
        rows = [[found.get((name, check.key), unasked) for check in CHECKS] for name in names]
        return GroundTruth.of(
            watch,
            coords={"model": names, "check": [check.key for check in CHECKS]},
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            programs=[known.compiled.program.name for known in models],
            disguises=[list(known.compiled.circuit.disguises) for known in models],
        )
