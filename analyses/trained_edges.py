"""Edges of the trained small Ouro and Huginn: do scores of paths add up, are path patches exact?

    python -m analyses.trained_edges          # some 40 minutes on one core

Integrated gradients by the midpoint and the adaptive rule; path patching beside runs written out by
hand (tests/edges/published_by_hand.py); all in float64. Results are kept in
analyses/results/trained_edges.csv; the tables go into docs/results/ouro-small-edges.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch

from analyses.ouro_small_edges import PAGE
from analyses.ouro_small_results import fresh
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp import load_pretrained
from loopinterp.edges import path_patching
from loopinterp.edges.edge_effects import EdgeEffects
from loopinterp.edges.edge_runs import graph_of_pairs
from loopinterp.tasks import IGNORE

HOPS, PAIRS = 8, 8
LOOPS = {"ouro-small": 4, "huginn-small": 8}
FILES = ("trained_edges.csv", "trained_paths.csv")
RULES: dict[str, dict[str, Any]] = {
    "adaptive": {"rule": "adaptive", "tolerance": 0.01},
    "midpoint": {"rule": "midpoint", "n_steps": 100},
}
MORE: dict[str, dict[str, Any]] = {"ouro-small": {"midpoint, more": {"n_steps": 600}}}
"""About as many as the adaptive rule takes."""
PATHS = {  # senders, receivers
    "ouro-small": [("1:block.1.head.1", "2:block.0.head.1.v"), ("0:block.0.mlp", "readout"),
                   ("input", "1:block.1.mlp")],
    "huginn-small": [("6:block.1.head.1", "7:block.0.head.1.v"), ("7:block.0.mlp", "readout"),
                     ("input", "5:block.1.mlp")],
}  # fmt: skip


@contextmanager
def in_float64(name: str) -> Iterator[Any]:
    """A model of the zoo; its published code, which casts to float32 in norms, casts to float64."""
    model, float32 = load_pretrained(name).double(), torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield model
    finally:
        torch.Tensor.float = float32  # type: ignore[method-assign]


def pairs() -> tuple[Any, Any, Any]:
    """Base, source, and the positions asked, of sequences whose answers differ."""
    batch = fresh(HOPS, 8 * PAIRS)
    base, source = batch[: 4 * PAIRS], batch[4 * PAIRS :]
    rows = (base.targets[:, -1] != source.targets[:, -1]).nonzero()[:PAIRS, 0]
    return base.inputs[rows], source.inputs[rows], base.targets[rows] != IGNORE


def gaps(name: str) -> pd.DataFrame:
    """How far the scores out of the input are from the whole change, by rule."""
    base, source, scored = pairs()
    options: dict[str, Any] = {"neurons": None, "split": False, "n_loops": LOOPS[name]}
    with in_float64(name) as model:
        graph, base, source, scored = graph_of_pairs(
            model, base, source, scored=scored, stream_norms="nodes", **options
        )
        effects, rows = EdgeEffects(model, graph, base, source, scored=scored), []
        for rule, path in (RULES | MORE.get(name, {})).items():
            effects.scores("eap_ig", **path)
            rows.append({"model": name, "rule": rule, **vars(effects.integrals["eap_ig"])})
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def paths(name: str) -> pd.DataFrame:
    """Largest difference of logits between path patching and a run by hand, in float64."""
    from tests.edges.published_by_hand import embedding_of, run_by_hand

    base, source, _ = pairs()
    rows, n_loops = [], LOOPS[name]

    def hand(tokens: Any, *sees: Any) -> Any:
        with torch.no_grad():
            embedded = embedding_of(model.published, tokens)
            start = model.initial_state(model.embed(tokens)) if "huginn" in name else None
        return run_by_hand(model.published, embedded, start, n_loops, *sees)

    with in_float64(name) as model:
        plain, _ = hand(base)
        _, donated = hand(source)
        for sender, receiver in PATHS[name]:
            patched = path_patching(
                model, base, source, n_loops=n_loops, senders=sender, receivers=receiver
            )

            def sees(s: str, r: str, x: Any, ends: Any = (sender, receiver)) -> Any:
                return donated[s] if (s, r) == ends or (s == ends[0] and r[:-2] == ends[1]) else x

            by_hand, _ = hand(base, sees)
            error, effect = (float((patched - x).abs().max()) for x in (by_hand, plain))
            rows.append({"model": name, "sender": sender, "receiver": receiver, "effect": effect,
                         "error": error})  # fmt: skip
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def as_tables(found: pd.DataFrame, patched: pd.DataFrame) -> dict[str, str]:
    rows = [
        [x["model"], x["rule"], x["n_gradients"], x["n_slopes"], f"{x['gap']:.2%}",
         f"{x['largest_gap']:.1%}"]
        for x in found.to_dict("records")
    ]  # fmt: skip
    header = ["model", "rule", "gradients", "slopes", "gap of the mean", "worst pair"]
    paths = [
        [x["model"], f"{x['sender']} → {x['receiver']}", f"{x['effect']:.2g}", f"{x['error']:.0e}"]
        for x in patched.to_dict("records")
    ]
    return {
        "trained-gaps": table(header, rows),
        "trained-paths": table(["model", "path", "effect", "difference"], paths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Completeness and exactness of edges.")
    parser.add_argument("--page", action="store_true", help="write the page from the files")
    torch.set_num_threads(1)
    if not parser.parse_args().page:
        for file, measured in zip(FILES[::-1], (paths, gaps)):
            rows = pd.concat([measured(name) for name in LOOPS])
            rows.to_csv(RESULTS / file, index=False, float_format="%.4g")
    rewrite(PAGES / PAGE, as_tables(*(pd.read_csv(RESULTS / file) for file in FILES)))


if __name__ == "__main__":
    main()
