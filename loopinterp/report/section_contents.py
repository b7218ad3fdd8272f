"""What the template shows of a run: its sections, with findings and figures in reading order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from loopinterp.explorer import Exploration
from loopinterp.plotting.circuit_graph import CircuitGraph
from loopinterp.plotting.circuit_html import fragment
from loopinterp.report.assets import (
    FLAT,
    Download,
    exploration_json,
    figure_json,
    slug,
    table_download,
)
from loopinterp.report.circuit_evidence import Evidence, evidence_by_name
from loopinterp.report.sections import EXPLORER, OTHER, SECTIONS, Section
from loopinterp.results import Figure, Finding

if TYPE_CHECKING:
    from loopinterp.report.run_record import RunRecord

EMPTY = Markup("")
_FINDINGS, _FIGURES, _GRAPHS = 2, 1, 1
"""Of a section's first study, what is seen at once, a circuit beside the first figure; all else is
folded."""

_TITLES = 2
"""Figures of a fold that its line names."""


@dataclass(frozen=True)
class FigureView:
    """A figure as the template shows it: as JSON for Plotly, or as HTML, the graph of a circuit."""

    anchor: str
    figure: Figure
    json: Markup
    download: Download | None
    html: Markup = EMPTY
    flat: bool = True


@dataclass(frozen=True)
class Fold:
    """What is seen when it is asked for: a line that says what it is, and what is behind it."""

    anchor: str
    title: str
    value: str
    good: bool | None
    findings: list[Finding]
    figures: list[FigureView]


@dataclass(frozen=True)
class SectionView:
    """A section as the template shows it: a claim with its figure, and folds.

    ``verdicts`` are said in the summary, and named again where their evidence is. ``explorers`` are
    what explorers are given.
    """

    section: Section
    verdicts: list[Finding]
    findings: list[Finding]
    figures: list[FigureView]
    folds: list[Fold]
    explorers: list[Markup] = field(default_factory=list)

    @property
    def all_figures(self) -> list[FigureView]:
        """Its figures, those of its folds included."""
        return [*self.figures, *(figure for fold in self.folds for figure in fold.figures)]

    def places(self) -> list[tuple[str, Finding]]:
        """All findings, each with the anchor of what it is part of."""
        folded = [(fold.anchor, finding) for fold in self.folds for finding in fold.findings]
        return [(self.section.key, finding) for finding in self.findings] + folded


@dataclass(frozen=True)
class _Said:
    """What one result says."""

    name: str
    findings: list[Finding]
    figures: list[Figure]
    explorers: list[Markup]

    @property
    def names_the_program(self) -> bool:
        return any(finding.kind == "verdict" for finding in self.findings)


def section_views(record: RunRecord) -> tuple[list[SectionView], list[str]]:
    """The sections that have something to show, in reading order.

    Returns:
        The sections, and a sentence for each result that cannot be shown.
    """
    said, problems = _in_order_of_making(record)
    evidence = evidence_by_name(record.results, problems)
    views = [_view(section, said, problems, evidence) for section in (*SECTIONS, OTHER)]
    views = [replace(view, section=view.section.at(record.depth)) for view in views]
    return [view for view in views if _shows_anything(view)], problems


def figure_views(
    figures: Iterable[Figure],
    problems: list[str],
    numbers: Iterable[int],
    evidence: Evidence | None = None,
) -> list[FigureView]:
    """Figures with an anchor of their own each; one that cannot be drawn becomes a problem.

    Args:
        figures: The figures.
        problems: Where a sentence is added for each that cannot be drawn.
        numbers: Of their anchors.
        evidence: What is told of the nodes of circuits, by name.
    """
    views = []
    for figure, number in zip(figures, numbers):
        anchor = f"{slug(figure.section)}-{number}-{slug(figure.title)}"
        try:
            download = None if figure.data is None else table_download(figure.data, anchor)
            if isinstance(figure.plot, CircuitGraph):
                html = fragment(figure.plot.with_facts(evidence or {}))
                views.append(FigureView(anchor, figure, EMPTY, download, html))
            else:
                flat = {trace.type for trace in figure.plot.data} <= FLAT
                json = figure_json(figure.plot)
                views.append(FigureView(anchor, figure, json, download, flat=flat))
        except Exception as error:  # whatever a damaged value makes of Plotly's and pandas' code
            problems.append(
                f"The figure {figure.title!r} has values that cannot be shown "
                f"({type(error).__name__})."
            )
    return views


def tiles(views: Sequence[SectionView]) -> list[tuple[str, str, Finding]]:
    """For the summary: what has a number or a name to show large, with its anchor and its name.

    First what says more of the program than the verdict does, then of each section the first such
    finding; the section whose verdict heads the summary has none.
    """
    found = [(a, f.label, f) for view in views for a, f in view.places() if f.label]
    for view in views:
        short = [place for place in view.places() if place[1].value and not place[1].label]
        if short and not view.verdicts:
            found.append((short[0][0], view.section.short or view.section.title, short[0][1]))
    return found


def _in_order_of_making(record: RunRecord) -> tuple[list[_Said], list[str]]:
    order = {name: place for place, name in enumerate(record.made.get("stages", {}))}
    names = sorted(record.results, key=lambda name: (order.get(name, len(order)), name))
    said, problems = [], []
    for name in names:
        result = record.results[name]
        try:
            explored = [exploration_json(result)] if isinstance(result, Exploration) else []
            said.append(_Said(name, result.findings(), result.figures(), explored))
        except Exception as error:  # whatever a damaged value makes of a study's own code
            problems.append(
                f"{name} has values that cannot be shown ({type(error).__name__}). "
                "Run the study again."
            )
    return said, problems


def _view(
    section: Section, said: Sequence[_Said], problems: list[str], evidence: Evidence
) -> SectionView:
    """The section's own study comes first, the others in the order in which they were made."""
    first = sorted(said, key=lambda one: not (one.name == section.key or one.names_the_program))
    numbers, parts = itertools.count(1), []
    for one in first:
        findings = [f for f in one.findings if _belongs(f.kind, section)]
        figures = [f for f in one.figures if _belongs(f.section, section)]
        parts.append((findings, figure_views(figures, problems, numbers, evidence)))
    (findings, figures), *others = [part for part in parts if any(part)] or [([], [])]
    graphs = [figure for figure in figures[_FIGURES:] if figure.html][:_GRAPHS]
    seen = [*figures[:_FIGURES], *graphs]
    others.insert(0, (findings[_FINDINGS:], [f for f in figures if f not in seen]))
    folds = [
        _fold(f"{section.key}-fold-{number}", *other)
        for number, other in enumerate(other for other in others if any(other))
    ]
    verdicts = [f for one in first for f in one.findings if f.kind == "verdict"]
    verdicts = verdicts if section.key == "program" else []
    explorers = [x for one in first for x in one.explorers if section.key == EXPLORER]
    return SectionView(section, verdicts, findings[:_FINDINGS], seen, folds, explorers)


def _shows_anything(view: SectionView) -> bool:
    return bool(view.verdicts or view.findings or view.figures or view.explorers)


def _fold(anchor: str, findings: list[Finding], figures: list[FigureView]) -> Fold:
    """Headed by what its figures show, or by what its first finding is."""
    first = findings[0] if findings else Finding("")
    titles = [view.figure.title for view in figures]
    title = "; ".join(titles[:_TITLES]) or first.label or "More findings"
    if others := titles[_TITLES:]:
        title = f"{title}; {len(others)} more figure{'s' * (len(others) > 1)}"
    return Fold(anchor, title, first.value, first.good, findings, figures)


def _belongs(kind: str, section: Section) -> bool:
    if section is OTHER:
        return kind not in {known.key for known in SECTIONS} | {"verdict"}
    return kind == section.key
