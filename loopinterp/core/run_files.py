"""The files of a run, the run that each belongs to, and notes of how the run was made.

The :func:`~loopinterp.core.results.config_hash` of its ``config.json`` identifies a run in all its
files. Weights and checkpoint also seal the lines of ``metrics.jsonl`` written before them.
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
    read_tensors_and_metadata,
    write_json,
)

if TYPE_CHECKING:
    from loopinterp.core.results import Provenance


_RUN, _LINES, _METRICS = "loopinterp.run", "loopinterp.metrics.lines", "loopinterp.metrics.sha256"


class Mismatch(Enum):
    """Why a file in a run's folder is not, or may not be, the run's."""

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
    """The run that a file of tensors belongs to, and the lines of metrics before it.

    Attributes:
        run: :func:`~loopinterp.core.results.config_hash` of the run's ``config.json``.
        metrics: SHA-256 of the first ``n_lines`` lines of ``metrics.jsonl``.
    """

    run: str
    n_lines: int = 0
    metrics: str = hashlib.sha256(b"").hexdigest()

    def texts(self) -> dict[str, str]:
        return {_RUN: self.run, _LINES: str(self.n_lines), _METRICS: self.metrics}

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Seal | None:
        lines = texts.get(_LINES, "")
        # Python refuses numbers of 5,000 digits, and no file has so many lines.
        if _RUN not in texts or not (lines.isascii() and lines.isdecimal() and len(lines) < 19):
            return None
        return cls(texts[_RUN], int(lines), texts.get(_METRICS, ""))

    @classmethod
    def of_file(cls, path: Path) -> Seal | None:
        """The seal in a safetensors file; None if it is missing or has none."""
        return cls.of_texts(read_tensors_and_metadata(path)[1]) if path.exists() else None


class LinesDigest:
    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._sha256, self.n_lines = hashlib.sha256(), 0
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        self._sha256.update(f"{line}\n".encode(errors="surrogatepass"))
        self.n_lines += 1

    def seal(self, run: str) -> Seal:
        return Seal(run, self.n_lines, self._sha256.hexdigest())


def check_lines(lines: Sequence[str], seal: Seal | None, *, last: object = None) -> Mismatch | None:
    """Why lines are not a run's ``metrics.jsonl``, if so.

    The sealed lines must have the seal's digest; all steps must pass :func:`check_steps`.
    """
    n_sealed = 0 if seal is None else seal.n_lines
    if len(lines) < n_sealed:
        return Mismatch.LINES_MISSING
    if seal is not None and LinesDigest(lines[:n_sealed]).seal(seal.run) != seal:
        return Mismatch.LINES_CHANGED
    rows = [parse_json_object(line) for line in lines]
    if None in rows:
        return None  # damaged, which their reader reports
    steps = [row.get("step") for row in rows if row is not None]
    return check_steps(steps, last, even=True)


def check_steps(steps: Sequence[object], last: object, *, even: bool = False) -> Mismatch | None:
    """Why steps are not those of a run, if so.

    Steps increase up to the run's ``last``, if known; ``even`` steps have no line missing.
    """
    integers = [step for step in steps if type(step) is int]
    by = {after - before for before, after in pairwise(integers)}
    if len(integers) < len(steps) or min(by, default=1) <= 0 or (even and len(by) > 1):
        return Mismatch.STEPS_OUT_OF_ORDER
    beyond = isinstance(last, int) and any(step > last for step in integers)
    return Mismatch.STEPS_BEYOND if beyond else None


def spell_mismatch(mismatch: Mismatch) -> str:
    """A clause to follow the file's name."""
    return {
        Mismatch.OTHER_RUN: "is of a run of another configuration",
        Mismatch.OTHER_WEIGHTS: "is of other weights than the run has now",
        Mismatch.UNKNOWN_MODEL: "does not name its model",
        Mismatch.UNSEALED: "does not name its run, as an earlier version wrote it",
        Mismatch.LINES_MISSING: "has fewer lines than the run wrote",
        Mismatch.LINES_CHANGED: "has other lines than the run wrote",
        Mismatch.STEPS_OUT_OF_ORDER: "has lines whose steps do not go up evenly",
        Mismatch.STEPS_BEYOND: "has lines of later steps than the run has",
    }[mismatch]


