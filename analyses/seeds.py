"""Does every seed of one recipe learn the same circuit? Five models, each with its verdict.

    python analyses/seeds.py --out runs/seeds

Trains the addition recipe with several seeds (a minute each on one core; finished runs are kept),
compares each model with all programs of addition, and measures how long a carry that is put in by
hand lives in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from loopinterp.comparison import compare_programs, injected_carry_study, statement
from loopinterp.pages import write_results
from loopinterp.programs import list_programs
from loopinterp.training import RECIPES, apply_settings, train


def main() -> None:
    parser = argparse.ArgumentParser(description="Models of one recipe, seed by seed.")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    recipe = apply_settings(RECIPES["addition"], args.set)
    runs = {
        f"seed {s}": train(recipe.replace(seed=s), args.out / f"seed-{s}")
        for s in range(args.seeds)
    }
    models = {name: run.model() for name, run in runs.items()}
    task = next(iter(runs.values())).task
    generator = torch.Generator().manual_seed(0)
    data = [task.sample(n, batch_size=512, generator=generator) for n in args.lengths]
    comparison = compare_programs(
        list(models.values()), list_programs("addition"), data, names=list(models)
    )
    lives = injected_carry_study(list(models.values()), data[0], names=list(models))
    print(table(comparison, lives).to_string())
    for name in models:
        print(f"\n{name}: {statement(comparison, name)}")
    print()
    found = {"comparison": comparison, "planted-carry": lives}
    print(write_results(found, args.out / "seeds.html", title="Seeds of one recipe"))


def table(comparison, lives) -> pd.DataFrame:
    """Each model: verdict, nearest program with its interval, left alone, hold times."""
    rows = {}
    for name, verdict in comparison.verdicts.items():
        data = comparison.data.sel(model=name, program=verdict.closest)
        value, low, high = data["whole_run"].sel(stratum="all").values
        alone = data["undisturbed"].values
        rows[name] = {
            "named": verdict.identified or "none",
            "nearest": verdict.closest,
            "whole runs": f"{value:.2f} ({low:.2f}-{high:.2f})",
            "followed for": verdict.followed_for,
            "left alone": f"{alone[0]:.2f} ({alone[1]:.2f}-{alone[2]:.2f})",
            "planted carry lives": quantiles(lives, name, "planted"),
            "erased carry lives": quantiles(lives, name, "erased"),
        }
    return pd.DataFrame(rows).T


def quantiles(lives, model: str, kind: str) -> str:
    low, middle, high = (lives.quantile(q, model, kind) for q in (0.05, 0.5, 0.95))
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


if __name__ == "__main__":
    main()
