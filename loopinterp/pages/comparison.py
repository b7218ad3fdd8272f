"""Several runs side by side on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from loopinterp.core.errors import InputError
from loopinterp.core.storage import write_bytes
from loopinterp.pages import Exploration
from loopinterp.pages.assets import Tables, compared_figures, embedded, plotly_scripts, tables_of
from loopinterp.pages.exploration import page_json
from loopinterp.pages.facts import Fact, Topic, facts_of, story_of_runs, title_of
from loopinterp.pages.report import need_page, render_page
from loopinterp.pages.run_record import (
    Problem,
    RunRecord,
    Trouble,
    noting,
    read_run,
    spell_problem,
)
from loopinterp.pages.sections import SECTIONS, figure_views

if TYPE_CHECKING:
    import pandas as pd


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
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        raise InputError(
            "runs",
            expected="two or more, each once",
            given=", ".join(map(str, folders)) or "none",
            fix="Name the folders of the runs to compare.",
        )
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
                    explorers[run] = Markup(page_json(result))
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
