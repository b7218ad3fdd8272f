"""Tables and picture of docs/results/trained-huginn.md, from the files of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import table
from analyses.train_huginn_small import MEAN_LOOPS
from loopinterp.figures import LinePanel, Series, line_panels

PAGE, NAME = "results/trained-huginn.md", "huginn_small_{}.csv"
SHOWN = (1, 2, 4, 8, 16, 64)
"""Loops of the tables."""
PARTS = {"hops": "p-hop", "text": "text"}


def as_tables(folder: Path) -> dict[str, str]:
    """The tables of the page by name."""
    made = {
        "huginn-hops": ("quality", _hops),
        "huginn-text": ("quality", _text),
        "huginn-regimes": ("regimes", _regimes),
        "huginn-starts": ("starts", _starts),
        "huginn-needed": ("needed", _needed),
        "huginn-lenses": ("lenses", _lenses),
        "huginn-handoff": ("handoff", _handoff),
    }
    return {
        name: make(pd.read_csv(folder / NAME.format(study))) for name, (study, make) in made.items()
    }


def _hops(found: pd.DataFrame) -> str:
    found, rows = found.query("part == 'hops'"), []
    for (model, seed), each in _groups(found, "model", "seed"):
        own = {"untrained": (8,), "unlooped": (1,)}.get(str(model), SHOWN)
        for loops in own:
            cells = each.query("loops == @loops").sort_values("p")
            rows.append([model, seed, loops, *(_shown(x, 100) for x in _records(cells))])
    return table(["model", "seed", "loops", *(f"p = {p}" for p in range(1, 9))], rows)


def _text(found: pd.DataFrame) -> str:
    found, rows = found.query("part == 'text'"), []
    for model, each in found.groupby("model", sort=False):
        own = {"untrained": (8,), "unlooped": (1,), "feedforward-6": (1,)}
        own |= dict.fromkeys(("ouro", "ouro-6"), SHOWN)
        for loops in own.get(str(model), SHOWN if model == "looped" else (0,)):
            for cell in _records(each.query("loops == @loops")):
                weights = "" if pd.isna(cell["weights"]) else f"{int(cell['weights']):,}"
                rows.append([model, weights, loops or "", _shown(cell, 1, 2)])
    return table(["model", "weights", "loops", "bits per character"], rows)


def _regimes(found: pd.DataFrame) -> str:
    """All tokens of each model, and those kinds of the trained one's of which some move on."""
    rows = []
    for (part, seed, model, token), each in _groups(found, "part", "seed", "model", "token"):
        cells = _records(each)
        moves = model == "looped" and cells[0]["value"] < 0.9  # the first is the fixed point
        if token == "all" or moves:
            orbits = next(x for x in cells if x["regime"] == "orbit")
            count = f"{orbits['touched']:.0f} of {orbits['sequences']:.0f}"
            shares = [_shown(x, 100) for x in cells]
            period = "" if pd.isna(orbits["period"]) else f"{orbits['period']:.2f}"
            rows.append([PARTS[str(part)], seed, model, token, *shares, count, period])
    head = ["part", "seed", "weights", "tokens", *found["regime"].unique()]
    return table([*head, "sequences with an orbit", "period (median)"], rows)


def _starts(found: pd.DataFrame) -> str:
    rows = []
    for (part, seed, model), each in _groups(found, "part", "seed", "model"):
        cells = {(x["what"], x["loops"]): x for x in _records(each)}
        apart = [_shown(cells["starts", t], 1, 3) for t in (0, 4, 8, 16, 64)]
        others = _shown(cells["inputs", 64], 1, 2)
        same = [_shown(cells["same answer", t], 100, 1) for t in (8, 64)]
        rows.append([PARTS[str(part)], seed, model, *apart, others, *same])
    loops = [f"after {t}" for t in (0, 4, 8, 16, 64)]
    head = ["part", "seed", "model", *loops, "other inputs, after 64", "same answer, after 8"]
    return table([*head, "after 64"], rows)


def _needed(found: pd.DataFrame) -> str:
    rows = []
    for (part, seed), each in _groups(found, "part", "seed"):
        for x in _records(each):
            group = f"quarter {x['group']} ({x['bits']:.2f} bits)"
            group = f"p = {x['group']}" if part == "hops" else group if x["group"] else ""
            never = f"{100 * x['never']:.0f}%" if part == "hops" else ""
            rows.append([PARTS[str(part)], seed, x["by"], group, _shown(x, 1, 2), never])
    return table(["part", "seed", "by", "group", "loops needed", "never right"], rows)


def _lenses(found: pd.DataFrame) -> str:
    loops, rows = (0, 1, 2, 3, 4, 6, 8), []
    for (part, seed, lens), each in _groups(found, "part", "seed", "lens"):
        cells = [_shown(x, 1, 2) for x in _records(each.query("loops in @loops"))]
        rows.append([PARTS[str(part)], seed, lens, *cells, f"{each['unigram'].iloc[0]:.2f}"])
        if lens == "jacobian":
            norms = [f"{x['norm']:.2g}" for x in _records(each.query("loops in @loops"))]
            rows.append([PARTS[str(part)], seed, "norm of its map", *norms, ""])
    head = ["part", "seed", "lens", *(f"loop {t}" for t in loops)]
    return table([*head, "mean answer"], rows)


def _handoff(found: pd.DataFrame) -> str:
    """What the last loop reads of the states one, two and three loops before its end."""
    last, rows = found.query(f"read == n_loops == {MEAN_LOOPS}"), []
    names = {"q": "queries", "k": "keys", "v": "values"}
    for (seed, source), of_source in _groups(last, "seed", "source"):
        for part, name in names.items():
            of_part = of_source.sort_values("written", ascending=False).query(f"part == {part!r}")
            cells = _records(of_part)
            shown = [_shown(x, 100) for x in cells]
            rows.append([seed, source, name, *shown, *[""] * (3 - len(shown))])
    written = ("the loop before", "two before", "three before")
    return table(["seed", "from", "what is put in", *written], rows)


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


def _groups(frame: pd.DataFrame, *names: str) -> list[tuple[Any, pd.DataFrame]]:
    return list(frame.groupby([*names], sort=False))


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for _, row in frame.iterrows()]


def _shown(cell: dict[str, Any], times: int, digits: int = 0) -> str:
    """A value with its interval, ``98 (97–99)``."""
    texts = [f"{times * cell[x]:.{digits}f}" for x in ("value", "low", "high")]
    value, low, high = (text if float(text) else text.lstrip("-") for text in texts)  # not -0
    return f"{value} ({low}–{high})"
