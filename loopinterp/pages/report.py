"""From a run folder to one HTML file, or several runs side by side on one page."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

import loopinterp
from loopinterp.compiler.figures import draw
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.core.results import Figure, Result
from loopinterp.core.storage import write_bytes
from loopinterp.figures import LinePanel, Series, bars_with_intervals, line_panels
from loopinterp.figures.circuit_graph import (
    CircuitGraph,
    fragment,
    security_policy,
    visible_controls,
)
from loopinterp.pages import Exploration
from loopinterp.pages.assets import (
    Tables,
    asset,
    compared_figures,
    embedded,
    page_scripts,
    plotly_scripts,
    setting_groups,
    tables_of,
)
from loopinterp.pages.exploration import page_json
from loopinterp.pages.facts import Fact, Topic, facts_of, story, story_of_runs, title_of
from loopinterp.pages.run_record import (
    Problem,
    RunRecord,
    Trouble,
    noting,
    read_run,
    spell_problem,
)
from loopinterp.pages.sections import EXPLORER, SECTIONS, figure_views, section_views

if TYPE_CHECKING:
    from jinja2 import Environment

_MARKER = '<meta name="generator" content="loopinterp report">'
"""In the head of every page written here; a file with it may be overwritten."""


@checked
def write_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run as one self-contained HTML file.

    ``out`` is ``RUN/report.html`` by default.

    Raises:
        InputError: If the folder is no run, or ``out`` is no earlier report.
    """
    out = need_page(Path(run_folder) / "report.html" if out is None else out)
    write_bytes(out, render_report(read_run(run_folder)).encode(errors="replace"))
    return out


@checked
def need_page(out: str | Path) -> Path:
    """The path, if it is a new file or an earlier page."""
    out = Path(out)
    try:
        mode = out.lstat().st_mode
    except (OSError, ValueError):
        return out  # nothing is there; whether it can be made is seen when it is written
    if stat.S_ISREG(mode):
        with out.open("rb") as file:
            if _MARKER.encode() in file.read(1000):  # it stands in the head of a page
                return out
        kind, fix = "another file", "Delete it yourself, or choose another name."
    elif stat.S_ISDIR(mode):
        kind, fix = "a folder", f"Name a file in it: {out / 'report.html'}."
    elif stat.S_ISLNK(mode):
        kind, fix = "a link, which would be replaced", "Name the file that it points to."
    else:
        kind, fix = "a device, pipe or socket", "Choose another name."
    expected = "a new file, or an earlier report"
    raise InputError(f"output file {out}", expected=expected, given=kind, fix=fix)


@checked
def write_results(results: Mapping[str, Result], out: str | Path, *, title: str) -> Path:
    """Write results that belong to no run as one self-contained HTML file.

    Raises:
        InputError: If there is no result, or ``out`` is no earlier page.
    """
    fix = "Pass {'name': result}."
    need(results, "results", "at least one", "none", fix)
    for name, x in results.items():
        kind = f"a {type(x).__name__}"
        need(isinstance(x, Result), f"result {name!r}", "what a study returns", kind, fix)
    out = need_page(out)
    write_bytes(out, render_report(RunRecord(name=title, results=results)).encode(errors="replace"))
    return out


