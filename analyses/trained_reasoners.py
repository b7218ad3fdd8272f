"""What the studies find in the small TRM and HRM of ``train_trm_small``, on sudokus and mazes.

    python -m analyses.trained_reasoners depth          # right answers after 0 to 20 loops
    python -m analyses.trained_reasoners page           # the tables of the page, from the files

Parts: depth, exits, simple, fates, restarts, attention, ablation, probes, patching, locality. Each
writes analyses/results/reasoners_PART.csv. A loop is one slow cycle; a segment has two. Puzzles are
fresh: none is in the training set. Weights are read from ``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.tables_in_pages import RESULTS
from analyses.train_trm_small import KINDS, OUT, TASKS, build, fresh, opened, trained
from analyses.trained_reasoners_page import write_page
from loopinterp.adapters import PublishedModel
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.core.storage import write_bytes
from loopinterp.dynamics import (
    convergence_study,
    exact_match,
    extrapolation_study,
    jvp,
    likeliest,
    lyapunov_exponents,
    reachability_study,
    run_loops,
)
from loopinterp.dynamics.measures import correctness
from loopinterp.interventions import ablation_study, patching_sweep
from loopinterp.lenses import attention_study, exit_study
from loopinterp.models import bind
from loopinterp.probing import probe_study
from loopinterp.tasks import IGNORE, Batch
from loopinterp.tasks.maze import WAYS
from loopinterp.tasks.sudoku import peers

LOOPS, SEGMENT = 16, 2
"""Loops of a run as in training, and of a segment."""
LATER = 64
"""Loops of a run that shows whether a state converges."""


Who = dict[str, Any]
"""Task, model and seed: the first columns of every table."""

Row = dict[str, Any]


def models(out: Path, seeds: list[int]) -> Iterator[tuple[Who, PublishedModel]]:
    """Every model of the folder, and untrained ones."""
    for task in TASKS:
        for kind in KINDS:
            for seed in seeds:
                who = {"task": task, "model": kind, "seed": seed}
                if (out / f"{kind}-{task}-seed-{seed}.safetensors").exists():
                    yield who, opened(trained(out, kind, task, seed), task)
            if kind != "unlooped":
                who = {"task": task, "model": f"untrained {kind}", "seed": 0}
                yield who, opened(build(kind, task, 0), task)


def measures(part: str, who: Who) -> bool:
    """Whether a part measures a model."""
    unlooped, untrained = who["model"] == "unlooped", who["model"].startswith("untrained")
    if part == "simple":
        return who["task"] == "sudoku" and not untrained
    return part == "depth" or not (unlooped or (untrained and part not in UNTRAINED))


def answered(model: Any, batch: Batch, n_loops: int = LOOPS) -> Tensor:
    """Whether each puzzle is solved after so many loops, [batch]."""
    rights = []
    for rows in torch.arange(len(batch)).split(250):
        answer = likeliest(model(batch.inputs[rows], n_loops=n_loops))
        rights.append(exact_match(correctness(answer, batch.targets[rows])).bool())
    return torch.cat(rights)


def ends(name: str, estimate: Any) -> dict[str, float]:
    """Columns of a value with its interval."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(float, estimate)))


