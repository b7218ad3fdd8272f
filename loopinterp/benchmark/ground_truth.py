"""Every tool of the library on models whose circuit is known: does it find what is there?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.benchmark.known_models import KnownModel, Score, known_models
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
from loopinterp.compiler import add_noise, rotate
from loopinterp.core.errors import InputError, check_choice
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from loopinterp.programs.program import LoopProgram


@dataclass(frozen=True, repr=False)
class Check(ShortRepr):
    """One question with a known answer.

    Attributes:
        key: Short name.
        tool: The tool that is scored.
        question: What the score is.
        control: What its control is.
        limit: Limit that the score must reach.
        highest: Whether the limit is an upper one.
    """

    key: str
    tool: str
    question: str
    control: str
    limit: float
    highest: bool = False


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
"""In the order in which tables show them."""

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
"""From a tool to the function that scores it on one model."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GroundTruth(Result, kind="ground-truth"):
    """What :func:`ground_truth_study` returns. NaN where a check does not apply to a model.

    Arrays:
        value: Score of each model in each check.
        control: The control beside it.

    Attributes:
        programs: The program of each model.
        disguises: Disguises of each model, step by step.
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
        """Keys of the checks, in the order of :data:`CHECKS`."""
        return self.data["check"].values.tolist()

    @property
    def passed(self) -> xr.DataArray:
        """1 where a check is passed, 0 where it is not, NaN where it does not apply."""
        value = self.data["value"]
        checks = [CHECK_OF[key] for key in self.checks]
        # Limits of each check; upper ones for what should not be there.
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
    """Score tools on compiled models, by questions with known answers.

    :data:`~loopinterp.benchmark.CHECKS` lists the questions, the control of each, and the score
    that passes. A check that does not apply to a model is NaN: a program without variables that
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
            expected=f"a list of tools: {', '.join(_SCORERS)}",
            given=repr(tools),
            fix="Leave it out for all of them.",
        )
    chosen = [
        check_choice("tool", tool, _SCORERS) for tool in (_SCORERS if tools is None else tools)
    ]
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


_NOISE_CHECKS = (
    "probe finds",
    "interchange",
    "interchange by probe",
    "heads found",
    "answer stable",
)
"""Checks that noise can change, and that apply to every model."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Robustness(Result, kind="noise-robustness"):
    """What :func:`robustness_study` returns.

    Arrays (``noise``: on every weight, relative to the weights of its matrix):
        value: Score of each check at each level of noise, mean over models.
        exact_match: Of the models, mean.

    Attributes:
        programs: Programs of the models.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {"value": "noise check", "exact_match": "noise"}

    programs: list[str]


def robustness_study(
    programs: Sequence[str | LoopProgram],
    *,
    levels: Iterable[float] = (0.001, 0.003, 0.01, 0.03, 0.1),
    n: int = 6,
    examples: int = 128,
    seed: int = 0,
) -> Robustness:
    """Score the tools on compiled models with more and more noise on their weights.

    Args:
        programs: Loop programs whose task is registered.
        levels: Standard deviation of the noise, relative to the weights of each matrix.
        n: Problem length.
        examples: Inputs for each model.
        seed: Seed of inputs, rotation and noise.

    Raises:
        InputError: no level, a negative one, or a program cannot be compiled.
    """
    levels = list(levels)
    if not levels or any(not level >= 0 for level in levels):
        raise InputError(
            "levels",
            expected="at least one, none of them negative",
            given=repr(levels),
            fix="Pass e.g. levels=(0.001, 0.01, 0.1).",
        )
    tools = ["probes", "interchange interventions", "heads against selectors", "dynamics"]
    with study(seed, study="robustness", levels=levels, n=n) as watch:
        values, exact_match, names = [], [], []
        for level in track(levels, "levels of noise"):
            hide = [partial(rotate, seed=seed), partial(add_noise, relative=level, seed=seed)]
            models = known_models(
                programs, n=n, examples=examples, disguises=hide, label="", seed=seed
            )
            scores = ground_truth_study(models, tools=tools, seed=seed).data["value"]
            values.append(scores.sel(check=list(_NOISE_CHECKS)).mean("model").values)
            exact_match.append(float(np.mean([_exact_match(known) for known in models])))
            names = [known.name for known in models]
        return Robustness.of(
            watch,
            coords={"noise": levels, "check": list(_NOISE_CHECKS)},
            value=np.stack(values),
            exact_match=np.array(exact_match),
            programs=names,
        )


@torch.no_grad()
def _exact_match(known: KnownModel) -> float:
    logits = known.compiled.model(known.batch.inputs, n_loops=max(known.n_loops, 1))
    targets = known.batch.targets
    return float(((logits.argmax(-1) == targets) | (targets < 0)).all(-1).float().mean())