def render_report(record: RunRecord) -> str:
    """The report as HTML; without a configuration, of the results alone."""
    sections, problems = section_views(record)
    figures, undrawn = _made_figures(record)
    made_views = figure_views(figures, undrawn, count(1))
    shown = {view.section.key for view in sections}
    # Graphs of circuits are HTML; all other figures are drawn by Plotly.
    views = [view for section in sections for view in section.all_figures]
    drawn = [view for view in views if not view.html] + (made_views if record.is_run else [])
    facts = facts_of(record.results)
    if record.is_run:
        heading, *sentences = story(record, facts)
    else:  # what the model makes of the prompt, on a page that shows nothing else
        heading, results = record.name, [*record.results.values()]
        shows_one = len(results) == 1 and isinstance(results[0], Exploration)
        sentences = [results[0].findings()[-1].text] if shows_one else []
    versions = dict(record.made.get("versions", {}))
    # Where the run wrote down no version, that of its studies is shown.
    if studies := {result.provenance.version for result in record.results.values()} - {""}:
        versions.setdefault("loopinterp", ", ".join(sorted(studies)))
    versions["this report"] = f"loopinterp {loopinterp.__version__}"
    return render_page(
        "report.html.j2",
        record=record,
        problems=[*map(spell_problem, [*record.problems, *problems, *undrawn])],
        title=heading,
        story=" ".join(sentences),
        facts=facts,
        model=_model(record),
        first=[view for view in sections if view.section.key == EXPLORER],
        sections=[view for view in sections if view.section.key != EXPLORER],
        explored=any(view.explorers for view in sections),
        not_measured=[
            section.at(record.depth)
            for section in SECTIONS
            if record.is_run
            and section.key not in shown
            and section.of_study not in record.skipped
            and section.applies(record.task)
        ],
        made_figures=made_views,
        circuits=any(view.html for view in views),
        settings=setting_groups(record.config),
        versions=versions,
        data=embedded(tables_of({record.name: record})),
        plotly_scripts=plotly_scripts(view.flat for view in drawn),
    )


def render_page(template: str, **context: Any) -> str:
    """A page of ``templates/``, with all foreign text escaped."""
    policy = security_policy(page_scripts(context.get("plotly_scripts", ())))
    return _environment().get_template(template).render(policy=policy, **context)


