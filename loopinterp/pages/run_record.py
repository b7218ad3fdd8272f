"""What the report needs of a run folder: JSON and saved results, no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from loopinterp.core.errors import CheckpointError
from loopinterp.core.results import Result, config_hash, load_result, result_files
from loopinterp.core.run_files import (
    Mismatch,
    Owner,
    Seal,
    check_lines,
    check_steps,
    read_run_config,
    spell_mismatch,
)
from loopinterp.core.storage import parse_json_object, read_bytes, read_json_object
from loopinterp.core.text import ShortRepr, printable


class Trouble(Enum):
    """What is wrong with a file of a run or a figure, as a sentence for the page."""

    WEIGHTS_UNREADABLE = (
        "The model's weights cannot be read, so it is not known whether the results are of them. "
        "{detail}"
    )
    WEIGHTS_DOUBTED = (
        "The weights' file {detail}. Nothing shows that the model is the one that the "
        "configuration describes."
    )
    RESULT_UNREADABLE = "{name} cannot be read and is not shown. {detail}"
    RESULT_DISOWNED = "{name} {detail} and is not shown. Run the study again."
    RESULT_VALUES = "{name} has values that cannot be shown ({detail}). Run the study again."
    CIRCUIT_VALUES = (
        "{name} has values that cannot be shown in a circuit ({detail}). Run the study again."
    )
    FIGURE_VALUES = "The figure {name!r} has values that cannot be shown ({detail})."
    NOT_DRAWN = "The {name} cannot be drawn ({detail})."
    FILE_DOUBTED = "{name} {detail}."
    FILE_DISOWNED = "{name} {detail} and is left out."
    METRICS_UNREADABLE = "metrics.jsonl cannot be read ({detail}) and is left out."
    METRICS_OF_OTHER_RUN = "metrics.jsonl may be of that other run too and is left out."
    LINE_DAMAGED = "Line {name} of metrics.jsonl is damaged and left out."
    LINES_UNCHECKED = (
        "As a line is damaged, the other lines of metrics.jsonl cannot be checked: they may be of "
        "another run."
    )
    MADE_UNREADABLE = "made.json is no JSON object and is left out."
    ENTRY_DAMAGED = "Entry {name!r} of made.json is damaged and left out."
    SKIPS_DISOWNED = (
        "What made.json says of skipped studies ({name}) {detail} and is not shown. Run "
        "`loopinterp analyze` again."
    )


@dataclass(frozen=True)
class Problem:
    """Trouble with a part of a run: the name of the part, and why."""

    trouble: Trouble
    name: str = ""
    detail: Mismatch | str = ""


def spell_problem(problem: Problem) -> str:
    """The sentence for a page.

    Example:
        >>> spell_problem(Problem(Trouble.LINE_DAMAGED, "3"))
        'Line 3 of metrics.jsonl is damaged and left out.'
    """
    why = problem.detail
    detail = spell_mismatch(why) if isinstance(why, Mismatch) else why
    return problem.trouble.value.format(name=problem.name, detail=detail)


@contextmanager
def noting(problems: list[Problem], trouble: Trouble, name: str) -> Iterator[None]:
    """Add whatever a damaged value raises in our code, xarray's, pandas' or Plotly's."""
    try:
        yield
    except Exception as error:
        problems.append(Problem(trouble, name, type(error).__name__))


