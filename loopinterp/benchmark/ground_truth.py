"""Every tool of the library on models whose circuit is known: does it find what is there?"""

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


@dataclass(frozen=True, repr=False, kw_only=True)
class Check(ShortRepr):
    """One question with a known answer, and the limit that a score has to keep."""

    key: str
    tool: str
    question: str
    control: str
    at_least: float = math.nan
    at_most: float = math.nan


CHECKS = (
    Check(
        key="probe finds",
        tool="probes",
        question="Accuracy of a linear probe for a variable on the state: the worst of all loops.",
        control="the same probe on the injected input alone, mean",
        at_least=0.999,
    ),
    Check(
        key="probe finds nothing else",
        tool="probes",
        question="Accuracy of a probe on the state without the directions of the variable and of "
        "distractors, less what the rest of the state says about it: the largest excess.",
        control="the largest excess with those directions in place",
        at_most=0.03,
    ),
    Check(
        key="interchange",
        tool="interchange interventions",
        question="IIA of the right variable at the right loop: the worst of all variables and "
        "loops at which two inputs differ in a way that matters to an answer.",
        control="the best of the three wrong exchanges below, over whole runs",
        at_least=1.0,
    ),
    Check(
        key="interchange by probe",
        tool="interchange interventions",
        question="IIA over whole runs of the subspaces in which probes find the variables, at all "
        "loops: what one would do without knowing the circuit.",
        control="a change of equal norm in a random direction",
        at_least=0.95,
    ),
    Check(
        key="wrong variable",
        tool="interchange interventions",
        question="Agreement over whole runs when another variable is exchanged, where the program "
        "tells the two apart.",
        control="no exchange at all",
        at_most=0.0,
    ),
    Check(
        key="wrong loop",
        tool="interchange interventions",
        question="Agreement over whole runs when the variable is taken from another loop, where "
        "that has another value.",
        control="no exchange at all",
        at_most=0.0,
    ),
    Check(
        key="random change",
        tool="interchange interventions",
        question="Agreement over whole runs after a change of equal norm in a random direction.",
        control="no exchange at all",
        at_most=0.5,
    ),
    Check(
        key="same value",
        tool="interchange interventions",
        question="Share of whole runs that stay as they are when the source has the same value of "
        "the variable, in another context.",
        control="agreement after a random change",
        at_least=1.0,
    ),
    Check(
        key="decodable, not used",
        tool="interchange interventions",
        question="Share of answers that change when the directions of distractors are exchanged.",
        control="accuracy of a probe for the variables in those directions, mean",
        at_most=0.0,
    ),
    Check(
        key="heads found",
        tool="heads against selectors",
        question="Share of the heads that compute a selector and are matched with that one.",
        control="mean overlap of even attention with the selectors",
        at_least=1.0,
    ),
    Check(
        key="no other head",
        tool="heads against selectors",
        question="Heads that compute none, but are matched with a selector that is not everything.",
        control="heads that compute no selector",
        at_most=0.0,
    ),
    Check(
        key="patched states",
        tool="patching sweeps",
        question="Share of (loop, position) at which patching the state recovers exactly as many "
        "answers as the program says.",
        control="the same against what the program says of the loop before",
        at_least=1.0,
    ),
    Check(
        key="patched heads",
        tool="patching sweeps",
        question="Largest effect of a head that is not in the circuit, on any answer's logits.",
        control="largest effect of a head that is",
        at_most=1e-3,
    ),
    *(
        Check(
            key=f"ablated: {kind}",
            tool="ablation",
            question="Share of the heads and MLPs of the block that are judged needed or idle as "
            f"the circuit says, where a part is {words}.",
            control="the share that calling every part needed would judge right",
            at_least=1.0,
        )
        for kind, words in {
            "zero": "set to zero",
            "mean": "set to its mean over the examples",
            "resample": "taken from another example",
        }.items()
    ),
    Check(
        key="settling loop",
        tool="dynamics",
        question="Share of tokens whose state settles in the loop in which the variables do.",
        control="the share if all settled after the most common number of loops",
        at_least=1.0,
    ),
    Check(
        key="answer stable",
        tool="dynamics",
        question="Share of answers that are kept from the loop on from which the program's is.",
        control="the share if all were kept from the most common loop on",
        at_least=1.0,
    ),
    Check(
        key="stability",
        tool="dynamics",
        question="Spectral radius of the Jacobian at the fixed point: 0, as maps of finite values "
        "are flat around each.",
        control="1, from which on a fixed point is not stable",
        at_most=0.01,
    ),
    Check(
        key="wavefront",
        tool="carry study",
        question="Share of (loop, chain length) at which the carry is as decodable as in the "
        "program.",
        control="the same of a model with shuffled weights",
        at_least=0.95,
    ),
    Check(
        key="verdict",
        tool="comparison of programs",
        question="IIA over whole runs of the program that is run, if it is identified; else 0.",
        control="IIA of the next program; nothing where the task has no other",
        at_least=0.95,
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
        # [check], where one of the two is NaN, which nothing reaches; value is [model, check].
        least, most = ([getattr(c, end) for c in checks] for end in ("at_least", "at_most"))
        good = (value.values >= np.array(least)) | (value.values <= np.array(most))
        return value.copy(data=good.astype(float)).where(value.notnull())

    @property
    def missed(self) -> list[tuple[str, str, float, float]]:
        """Checks that were not passed: (model, check, score, control)."""
        # NaN is neither passed nor missed.
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
    # A model by itself is no list, and is refused like an empty one.
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
        none = Score(math.nan)
        # Rows of [model, check]: a check that does not apply to a model is NaN.
        rows = [[answers.get((name, check.key), none) for check in CHECKS] for name in names]
        return GroundTruth.of(
            watch,
            coords={"model": names, "check": [check.key for check in CHECKS]},
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            programs=[known.compiled.program.name for known in models],
            disguises=[list(known.compiled.circuit.disguises) for known in models],
        )
