"""From a run folder to one HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.report.assets import (
    Download,
    asset,
    figure_json,
    plotly_script,
    slug,
    table_download,
)
from loopinterp.report.made import made_figures, seconds, setting_groups, stage_seconds
from loopinterp.report.record import RunRecord, read_run
from loopinterp.report.sections import SECTIONS, Section
from loopinterp.results import Figure, Finding
from loopinterp.storage import write_bytes

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class FigureView:
    """A figure as the template shows it."""

    anchor: str
    figure: Figure
    json: Markup
    download: Download | None


@dataclass(frozen=True)
class SectionView:
    """A section as the template shows it."""

    section: Section
    findings: list[Finding]
    figures: list[FigureView]

    @property
    def is_missing(self) -> bool:
        return not self.findings and not self.figures


def write_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run: one file, with everything it needs inside.

    Args:
        run_folder: A folder with ``config.json``, ``metrics.jsonl`` and ``results/``.
        out: The file to write; ``RUN/report.html`` by default.

    Returns:
        The file that was written.

    Raises:
        InputError: If the folder is not a run, or the file cannot be written.
    """
    out = Path(out) if out is not None else Path(run_folder) / "report.html"
    write_bytes(out, render_report(read_run(run_folder)).encode())
    return out


def render_report(record: RunRecord) -> str:
    """The report of a run as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("loopinterp.report"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seconds"] = lambda value: tidy(seconds(value))
    environment.filters["tidy"] = tidy
    environment.globals["asset"] = asset
    return environment.get_template("report.html.j2").render(**_context(record))


def tidy(text: str) -> str:
    """Keep a number and its unit on one line.

    Example:
        >>> tidy("95 % in 3 min 4 s") == "95\\u00a0% in 3\\u00a0min 4\\u00a0s"
        True
    """
    return re.sub(r"(?<=\d) (?=(%|s|min|h|bits|loops)\b|%)", "\u00a0", text)


def _context(record: RunRecord) -> dict[str, Any]:
    figures = [figure for result in record.results.values() for figure in result.figures()]
    findings = [finding for result in record.results.values() for finding in result.summary()]
    sections = [_section_view(section, findings, figures) for section in SECTIONS]
    other = _other(findings, figures)
    if other is not None:
        sections.append(other)
    verdicts = [finding for finding in findings if finding.kind == "verdict"]
    stages = stage_seconds(record)
    return {
        "record": record,
        "title": f"{_task_title(record.config)}, opened loop by loop",
        "facts": _facts(record.config),
        "verdicts": verdicts,
        "tiles": [tile for view in sections if (tile := _tile(view)) is not None],
        "sections": sections,
        "made_figures": _figure_views(made_figures(record)),
        "settings": setting_groups(record.config),
        "command": record.made.get("command"),
        "versions": _versions(record),
        "total_seconds": sum(stages.values()),
        "machine": record.made.get("machine"),
        "plotly_script": plotly_script(),
    }


def _section_view(section: Section, findings: list[Finding], figures: list[Figure]) -> SectionView:
    # The verdict is said in the summary, and again where its evidence is.
    kinds = {section.key, "verdict"} if section.key == "program" else {section.key}
    return SectionView(
        section,
        [finding for finding in findings if finding.kind in kinds],
        _figure_views(figure for figure in figures if figure.section == section.key),
    )


def _other(findings: list[Finding], figures: list[Figure]) -> SectionView | None:
    """What belongs to no section of ours (a study of someone else's) is shown all the same."""
    known = {section.key for section in SECTIONS} | {"verdict"}
    left = [finding for finding in findings if finding.kind not in known]
    drawn = _figure_views(figure for figure in figures if figure.section not in known)
    if not left and not drawn:
        return None
    section = Section(
        key="other",
        title="Other studies",
        short="Other studies",
        question="What else was measured?",
        intro="",
        missing="",
    )
    return SectionView(section, left, drawn)


def _figure_view(figure: Figure, number: int) -> FigureView:
    anchor = f"{figure.section}-{number}-{slug(figure.title)}"
    table = figure.data
    download = None if table is None else table_download(table, anchor)
    return FigureView(anchor, figure, figure_json(figure.plot), download)


def _figure_views(figures: Iterable[Figure]) -> list[FigureView]:
    return [_figure_view(figure, number) for number, figure in enumerate(figures, start=1)]


def _tile(view: SectionView) -> tuple[Section, Finding] | None:
    """The first finding of a section that has a number or a name to show large."""
    for finding in view.findings:
        if finding.value and finding.kind != "verdict":
            return view.section, finding
    return None


def _task_title(config: Mapping[str, Any]) -> str:
    task = _task_name(config)
    return f"A looped transformer on {task}" if task else "A looped transformer"


def _task_name(config: Mapping[str, Any]) -> str:
    task = config.get("task", "")
    name = task.get("name", "") if isinstance(task, Mapping) else task
    return str(name).replace("_", " ")


def _facts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What to know about the model at a glance, as far as the configuration says it."""
    model, curriculum = config.get("model", {}), config.get("curriculum", {})
    n_layers = model.get("n_layers")
    facts = [
        ("Block", f"{n_layers} layer{'s' if n_layers != 1 else ''}, looped" if n_layers else None),
        ("Width (d_model)", model.get("d_model")),
        ("Heads", model.get("n_heads")),
        ("Trained up to length", curriculum.get("max_n")),
        ("Steps", config.get("steps")),
        ("Seed", config.get("seed")),
    ]
    return [
        (name, f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in facts
        if value is not None
    ]


def _versions(record: RunRecord) -> list[tuple[str, str]]:
    from loopinterp import __version__

    made = {str(k): str(v) for k, v in record.made.get("versions", {}).items()}
    studies = sorted({r.provenance.version for r in record.results.values()} - {""})
    if "loopinterp" not in made and studies:
        made["loopinterp"] = ", ".join(studies)
    return [*made.items(), ("this report", f"loopinterp {__version__}")]
