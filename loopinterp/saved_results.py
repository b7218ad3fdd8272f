"""Reading any saved result: the kinds of result there are, and where each is defined."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from loopinterp.errors import CheckpointError
from loopinterp.results import SUFFIX, Result, kind_of, known_kinds

KINDS = {
    "activation-patching": "loopinterp.circuits.activation_patching_result",
    "attention": "loopinterp.lenses.attention_by_loop",
    "attention-stabilisation": "loopinterp.dynamics.attention_stabilisation",
    "carry": "loopinterp.probing.carry_wavefront_result",
    "convergence": "loopinterp.dynamics.convergence",
    "decodability": "loopinterp.circuits.variable_decodability",
    "evaluation": "loopinterp.training.evaluation",
    "extrapolation": "loopinterp.dynamics.extrapolation",
    "false-names": "loopinterp.ground_truth.false_names",
    "ground-truth": "loopinterp.ground_truth.ground_truth_study",
    "head-match": "loopinterp.circuits.head_matching",
    "noise-robustness": "loopinterp.ground_truth.noise_robustness",
    "planted-carry": "loopinterp.circuits.planted_carry",
    "probes": "loopinterp.probing.probe_grid",
    "program-comparison": "loopinterp.circuits.program_comparison",
    "subspace-search": "loopinterp.circuits.subspace_search",
    "variable-interchange": "loopinterp.circuits.variable_interchange",
    "worked-example": "loopinterp.lenses.worked_example",
}
"""Each kind of result of the package -> the module that defines it."""


def load_result(path: str | Path) -> Result:
    """Read any saved result; nothing is unpickled, and no name in the file is imported.

    Raises:
        CheckpointError: If the file is missing or damaged, or of a kind that is not known here.
    """
    kind = kind_of(path)
    if kind not in known_kinds() and kind in KINDS:
        importlib.import_module(KINDS[kind])
    cls = known_kinds().get(kind)
    if cls is None:
        raise CheckpointError(
            f"result {path}",
            expected=f"one of the kinds {', '.join(sorted({*KINDS, *known_kinds()}))}",
            given=f"the kind {kind!r}",
            fix="Run the study again with this version, or import the package that defines it.",
        )
    return cls.load(path)


def result_files(folder: str | Path) -> Iterator[Path]:
    """The saved results in a folder, in alphabetical order."""
    return iter(sorted(Path(folder).glob(f"*{SUFFIX}")))