@cache
def _environment() -> Environment:
    """Compiled once: that takes as long as filling a page in."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def without_controls(value: Any) -> Any:
        # Text of saved files cannot turn the direction of what follows.
        plain = isinstance(value, str) and not isinstance(value, Markup)
        return visible_controls(value) if plain else value

    environment = Environment(
        loader=PackageLoader("loopinterp.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=without_controls,
    )
    environment.filters |= {"tidy": _tidy, "in_short": _in_short}
    environment.filters["seconds"] = lambda value: _tidy(seconds(value))
    environment.globals |= {"asset": asset, "marker": Markup(_MARKER)}
    return environment


def _tidy(text: str) -> str:
    """Keep a number and its unit on one line.

    Example:
        >>> _tidy("95% in 3 min 4 s") == "95% in 3\\u00a0min 4\\u00a0s"
        True
    """
    return re.sub(r"(?<=\d) (?=(s|min|h|bits|loops)\b)", "\u00a0", text)


def _in_short(text: str, most: int = 2) -> tuple[str, str]:
    """The first ``most`` sentences of a text, and the rest.

    Example:
        >>> _in_short("It is. It was, in 0.5% of runs. It will be. Perhaps.")
        ('It is. It was, in 0.5% of runs.', 'It will be. Perhaps.')
    """
    # A full stop within a number is followed by no capital.
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z“])", text)
    return " ".join(sentences[:most]), " ".join(sentences[most:])


def _model(record: RunRecord) -> list[tuple[str, str]]:
    config = record.config
    parts = (config.get(name) for name in ("model", "curriculum"))
    model, curriculum = (part if isinstance(part, Mapping) else {} for part in parts)
    n_layers = model.get("n_layers")
    runs = {None: "looped", 1: "run once"}.get(record.depth, f"run {record.depth} times")
    # Where a model that was not trained in the run was trained; of one in memory nothing is known.
    origin = record.origin
    training = "elsewhere" if origin.startswith("trained") else "none"
    known = [
        ("Block", f"{n_layers} layer{'s' if n_layers != 1 else ''}, {runs}" if n_layers else None),
        ("Width (d_model)", model.get("d_model")),
        ("Heads", model.get("n_heads")),
        ("Trained up to length", curriculum.get("max_n")),
        ("Made for lengths up to", config.get("max_n")),
        ("Training", training if origin and not origin.startswith("given") else None),
        ("Steps", config.get("steps")),
        ("Seed", config.get("seed")),
    ]
    return [
        (name, f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in known
        if value is not None
    ]


def _made_figures(record: RunRecord) -> tuple[list[Figure], list[Problem]]:
    figures: list[Figure] = []
    problems: list[Problem] = []
    parts = {"metrics of training": _training_curve, "times of the stages": _stage_times}
    for name, figures_of_part in parts.items():
        with noting(problems, Trouble.NOT_DRAWN, name):
            figures += figures_of_part(record)
    return figures, problems


def seconds(value: float) -> str:
    """A duration in words.

    Example:
        >>> seconds(0.25), seconds(7.34), seconds(80), seconds(4020)
        ('0.25 s', '7.3 s', '1 min 20 s', '1 h 7 min')
    """
    if value < 60:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def _training_curve(record: RunRecord) -> list[Figure]:
    table = pd.DataFrame(record.metrics)
    # A curve of some hundred points looks the same and keeps the page small.
    points = table.iloc[:: max(len(table) // 600, 1)]
    panels = []
    names = {"loss": "loss", "exact_match": "exact match", "longest_n": "longest length"}
    for column, name in names.items():
        if "step" in points and column in points:
            log = column == "loss" and bool((points[column] > 0).all())
            unit = (0, 1.02) if column == "exact_match" else None
            line = Series(name, points["step"], points[column], markers=False)
            panels.append(LinePanel([line], name, y_log=log, y_range=unit))
    if not panels:
        return []
    plot = line_panels(panels, x_title="step")
    plot.update_layout(showlegend=False)  # each panel says on its axis what it shows
    caption = (
        "Recorded in training, on its own batches. When the longest length drawn goes up, batches "
        "become harder: the loss jumps and the exact match drops."
    )
    return [Figure(title="Training", plot=plot, caption=caption, data=table, section="made")]


def _stage_times(record: RunRecord) -> list[Figure]:
    positive = {stage: time for stage, time in record.stage_seconds.items() if time > 0}
    times = pd.Series(positive, dtype=float)
    if times.empty:
        return []
    bars = Series("seconds", times.index, times)
    return [
        Figure(
            title="Time by stage",
            plot=bars_with_intervals([bars], value_title="seconds"),
            caption=f"Wall time of each stage, {seconds(times.sum())} in all.",
            data=times.rename_axis("stage").reset_index(name="seconds"),
            section="made",
        )
    ]


@checked
def write_circuit_page(circuit: Any, out: str | Path) -> Path:
    """Write the graph of a circuit as one HTML file that works offline.

    ``circuit`` is a compiled model or its circuit, a program, an expression, or a graph such as
    :func:`loopinterp.edges.edge_graph` returns.

    Raises:
        InputError: If the circuit is none of these or too large, or ``out`` is no earlier page.
    """
    # A compiled model has its circuit as an attribute.
    is_graph = isinstance(circuit, CircuitGraph)
    graph = circuit if is_graph else draw(getattr(circuit, "circuit", circuit))
    out = need_page(out)
    page = render_page(
        "circuit.html.j2",
        title=f"Circuit of {graph.title}",
        heading=graph.title,
        graph=fragment(graph),
    )
    write_bytes(out, page.encode(errors="replace"))
    return out


@dataclass(frozen=True)
class Cell:
    value: str = ""
    good: bool | None = None
    text: str = ""
    measured: bool = True


@dataclass(frozen=True)
class Row:
    title: str
    cells: list[Cell]

    @property
    def about(self) -> str:
        """The first text; it explains the values."""
        return next((cell.text for cell in self.cells if cell.text), "")

    @property
    def differs(self) -> bool:
        """Whether runs differ, or some have no value."""
        return len({cell.value for cell in self.cells}) > 1


def write_comparison(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write two or more runs side by side as one self-contained HTML file.

    It shows facts, explorers stepped together, settings and findings that differ, and curves on
    shared axes, from saved results. :func:`read_report` reads the tables back.

    Raises:
        InputError: For fewer than two different runs, or if ``out`` is no earlier page.
    """
    folders = [Path(run) for run in runs]
    enough = len({folder.resolve() for folder in folders}) >= max(len(folders), 2)
    got, fix = ", ".join(map(str, folders)) or "none", "Name the folders of the runs to compare."
    need(enough, "runs", "two or more, each once", got, fix)
    out = need_page(out)
    records: dict[str, RunRecord] = {}
    for record in map(read_run, folders):
        # By the names of their folders; a number tells those of one name apart.
        names = (record.name if k == 1 else f"{record.name} ({k})" for k in count(1))
        records[next(name for name in names if name not in records)] = record
    write_bytes(out, _render(records).encode(errors="replace"))
    return out


