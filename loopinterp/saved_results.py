"""Reading any saved result: the kinds of result there are, and where each is defined."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from loopinterp.errors import CheckpointError
from loopinterp.results import SUFFIX, Result, kind_of, known_kinds

MODULES = (
    "loopinterp.circuits.comparison",
    "loopinterp.circuits.decoding",
    "loopinterp.circuits.heads",
    "loopinterp.dynamics.attention",
    "loopinterp.dynamics.convergence",
    "loopinterp.dynamics.extrapolation",
    "loopinterp.lenses.attention",
    "loopinterp.probing.carry_result",
    "loopinterp.probing.grid_result",
    "loopinterp.training.evaluation",
)
"""The modules that define results."""


def load_result(path: str | Path) -> Result:
    """Read any saved result; nothing is unpickled, and no name in the file is imported.

    Raises:
        CheckpointError: If the file is missing or damaged, or of a kind that is not known here.
    """
    kind = kind_of(path)
    if kind not in known_kinds():
        for module in MODULES:
            importlib.import_module(module)
    cls = known_kinds().get(kind)
    if cls is None:
        raise CheckpointError(
            f"result {path}",
            expected=f"one of the kinds {', '.join(sorted(known_kinds()))}",
            given=f"the kind {kind!r}",
            fix="Run the study again with this version, or import the package that defines it.",
        )
    return cls.load(path)


def result_files(folder: str | Path) -> Iterator[Path]:
    """The saved results in a folder, in alphabetical order."""
    return iter(sorted(Path(folder).glob(f"*{SUFFIX}")))
