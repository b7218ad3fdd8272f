"""Every tool of the library on models whose circuit is known: does it find what is there?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from loopinterp.benchmark.known_models import KnownModel, Score
from loopinterp.benchmark.mechanism_scores import (
    score_ablation,
    score_heads,
    score_interchange,
    score_patching,
)
from loopinterp.benchmark.state_scores import (
    score_dynamics,
    score_probes,
    score_verdict,
    score_wavefront,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclass(frozen=True, repr=False)
class Check(ShortRepr):
    """One question with a known answer."""

    key: str
    tool: str
    question: str
    control: str
    limit: float  # what the score has to reach
    highest: bool = False  # whether the score has to stay at or below the limit instead


CHECKS = (
    Check(
        "probe finds",
        "probes",
        "Accuracy of a linear probe for a variable on the state that holds it: the worst of all "
        "variables and loops.",
        "the same probe on the injected input alone, mean",
        0.999,
    ),
    Check(
        "probe finds nothing else",
        "probes",
        "Accuracy of a probe on the state without the variable's directions (and without those of "
        "distractors), less what the other contents of the state say about it: the largest excess.",
        "the largest excess with those directions in place",
        0.03,
        highest=True,
    ),
    Check(
        "interchange",
        "interchange interventions",
        "IIA of the right variable at the right loop: the worst of all variables and loops at "
        "which two inputs differ in a way that matters to an answer.",
        "the best of the three wrong exchanges below, over whole runs",
        1.0,
    ),
    Check(
        "interchange by probe",
        "interchange interventions",
        "IIA over whole runs of the subspace in which a probe finds the variable, over all "
        "variables and loops: what one would do without knowing the circuit.",
        "a change of equal norm in a random direction",
        0.95,
    ),
    Check(
        "wrong variable",
        "interchange interventions",
        "Agreement over whole runs when another variable is exchanged, where the program tells "
        "the two apart.",
        "no exchange at all",
        0.0,
        highest=True,
    ),
    Check(
        "wrong loop",
        "interchange interventions",
        "Agreement over whole runs when the variable is taken from another loop, where that has "
        "another value.",
        "no exchange at all",
        0.0,
        highest=True,
    ),
    Check(
        "random change",
        "interchange interventions",
        "Agreement over whole runs after a change of equal norm in a random direction.",
        "no exchange at all",
        0.5,
        highest=True,
    ),
    Check(
        "same value",
        "interchange interventions",
        "Share of whole runs that stay as they are when the donor has the same value of the "
        "variable, in another context.",
        "agreement after a random change",
        1.0,
    ),
    Check(
        "decodable, not used",
        "interchange interventions",
        "Share of answers that change when the directions of distractors are exchanged.",
        "accuracy of a probe for the variables in those directions, mean",
        0.0,
        highest=True,
    ),
    Check(
        "heads found",
        "heads against selectors",
        "Share of the heads that compute a selector and are said to compute that one.",
        "mean overlap of even attention with the selectors",
        1.0,
    ),
    Check(
        "no other head",
        "heads against selectors",
        "Heads that compute no selector, but are said to compute one that is not everything.",
        "heads that compute no selector",
        0.0,
        highest=True,
    ),
    Check(
        "patched states",
        "patching sweeps",
        "Share of (loop, position) at which patching the state recovers exactly as many answers "
        "as the program says.",
        "the same against what the program says of the loop before",
        1.0,
    ),
    Check(
        "patched heads",
        "patching sweeps",
        "Largest effect of a head that is not in the circuit, on any answer's logits.",
        "largest effect of a head that is",
        1e-3,
        highest=True,
    ),
    *(
        Check(
            f"ablated: {kind}",
            "ablation",
            "Share of the heads and MLPs of the block that are judged needed or idle as the "
            f"circuit says, where a part is {words}.",
            "the share that calling every part needed would judge right",
            1.0,
        )
        for kind, words in (
            ("zero", "set to zero"),
            ("mean", "set to its mean over the examples"),
            ("resample", "taken from another example"),
        )
    ),
    Check(
        "settling loop",
        "dynamics",
        "Share of tokens whose state settles in the loop in which the program's variables do.",
        "the share if all settled after the most common number of loops",
        1.0,
    ),
    Check(
        "answer stable",
        "dynamics",
        "Share of places whose answer is kept from the loop on from which the program's is.",
        "the share if all were kept from the most common loop on",
        1.0,
    ),
    Check(
        "stability",
        "dynamics",
        "Spectral radius of the Jacobian at the fixed point. Maps of finite values are flat "
        "around each: 0.",
        "1, from which on a fixed point is not stable",
        0.01,
        highest=True,
    ),
    Check(
        "wavefront",
        "carry study",
        "Share of (loop, chain length) at which the carry is as decodable as in the program.",
        "the same of a model with shuffled weights",
        0.95,
    ),
    Check(
        "verdict",
        "comparison of programs",
        "IIA over whole runs of the program that is run, if of all of its task it is the one "
        "named; else 0.",
        "IIA of the next program; nothing where the task has no other",
        0.95,
    ),
)
"""In the order in which tables show them, by tool."""

CHECK_OF = {check.key: check for check in CHECKS}

_SCORERS: dict[str, Callable[..., dict[str, Score]]] = {
    "probes": score_probes,
    "interchange interventions": score_interchange,
    "heads against selectors": score_heads,
    "patching sweeps": score_patching,
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
        limits = np.array([check.limit for check in checks])  # [check]; value is [model, check]
        good = np.where([check.highest for check in checks], value <= limits, value >= limits)
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


@checked
def ground_truth_study(
    models: Sequence[KnownModel],
    *,
    tools: Annotated[Sequence[str], Field(min_length=1)] | None = None,
    seed: Seed = 0,
) -> GroundTruth:
    """Score tools on compiled models, by questions with known answers.

    :data:`~loopinterp.benchmark.CHECKS` lists the questions, the control of each, and the score
    that passes. A check that does not apply to a model is NaN: a program without variables that
    change, a head whose selector selects nothing, the carry study on a task other than addition.

    Args:
        models: Models with their inputs, from :func:`known_models`.
        tools: Tools to score; by default all.

    Raises:
        InputError: no model, two of one name, no tool, or an unknown one.

    Example:
        >>> from loopinterp.benchmark import known_models
        >>> models = known_models(["prefix_xor"], n=4, examples=64)
        >>> result = ground_truth_study(models, tools=["interchange interventions"])
        >>> float(result.data["value"].sel(model="prefix_xor", check="interchange"))
        1.0
    """
    listed = [] if isinstance(models, KnownModel) else models
    names = [known.name for known in listed if isinstance(known, KnownModel)]
    if not names or len(set(names)) < len(models):
        raise InputError(
            "models",
            expected="a list of known models, each of another name",
            given=", ".join(names) or "none",
            fix="Make them with known_models(['ripple']); tell disguises apart with its label=.",
        )
    chosen = [check_choice("tool", tool, _SCORERS) for tool in tools or _SCORERS]
    with study(seed, study="ground truth", models=names, tools=chosen) as watch:
        answers: dict[tuple[str, str], Score] = {}
        for known, tool in track(list(product(models, chosen)), "tools on known models"):
            scores = _SCORERS[tool](known, seed=seed)
            answers |= {(known.name, key): score for key, score in scores.items()}
        none = Score(float("nan"))
        rows = [[answers.get((name, check.key), none) for check in CHECKS] for name in names]
        return GroundTruth.of(
            watch,
            coords={"model": names, "check": [check.key for check in CHECKS]},
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            programs=[known.compiled.program.name for known in models],
            disguises=[list(known.compiled.circuit.disguises) for known in models],
        )