@dataclass(frozen=True, kw_only=True, repr=False)
class RunRecord(ShortRepr):
    """A run, read from its folder.

    Attributes:
        config: ``config.json``; empty without a run.
        metrics: Lines of ``metrics.jsonl``.
        results: Saved results by file name.
        made: ``made.json``, all keys optional: ``command``, ``stages`` (seconds by name),
            ``unsaid`` (reasons of skipped studies), ``versions``, ``machine``.
        problems: What could not be read.
        weights: SHA-256 of the weights, or "".
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    results: Mapping[str, Result] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    weights: str = ""
    n_parameters: int | None = None

    @property
    def is_run(self) -> bool:
        """Whether the results belong to a model of a run."""
        return bool(self.config)

    @property
    def origin(self) -> str:
        """Where a model that was not trained in the run comes from, or ""."""
        return str(self.config.get("origin", ""))

    @property
    def skipped(self) -> Mapping[str, str]:
        """Skipped studies, each with the reason as a clause."""
        return self.made.get("unsaid", {})

    @property
    def task(self) -> str:
        """Name of the task; "" if unknown."""
        task = self.config.get("task", "")
        return str(task.get("name", "") if isinstance(task, Mapping) else task)

    @property
    def depth(self) -> int | None:
        """The number of loops, if it is the same at every length."""
        objective = self.config.get("objective")
        trained = objective.get("n_loops") if isinstance(objective, Mapping) else None
        depth = self.config.get("depth", trained)
        return depth if isinstance(depth, int) else None

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Wall time by stage, or else of each study."""
        # Runs without made.json know the times of their studies alone.
        of_studies = {name: result.provenance.wall_time for name, result in self.results.items()}
        return self.made.get("stages") or of_studies


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder.

    A damaged file becomes a problem of the record. Results of other weights are left out.

    Raises:
        CheckpointError: If the folder is not a run, or its ``config.json`` is damaged.
    """
    folder = Path(folder)
    problems: list[Problem] = []
    config = read_run_config(folder)
    try:
        owner = Owner.of_run(folder)
    except CheckpointError as error:
        problems.append(Problem(Trouble.WEIGHTS_UNREADABLE, detail=error.fix))
        owner = Owner(config=config_hash(config))
    if owner.mismatch:
        problems.append(Problem(Trouble.WEIGHTS_DOUBTED, detail=owner.mismatch))
    last = config.get("steps", 0)  # a model that was not trained here has no line
    metrics = _read_metrics(folder / "metrics.jsonl", owner, last, problems)
    results: dict[str, Result] = {}
    for path in result_files(folder / "results"):
        try:
            result = load_result(path)
        except CheckpointError as error:
            problems.append(Problem(Trouble.RESULT_UNREADABLE, path.name, error.fix))
            continue
        if mismatch := owner.disowns(result.provenance):
            problems.append(Problem(Trouble.RESULT_DISOWNED, path.name, mismatch))
        else:
            results[path.stem] = result
    notes = _read_made(folder / "made.json", owner, problems)
    n_parameters, weights = None, folder / "model" / "model.safetensors"
    if weights.is_file():  # no model in memory, nor a pipe, which would never end
        # A file that cannot be read is a problem already.
        with suppress(OSError, SafetensorError), safe_open(weights, "np") as file:
            names = file.keys()  # a file is no mapping
            n_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return RunRecord(
        name=printable(folder.resolve().name),
        config=config,
        metrics=metrics,
        # What an earlier version said all the same is no longer said.
        results={name: x for name, x in results.items() if name not in notes.get("unsaid", {})},
        made=notes,
        problems=problems,
        weights=owner.weights,
        n_parameters=n_parameters,
    )


def _read_metrics(
    path: Path, owner: Owner, last: object, problems: list[Problem]
) -> list[dict[str, Any]]:
    seal = _lines_seal(path.parent, owner)
    if not path.is_file():
        if seal is not None and seal.n_lines:
            problems.append(Problem(Trouble.FILE_DOUBTED, path.name, Mismatch.LINES_MISSING))
        return []
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except CheckpointError as error:
        problems.append(Problem(Trouble.METRICS_UNREADABLE, detail=error.given))
        return []
    rows, n_sound = [], len(lines)
    for number, line in enumerate(lines, start=1):
        row = parse_json_object(line)
        if row is not None and _maps_names_to(_is_number, row):
            rows.append(row)
        else:
            n_sound = min(n_sound, number - 1)
            problems.append(Problem(Trouble.LINE_DAMAGED, str(number)))
    # The digest is of all sealed lines: with one of them damaged it says nothing of the others.
    checked = n_sound == len(lines) or (seal is not None and seal.n_lines <= n_sound)
    mismatch = check_lines(lines[:n_sound], seal, last=last) if checked else None
    mismatch = mismatch or check_steps([row.get("step") for row in rows], last)
    if mismatch:
        problems.append(Problem(Trouble.FILE_DISOWNED, path.name, mismatch))
        return []
    if lines and seal is None and owner.mismatch is Mismatch.OTHER_RUN:
        # Nothing of the run is there that says which lines it wrote.
        problems.append(Problem(Trouble.METRICS_OF_OTHER_RUN))
        return []
    if seal is not None and not checked:
        problems.append(Problem(Trouble.LINES_UNCHECKED))
    return rows


def _lines_seal(folder: Path, owner: Owner) -> Seal | None:
    """The seal of the run's metrics: its weights', or else its checkpoint's."""
    if owner.seal is not None and owner.mismatch is None:
        return owner.seal
    checkpoint = folder / "state" / "checkpoint.safetensors"
    try:
        seal = Seal.of_file(checkpoint) if checkpoint.is_file() else None
    except CheckpointError:
        return None
    return seal if seal is not None and seal.run == owner.config else None


