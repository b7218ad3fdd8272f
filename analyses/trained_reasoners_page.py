"""Tables and picture of docs/results/trained-reasoners.md, from its CSV files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.figures import LinePanel, Series, line_panels

PAGE = PAGES / "results" / "trained-reasoners.md"
WHO = ["task", "model", "seed"]
Table = Any
"""A DataFrame; selections of one are too wide for a type checker."""


def percent(row: Table, name: str) -> str:
    """A share with its interval, ``98 (97–99)``."""
    value, low, high = (100 * row[x] for x in (name, f"{name}_low", f"{name}_high"))
    return f"{value:.0f} ({low:.0f}–{high:.0f})"


def accuracy(found: Table) -> str:
    last = found["loop"] == np.where(found["model"] == "unlooped", 1, 16)
    rows = [
        [*(row[x] for x in WHO), percent(row, "exact"), f"{100 * row['cells']:.1f}"]
        for _, row in found[last].sort_values(["task", "model", "seed"]).iterrows()
    ]
    return table([*WHO, "grids right", "cells right"], rows)


def depth(found: Table) -> str:
    shown = [0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    rows = []
    for who, each in found[~found["model"].str.contains("un")].groupby(WHO, sort=False):
        by_loop = each.set_index("loop")["exact"]
        rows.append([*who, *(f"{100 * by_loop[loop]:.1f}" for loop in shown)])
    return table([*WHO, *map(str, shown)], rows)


def exits(found: Table) -> str:
    rows: dict[str, list[str]] = {}
    columns = list(found.groupby(WHO, sort=False))
    for _, each in columns:
        for _, row in each.iterrows():
            shown = f"{100 * row['right']:.1f} ({row['loops']:.1f})"
            rows.setdefault(row["rule"], []).append(
                shown if pd.isna(row["dealt"]) else f"{shown}; {100 * row['dealt']:.1f}"
            )
    head = [f"{model}, {task}, seed {seed}" for (task, model, seed), _ in columns]
    return table(["rule", *head], [[rule, *cells] for rule, cells in rows.items()])


def auc_interval(wrong: np.ndarray, values: np.ndarray, draws: int = 500) -> str:
    """Area under the curve of a measure for telling wrong from right, with a bootstrap interval."""
    if wrong.all() or not wrong.any():
        return "–"
    source, drawn = np.random.default_rng(0), []
    ones, others = values[wrong][:, None], values[~wrong]
    greater = (ones > others) + 0.5 * (ones == others)  # [wrong, right]; a tie counts half
    for _ in range(draws):
        rows = [source.choice(size, size) for size in greater.shape]
        drawn.append(greater[np.ix_(*rows)].mean())
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{greater.mean():.2f} ({low:.2f}–{high:.2f})"


def telling(found: Table) -> str:
    rows = []
    for who, each in found.groupby(WHO, sort=False):
        wrong = each["wrong"].to_numpy(bool)
        measures = {"residual": 1, "lyapunov_run": 1, "lyapunov_late": 1, "halt": -1}
        cells = [auc_interval(wrong, sign * each[x].to_numpy()) for x, sign in measures.items()]
        rows.append([*who, int(wrong.sum()), *cells])
    head = ["wrong", "residual, loop 16", "exponent, loops 1 to 16", "loops 17 to 64"]
    return table([*WHO, *head, "halting head"], rows)


def probes(found: Table) -> str:
    shown, rows = (1, 2, 4, 8, 16), []
    for (*who, site), each in found.groupby([*WHO, "site"], sort=False):
        by_loop = each.set_index("loop")
        cells = [f"{100 * by_loop.loc[loop, 'accuracy']:.0f}" for loop in shown]
        controls = ("control_task", "random_model", "embedding", "majority")
        cells += [f"{100 * each[x].max():.0f}" for x in controls]
        rows.append([*who, str(site).removeprefix("hook_"), *cells])
        if site == "hook_z_H":
            answers = [f"{100 * by_loop.loc[loop, 'readout']:.0f}" for loop in shown]
            rows.append([*who, "the model's answer", *answers, *[""] * 4])
    loops = [f"loop {loop}" for loop in shown]
    head = ["random labels", "shuffled weights", "embedding", "majority"]
    return table([*WHO, "read from", *loops, *head], rows)


def patching(found: Table) -> str:
    loops = sorted({*found["loop"]})
    rows = []
    for (*who, part, read), each in found.groupby([*WHO, "part", "read"], sort=False):
        cells = [f"{100 * x:.0f}" for x in each["recovered"]]
        name = {"hook_state_post": "both"}.get(part, part.removeprefix("hook_"))
        rows.append([*who, name, read, *cells, f"{100 * each['control_recovered'].max():.0f}"])
    head = [f"loop {int(loop) + 1}" for loop in loops]
    return table([*WHO, "part", "read at", *head, "control"], rows)


def ablation(found: Table) -> str:
    rows = []
    for (*who, part), each in found.groupby([*WHO, "part"], sort=False):
        cells = each.set_index("when")
        whole = cells.loc["all loops"]
        changed = [100 * (1 - whole[x]) for x in ("agreement", "agreement_high", "agreement_low")]
        noise = 100 * (1 - whole["control_agreement"])
        one = 100 * (1 - cells.drop(index="all loops")["agreement"].min())
        shown = "{:.0f} ({:.0f}–{:.0f})".format(*changed)
        rows.append([*who, part, shown, f"{noise:.0f}", f"{one:.0f}"])
    head = ["all loops", "noise of equal norm", "one loop, at most"]
    return table([*WHO, "module", *head], rows)


def by_relation(found: Table, keys: list[str], *, intervals: bool) -> str:
    """A row for each model and place, and a column for each relation of two cells."""
    names, rows = list(found["relation"].unique()), []
    for key, each in found.groupby(keys, sort=False):
        cells = each.set_index("relation")[["times", "times_low", "times_high"]]
        shown = "{:.2f} ({:.2f}–{:.2f})" if intervals else "{:.2f}"
        rows.append([*key, *(shown.format(*cells.loc[name]) for name in names)])
    return table([*keys, *names], rows)


def attention(found: Table, task: str) -> str:
    """The second fast cycle and the slow stack, in the last loop."""
    inside = found["layer"].str.startswith(("inner.1", "inner.2"))
    found = found[(found["task"] == task) & (found["loop"] == 16) & inside]
    return by_relation(found, ["model", "seed", "layer"], intervals=False)


def picture(depths: Table) -> bytes:
    """Right grids by loops, a panel for each task, as PNG."""
    panels = []
    for task, of_task in depths.groupby("task", sort=False):
        lines = []
        for (model, seed), each in of_task.groupby(["model", "seed"], sort=False):
            if "untrained" in model or seed:
                continue
            shown = ["exact", "exact_low", "exact_high"]
            if control := model == "unlooped":  # its one loop, as a level for all
                each.loc[:, shown] = each.loc[each["loop"] == 1, shown].to_numpy()
            exact, low, high = (each[name] for name in shown)
            line = Series(model, each["loop"], exact, low=low, high=high, control=control)
            lines.append(line)
        panels.append(LinePanel(lines, "grids right", title=task, y_range=(0, 1)))
    figure = line_panels(panels, x_title="loops")
    with StillPictures() as pictures:
        return pictures.draw(figure, width=760)


TABLES: dict[str, tuple[str, Callable[[Table], str]]] = {
    "accuracy": ("depth", accuracy),
    "depth": ("depth", depth),
    "exits": ("exits", exits),
    "probes": ("probes", probes),
    "patching": ("patching", patching),
    "ablation": ("ablation", ablation),
    "attention-sudoku": ("attention", lambda found: attention(found, "sudoku")),
    "attention-maze": ("attention", lambda found: attention(found, "maze")),
}
"""Of each table, the file and what makes it."""


def as_tables(results: Path = RESULTS) -> dict[str, str]:
    return {
        f"reasoners-{name}": make(pd.read_csv(results / f"reasoners_{part}.csv"))
        for name, (part, make) in TABLES.items()
    }


def write_page(results: Path) -> None:
    rewrite(PAGE, as_tables(results))
    drawn = picture(pd.read_csv(results / "reasoners_depth.csv"))
    (PAGES / "pictures" / "trained-reasoners.png").write_bytes(drawn)
