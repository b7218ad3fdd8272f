"""Every tool of the library, scored on known-circuit models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from loopinterp.benchmark.known_models import KnownModel, Score
from loopinterp.benchmark.mechanism_scores import (
    score_ablation,
    score_dynamics,
    score_heads,
    score_interchange,
    score_patching,
    score_probes,
    score_verdict,
    score_wavefront,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclass(frozen=True, repr=False)
class Check(ShortRepr):
    """A question with a known answer, its control, and the score that passes."""

    key: str
    tool: str
    question: str
    control: str
    at_least: float = math.nan
    at_most: float = math.nan


_INTERCHANGE, _HEADS, _PATCHING = (
    "interchange interventions",
    "heads against selectors",
    "patching sweeps",
)

CHECKS = (
    Check(
        "probe finds",
        "probes",
        "Accuracy of a linear probe for a variable on the state, worst loop.",
        "the same probe on the injected input, mean",
        at_least=0.999,
    ),
    Check(
        "probe finds nothing else",
        "probes",
        "Accuracy of a probe on the state without the directions of the variable and of "
        "distractors, minus what the rest of the state predicts: largest excess.",
        "the largest excess with those directions in place",
        at_most=0.03,
    ),
    Check(
        "interchange",
        _INTERCHANGE,
        "IIA of the right variable at the right loop: the worst variable and loop at which two "
        "inputs differ in a way that changes an answer.",
        "the best of the three wrong interchanges below, over whole runs",
        at_least=1.0,
    ),
    Check(
        "interchange by probe",
        _INTERCHANGE,
        "IIA over whole runs of the subspaces in which probes find the variables, all loops: the "
        "method without knowledge of the circuit.",
        "a change of equal norm in a random direction",
        at_least=0.95,
    ),
    Check(
        "wrong variable",
        _INTERCHANGE,
        "Whole-run agreement after an interchange of another variable, where the program "
        "distinguishes the two.",
        "no intervention",
        at_most=0.0,
    ),
    Check(
        "wrong loop",
        _INTERCHANGE,
        "Whole-run agreement after an interchange with another loop, where the variable has "
        "another value.",
        "no intervention",
        at_most=0.0,
    ),
    Check(
        "random change",
        _INTERCHANGE,
        "Whole-run agreement after a change of equal norm in a random direction.",
        "no intervention",
        at_most=0.5,
    ),
    Check(
        "same value",
        _INTERCHANGE,
        "Same-value control: share of whole runs that stay unchanged.",
        "agreement after a random change",
        at_least=1.0,
    ),
    Check(
        "decodable, not used",
        _INTERCHANGE,
        "Share of answers that change after an interchange of the directions of distractors.",
        "accuracy of a probe for the variables in those directions, mean",
        at_most=0.0,
    ),
    Check(
        "heads found",
        _HEADS,
        "Share of the heads that compute a selector and are matched with it.",
        "mean overlap of even attention with the selectors",
        at_least=1.0,
    ),
    Check(
        "no other head",
        _HEADS,
        "Heads that compute no selector but are matched with one that does not select everything.",
        "heads that compute no selector",
        at_most=0.0,
    ),
    Check(
        "patched states",
        _PATCHING,
        "Share of (loop, position) at which a patched state recovers exactly as many answers as "
        "the program predicts.",
        "the same against the program's prediction for the loop before",
        at_least=1.0,
    ),
    Check(
        "patched heads",
        _PATCHING,
        "Largest effect on any answer's logits of a head outside the circuit.",
        "largest effect of a head of the circuit",
        at_most=1e-3,
    ),
    *(
        Check(
            f"ablated: {kind}",
            "ablation",
            "Share of the block's heads and MLPs that are judged needed or idle as the circuit "
            f"says ({kind} ablation).",
            "the share that calling every part needed would get right",
            at_least=1.0,
        )
        for kind in ("zero", "mean", "resample")
    ),
    Check(
        "settling loop",
        "dynamics",
        "Share of tokens whose state converges in the loop in which the variables do.",
        "the share if all converged after the most common number of loops",
        at_least=1.0,
    ),
    Check(
        "answer stable",
        "dynamics",
        "Share of answers that become final in the loop in which the program's do.",
        "the share if all became final in the most common loop",
        at_least=1.0,
    ),
    Check(
        "stability",
        "dynamics",
        "Spectral radius of the Jacobian at the fixed point: 0, as the map is flat around each.",
        "1, from which on a fixed point is unstable",
        at_most=0.01,
    ),
    Check(
        "wavefront",
        "carry study",
        "Share of (loop, chain length) at which the carry is as decodable as in the program.",
        "the same of a model with shuffled weights",
        at_least=0.95,
    ),
    Check(
        "verdict",
        "comparison of programs",
        "IIA over whole runs of the model's program if it is identified, else 0.",
        "IIA of the next program; none where the task has no other",
        at_least=0.95,
    ),
)
"""All checks, in the order of tables, by tool."""

CHECK_OF = {check.key: check for check in CHECKS}
_SCORERS: dict[str, Callable[..., dict[str, Score]]] = {
    "probes": score_probes,
    _INTERCHANGE: score_interchange,
    _HEADS: score_heads,
    _PATCHING: score_patching,
    "ablation": score_ablation,
    "dynamics": score_dynamics,
    "carry study": score_wavefront,
    "comparison of programs": score_verdict,
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GroundTruth(Result, kind="ground-truth"):
    """The score of each model in each check, and its control; NaN where a check does not apply."""

    VARIABLES: ClassVar[Mapping[str, str]] = {"value": "model check", "control": "model check"}

    programs: list[str]
    disguises: list[list[str]]  # of each model, in order

    @property
    def models(self) -> list[str]:
        """The program of each model, with its disguises."""
        return self.data["model"].values.tolist()

    @property
    def passed(self) -> xr.DataArray:
        """1 where a check is passed, 0 where it is not, NaN where it does not apply."""
        value = self.data["value"]
        checks = [CHECK_OF[key] for key in self.data["check"].values]
        # [check] each; of a check's two limits one is NaN, which no score reaches.
        least, most = ([getattr(c, end) for c in checks] for end in ("at_least", "at_most"))
        good = (value.values >= np.array(least)) | (value.values <= np.array(most))
        return value.copy(data=good.astype(float)).where(value.notnull())

    @property
    def missed(self) -> list[tuple[str, str, float, float]]:
        """Failed checks: (model, check, score, control)."""
        rows = self.data.where(self.passed == 0).to_dataframe().dropna(subset="value")
        return [
            (model, check, float(row.value), float(row.control))
            for (model, check), row in rows.iterrows()
        ]

    def table(self) -> pd.DataFrame:
        """Scores, a row for each model and a column for each check."""
        return self.data["value"].to_dataset("check").to_dataframe()


@checked
def ground_truth_study(
    models: Sequence[KnownModel],
    *,
    tools: Annotated[Sequence[str], Field(min_length=1)] | None = None,
    seed: Seed = 0,
) -> GroundTruth:
    """Score tools on compiled models, by questions with known answers.

    :data:`~loopinterp.benchmark.CHECKS` lists questions, controls and the scores that pass. A check
    that does not apply to a model is NaN, such as the carry study on a task other than addition.

    Args:
        models: Models with inputs, from :func:`known_models`.
        tools: Tools to score; by default all.

    Example:
        >>> from loopinterp.benchmark import known_models
        >>> models = known_models(["prefix_xor"], n=4, examples=64)
        >>> result = ground_truth_study(models, tools=["interchange interventions"])
        >>> float(result.data["value"].sel(model="prefix_xor", check="interchange"))
        1.0
    """
    names = [] if isinstance(models, KnownModel) else [known.name for known in models]
    expected, got = "a list of known models of different names", ", ".join(names) or "none"
    fix = "Make them with known_models(['ripple']); distinguish disguises with its label=."
    need(names and len(set(names)) == len(names), "models", expected, got, fix)
    chosen = [check_choice("tool", tool, _SCORERS) for tool in tools or _SCORERS]
    with study(seed, study="ground truth", models=names, tools=chosen) as watch:
        answers: dict[tuple[str, str], Score] = {}
        for known, tool in track(list(product(models, chosen)), "tools on known models"):
            scores = _SCORERS[tool](known, seed=seed)
            answers |= {(known.name, key): score for key, score in scores.items()}
        none = Score(math.nan)
        rows = [[answers.get((name, check.key), none) for check in CHECKS] for name in names]
        return GroundTruth.of(
            watch,
            coords={"model": names, "check": [check.key for check in CHECKS]},
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            programs=[known.compiled.program.name for known in models],
            disguises=[list(known.compiled.circuit.disguises) for known in models],
        )
