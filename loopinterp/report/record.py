"""What a run folder holds, as the report needs it: JSON and saved results, never a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopinterp.errors import CheckpointError, InputError
from loopinterp.results import Result, load_result
from loopinterp.storage import read_json


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, read from its folder.

    Attributes:
        name: Name of the folder.
        config: ``config.json``.
        metrics: The lines of ``metrics.jsonl``.
        results: Saved results by file name, in alphabetical order.
        made: ``made.json``: ``command``, ``stages`` (seconds by name), ``versions``, ``machine``;
            all optional.
        problems: What could not be read, one sentence each; the report says so.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    results: Mapping[str, Result] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder; a damaged result becomes a problem of the record, not an error.

    Raises:
        InputError: If the folder is not a run.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"run {folder}",
            expected="a folder written by `loopinterp train` or `loopinterp demo`",
            given="a folder without config.json" if folder.is_dir() else "no such folder",
            fix="Check the path, or train a model there first.",
        )
    problems: list[str] = []
    results: dict[str, Result] = {}
    for path in sorted((folder / "results").glob("*.json")):
        try:
            results[path.stem] = load_result(path)
        except CheckpointError as error:
            problems.append(f"{path.name} cannot be read and is not shown. {error.fix}")
    made = folder / "made.json"
    return RunRecord(
        name=folder.resolve().name,
        config=read_json(folder / "config.json"),
        metrics=_read_metrics(folder / "metrics.jsonl", problems),
        results=results,
        made=read_json(made) if made.is_file() else {},
        problems=problems,
    )


def _read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            problems.append(f"Line {number} of metrics.jsonl is damaged and left out.")
    return rows
