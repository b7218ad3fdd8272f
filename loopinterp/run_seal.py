"""The seal of a run: each of its files says which run it is of, and which metrics came before it.

A run is known by the :func:`~loopinterp.results.config_hash` of its ``config.json``. The weights,
the checkpoint, ``made.json`` and every result hold it; weights and checkpoint also hold the number
and SHA-256 of the lines that ``metrics.jsonl`` had when they were written. The lines reach the disk
before the weights do, so that a kill between the two leaves more lines than are sealed, and never
fewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path

from loopinterp.storage import parse_json_object, read_metadata

_RUN, _LINES, _METRICS = "loopinterp.run", "loopinterp.metrics.lines", "loopinterp.metrics.sha256"
NO_LINES = hashlib.sha256(b"").hexdigest()


class Mismatch(Enum):
    """Why a file of a run's folder is not, or may not be, the run's."""

    OTHER_RUN = "other run"
    OTHER_WEIGHTS = "other weights"
    UNKNOWN_MODEL = "unknown model"
    UNSEALED = "unsealed"
    LINES_MISSING = "lines missing"
    LINES_CHANGED = "lines changed"
    STEPS_OUT_OF_ORDER = "steps out of order"
    STEPS_BEYOND = "steps beyond the last"


@dataclass(frozen=True)
class Seal:
    """What a file of tensors says of the run that it is of.

    Attributes:
        run: :func:`~loopinterp.results.config_hash` of the run's ``config.json``.
        n_lines: Lines of ``metrics.jsonl`` before it was written.
        metrics: SHA-256 of these lines.
    """

    run: str
    n_lines: int = 0
    metrics: str = NO_LINES

    def texts(self) -> dict[str, str]:
        """The seal as texts of a safetensors file."""
        return {_RUN: self.run, _LINES: str(self.n_lines), _METRICS: self.metrics}

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Seal | None:
        """The seal that a file's texts hold; None where an earlier version wrote the file."""
        lines = texts.get(_LINES, "")
        # A number of 5,000 digits is none that Python reads, and no file has so many lines.
        if _RUN not in texts or not (lines.isascii() and lines.isdecimal() and len(lines) < 19):
            return None
        return cls(texts[_RUN], int(lines), texts.get(_METRICS, ""))

    @classmethod
    def of_file(cls, path: str | Path) -> Seal | None:
        """The seal of a file of tensors.

        Raises:
            CheckpointError: If it is missing or damaged.
        """
        return cls.of_texts(read_metadata(path))


class LinesDigest:
    """The SHA-256 of the lines that ``metrics.jsonl`` has had so far.

    Args:
        lines: Those that are there.
    """

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._sha256, self.n_lines = hashlib.sha256(), 0
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Count one more line, which is given without its end."""
        self._sha256.update(f"{line}\n".encode(errors="surrogatepass"))
        self.n_lines += 1

    def seal(self, run: str) -> Seal:
        """The seal of what is written now."""
        return Seal(run, self.n_lines, self._sha256.hexdigest())


def check_lines(lines: Sequence[str], seal: Seal | None, *, last: object = None) -> Mismatch | None:
    """Why lines are not those of a run's ``metrics.jsonl``; None if they may be.

    Those that were sealed have the digest. The steps of all go up evenly, those after the last
    checkpoint included, and none is after the run's last step where that is known (``last``).
    """
    n_sealed = 0 if seal is None else seal.n_lines
    if len(lines) < n_sealed:
        return Mismatch.LINES_MISSING
    if seal is not None and LinesDigest(lines[:n_sealed]).seal(seal.run) != seal:
        return Mismatch.LINES_CHANGED
    rows = [parse_json_object(line) for line in lines]
    if None in rows:
        return None  # damaged, as whoever reads them will say
    steps = [row.get("step") for row in rows if row is not None]
    return check_steps(steps, last, even=True)


def check_steps(steps: Sequence[object], last: object, *, even: bool = False) -> Mismatch | None:
    """Why these are not among the steps of a run's lines; None if they may be.

    They are integers that go up, each by as much as the one before if all lines are there
    (``even``), and none is after the run's last step where that is known (``last``).
    """
    whole = [step for step in steps if type(step) is int]
    by = {after - before for before, after in pairwise(whole)}
    if len(whole) < len(steps) or min(by, default=1) <= 0 or (even and len(by) > 1):
        return Mismatch.STEPS_OUT_OF_ORDER
    beyond = isinstance(last, int) and any(step > last for step in whole)
    return Mismatch.STEPS_BEYOND if beyond else None
