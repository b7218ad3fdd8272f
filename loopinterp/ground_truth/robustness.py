"""How much noise on the weights the behaviour stands, and how much each tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.ground_truth.checks import SECTION
from loopinterp.ground_truth.study import ground_truth_study
from loopinterp.ground_truth.subjects import Subject, make_subjects
from loopinterp.rasp.disguises import add_noise, rotate
from loopinterp.results import Figure, Finding, Result, percent, study

if TYPE_CHECKING:
    from loopinterp.rasp.program import LoopProgram

SHOWN = ("probe finds", "interchange", "interchange by probe", "heads found", "answer stable")
"""Checks that noise can spoil, and that are asked of every model."""

SOLVED = 0.99


@dataclass(frozen=True, kw_only=True)
class Robustness(Result):
    """What :func:`robustness_study` returns.

    Attributes:
        value: Score of each check at each level of noise, mean over models.
        behaviour: Exact match of the models, mean.
        levels: Noise on every weight, relative to the weights of its matrix.
        checks: The checks.
        models: The programs.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "value": ("level", "check"),
        "behaviour": ("level",),
    }

    value: np.ndarray
    behaviour: np.ndarray
    levels: list[float]
    checks: list[str]
    models: list[str]

    def figures(self) -> list[Figure]:
        from loopinterp.plotting import Series, line_figure

        lines = [Series(key, self.levels, self.value[:, k]) for k, key in enumerate(self.checks)]
        behaviour = Series("exact match of the model", self.levels, self.behaviour, control=True)
        plot = line_figure(
            [*lines, behaviour],
            x_title="noise on the weights, relative to their size",
            y_title="score",
            y_range=(0, 1.02),
        )
        plot.update_xaxes(type="log", tickvals=self.levels, ticktext=list(map(str, self.levels)))
        return [
            Figure(
                title="How much noise on the weights the tools stand",
                plot=plot,
                caption=(
                    f"The models ({', '.join(self.models)}) are rotated, and noise is put on every "
                    "weight. Compiled values are restored in every layer, so that small noise "
                    "changes nothing; what is found of a circuit must hold as long as the model "
                    "works."
                ),
                control="The model's own exact match: beyond it there is no circuit to be found.",
                data=self.to_frame(),
                section=SECTION,
            )
        ]

    def summary(self) -> list[Finding]:
        """The largest noise at which the models still work, and what the tools say there."""
        works = [k for k, right in enumerate(self.behaviour) if right >= SOLVED]
        if not works:
            return []
        level = max(works, key=lambda k: self.levels[k])
        worst = int(np.nanargmin(self.value[level]))
        text = (
            f"With noise of {percent(self.levels[level])} on every weight the compiled models "
            f"still work, and the tools score at least {self.value[level, worst]:.3g} "
            f"({self.checks[worst]})."
        )
        return [Finding(kind=SECTION, text=text, value="")]


def robustness_study(
    programs: Sequence[str | LoopProgram],
    *,
    levels: Sequence[float] = (0.001, 0.003, 0.01, 0.03, 0.1),
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
    if not levels or any(not level >= 0 for level in levels):
        raise InputError(
            "levels",
            expected="at least one, none of them negative",
            given=repr(list(levels)),
            fix="Pass e.g. levels=(0.001, 0.01, 0.1).",
        )
    tools = ["probes", "interchange interventions", "heads against selectors", "dynamics"]
    with study(seed, study="robustness", levels=list(levels), n=n) as watch:
        values, behaviour, names = [], [], []
        for level in levels:
            hide = [partial(rotate, seed=seed), partial(add_noise, relative=level, seed=seed)]
            subjects = make_subjects(
                programs, n=n, examples=examples, disguises=hide, label="", seed=seed
            )
            result = ground_truth_study(subjects, tools=tools, seed=seed)
            values.append([float(np.nanmean(result.table()[key])) for key in SHOWN])
            behaviour.append(float(np.mean([_exact_match(subject) for subject in subjects])))
            names = result.models
        return Robustness(
            provenance=watch.provenance(),
            value=np.array(values),
            behaviour=np.array(behaviour),
            levels=list(levels),
            checks=list(SHOWN),
            models=names,
        )


@torch.no_grad()
def _exact_match(subject: Subject) -> float:
    logits = subject.compiled.model(subject.batch.inputs, n_loops=max(subject.n_loops, 1))
    targets = subject.batch.targets
    return float(((logits.argmax(-1) == targets) | (targets < 0)).all(-1).float().mean())
