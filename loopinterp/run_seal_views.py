"""Why a file is not its run's, in words."""

from __future__ import annotations

from loopinterp.run_seal import Mismatch

_CLAUSES = {
    Mismatch.OTHER_RUN: "is of a run of another configuration",
    Mismatch.OTHER_WEIGHTS: "is of other weights than the run has now",
    Mismatch.UNKNOWN_MODEL: "does not say which model it is of",
    Mismatch.UNSEALED: "does not say which run it is of, as an earlier version wrote it",
    Mismatch.LINES_MISSING: "has fewer lines than the run wrote",
    Mismatch.LINES_CHANGED: "has other lines than the run wrote",
    Mismatch.STEPS_OUT_OF_ORDER: "has lines whose steps do not go up evenly",
    Mismatch.STEPS_BEYOND: "has lines of later steps than the run has",
}


def spell_mismatch(mismatch: Mismatch) -> str:
    """A clause that goes on after the name of the file."""
    return _CLAUSES[mismatch]
