"""The circuit of eight hops in a small trained Ouro: which edges carry the answer, at which loops.

    python -m analyses.train_ouro_small      # the weights, once
    python -m analyses.ouro_small_edges      # some six minutes a seed on one core

Base and source are random sequences that ask for eight hops.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file

from analyses.ouro_small_results import fresh
from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from analyses.train_ouro_small import N_LOOPS, build
from loopinterp.adapters import adapt
from loopinterp.edges import EdgeStudy, edge_study
from loopinterp.figures import heatmap_panels
from loopinterp.tasks import IGNORE

HOPS, SHOWN = 8, 10  # hops asked for; edges of each seed in the picture
SCORES, SHARES = ("exact", "eap_ig", "random"), (0.02, 0.05, 0.1, 0.2, 0.5)
FILES, PAGE = ("ouro_small_edges.csv", "ouro_small_circuits.csv"), "results/ouro-small-edges.md"


def study(folder: Path, seed: int, n: int) -> EdgeStudy:
    """Edges between ``n`` pairs of sequences whose answers differ."""
    published = build(N_LOOPS, seed)
    published.load_state_dict(load_file(folder / f"looped-stage-I-seed-{seed}.safetensors"))
    batch = fresh(HOPS, 4 * n)
    base, source = batch[: 2 * n], batch[2 * n :]
    rows = (base.targets[:, -1] != source.targets[:, -1]).nonzero()[:n, 0]
    return edge_study(adapt(published.eval()), base.inputs[rows], source.inputs[rows],
                      methods=("exact", "eap_ig"), unrolled_exact=True, split=True, n_steps=30,
                      n_loops=N_LOOPS, scored=base.targets[rows] != IGNORE, threshold=0.01,
                      curve_points=2, seed=seed)  # fmt: skip


def measured(seed: int, result: EdgeStudy) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The effect of every edge of the run; and the faithfulness of circuits."""
    edges = result.to_dataframe("effect", "size").dropna().query("score == 'exact'")
    f = [result.pruned_faithfulness, result.random_faithfulness]
    pruned = pd.DataFrame({"score": ["pruned", "random"], "faithfulness": f, "graph": "pruned"})
    pruned["share"] = float(result.data["pruned"].mean())
    circuits = pd.concat([result.to_dataframe("faithfulness"), pruned])
    return edges.assign(seed=seed), circuits.assign(seed=seed)


def by_loop(edges: pd.DataFrame) -> pd.DataFrame:
    """Effect of each tied edge at the loops (from 1) that read it, largest sum first."""
    names = r"(?:(?P<loop>\d):)?(?:block\.)?(?P<name>.*)"
    sender, reader = edges["sender"].str.extract(names), edges["receiver"].str.extract(names)
    loop = reader["loop"].astype(float).fillna(N_LOOPS - 1).astype(int)  # the readout's: the last
    lag = (loop - sender["loop"].astype(float).fillna(loop)).clip(upper=2)
    words = lag.map({0: "", 1: " (1 loop later)", 2: " (2 or 3 loops later)"})
    found = edges.assign(loop=loop + 1, edge=sender["name"] + " → " + reader["name"] + words)
    wide = found.pivot_table(index="edge", columns="loop", values="size", aggfunc="sum")
    return wide.loc[wide.sum(axis=1).sort_values(ascending=False, kind="stable").index]


def as_tables(circuits: pd.DataFrame) -> dict[str, str]:
    f = circuits.set_index(["graph", "share", "seed", "score"])["faithfulness"].round(2) + 0
    columns = [(seed, score) for seed in (0, 1) for score in SCORES]
    rows = [[f"{graph}, {share:.0%}", *(f"{f[(graph, share, *at)]:.2f}" for at in columns)]
            for graph in ("unrolled", "tied") for share in SHARES]  # fmt: skip
    return {"ouro-circuits": table(["kept", *(f"seed {s}: {score}" for s, score in columns)], rows)}


def picture(edges: pd.DataFrame) -> bytes:
    """The strongest edges of either seed, by the loop that reads them."""
    tables = {f"seed {seed}": by_loop(each) for seed, each in edges.groupby("seed")}
    names = list(dict.fromkeys(x for wide in tables.values() for x in wide.index[:SHOWN]))
    panels = {k: x.loc[names].stack(future_stack=True).to_xarray() for k, x in tables.items()}
    drawn = heatmap_panels(panels, value_title="effect", x_title="loop of the reader", y_title="",
                           scale="mass", value_range=(0, 1))  # fmt: skip
    with StillPictures() as pictures:
        return pictures.draw(drawn, width=900, height=520)


def main() -> None:
    parser = argparse.ArgumentParser(description="The circuit of p-hop in a small Ouro.")
    parser.add_argument("--runs", type=Path, default=Path("runs/ouro-small"))
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--page", action="store_true", help="write the page from the files")
    if not (args := parser.parse_args()).page:
        parts = [measured(seed, study(args.runs, seed, args.pairs)) for seed in (0, 1)]
        for file, rows in zip(FILES, map(pd.concat, zip(*parts))):
            rows.to_csv(RESULTS / file, index=False, float_format="%.4f")
    edges, circuits = (pd.read_csv(RESULTS / file) for file in FILES)
    rewrite(PAGES / PAGE, as_tables(circuits))
    (PAGES / "pictures/ouro-small-edges.png").write_bytes(picture(edges))


if __name__ == "__main__":
    main()