CONFIG = "config.json"  # a folder with this file is a run
IN_MEMORY = "in_memory"  # entry of config.json for a model whose weights are elsewhere
MADE = "made.json"


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a run."""
    path = Path(folder) / CONFIG
    if not os.path.isfile(path):  # which takes any name
        got = f"a folder without {CONFIG}" if os.path.isdir(folder) else "no such folder"
        expected = "a folder written by `loopinterp train`, `compile` or `demo`"
        fix = f"Check the path, or train: loopinterp train --task addition --out {folder}"
        raise CheckpointError(f"run {folder}", expected=expected, given=got, fix=fix)
    config = read_json_object(path)
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        expected, got = "whole characters", f"half of one ({error.object[error.start]!a})"
        fix = "Restore it from a copy."
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix) from error
    return config


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that results are saved in, as it is now.

    Attributes:
        config: :func:`~loopinterp.core.results.config_hash` of its ``config.json``.
        weights: SHA-256 of its model's weights, or "".
        seal: Seal of these weights, if any.
    """

    config: str
    weights: str = ""
    seal: Seal | None = field(default=None, compare=False)

    @classmethod
    def of_run(cls, folder: str | Path) -> Owner:
        config = config_hash(read_run_config(folder))
        weights = Path(folder) / "model" / "model.safetensors"
        if not weights.exists():
            return cls(config=config)
        tensors, texts = read_tensors_and_metadata(weights)
        return cls(config=config, weights=digest_tensors(tensors), seal=Seal.of_texts(texts))

    @property
    def mismatch(self) -> Mismatch | None:
        """Why the weights may not belong to the configuration, if so."""
        if not self.weights:
            return None
        if self.seal is None:
            return Mismatch.UNSEALED
        return Mismatch.OTHER_RUN if self.seal.run != self.config else None

    def disowns(self, provenance: Provenance) -> Mismatch | None:
        """Why a result is not this run's, if so."""
        if provenance.run not in ("", self.config):
            return Mismatch.OTHER_RUN
        if not (provenance.run or provenance.weights):
            return Mismatch.UNKNOWN_MODEL
        if provenance.weights and self.weights and self.weights not in provenance.weights:
            return Mismatch.OTHER_WEIGHTS
        return None

    def disowns_note(self, note: Mapping[str, Any]) -> Mismatch | None:
        """The same for a note of ``made.json``."""
        run, weights = note.get("run"), note.get("weights")
        if run is None or weights is None:
            return Mismatch.UNSEALED
        if run != self.config:
            return Mismatch.OTHER_RUN
        return Mismatch.OTHER_WEIGHTS if weights != self.weights else None


def record_how_it_was_made(
    run: Path,
    *,
    command: str | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    skipped: Mapping[str, str] = MappingProxyType({}),
    owner: Owner | None = None,
) -> None:
    """Add to a run's ``made.json``: command, seconds by stage, versions, machine.

    Notes of another configuration are dropped.

    Args:
        command: The command that makes it again; None keeps the earlier one.
        seconds: Stage -> seconds.
        skipped: Skipped study -> reason.
        owner: The run as it is now; read from its folder if None.
    """
    path = run / MADE
    with in_turn(run):  # of two commands at once, neither undoes the other's notes
        if owner is None and (run / CONFIG).is_file():
            owner = (
                Owner.of_run(run) if skipped else Owner(config=config_hash(read_run_config(run)))
            )
        try:
            notes = read_json_object(path) if path.exists() else {}
        except CheckpointError:
            notes = {}
        if owner is not None and notes.get("run", owner.config) != owner.config:
            notes = {}
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
        packages = ("torch", "transformer-lens", "numpy", "scikit-learn")
        notes["versions"] = {"loopinterp": __version__, "python": platform.python_version()}
        notes["versions"] |= {package: version(package) for package in packages}
        notes["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        write_json(path, notes)


def record_training(run: Path, seconds: float) -> None:
    command = f"loopinterp train --config {shlex.quote(str(run / CONFIG))} --out NEW"
    record_how_it_was_made(run, command=command, seconds={"train": seconds})
