"""The files of a run, each of which says which run it is of; and the notes of how it was made.

A run is known by the :func:`~loopinterp.core.results.config_hash` of its ``config.json``. The
weights, the checkpoint, ``made.json`` and every result hold it; weights and checkpoint also hold
the number and SHA-256 of the lines that ``metrics.jsonl`` had when they were written. The lines
reach the disk before the weights do, so that a kill between the two leaves more lines than are
sealed, and never fewer.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loopinterp import __version__
from loopinterp.core.errors import CheckpointError
from loopinterp.core.results import config_hash
from loopinterp.core.storage import (
    digest_tensors,
    in_turn,
    parse_json_object,
    read_json_object,
    read_metadata,
    read_tensors_and_metadata,
    write_json,
)

if TYPE_CHECKING:
    from loopinterp.core.results import Provenance


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
        run: :func:`~loopinterp.core.results.config_hash` of the run's ``config.json``.
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
    integers = [step for step in steps if type(step) is int]
    by = {after - before for before, after in pairwise(integers)}
    if len(integers) < len(steps) or min(by, default=1) <= 0 or (even and len(by) > 1):
        return Mismatch.STEPS_OUT_OF_ORDER
    beyond = isinstance(last, int) and any(step > last for step in integers)
    return Mismatch.STEPS_BEYOND if beyond else None


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


CONFIG = "config.json"
"""The file that makes a folder a run."""


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """What the ``config.json`` of a run holds.

    Raises:
        CheckpointError: If the folder holds no run, or the file is damaged or spells half a
            character, which no page and no table can hold.
    """
    path = Path(folder) / CONFIG
    if not os.path.isfile(path):  # which takes any name
        raise CheckpointError(
            f"run {folder}",
            expected="a folder written by `loopinterp train`, `compile` or `demo`",
            given=f"a folder without {CONFIG}" if os.path.isdir(folder) else "no such folder",
            fix=f"Check the path, or train: loopinterp train --task addition --out {folder}",
        )
    config = read_json_object(path)
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"file {path}",
            expected="text of whole characters",
            given=f"half of one ({error.object[error.start]!a})",
            fix="Restore it from a copy.",
        ) from error
    return config


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that results are saved in, as it is now.

    Attributes:
        config: :func:`~loopinterp.core.results.config_hash` of its ``config.json``.
        weights: SHA-256 of its model's weights; "" where it has none.
        seal: What its model's weights say of the run that they are of; None where they say
            nothing, as those that an earlier version wrote.
    """

    config: str
    weights: str = ""
    seal: Seal | None = field(default=None, compare=False)

    @classmethod
    def of_run(cls, folder: str | Path) -> Owner:
        """Read it from the files of a run.

        Raises:
            CheckpointError: If a file is damaged, or there is no configuration.
        """
        config = config_hash(read_run_config(folder))
        weights = Path(folder) / "model" / "model.safetensors"
        if not weights.exists():
            return cls(config=config)
        tensors, texts = read_tensors_and_metadata(weights)
        return cls(config=config, weights=digest_tensors(tensors), seal=Seal.of_texts(texts))

    @property
    def mismatch(self) -> Mismatch | None:
        """Why the weights are not, or may not be, those of the configuration; None if they are."""
        if not self.weights:
            return None
        if self.seal is None:
            return Mismatch.UNSEALED
        return Mismatch.OTHER_RUN if self.seal.run != self.config else None

    def disowns(self, provenance: Provenance) -> Mismatch | None:
        """Why a result is not this run's; None if it is.

        Example:
            >>> from loopinterp.core.results import Provenance
            >>> owner = Owner(config="f00d", weights="cafe")
            >>> owner.disowns(Provenance(seed=0, config={"model": {"weights_sha256": "cafe"}}))
            >>> owner.disowns(Provenance(seed=0, config={"model": {"weights_sha256": "beef"}}))
            <Mismatch.OTHER_WEIGHTS: 'other weights'>
        """
        if provenance.run not in ("", self.config):
            return Mismatch.OTHER_RUN
        if not (provenance.run or provenance.weights):
            return Mismatch.UNKNOWN_MODEL
        if provenance.weights and self.weights and self.weights not in provenance.weights:
            return Mismatch.OTHER_WEIGHTS
        return None

    def disowns_note(self, note: Mapping[str, Any]) -> Mismatch | None:
        """Why a note of ``made.json`` with ``run`` and ``weights`` is not this run's.

        Returns:
            None if it is.
        """
        run, weights = note.get("run"), note.get("weights")
        if run is None or weights is None:
            return Mismatch.UNSEALED
        if run != self.config:
            return Mismatch.OTHER_RUN
        return Mismatch.OTHER_WEIGHTS if weights != self.weights else None


MADE = "made.json"

_PACKAGES = ("torch", "transformer-lens", "numpy", "scikit-learn")


def record_how_it_was_made(
    run: Path,
    *,
    command: str | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    skipped: Mapping[str, str] = MappingProxyType({}),
    owner: Owner | None = None,
) -> None:
    """Keep in the run how it was made: command, seconds by stage, versions, machine.

    What is there of another configuration is dropped.

    Args:
        run: The run's folder.
        command: What makes it again; None leaves what is there.
        seconds: Times of the stages just done, added to those of earlier ones.
        skipped: Studies that do not apply to this model, each with the reason in words.
        owner: The run as it is now; read from its folder if None.
    """
    path = run / MADE
    with in_turn(run):  # of two commands at once, neither undoes what the other notes
        if owner is None and (run / CONFIG).is_file():
            owner = (
                Owner.of_run(run) if skipped else Owner(config=config_hash(read_run_config(run)))
            )
        notes = _notes(path, owner)
        if command is not None:
            notes["command"] = command
        if owner is not None:
            notes["run"] = owner.config
        sealed = {} if owner is None else {"run": owner.config, "weights": owner.weights}
        reasons = {name: {"reason": reason, **sealed} for name, reason in skipped.items()}
        for name, added in (("stages", seconds), ("unsaid", reasons)):
            earlier = notes.get(name)
            notes[name] = (earlier if isinstance(earlier, dict) else {}) | dict(added)
        notes["unsaid"] = {k: why for k, why in notes["unsaid"].items() if k not in seconds}
        notes["versions"] = {"loopinterp": __version__, "python": platform.python_version()} | {
            package: version(package) for package in _PACKAGES
        }
        notes["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        write_json(path, notes)


def _notes(path: Path, owner: Owner | None) -> dict[str, Any]:
    """What was noted of the run before; nothing of what can no longer be read."""
    try:
        notes = read_json_object(path) if path.exists() else {}
    except CheckpointError:
        return {}
    other = owner is not None and notes.get("run", owner.config) != owner.config
    return {} if other else notes


def record_training(run: Path, seconds: float) -> None:
    """Keep in a run that its own configuration makes it again, and how long that takes."""
    command = f"loopinterp train --config {shlex.quote(str(run / CONFIG))} --out NEW"
    record_how_it_was_made(run, command=command, seconds={"train": seconds})
