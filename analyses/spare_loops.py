"""Is a carry read as late as training lets it be? Additions with no loop to spare, one and two.

    python -m analyses.spare_loops --out runs/spare_loops --jobs 2   # some 40 s of one core a model

A carry takes n - 1 loops from the first bit to the last. The recipe of addition asks for answers
after T(n) = n + 1, so that two are to spare; here it asks after n - 1, n and n + 1 as well. Of each
model the logit lens is held against the carry study: is a bit read at the loop at which the carry
into it can be decoded? Finished trainings are kept. What was found lies in
analyses/results/spare_loops.csv, and its table in docs/results/lenses.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.lenses import BITS, LONGEST, PAGE, PAIRS
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.lenses import lens_study
from loopinterp.models import LoopedModel
from loopinterp.probing import carry_study, sample_chains
from loopinterp.tasks import Addition
from loopinterp.training import RECIPES, apply_settings, train

FILE, NAME = "spare_loops.csv", "spare-loops"
NEEDED = -2
"""Loops that a carry takes from the first bit to the last, less T(n)."""

SPARE, SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
KINDS = ("passed on", "ending, carry of 0", "ending, carry of 1")
PROBE = "probe of the carry"


def main() -> None:
    parser = argparse.ArgumentParser(description="Loops to spare, and when a carry is read.")
    parser.add_argument("--out", type=Path, default=Path("runs/spare_loops"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--spare", type=int, nargs="+", default=SPARE)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="Of each chain length.")
    parser.add_argument("--set", action="append", default=[], help="Changes of the training.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    cells = [(spare, seed) for spare in args.spare for seed in args.seeds]
    measured: Any = Parallel(n_jobs=args.jobs)(
        delayed(trained)(spare, seed, args.out, args.set, args.pairs) for spare, seed in cells
    )
    found = pd.concat(measured)
    args.results.mkdir(parents=True, exist_ok=True)
    found.to_csv(args.results / FILE, index=False, float_format="%.4f")
    rewrite(args.page, {NAME: as_table(pd.read_csv(args.results / FILE))})
    print(as_table(found))


def trained(spare: int, seed: int, out: Path, changes: list[str], pairs: int) -> pd.DataFrame:
    """Train a model, or take the one that is there, and measure it."""
    torch.set_num_threads(1)
    recipe = apply_settings(
        RECIPES["addition"], [f"objective.extra_loops={NEEDED + spare}", f"seed={seed}", *changes]
    )
    run = train(recipe, out / f"spare-{spare}-seed-{seed}")
    return measure(run.model(), pairs).assign(spare=spare, seed=seed)


def measure(model: LoopedModel, pairs: int) -> pd.DataFrame:
    """Share of bits that are read, by chain length, by kind, and by loops since the carry came."""
    task, n_loops = Addition(), Addition().n_loops(BITS)
    generator = torch.Generator().manual_seed(0)
    sample = sample_chains(task, BITS, max_chain=LONGEST, n_pairs=pairs, generator=generator)
    result = lens_study(model, sample.inputs, lens="logit", n_loops=n_loops)
    answer = torch.from_numpy(result.data["answer"].sel(layer="state").values)
    right = (answer == task.targets(sample.inputs))[:, sample.row, sample.pos]  # loop chain sample
    passes = task.propagate(sample.inputs)[sample.row, sample.pos]
    carry = sample.carry.bool()
    kinds = dict(zip(KINDS, (passes, ~passes & ~carry, ~passes & carry)))
    probe = carry_study(
        model, task, n=BITS, max_chain=LONGEST, n_train=pairs, n_test=max(pairs // 2, 1)
    )
    decoded = probe.data["accuracy"].values  # [loop, chain]
    rows = []
    for chain in range(1, LONGEST + 1):
        for ahead in (-1, 0, 1):
            at = {"chain_length": chain, "ahead": ahead}
            for kind, of in kinds.items():
                bits = right[chain + ahead, chain - 1][of[chain - 1]].double()
                if len(bits):
                    rows.append(at | {"kind": kind, "right": bits.mean().item()})
            rows.append(at | {"kind": PROBE, "right": float(decoded[chain + ahead, chain - 1])})
    return pd.DataFrame(rows)


def as_table(found: pd.DataFrame) -> str:
    """A row for each model: least and greatest share over chain lengths."""
    rows = []
    for (spare, seed), of in found.groupby(["spare", "seed"]):
        lens = of.query("kind != @PROBE")
        at = [of.query("ahead == 0 and kind == @kind") for kind in (PROBE, *KINDS)]
        shares = [lens.query("ahead == -1 and kind == 'passed on'"), *at, lens.query("ahead == 1")]
        span = [f"{x['right'].min():.2f} to {x['right'].max():.2f}" for x in shares]
        rows.append([spare, seed, *span])
    at_loop = [f"at it: {kind}" for kind in (PROBE, *KINDS)]
    heads = [
        "loops to spare",
        "seed",
        "a loop before (outside the light cone): passed on",
        *at_loop,
        "a loop later: all",
    ]
    return table(heads, rows)


if __name__ == "__main__":
    main()