def _render(records: dict[str, RunRecord]) -> str:
    tables, runs = tables_of(records), [*records]
    problems = {run: [*record.problems] for run, record in records.items()}
    explorers: dict[str, Markup] = {}
    for run, record in records.items():
        for name, result in record.results.items():
            if run not in explorers and isinstance(result, Exploration):
                with noting(problems[run], Trouble.RESULT_VALUES, name):
                    explorers[run] = page_json(result)
    facts = {run: facts_of(record.results) for run, record in records.items()}
    undrawn: list[Problem] = []
    figures = figure_views(compared_figures(tables["curves"], runs), undrawn, count(1))
    rows = _finding_rows(tables, runs)
    settings = _differing_settings(tables, runs)
    # Settings that some runs do not have and that are equal in all others.
    lacking = settings.isna().any(axis=1) & (settings.nunique(axis=1) < 2)
    tasks = {record.task.replace("_", " ") for record in records.values() if record.task}
    return render_page(
        "comparison.html.j2",
        title=f"{len(runs)} runs side by side" + (f": {', '.join(sorted(tasks))}" if tasks else ""),
        runs=runs,
        records=records,
        story=" ".join(story_of_runs(facts)),
        facts=_fact_rows(facts),
        settings=settings[~lacking].fillna("–"),
        lacking=settings[lacking].fillna("–"),
        differing=[row for row in rows if row.differs],
        alike=[row for row in rows if not row.differs],
        figures=figures,
        explorers=explorers,
        said={
            result: {run: rows["text"].tolist() for run, rows in table.groupby("run", sort=False)}
            for result, table in tables["findings"].groupby("result", sort=False)
        },
        problems=[
            *(f"{run}: {spell_problem(one)}" for run, of_run in problems.items() for one in of_run),
            *map(spell_problem, undrawn),
        ],
        data=embedded(tables),
        plotly_scripts=plotly_scripts(view.flat for view in figures),
    )


def _fact_rows(facts: Mapping[str, list[Fact]]) -> list[tuple[str, list[Fact | None]]]:
    by_topic = [{fact.topic: fact for fact in of_run} for of_run in facts.values()]
    rows = []
    for topic in Topic:
        cells = [of_run.get(topic) for of_run in by_topic]
        if known := [fact for fact in cells if fact is not None]:
            rows.append((title_of(known), cells))
    return rows


def _differing_settings(tables: Tables, runs: Sequence[str]) -> pd.DataFrame:
    """Settings that differ between runs, one column for each run; NaN if a run lacks one."""
    wide: Any = tables["settings"].pivot_table(
        index=["part", "setting"], columns="run", values="value", aggfunc="first", sort=False
    )
    wide = wide.reindex(columns=list(runs))
    return wide[(wide.nunique(axis=1) > 1) | wide.isna().any(axis=1)]


def _finding_rows(tables: Tables, runs: Sequence[str]) -> list[Row]:
    """Findings with a value, run by run, in the order of the report."""
    table = tables["findings"]
    measured = {(str(run), str(result)) for run, result in zip(table["run"], table["result"])}
    table = table[(table["value"] != "") & (table["section"] != "verdict")]
    order = {section.key: k for k, section in enumerate(SECTIONS)}
    titles = {section.key: section.short or section.title for section in SECTIONS}
    # By place of the section, result, title and number: the cell of each run.
    cells_of: dict[tuple[int, str, str, int], dict[str, Cell]] = {}
    seen: dict[tuple[str, str, str], int] = {}
    for line in table.itertuples():
        repeated = (str(line.run), str(line.result), str(line.label))
        seen[repeated] = number = seen.get(repeated, 0) + 1
        title = str(line.label) or titles.get(str(line.section), str(line.section))
        key = (order.get(str(line.section), len(order)), str(line.result), title, number)
        good = None if line.good is None else bool(line.good)
        cell = Cell(str(line.value), good, str(line.text))
        cells_of.setdefault(key, {})[str(line.run)] = cell
    return [
        Row(
            f"{title}{f' ({number})' if number > 1 else ''}, {result.replace('-', ' ')}",
            [cells.get(run, Cell(measured=(run, result) in measured)) for run in runs],
        )
        for (_, result, title, number), cells in sorted(cells_of.items(), key=lambda item: item[0])
    ]
