"""What lenses read of the zoo's additions: when each carry is read, and how far off each lens is.

    python -m analyses.lenses                        # some eight minutes on one core
    python -m analyses.lenses --name addition        # one model anew, the others as they were

Carries of every chain length come in pairs of additions that differ in all of them, so that who
has not seen the deciding bit is right in half. Bits that a carry passes on from (one of the two
digits is 1) and bits at which it ends (both are 0, or both 1) are counted apart. What was found is
kept in analyses/results/lenses.csv; the tables go into docs/results/lenses.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.lenses import FittedLens, LensResult, fit_jacobian_lens, fit_tuned_lens, lens_study
from loopinterp.probing import carry_study, sample_chains
from loopinterp.probing.carry_wavefront import ChainSample
from loopinterp.tasks import Addition
from loopinterp.zoo import load_pretrained

FILE, PAGE = "lenses.csv", "results/lenses.md"
ARRIVALS, DISTANCES = "carries-by-lens", "distance-by-lens"
SEEDS = tuple(f"addition-seed-{k}" for k in (1, 2, 3, 4))
NAMES = ("addition", *SEEDS, "addition-no-hold", "addition-no-spare-loops")
BITS, LONGEST, PAIRS = 16, 10, 64
SHOWN = (1, 2, 4, 8, 12)
"""Loops whose distance from the last is on the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Lenses on the zoo's additions.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--name", action="append", choices=NAMES, help="Default: all.")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="Of each chain length.")
    parser.add_argument("--steps", type=int, default=300, help="Of the tuned lens.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = args.results / FILE
    known = pd.read_csv(kept) if kept.exists() else pd.DataFrame(columns=["model"])
    for name in args.name or NAMES:
        found = measure(name, args.pairs, args.steps)
        others = known.query("model != @name")
        known = pd.concat([others, found] if len(others) else [found])
        known = known.sort_values(by=["model"], kind="stable")
        args.results.mkdir(parents=True, exist_ok=True)
        known.to_csv(kept, index=False, float_format="%.4f")
        print(found.to_string(index=False), flush=True)
    rewrite(args.page, tables(pd.read_csv(kept)))
    print(args.page)


def measure(name: str, pairs: int, steps: int) -> pd.DataFrame:
    """A row for each lens and loop of a model: what it reads, and how far off it is."""
    model, task = load_pretrained(name), Addition()
    n_loops = task.n_loops(BITS)

    def draw(seed: int) -> ChainSample:
        generator = torch.Generator().manual_seed(seed)
        return sample_chains(task, BITS, max_chain=LONGEST, n_pairs=pairs, generator=generator)

    probes = carry_study(model, task, n=BITS, max_chain=LONGEST, n_train=pairs, n_test=pairs // 2)
    sample, others = draw(0), draw(1)
    lenses: dict[str, str | FittedLens] = {
        "logit": "logit",
        "tuned": fit_tuned_lens(model, others.inputs, n_loops=n_loops, steps=steps),
        "tuned, one for all": fit_tuned_lens(
            model, others.inputs, n_loops=n_loops, steps=steps, shared=True
        ),
        "Jacobian": fit_jacobian_lens(model, others.inputs[:48], n_loops=n_loops),
        "Jacobian, own position": fit_jacobian_lens(
            model, others.inputs[:48], n_loops=n_loops, targets="own"
        ),
    }
    rows = []
    for lens, given in lenses.items():
        result = lens_study(model, sample.inputs, lens=given, n_loops=n_loops)  # type: ignore[arg-type]
        rows += _rows(result, sample, task, {"model": name, "lens": lens, "pairs": pairs})
    for loop, accuracy in enumerate(probes.data["accuracy"].values):
        for chain, share in enumerate(accuracy, 1):
            said = {"model": name, "lens": "probe of the carry", "pairs": pairs, "loop": loop}
            rows.append(said | {"chain_length": chain, "right": share})
    return pd.DataFrame(rows)


def _rows(
    result: LensResult, sample: ChainSample, task: Addition, said: dict[str, object]
) -> list[dict[str, object]]:
    data = result.data.sel(layer="state")
    right = data["answer"].values == task.targets(sample.inputs).numpy()
    row, pos = sample.row.numpy(), sample.pos.numpy()
    passes = task.propagate(sample.inputs).numpy()[row, pos]
    kl, rows = data["reading_kl"].mean("batch"), []
    for loop in data["loop"].values.tolist():
        at = said | {"loop": loop}
        for chain in range(LONGEST):
            cell, on = right[loop, row[chain], pos[chain]], passes[chain]
            kinds = {"right": cell, "right_passing": cell[on], "right_ending": cell[~on]}
            shares = {kind: bits.mean() if bits.size else np.nan for kind, bits in kinds.items()}
            rows.append(at | {"chain_length": chain + 1, **shares})
        distances = {f"kl_{r}": float(kl.sel(loop=loop, reading=r)) for r in kl["reading"].values}
        unigram = float(result.data["unigram_kl"].mean())
        rows.append(at | {"chain_length": 0, **distances, "kl_unigram": unigram})
    return rows


def tables(known: pd.DataFrame) -> dict[str, str]:
    """Both tables of the page."""
    return {ARRIVALS: arrivals(known), DISTANCES: distances(known)}


def arrivals(known: pd.DataFrame) -> str:
    """Share of bits that are read before, at, and after the loop of their carry's chain length."""
    rows = []
    for (model, lens), cells in known.query("chain_length > 0").groupby(["model", "lens"]):
        cells = cells[cells["loop"] >= 1]
        ahead = cells["loop"] - cells["chain_length"]
        at = [cells[ahead < 0]["right"]]
        kinds = ("right", "right_passing", "right_ending")
        at += [pd.Series(cells[ahead == 0][kind]).dropna() for kind in kinds]
        at += [cells[ahead == 1]["right"], cells[ahead > 1]["right"]]
        span = [f"{x.min():.2f} to {x.max():.2f}" if len(x) else "" for x in at]
        rows.append([model, lens, *span])
    heads = [
        "before (outside the light cone)",
        "at that loop",
        "… passed on",
        "… ending there",
        "one later",
        "after that",
    ]
    return table(["model", "read by", *heads], rows)


def distances(known: pd.DataFrame) -> str:
    """Mean divergence from the last loop, by lens and loop, of the first model."""
    rows = known.query("chain_length == 0 and model == @NAMES[0]")
    shown = []
    for lens, cells in rows.groupby("lens", sort=False):
        at = cells.set_index("loop")
        shown.append([lens, *(f"{at['kl_lens'][t]:.2f}" for t in SHOWN)])
        if lens in ("logit", "tuned"):
            mixed = (f"{at['kl_shuffled'][t]:.2f}" for t in SHOWN)
            shown.append([f"{lens}, components shuffled", *mixed])
    unigram = rows["kl_unigram"].mean()
    shown.append(["one distribution for all", *[f"{unigram:.2f}"] * len(SHOWN)])
    return table(["lens", *(f"loop {t}" for t in SHOWN)], shown)


if __name__ == "__main__":
    main()
