"""Tables and picture of docs/results/trained-huginn.md, from the files of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import table
from loopinterp.figures import LinePanel, Series, line_panels

PAGE, NAME = "results/trained-huginn.md", "huginn_small_{}.csv"
SHOWN = (1, 2, 4, 8, 16, 64)
"""Loops of the tables."""
PARTS = {"hops": "p-hop", "text": "text"}
MODELS = {"hops": "huginn-small", "text": "small Huginn on text"}


def as_tables(folder: Path) -> dict[str, str]:
    """The tables of the page by name."""
    made = {
        "huginn-hops": ("quality", _hops),
        "huginn-text": ("quality", _text),
        "huginn-needed": ("needed", _needed),
    }
    return {
        name: make(pd.read_csv(folder / NAME.format(study))) for name, (study, make) in made.items()
    }


def _hops(found: pd.DataFrame) -> str:
    found, rows = found.query("part == 'hops'"), []
    for (model, seed), each in groups(found, "model", "seed"):
        own = {"untrained": (8,), "unlooped": (1,)}.get(str(model), SHOWN)
        for loops in own:
            cells = each.query("loops == @loops").sort_values("p")
            rows.append([model, seed, loops, *(shown(x, 100) for x in records(cells))])
    return table(["model", "seed", "loops", *(f"p = {p}" for p in range(1, 9))], rows)


def _text(found: pd.DataFrame) -> str:
    found, rows = found.query("part == 'text'"), []
    for model, each in found.groupby("model", sort=False):
        own = {"untrained": (8,), "unlooped": (1,), "feedforward-6": (1,)}
        own |= dict.fromkeys(("ouro", "ouro-6"), SHOWN)
        for loops in own.get(str(model), SHOWN if model == "looped" else (0,)):
            for cell in records(each.query("loops == @loops")):
                weights = "" if pd.isna(cell["weights"]) else f"{int(cell['weights']):,}"
                rows.append([model, weights, loops or "", shown(cell, 1, 2)])
    return table(["model", "weights", "loops", "bits per character"], rows)


def _needed(found: pd.DataFrame) -> str:
    rows = []
    for (part, seed), each in groups(found, "part", "seed"):
        for x in records(each):
            group = f"quarter {x['group']} ({x['bits']:.2f} bits)"
            group = f"p = {x['group']}" if part == "hops" else group if x["group"] else ""
            never = f"{100 * x['never']:.0f}%" if part == "hops" else ""
            rows.append([PARTS[str(part)], seed, x["by"], group, shown(x, 1, 2), never])
    return table(["part", "seed", "by", "group", "loops needed", "never right"], rows)


def picture(folder: Path) -> bytes:
    """Accuracy and bits by the number of loops, and distances between starts, as PNG."""
    quality = pd.read_csv(folder / NAME.format("quality")).query("model == 'looped'")
    starts = pd.read_csv(folder / NAME.format("starts")).query(
        "what == 'starts' and loops > 0 and value > 1e-4"
    )
    hops = [
        _line(f"p = {p}", quality.query("part == 'hops' and seed == 0 and p == @p"))
        for p in (1, 2, 4, 8)
    ]
    text = [_line("text", quality.query("part == 'text'"))]
    apart = [
        _line(
            f"{PARTS[part]}, {model}",
            starts.query("part == @part and seed == 0 and model == @model"),
        )
        for part in PARTS
        for model in ("looped", "shuffled")
    ]
    panels = [
        LinePanel(hops, "right", title="p-hop induction"),
        LinePanel(text, "bits per character", title="characters of held-out plays"),
        LinePanel(apart, "distance", title="states from two initial states", y_log=True),
    ]
    with StillPictures() as pictures:
        figure = line_panels(panels, x_title="loops", x_log=True)
        return pictures.draw(figure, width=760, height=900)


def _line(name: str, rows: pd.DataFrame) -> Series:
    rows = rows.sort_values("loops")
    x, y, low, high = (rows[name].tolist() for name in ("loops", "value", "low", "high"))
    return Series(name, x, y, low=low, high=high)


def looped_models(found: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each trained looped model, by its name."""
    found = found.query("model == 'looped'") if "model" in found else found
    return [
        (f"{MODELS.get(str(part), MODELS['hops'])}, seed {seed}", each)
        for (part, seed), each in groups(found, "part", "seed")
    ]


def ends(row: Any) -> list[float]:
    """A value and its interval."""
    return [float(row[x]) for x in ("value", "low", "high")]


def groups(frame: Any, *names: str) -> list[tuple[Any, pd.DataFrame]]:
    return list(frame.groupby([*names], sort=False))


def records(frame: Any) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for _, row in frame.iterrows()]


def shown(cell: dict[str, Any], times: int, digits: int = 0) -> str:
    """A value with its interval, ``98 (97–99)``."""
    texts = [f"{times * cell[x]:.{digits}f}" for x in ("value", "low", "high")]
    value, low, high = (text if float(text) else text.lstrip("-") for text in texts)  # not -0
    return f"{value} ({low}–{high})"
