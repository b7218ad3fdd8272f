"""How much noise on the weights the behaviour stands, and how much each tool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.benchmark.ground_truth_study import ground_truth_study
from loopinterp.benchmark.known_models import KnownModel, known_models
from loopinterp.errors import InputError
from loopinterp.progress import track
from loopinterp.rasp.disguises import add_noise, rotate
from loopinterp.results import Result, study

if TYPE_CHECKING:
    from loopinterp.rasp.program import LoopProgram

SHOWN = ("probe finds", "interchange", "interchange by probe", "heads found", "answer stable")
"""Checks that noise can spoil, and that are asked of every model."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Robustness(Result, kind="noise-robustness"):
    """What :func:`robustness_study` returns.

    Arrays (``noise``: on every weight, relative to the weights of its matrix):
        value: Score of each check at each level of noise, mean over models.
        exact_match: Of the models, mean.

    Attributes:
        programs: What the models run.
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
            values.append(scores.sel(check=list(SHOWN)).mean("model").values)
            exact_match.append(float(np.mean([_exact_match(known) for known in models])))
            names = [known.name for known in models]
        return Robustness.of(
            watch,
            coords={"noise": levels, "check": list(SHOWN)},
            value=np.stack(values),
            exact_match=np.array(exact_match),
            programs=names,
        )


@torch.no_grad()
def _exact_match(known: KnownModel) -> float:
    logits = known.compiled.model(known.batch.inputs, n_loops=max(known.n_loops, 1))
    targets = known.batch.targets
    return float(((logits.argmax(-1) == targets) | (targets < 0)).all(-1).float().mean())
