"""What the template shows of a run: its sections, with findings and figures in reading order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopinterp.report.assets import Download, figure_json, slug, table_download
from loopinterp.report.sections import OTHER, SECTIONS, Section
from loopinterp.results import Figure, Finding

if TYPE_CHECKING:
    from markupsafe import Markup

    from loopinterp.report.run_record import RunRecord

_OF_THE_FIRST_STUDY = 2
_OF_EVERY_OTHER = 1


@dataclass(frozen=True)
class FigureView:
    """A figure as the template shows it."""

    anchor: str
    figure: Figure
    json: Markup
    download: Download | None


@dataclass(frozen=True)
class SectionView:
    """A section as the template shows it: figures at once, and ``more`` when asked for."""

    section: Section
    findings: list[Finding]
    figures: list[FigureView]
    more: list[FigureView]


@dataclass(frozen=True)
class _Said:
    """What one result says."""

    name: str
    findings: list[Finding]
    figures: list[Figure]

    @property
    def names_the_program(self) -> bool:
        return any(finding.kind == "verdict" for finding in self.findings)


def section_views(record: RunRecord) -> tuple[list[SectionView], list[str]]:
    """The sections that have something to show, in reading order.

    Returns:
        The sections, and a sentence for each result that cannot be shown.
    """
    said, problems = _in_order_of_making(record)
    views = [_view(section, said, problems) for section in (*SECTIONS, OTHER)]
    return [view for view in views if view.findings or view.figures], problems


def figure_views(figures: Iterable[Figure], problems: list[str]) -> list[FigureView]:
    """Figures with an anchor of their own each; one that cannot be drawn becomes a problem."""
    views = []
    for number, figure in enumerate(figures, start=1):
        anchor = f"{slug(figure.section)}-{number}-{slug(figure.title)}"
        try:
            download = None if figure.data is None else table_download(figure.data, anchor)
            views.append(FigureView(anchor, figure, figure_json(figure.plot), download))
        except Exception as error:  # whatever a damaged value makes of Plotly's and pandas' code
            problems.append(
                f"The figure {figure.title!r} has values that cannot be shown "
                f"({type(error).__name__})."
            )
    return views


def tiles(views: Sequence[SectionView]) -> list[tuple[Section, Finding]]:
    """For the summary: what has a number or a name to show large.

    First what says more of the program than the verdict does, then of each section the first such
    finding; the section whose verdict heads the summary has none.
    """
    found = [(v.section, finding) for v in views for finding in v.findings if finding.label]
    for view in views:
        short = [finding for finding in view.findings if finding.value and not finding.label]
        if short and not any(finding.kind == "verdict" for finding in view.findings):
            found.append((view.section, short[0]))
    return found


def _in_order_of_making(record: RunRecord) -> tuple[list[_Said], list[str]]:
    order = {name: place for place, name in enumerate(record.made.get("stages", {}))}
    names = sorted(record.results, key=lambda name: (order.get(name, len(order)), name))
    said, problems = [], []
    for name in names:
        result = record.results[name]
        try:
            said.append(_Said(name, result.findings(), result.figures()))
        except Exception as error:  # whatever a damaged value makes of a study's own code
            problems.append(
                f"{name} has values that cannot be shown ({type(error).__name__}). "
                "Run the study again."
            )
    return said, problems


def _view(section: Section, said: Sequence[_Said], problems: list[str]) -> SectionView:
    """The section's own study comes first, the others in the order in which they were made."""
    programs = section.key == "program"
    first = sorted(said, key=lambda one: not (one.name == section.key or one.names_the_program))
    # The verdict is said in the summary, and again where its evidence is.
    findings = [
        finding
        for one in first
        for finding in one.findings
        if _belongs(finding.kind, section) or (programs and finding.kind == "verdict")
    ]
    shown, more = _split([[f for f in s.figures if _belongs(f.section, section)] for s in first])
    views, folded = figure_views([*shown, *more], problems), set(map(id, more))
    parts = ([v for v in views if (id(v.figure) in folded) is later] for later in (False, True))
    return SectionView(section, findings, *parts)


def _belongs(kind: str, section: Section) -> bool:
    if section is OTHER:
        return kind not in {known.key for known in SECTIONS} | {"verdict"}
    return kind == section.key


def _split(studies: Sequence[Sequence[Figure]]) -> tuple[list[Figure], list[Figure]]:
    """The figures that everyone sees, and those for readers who want to know more."""
    shown: list[Figure] = []
    more: list[Figure] = []
    for figures in studies:
        at_once = _OF_EVERY_OTHER if shown else _OF_THE_FIRST_STUDY
        shown += figures[:at_once]
        more += figures[at_once:]
    return (shown, more) if len(more) > 1 else ([*shown, *more], [])
