"""The sections of the report: titles, and findings and figures in reading order.

The circuit of a program shows for each part what the run's saved results measured, with controls.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from loopinterp.core.results import Figure, Finding, Kind, Result, registered_kinds
from loopinterp.core.text import percent
from loopinterp.figures.circuit_graph import CircuitGraph, fragment
from loopinterp.pages import Exploration
from loopinterp.pages.assets import FLAT, Download, figure_json, slug, table_download
from loopinterp.pages.exploration import page_json
from loopinterp.pages.run_record import Problem, Trouble, noting

if TYPE_CHECKING:
    from loopinterp.pages.run_record import RunRecord


Evidence = Mapping[str, list[tuple[str, str]]]
"""Headings and texts by the name of a selector, ``program.variable`` or component."""


def evidence_by_name(results: Mapping[str, Result], problems: list[Problem]) -> Evidence:
    """Evidence by name; unreadable results are added to ``problems``."""
    facts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    readers = {
        "ablation": _of_ablation,
        "head-match": _of_heads,
        "decodability": _of_decodability,
        "variable-interchange": _of_interchange,
    }
    for kind, read in readers.items():
        for name, result in results.items():
            if result.kind == kind:
                with noting(problems, Trouble.CIRCUIT_VALUES, name):
                    read(result, facts)
    return dict(facts)


def _of_ablation(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    data = result.data.isel(pos=0)
    everywhere = str(data["when"].values[0])
    # Exact match without ablation.
    clean = percent(data["reference_exact_match"].sel(estimate="value"))
    for part in map(str, data["part"].values):
        at = data.sel({"part": part, "when": everywhere, "estimate": "value"})
        texts = [
            f"{kind['ablation'].item()}: {percent(kind['exact_match'])} right "
            f"(noise of equal norm: {percent(kind['control_exact_match'])})"
            for kind in (at.isel(ablation=k) for k in range(at.sizes["ablation"]))
        ]
        text = f"{part}, {everywhere}. {'; '.join(texts)}. Clean runs: {clean}."
        facts[part].append(("Ablation", text))


def _of_heads(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    # Means over all loops, by selector and head.
    means = result.data[["overlap", "overlap_even", "overlap_other_input"]].mean("loop")
    for selector, head in zip(map(str, means["selector"].values), getattr(result, "assigned", [])):
        if not head:
            continue
        at = means.sel(selector=selector, head=head)
        text = (
            f"{head} is closest: its attention overlaps by {percent(at['overlap'])} with what "
            f"“{selector}” selects (even attention: {percent(at['overlap_even'])}; what it selects "
            f"in another input: {percent(at['overlap_other_input'])}), mean over loops."
        )
        for name in selector.split(" = "):
            facts[name].append(("In the model studied", text))
            part = re.sub(r"^head (\d+)$", r"head 0.\1", head)
            facts[name] += [fact for fact in facts.get(part, []) if fact[0] == "Ablation"]


def _of_decodability(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    loops = result.data["loop"].values
    controls = {"random_weights": "random weights", "shuffled": "shuffled labels"}
    controls["embedding"] = "injected input alone"
    for variable in map(str, result.data["variable"].values):
        measured = {}
        for name, values in result.data.sel(variable=variable).items():
            if name in ("accuracy", *controls):
                if "loop" in values.dims:  # loop for loop: of both axes the diagonal
                    same = values.sel(loop=loops, program_loop=loops)
                    values = same.transpose("loop", "program_loop").values.diagonal()
                measured[str(name)] = np.asarray(values)[1:]
        known = {name: x for name, x in measured.items() if not np.isnan(x).all()}
        if "accuracy" not in known:
            continue
        ceilings = [
            f"{words} at most {np.nanmax(known[name]):.2f}"
            for name, words in controls.items()
            if name in known
        ]
        text = (
            "A linear probe reads it from the state, loop for loop, with balanced accuracy of at "
            f"least {np.nanmin(known['accuracy']):.2f} ({'; '.join(ceilings)})."
        )
        facts[variable].append(("In the model studied", text))


def _of_interchange(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    program = getattr(result, "program", "")
    for variable in map(str, result.data["variable"].values):
        texts = []
        for name in map(str, result.data["intervention"].values):
            at = result.data.sel(intervention=name, variable=variable, estimate="value")
            n, share = at["whole_run_pairs"].values, at["whole_run"].values
            if n.sum():
                # Mean share over loops, weighted by pairs.
                mean = float(np.nansum(share * n) / n.sum())
                texts.append(f"{name} {percent(mean)} of {int(n.sum())}")
        text = f"Whole runs predicted by the program after an interchange of: {'; '.join(texts)}."
        facts[f"{program}.{variable}"].append(("Interchanged in the model studied", text))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the report; ``sections.html.j2`` introduces it.

    Attributes:
        key: The section's name and anchor.
        title_once: Title for models of one loop.
        short: Title in the table of contents.
        study: Its own study; ``key`` by default.
        missing: Text for a run without that study.
        folded: Whether it is closed at first; no main fact may rest on it.
    """

    key: str
    title: str
    title_once: str = ""
    short: str = ""
    study: str = ""
    missing: str = ""
    folded: bool = False

    def at(self, depth: int | None) -> Section:
        """The section with its title for a model of ``depth`` loops (None: T(n)).

        Example:
            >>> SECTIONS[0].at(None).title, SECTIONS[0].at(1).title
            ('The task, and a few inputs loop by loop', 'The task, and a few inputs')
        """
        return replace(self, title=self.title_once or self.title) if depth == 1 else self

    def applies(self, task: str) -> bool:
        from loopinterp.programs import get_program, list_programs

        kind = next((k for k in registered_kinds().values() if k.study == self.of_study), Kind(""))
        if kind.of_programs and all(get_program(p).task != task for p in list_programs()):
            return False
        return not kind.tasks or task in kind.tasks

    @property
    def of_study(self) -> str:
        return self.study or self.key


