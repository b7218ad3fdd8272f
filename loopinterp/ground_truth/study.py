"""Every tool of the library on models whose circuit is known: does it find what is there?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loopinterp.errors import InputError, unknown_name
from loopinterp.ground_truth.attention import score_heads
from loopinterp.ground_truth.checks import CHECKS, Score
from loopinterp.ground_truth.dynamics import score_dynamics
from loopinterp.ground_truth.interventions import score_interchange, score_patching
from loopinterp.ground_truth.probes import score_probes
from loopinterp.ground_truth.result import GroundTruth
from loopinterp.ground_truth.subjects import Subject
from loopinterp.ground_truth.verdicts import score_verdict
from loopinterp.ground_truth.wavefront import score_wavefront
from loopinterp.results import study

SCORERS: dict[str, Callable[..., dict[str, Score]]] = {
    "probes": score_probes,
    "interchange interventions": score_interchange,
    "heads against selectors": score_heads,
    "patching sweeps": score_patching,
    "dynamics": score_dynamics,
    "carry study": score_wavefront,
    "comparison of programs": score_verdict,
}
"""Tool -> how it is scored on one model."""


def ground_truth_study(
    subjects: Sequence[Subject],
    *,
    tools: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> GroundTruth:
    """Score tools on compiled models, by questions whose answers are known.

    :data:`loopinterp.ground_truth.CHECKS` lists the questions, the control of each, and the score
    that passes. A question that a model cannot be asked is NaN: a program without variables that
    change, a head whose selector selects nothing, the verdict on a task other than addition.

    Args:
        subjects: Models with their inputs, from :func:`make_subjects`.
        tools: Tools to score; by default all.
        seed: Seed of the tools.
        progress: Called with the name of each model before it is scored.

    Raises:
        InputError: no subject, two of one name, no tool, or an unknown one.

    Example:
        >>> from loopinterp.ground_truth import make_subjects
        >>> subjects = make_subjects(["prefix_xor"], n=4, examples=64)
        >>> result = ground_truth_study(subjects, tools=["interchange interventions"])
        >>> result.score("prefix_xor", "interchange")
        1.0
    """
    if isinstance(subjects, Subject) or not all(isinstance(s, Subject) for s in subjects):
        raise InputError(
            "subjects",
            expected="a list of subjects",
            given=type(subjects).__name__,
            fix="Make them with make_subjects(['ripple']).",
        )
    names = [subject.name for subject in subjects]
    if not names or len(set(names)) < len(names):
        raise InputError(
            "subjects",
            expected="at least one, each of another name",
            given=", ".join(names) or "none",
            fix="Give each program once, or tell disguises apart with make_subjects(label=...).",
        )
    if isinstance(tools, str) or (tools is not None and not len(tools)):
        raise InputError(
            "tools",
            expected=f"a list of tools: {', '.join(SCORERS)}",
            given=repr(tools),
            fix="Leave it out for all of them.",
        )
    chosen = list(SCORERS) if tools is None else list(tools)
    for tool in chosen:
        if tool not in SCORERS:
            raise unknown_name("tool", tool, SCORERS)
    about = {"study": "ground truth", "models": names, "tools": chosen}
    with study(seed, **about) as watch:
        rows = []
        for subject in subjects:
            progress(subject.name)
            found: dict[str, Score] = {}
            for tool in chosen:
                found.update(SCORERS[tool](subject, seed=seed))
            rows.append([found.get(check.key, Score(float("nan"))) for check in CHECKS])
        return GroundTruth(
            provenance=watch.provenance(),
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            models=names,
            programs=[subject.compiled.program.name for subject in subjects],
            disguises=[list(subject.compiled.circuit.disguises) for subject in subjects],
            checks=[check.key for check in CHECKS],
        )