def depth(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Share of grids, and of cells, that are right after each loop."""
    found = extrapolation_study(model, fresh(who["task"], n), n_loops=20).data
    for loop in found["loop"].values:
        exact, cells = (found[x].sel(loop=loop).values for x in ("exact", "accuracy"))
        yield {
            **who, "loop": loop, "n": n,
            **ends("exact", wilson_estimate(exact.sum(), n)),
            **ends("cells", mean_estimate(cells)),
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


def simple(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Sudokus with few blanks, fewer than in training, and with as many as there."""
    for blanks in (1, 2, 3, 4, 6, 8, 10, 12):
        generator = torch.Generator().manual_seed(blanks)
        drawn = TASKS["sudoku"].sample(blanks, batch_size=n // 4, generator=generator)
        right = answered(model, drawn, model.n_loops).sum()
        share = wilson_estimate(right, n // 4)
        yield {**who, "blanks": blanks, "n": n // 4, **ends("exact", share)}


_RIGHT: dict[tuple[Any, ...], Tensor] = {}


def chosen(model: Any, who: dict[str, Any], n: int, most: int) -> tuple[Batch, int]:
    """Puzzles wrong after the last loop, then as many right ones; how many are wrong."""
    batch, key = fresh(who["task"], n, seed=2 * 10**6), (*who.values(), n)
    if key not in _RIGHT:  # once for two parts
        _RIGHT[key] = answered(model, batch)
    right = _RIGHT[key]
    wrong, fine = ((right == x).nonzero()[:most, 0] for x in (False, True))
    return batch[torch.cat((wrong, fine))], len(wrong)


def fates(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Each wrong and right puzzle: does its state converge, and how fast do neighbours part?"""
    batch, n_wrong = chosen(model, who, 3 * n, 60)
    found = convergence_study(model, batch, n_loops=LATER, limit_steps=200, n_spectral=0)
    still = found.of_counted("residual").mean("pos")
    fate, status = found.fates().values, found.data["limit_status"].values
    end = (found.data["right"].isel(loop=-1) != 0).all("pos").values
    iteration = bind(model, batch.inputs)
    states = run_loops(iteration, LOOPS)
    run, late = (
        lyapunov_exponents(iteration.step, h, loops, discard=0).values[:, 0]
        for h, loops in ((states[0], LOOPS), (states[-1], LATER - LOOPS))
    )
    halt = model.exit_probability(states[-1])[:, 0]
    for k in range(len(batch)):
        yield {
            **who, "wrong": k < n_wrong, "fate": fate[k], "limit": int(status[k]),
            "right_later": bool(end[k]), "residual": float(still[LOOPS, k]),
            "residual_later": float(still[-1, k]), "lyapunov_run": float(run[k]),
            "lyapunov_late": float(late[k]), "halt": float(halt[k]),
        }  # fmt: skip


def restarts(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Right answers from other initial states, and after perturbations of the state at the end."""
    batch, n_wrong = chosen(model, who, 3 * n, 30)
    for name, rows in (("wrong", slice(n_wrong)), ("right", slice(n_wrong, None))):
        part = batch[rows]
        if len(part) < 5:
            continue
        found = reachability_study(
            model, part, n_loops=LATER, kicks=(0.1, 0.3, 1.0, 3.0), n_draws=2
        ).data
        settled = (found["period"].sel(start="own") > 0).values
        cells = {("start", str(x)): found["exact"].sel(start=x) for x in found["start"].values}
        # Of two draws, the mean for each example.
        cells |= {
            ("perturbation", str(x)): found["kick_exact"].sel(kick=x).mean("draw")
            for x in found["kick"].values
        }
        for (change, size), exact in cells.items():
            for group, of_group in (("all", settled | True), ("settled", settled)):
                values = exact.values[of_group]
                if len(values) > 1:
                    share = wilson_estimate(values.sum(), len(values))
                    yield {**who, "group": name, "state": group, "change": change,
                           "size": size, "n": len(values), **ends("right", share)}  # fmt: skip


def relations(task: str, inputs: Tensor) -> dict[str, Tensor]:
    """Masks [batch, pos, pos] of pairs of cells: the task's constraints, and distance on the grid.

    Of a maze, ``open`` are neighbours with a passage, ``walled`` those without.
    """
    n, n_pos = inputs.shape
    width = int(n_pos**0.5)
    place = torch.arange(n_pos)
    row, column = place // width, place % width
    away = (row[:, None] - row).abs() + (column[:, None] - column).abs()  # [pos, pos]
    one, near = torch.eye(n_pos, dtype=torch.bool), away == 1
    if task == "sudoku":
        peer = torch.zeros(n_pos, n_pos, dtype=torch.bool)
        for cell, others in enumerate(peers(2)):
            peer[cell, list(others)] = True
        masks = {"itself": one, "peer, next to it": peer & near, "peer, farther": peer & ~near,
                 "no peer, next to it": ~peer & near & ~one,
                 "no peer, farther": ~peer & ~near & ~one}  # fmt: skip
        return {name: mask.expand(n, -1, -1) for name, mask in masks.items() if mask.any()}
    leads = torch.zeros(n, n_pos, n_pos, dtype=torch.bool)
    for way, (down, right) in enumerate(WAYS):
        to = (row[:, None] + down == row) & (column[:, None] + right == column)
        leads |= ((inputs >> way & 1) == 1)[..., None] & to
    distance = torch.where(one, 0, torch.where(leads, 1, n_pos)).float()
    for middle in range(n_pos):  # all shortest ways through the maze
        distance = torch.minimum(distance, distance[:, :, middle, None] + distance[:, middle, None])
    return {"itself": distance == 0, "open": distance == 1, "walled": near & (distance > 1),
            "way of 2": distance == 2, "way of 3 or 4": (distance > 2) & (distance < 5) & ~near,
            "way of 5 or more": (distance > 4) & ~near}  # fmt: skip


def shares(
    who: dict[str, Any], weight: Tensor, inputs: Tensor, **where: Any
) -> Iterator[dict[str, Any]]:
    """Mean weight [batch, to, from] by relation, over that of even weights without the cell itself.

    An interval is over examples.
    """
    masks = relations(who["task"], inputs)
    others = ~masks["itself"]
    even = (weight * others).sum((1, 2)) / others.sum((1, 2))  # [batch]
    for name, mask in masks.items():
        count = mask.sum((1, 2))
        some = count > 0
        mean = (weight * mask).sum((1, 2))[some] / count[some] / even[some]
        yield {**who, **where, "relation": name, **ends("times", mean_estimate(mean))}


@torch.no_grad()
def influence(step: Any, h: Tensor, n_draws: int = 8, seed: int = 0) -> Tensor:
    """Squared norms of the blocks ``d h'_i / d h_j``, [batch, i, j], estimated by random tangents.

    ``E |J v|^2`` over v of independent standard normal numbers at position j alone.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(*h.shape[:2], h.shape[1])
    for j in range(h.shape[1]):
        for _ in range(n_draws):
            v = torch.zeros_like(h)
            v[:, j] = torch.randn(h[:, j].shape, generator=generator)
            total[:, :, j] += jvp(step, h, v).square().sum(-1) / n_draws
    return total


def locality(who: Who, model: Any, n: int) -> Iterator[Row]:
    """How strongly the state of one cell acts on another's, in one loop and in eight."""
    batch = fresh(who["task"], max(n // 40, 4))
    iteration = bind(model, batch.inputs)
    states = run_loops(iteration, LOOPS)

    def eight(h: Tensor, step: Any = iteration.step) -> Tensor:
        for _ in range(8):
            h = step(h)
        return h

    for start, span, step in ((0, 1, iteration.step), (4, 1, iteration.step),
                              (12, 1, iteration.step), (4, 8, eight)):  # fmt: skip
        weight = influence(step, states[start], n_draws=4 if span == 1 else 2)
        yield from shares(who, weight, batch.inputs, after=start, span=span)


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
    "depth": depth, "exits": exits, "simple": simple, "fates": fates, "restarts": restarts,
    "attention": attention, "ablation": ablation, "probes": probes, "patching": patching,
    "locality": locality,
}  # fmt: skip
UNTRAINED = ("depth", "attention", "locality")
"""Parts that measure untrained models too."""


def replaced(file: Path, who: Who, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a file, with those of one model put in place of its former ones."""
    if not file.exists():
        return rows
    known = pd.read_csv(file)
    others = (known[[*who]] != pd.Series(who)).any(axis=1)
    return pd.concat([known.loc[others], rows], ignore_index=True)


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
                with torch.no_grad():
                    rows = pd.DataFrame(list(PARTS[part](who, model, args.samples)))
                file = args.results / f"reasoners_{part}.csv"
                table = replaced(file, who, rows)
                write_bytes(file, table.to_csv(index=False, float_format="%.4f").encode())
                print(part, *who.values(), len(rows), flush=True)


if __name__ == "__main__":
    main()