EXPLORER = "explorer"
"""Key of the section before the summary, which shows the task on a few inputs."""

SECTIONS = (
    Section(
        key=EXPLORER,
        title="The task, and a few inputs loop by loop",
        title_once="The task, and a few inputs",
        short="Explorer",
        missing="no examples, so the task is not shown",
    ),
    Section(
        key="generalisation",
        title="Length generalisation",
        missing="no evaluation by length",
    ),
    Section(
        key="convergence",
        title="Convergence",
        missing="no convergence study, so it is not known whether its state converges",
    ),
    Section(
        key="limits",
        title="Limits",
        study="reachability",
        folded=True,
        missing="no study of its fixed points",
    ),
    Section(
        key="wavefront",
        title="The carry wavefront",
        short="Carry wavefront",
        missing="no carry study, so it is not known how fast the carry moves",
    ),
    Section(
        key="program",
        title="Program against model",
        short="Program and model",
        study="programs",
        missing="no comparison with programs, so there is no verdict",
    ),
    Section(
        key="attention",
        title="Attention by loop",
        title_once="Attention",
        folded=True,
        missing="no attention study",
    ),
    Section(
        key="ground-truth",
        title="The tools on known circuits",
        short="Known circuits",
        folded=True,
        missing="no scores of the tools on known-circuit models",
    ),
)
"""All sections with studies, in reading order; "How it was made" follows them."""

OTHER = Section(key="other", title="Other studies", folded=True)
"""The section for studies that name no known section."""


@dataclass(frozen=True)
class FigureView:
    anchor: str
    figure: Figure
    download: Download | None
    json: Markup | None = None
    html: Markup | None = None
    flat: bool = True


@dataclass(frozen=True)
class Fold:
    """A line that opens to findings and figures."""

    anchor: str
    title: str
    value: str
    good: bool | None
    findings: list[Finding]
    figures: list[FigureView]


@dataclass(frozen=True)
class SectionView:
    section: Section
    findings: list[Finding]
    figures: list[FigureView]
    folds: list[Fold]
    explorers: list[Markup] = field(default_factory=list)

    @property
    def all_figures(self) -> list[FigureView]:
        return [*self.figures, *(figure for fold in self.folds for figure in fold.figures)]


@dataclass(frozen=True)
class _Shown:
    name: str
    findings: list[Finding]
    figures: list[Figure]
    explorers: list[Markup]