def _read_made(path: Path, owner: Owner, problems: list[Problem]) -> dict[str, Any]:
    """The entries of ``made.json`` that have the right types and belong to this run."""
    if not path.is_file():
        return {}
    try:
        notes = read_json_object(path)
    except CheckpointError:
        problems.append(Problem(Trouble.MADE_UNREADABLE))
        return {}
    if notes.get("run", owner.config) != owner.config:
        problems.append(Problem(Trouble.FILE_DISOWNED, path.name, Mismatch.OTHER_RUN))
        return {}
    if "run" not in notes and owner.mismatch is not Mismatch.UNSEALED:  # said once of the run
        problems.append(Problem(Trouble.FILE_DOUBTED, path.name, Mismatch.UNSEALED))
    notes.pop("run", None)
    is_right = {
        "stages": lambda value: _maps_names_to(_is_number, value),
        "versions": lambda value: _maps_names_to(_is_text, value),
        "unsaid": lambda value: _maps_names_to(_is_text_or_reason, value),
    }
    entries = {name: x for name, x in notes.items() if is_right.get(name, _is_text)(x)}
    left_out = sorted(notes.keys() - entries.keys())
    problems.extend(Problem(Trouble.ENTRY_DAMAGED, name) for name in left_out)
    if "unsaid" in entries:
        # Why studies were skipped, as far as it was written of the weights that the run has now.
        reasons: dict[str, str] = {}
        dropped: dict[Mismatch, list[str]] = {}
        for name, note in entries["unsaid"].items():
            note = note if isinstance(note, dict) else {}
            if mismatch := owner.disowns_note(note):
                dropped.setdefault(mismatch, []).append(name)
            else:
                reasons[name] = note["reason"]
        problems.extend(
            Problem(Trouble.SKIPS_DISOWNED, ", ".join(names), mismatch)
            for mismatch, names in dropped.items()
        )
        entries["unsaid"] = reasons
    return entries


def _is_text_or_reason(note: Any) -> bool:
    """Whether it is text, or a reason with the run and weights that it belongs to."""
    return _is_text(note) or (_maps_names_to(_is_text, note) and "reason" in note)


def _maps_names_to(kind: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value)) and all(map(kind, value.values()))


def _is_text(value: Any) -> bool:
    """Whether it is text that a page can hold; JSON may contain half a character."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _is_number(value: Any) -> bool:
    """Whether it can be drawn and added; JSON may contain infinity and huge integers."""
    try:
        return isinstance(value, (int, float)) and math.fabs(value) < 1e300
    except OverflowError:
        return False
