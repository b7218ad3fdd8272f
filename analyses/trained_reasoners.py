"""What the studies find in the small TRM and HRM of ``train_trm_small``, on sudokus and mazes.

    python -m analyses.trained_reasoners depth          # right answers after 0 to 20 loops
    python -m analyses.trained_reasoners page           # the tables of the page, from the files

Parts: depth, exits, attention, ablation, probes, patching. Each writes
analyses/results/reasoners_PART.csv. A loop is one slow cycle; a segment has two. Puzzles are fresh:
none is in the training set. Weights are read from ``--out``. Papers' claims on the same models are
in analyses/papers: ``failed_puzzles``, ``stable_failures``, ``one_blank`` and ``locality``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analyses.cell_relations import shares
from analyses.papers.claims import within
from analyses.reasoner_models import (
    LOOPS,
    Row,
    Who,
    is_looped,
    is_trained,
    measure_part,
    models,
)
from analyses.tables_in_pages import RESULTS
from analyses.train_trm_small import OUT, fresh
from analyses.trained_reasoners_page import write_page
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.dynamics import extrapolation_study
from loopinterp.interventions import ablation_study, patching_sweep
from loopinterp.lenses import attention_study, exit_study
from loopinterp.probing import probe_study
from loopinterp.tasks import IGNORE

SEGMENT = 2
"""Loops of a segment."""


def depth(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Share of grids, and of cells, that are right after each loop."""
    found = extrapolation_study(model, fresh(who["task"], n), n_loops=20).data
    for loop in found["loop"].values:
        exact, cells = (found[x].sel(loop=loop).values for x in ("exact", "accuracy"))
        yield {
            **who, "loop": loop, "n": n,
            **within("exact", wilson_estimate(exact.sum(), n)),
            **within("cells", mean_estimate(cells)),
        }  # fmt: skip


def exits(who: Who, model: Any, n: int) -> Iterator[Row]:
    """What every stopping rule reaches, and the halting head as in training."""
    batch = fresh(who["task"], n)
    found = exit_study(model, batch, n_loops=LOOPS, gate=model.exit_probability)
    best, loops = found.best_loop()
    yield {**who, "rule": "one budget", "right": best, "loops": loops}
    right, loops = found.oracle()
    yield {**who, "rule": "oracle", "right": right, "loops": loops}
    for rule in found.rules:
        right, dealt, loops = found.gain(rule)
        cheapest = found.cheapest(rule)
        yield {**who, "rule": rule, "right": right, "loops": loops, "dealt": dealt,
               "cheapest": np.nan if cheapest is None else cheapest}  # fmt: skip
    exact = found.data["exact"].values[SEGMENT::SEGMENT]  # [segment, batch]
    halts = found.data["score"].sel(rule="gate").values[SEGMENT::SEGMENT] < 0.5
    stop = np.where(halts.any(0), halts.argmax(0), len(exact) - 1)
    yield {
        **who, "rule": "halting head, as trained",
        "right": np.take_along_axis(exact, stop[None], 0).mean(),
        "loops": SEGMENT * (stop.mean() + 1), "dealt": exact.mean(1)[stop].mean(),
        "halted": halts.any(0).mean(), "false": (halts.any(0) & ~exact[stop, range(n)]).mean(),
    }  # fmt: skip


def attention(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Attention by loop and stack to the cells of each relation, mean of heads."""
    batch = fresh(who["task"], max(n // 10, 4))
    entropy = attention_study(model, batch, n_loops=LOOPS).data
    _, cache = model.run_with_cache(
        batch.inputs, n_loops=LOOPS, names_filter="hook_pattern", loops=(0, 1, 3, 7, 15)
    )
    names = model.site_map.layer_names
    pattern = cache.stack("attn.hook_pattern", layer=slice(None))  # [loop, layer, b, head, q, k]
    for at, loop in enumerate((0, 1, 3, 7, 15)):
        for layer, name in enumerate(names):
            bits = entropy["entropy"].sel(loop=loop, layer=layer).mean("head")
            where = {"loop": loop + 1, "layer": name, "bits": float(bits),
                     "even_bits": float(entropy["entropy_even"].mean())}  # fmt: skip
            weight = pattern[at, layer].mean(1)  # mean of heads, [batch, query, key]
            yield from shares(who, weight, batch.inputs, **where)


def ablation(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Answers that change without one module, in all loops or from or up to one."""
    batch = fresh(who["task"], max(n // 20, 4))
    found = ablation_study(
        model, batch, components=("attn_out", "mlp_out"), kinds=("mean",),
        when=("all", "one"), loops=[0, 1, 3, 7, 14, 15],
    ).to_dataframe("agreement", "control_agreement")  # fmt: skip
    for row in found.to_dict("records"):
        yield {**who, **row}


def probes(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Accuracy of linear probes for a cell's answer in both parts of the state."""
    batch = fresh(who["task"], n // 2)
    sites = ("hook_z_H", "hook_z_L")
    found = probe_study(model, batch, {"answer": batch.targets}, n_loops=LOOPS, sites=sites)
    names = ["accuracy", "control_task", "random_model", "majority", "embedding"]
    table = found.data[names].to_dataframe().reset_index()
    answers = extrapolation_study(model, batch, n_loops=LOOPS).data["accuracy"].mean("batch")
    for row in table.drop(columns=["group", "target"]).to_dict("records"):
        loop = int(row.pop("loop")) + 1
        yield {**who, "loop": loop, **row, "readout": float(answers.sel(loop=loop))}


def patching(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Another puzzle's state, or a part of it, put in after a loop: whose answer is read?"""
    batch = fresh(who["task"], max(n // 10, 4))
    source = batch[torch.arange(len(batch)).roll(1)]
    both = (batch.targets != IGNORE) & (source.targets != IGNORE)
    for part in ("hook_z_H", "hook_z_L", "hook_state_post"):
        for n_loops in (LOOPS, 2 * LOOPS):
            found = patching_sweep(
                model, batch.inputs, source.inputs, component=part, n_loops=n_loops,
                loops=[0, 3, 7, 11, 14, 15], scored=both,
            ).to_dataframe()  # fmt: skip
            for row in found.to_dict("records"):
                kept = {name: row[name] for name in ("loop", "recovered", "control_recovered")}
                yield {**who, "part": part, "read": n_loops, **kept}


PARTS = {
    "depth": depth, "exits": exits, "attention": attention, "ablation": ablation,
    "probes": probes, "patching": patching,
}  # fmt: skip


def measures(part: str, who: Who) -> bool:
    """Whether a part measures a model."""
    return part == "depth" or (is_looped(who) and (is_trained(who) or part == "attention"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="+", choices=[*PARTS, "page"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--only", help="Models whose TASK-MODEL begins so.", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == ["page"]:
        write_page(args.results)
        return
    for who, model in models(args.out, args.seed):
        name = f"{who['task']}-{who['model']}"
        for part in args.part if name.startswith(args.only) else ():
            if measures(part, who):
                measure_part(PARTS[part], who, model, args.samples, args.results)


if __name__ == "__main__":
    main()
