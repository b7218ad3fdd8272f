"""The circuit of eight hops in a small trained Ouro: which edges carry the answer, at which loops.

    python -m analyses.train_ouro_small          # the weights, once
    python -m analyses.ouro_small_edges          # some ten minutes on one core

Base and source ask for eight hops in two random sequences. Effects and circuits come from
``edge_study``; what was measured is kept in analyses/results/ouro_small_edges.csv and
ouro_small_circuits.csv, and goes into docs/results/ouro-small-edges.md. ``--page`` writes the page
and its picture from the files alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from analyses.ouro_small_results import fresh
from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from analyses.train_ouro_small import N_LOOPS, build
from loopinterp.adapters import adapt
from loopinterp.edges import EdgeStudy, edge_study
from loopinterp.figures import heatmap_panels
from loopinterp.tasks import IGNORE

HOPS, TOP = 8, 10
METHODS = ("exact", "eap_ig", "edge_ig")
EDGES, CIRCUITS = "ouro_small_edges.csv", "ouro_small_circuits.csv"
PAGE, PICTURE = PAGES / "results/ouro-small-edges.md", PAGES / "pictures/ouro-small-edges.png"


def study(folder: Path, seed: int, n: int) -> EdgeStudy:
    """Edges between ``n`` pairs of sequences whose answers differ."""
    published = build(N_LOOPS, seed)
    published.load_state_dict(load_file(folder / f"looped-stage-I-seed-{seed}.safetensors"))
    batch = fresh(HOPS, 4 * n)
    base, source = batch[: 2 * n], batch[2 * n :]
    rows = (base.targets[:, -1] != source.targets[:, -1]).nonzero()[:n, 0]
    asked = base.targets[rows] != IGNORE  # the last position
    return edge_study(adapt(published.eval()), base.inputs[rows], source.inputs[rows],
                      n_loops=N_LOOPS, split=True, methods=METHODS, n_steps=10, scored=asked,
                      unrolled_exact=True, threshold=0.01, curve_points=2, seed=seed)  # fmt: skip


def measured(seed: int, result: EdgeStudy) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The effect of every edge of the run; and the faithfulness of circuits."""
    edges = result.to_dataframe("effect", "size").dropna()
    edges = edges[edges["score"].isin(["exact", "eap_ig", "edge_ig"])].assign(seed=seed)
    circuits = result.to_dataframe("faithfulness").assign(seed=seed)
    n_kept, n_tied = int(result.data["pruned"].sum()), int(result.data["pruned"].count())
    pruned = {"pruned": result.pruned_faithfulness, "random": result.random_faithfulness}
    rows = [{"graph": "pruned", "score": name, "share": n_kept / n_tied, "faithfulness": f,
             "seed": seed, "kept": n_kept} for name, f in pruned.items()]  # fmt: skip
    return edges, pd.concat([circuits, pd.DataFrame(rows)])


def by_loop(edges: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Size of each tied edge at each loop that reads it, largest sum first."""
    exact = edges[(edges["seed"] == seed) & (edges["score"] == "exact")].copy()
    ends = {
        end: exact[end].str.extract(r"(?:(\d):)?(?:block\.)?(.*)") for end in ("sender", "receiver")
    }
    loop = ends["receiver"][0].astype(float).fillna(N_LOOPS - 1)
    lag = (loop - ends["sender"][0].astype(float)).fillna(0).clip(upper=2)
    words = lag.map({0: "", 1: ", 1 loop back", 2: ", 2 or 3 loops back"})
    exact["edge"] = ends["sender"][1] + " → " + ends["receiver"][1] + words
    exact["loop"] = loop.astype(int) + 1
    wide = exact.pivot_table(index="edge", columns="loop", values="size", aggfunc="sum")
    return wide.loc[wide.sum(axis=1).sort_values(ascending=False).index]


def tables(edges: pd.DataFrame, circuits: pd.DataFrame) -> dict[str, str]:
    rows = []
    for (graph, score), each in circuits.groupby(["graph", "score"], sort=False):
        for share in sorted(each["share"].unique()) if graph != "pruned" else [None]:
            if share in (None, 0.02, 0.05, 0.1, 0.2):
                here = each if share is None else each[each["share"] == share]
                shown = f"{share:.0%}" if share else " / ".join(f"{x:.0f}" for x in here["kept"])
                rows.append([graph, score, shown, *(f"{x:.2f}" for x in here["faithfulness"])])
    seeds = sorted(edges["seed"].unique())
    return {
        "ouro-circuits": table(["graph", "edges by", "edges", *(f"seed {s}" for s in seeds)], rows)
    }


def picture(edges: pd.DataFrame) -> bytes:
    panels = {f"seed {s}": by_loop(edges, s).head(TOP) for s in sorted(edges["seed"].unique())}
    with StillPictures() as pictures:
        drawn = {}
        for name, wide in panels.items():
            values = wide.stack(future_stack=True).to_xarray()
            drawn[name] = values
        return pictures.draw(heatmap_panels(drawn, value_title="effect"), width=900, height=420)


def main() -> None:
    parser = argparse.ArgumentParser(description="The circuit of p-hop in a small Ouro.")
    parser.add_argument("--runs", type=Path, default=Path("runs/ouro-small"))
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--page", action="store_true", help="write the page from the files alone")
    args = parser.parse_args()


if __name__ == "__main__":
    main()
