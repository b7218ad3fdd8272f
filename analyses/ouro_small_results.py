"""How a trained Ouro answers p-hop questions, loop by loop, and when its gate stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.small_language_models import TASK, fresh
from analyses.tables_in_pages import table
from loopinterp.adapters import adapt
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.lenses import exit_study
from loopinterp.tasks import Batch

FILES, PAGE = ("ouro_small.csv", "ouro_small_exits.csv"), "results/trained-language-models.md"
STAGES = ("looped, stage I", "looped, stage II", "looped, stage II ahead")


def measure(
    name: str, seed: int, model: torch.nn.Module, n: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Accuracy and exits by p and loop; and what every stopping rule reaches over all p."""
    looped = adapt(model.eval())
    parts = [fresh(p, n) for p in range(1, TASK.most_hops + 1)]
    inputs, targets, n_symbols, answer_loops = (
        torch.cat([getattr(part, x) for part in parts])
        for x in ("inputs", "targets", "n", "n_loops")
    )
    batch = Batch(inputs, targets, n_symbols, answer_loops)
    result = exit_study(
        looped, batch, n_loops=looped.n_loops, gate=looped.exit_probability, seed=seed
    )
    hops, exact = TASK.hops(batch).numpy(), result.data["exact"].values[1:]  # [loop, batch]
    # The probability of not having stopped by each loop; by the last one all have, [loop, batch].
    going = result.data["score"].sel(rule="gate, cumulated").values[1:-1]
    ends = np.ones((1, len(hops)))
    exits = -np.diff(np.concatenate([ends, going, 0 * ends]), axis=0)
    stop = (going > 0.5).sum(0)  # the index of the loop where a half has stopped
    loops = np.arange(1, len(exact) + 1)
    who, rows = {"model": name, "seed": seed}, []
    for p in np.unique(hops):
        of_p = hops == p
        mean = mean_estimate((exits[:, of_p] * loops[:, None]).sum(0))
        for loop in loops:
            share = wilson_estimate(exact[loop - 1, of_p].sum(), of_p.sum())
            row = {**who, "hops": p, "loop": loop, "n": of_p.sum()}
            row |= dict(zip(("right", "right_low", "right_high"), share))
            row |= {"exit": exits[loop - 1, of_p].mean()}
            rows.append(row | dict(zip(("exit_loop", "exit_low", "exit_high"), mean)))
    best, best_loop = result.best_loop()
    found, mean_first = result.oracle()
    rules = [
        {"rule": "one budget", "right": best, "loops": best_loop},
        {"rule": "oracle", "right": found, "loops": mean_first},
    ]
    for rule in result.rules:
        right, dealt, mean_loops = result.gain(rule)
        cheapest = result.cheapest(rule)
        row = {"rule": rule, "right": right, "loops": mean_loops, "dealt": dealt}
        rules.append(row | {"cheapest": np.nan if cheapest is None else cheapest})
    rules.append(
        {
            "rule": "gate at 0.5",
            "right": np.take_along_axis(exact, stop[None], 0).mean(),
            "loops": stop.mean() + 1,
            "dealt": exact.mean(1)[stop].mean(),
            # Stops dealt among examples of one p: the gate may know no more than p.
            "dealt_within": np.mean(
                [exact[stop[hops == p]][:, hops == p].mean() for p in np.unique(hops)]
            ),
        }
    )
    return pd.DataFrame(rows), pd.DataFrame([who | row for row in rules])


def as_tables(by_loop: pd.DataFrame, rules: pd.DataFrame) -> dict[str, str]:
    """Accuracy of every model by p; loops, exits and rules of the looped one."""
    return {
        "ouro-accuracy": _accuracy(by_loop),
        "ouro-loops": _loops(by_loop),
        "ouro-rules": _rules(rules),
    }


def _accuracy(by_loop: pd.DataFrame) -> str:
    """A row for each model and seed: right after its last loop, by p."""
    rows = []
    for name in ("untrained", "unlooped", STAGES[0]):  # stage II keeps the answers of stage I
        of_name = by_loop.query("model == @name")
        last = of_name.query(f"loop == {of_name['loop'].max()}")
        for seed, cells in last.groupby("seed"):
            shares = [_share(cell, "right", 100) for cell in _records(cells)]
            rows.append([name.split(",")[0], seed, *shares])
    return table(["model", "seed", *(f"p = {p}" for p in sorted({*by_loop["hops"]}))], rows)


def _loops(by_loop: pd.DataFrame) -> str:
    """A row for each seed and p: right after each loop, and the mean exit after each stage."""
    looped, rows = by_loop.query("model in @STAGES"), []
    for seed, of_seed in looped.groupby("seed"):
        for p, of_p in of_seed.groupby("hops"):
            each = [_records(cells) for _, cells in of_p.groupby("model")]  # in the order of STAGES
            right = [f"{100 * cell['right']:.0f}" for cell in each[0]]
            exits = [_share(cells[0], "exit_loop", 1, 2) for cells in each]
            rows.append([seed, p, *right, *exits])
    loops = [f"loop {loop}" for loop in sorted({*looped["loop"]})]
    return table(["seed", "p", *loops, "exit, stage I", "stage II", "stage II ahead"], rows)


def _rules(rules: pd.DataFrame) -> str:
    """A row for each rule, and for the gate after each stage; three columns for each seed."""
    looped = rules.query("model in @STAGES")
    rows: dict[str, list[str]] = {}
    for x in _records(looped):
        name, stage = x["rule"], x["model"].split(", ")[1]
        if not name.startswith("gate") and stage != "stage I":
            continue  # stage II changes the gate alone
        within, fewest = x["dealt_within"], x["cheapest"]
        dealt = "" if pd.isna(x["dealt"]) else f"{100 * x['dealt']:.1f}"
        dealt += "" if pd.isna(within) else f"; within p {100 * within:.1f}"
        shown = [f"{100 * x['right']:.1f} ({x['loops']:.2f})", dealt]
        label = f"{name}, {stage}" if name.startswith("gate") else name
        row = rows.setdefault(label, [])
        row += [*shown, "" if pd.isna(fewest) else f"{fewest:.2f}"]
    seeds = [f"seed {seed}" for seed in looped["seed"].unique().tolist()]
    header = [
        cell for seed in seeds for cell in (f"{seed}: right (loops)", "dealt", "fewest loops")
    ]
    return table(["rule", *header], [[label, *row] for label, row in rows.items()])


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for _, row in frame.iterrows()]


def _share(cell: dict[str, Any], name: str, times: int, digits: int = 0) -> str:
    """A value with its interval, ``98 (97–99)``."""
    stem = name.removesuffix("_loop")
    ends = (times * cell[f"{stem}_low"], times * cell[f"{stem}_high"])
    return f"{times * cell[name]:.{digits}f} ({ends[0]:.{digits}f}–{ends[1]:.{digits}f})"