def section_views(record: RunRecord) -> tuple[list[SectionView], list[Problem]]:
    """The sections with something to show, in reading order, and problems."""
    # In the order in which studies were made; those of unknown order come last, by name.
    order = {name: place for place, name in enumerate(record.made.get("stages", {}))}
    shown: list[_Shown] = []
    problems: list[Problem] = []
    for name in sorted(record.results, key=lambda name: (order.get(name, len(order)), name)):
        result = record.results[name]
        with noting(problems, Trouble.RESULT_VALUES, name):
            explorers = [page_json(result)] if isinstance(result, Exploration) else []
            shown.append(_Shown(name, result.findings(), result.figures(), explorers))
    evidence = evidence_by_name(record.results, problems)
    views = []
    for section in (*SECTIONS, OTHER):
        view = _view(section, shown, problems, evidence)
        if view.findings or view.figures or view.explorers:
            views.append(replace(view, section=section.at(record.depth)))
    return views, problems


def figure_views(
    figures: Iterable[Figure],
    problems: list[Problem],
    numbers: Iterable[int],
    evidence: Evidence | None = None,
) -> list[FigureView]:
    """Figures with anchors; a figure that cannot be drawn becomes a problem.

    ``numbers`` make anchors unique; ``evidence`` is shown at the nodes of circuits.
    """
    views = []
    for figure, number in zip(figures, numbers):
        anchor = f"{slug(figure.section)}-{number}-{slug(figure.title)}"
        with noting(problems, Trouble.FIGURE_VALUES, figure.title):
            download = None if figure.data is None else table_download(figure.data, anchor)
            drawn: dict[str, Any]
            if isinstance(figure.plot, CircuitGraph):
                drawn = {"html": fragment(figure.plot.with_facts(evidence or {}))}
            else:
                flat = {trace.type for trace in figure.plot.data} <= FLAT
                drawn = {"json": figure_json(figure.plot), "flat": flat}
            views.append(FigureView(anchor, figure, download, **drawn))
    return views


def _view(
    section: Section, shown: Sequence[_Shown], problems: list[Problem], evidence: Evidence
) -> SectionView:
    """The section's own study comes first, the others in the order of the results."""
    known = {one.key for one in SECTIONS} | {"verdict"}

    def belongs(key: str) -> bool:
        key = "program" if key == "verdict" else key
        return key not in known if section is OTHER else key == section.key

    # The study that gives a verdict comes first, like the section's own.
    verdicts = {one.name: [f for f in one.findings if f.section == "verdict"] for one in shown}
    shown = sorted(shown, key=lambda one: one.name != section.key and not verdicts[one.name])
    numbers, parts = itertools.count(1), []
    for one in shown:
        findings = [f for f in one.findings if belongs(f.section)]
        figures = [f for f in one.figures if belongs(f.section)]
        parts.append((findings, figure_views(figures, problems, numbers, evidence)))
    (findings, figures), *others = [part for part in parts if any(part)] or [([], [])]
    # Of the first study two findings, a figure and a circuit are seen; all else is folded. The
    # circuit is seen where the model runs it: an identified program, or one read off the model.
    runs_it = bool(findings and findings[0].good)
    drawn = [figure for figure in figures if not figure.html]
    circuits = [figure for figure in figures if figure.html]
    seen = [*drawn[:1], *(circuits[:1] if runs_it or not drawn else [])]
    others.insert(0, (findings[2:], [f for f in figures if f not in seen]))
    folds = []
    for number, (more, drawn) in enumerate(other for other in others if any(other)):
        # Headed by what its figures show, or by what its first finding is.
        first, titles = more[0] if more else Finding(""), [view.figure.title for view in drawn]
        title = "; ".join(titles[:2]) or first.label or "More findings"
        if n_more := len(titles[2:]):
            title += f"; {n_more} more figure{'s' * (n_more > 1)}"
        anchor = f"{section.key}-fold-{number}"
        folds.append(Fold(anchor, title, first.value, first.good, more, drawn))
    explorers = [x for one in shown for x in one.explorers if section.key == EXPLORER]
    return SectionView(section, findings[:2], seen, folds, explorers)
