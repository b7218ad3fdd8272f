"""How often is a wrong program named? Near misses of every stock program, bare and disguised.

python analyses/near_misses.py --out runs/near-misses
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import pandas as pd

from loopinterp.benchmark.ground_truth import false_names_study
from loopinterp.compiler import distract, permute, rotate


def main() -> None:
    parser = argparse.ArgumentParser(description="How often is a wrong program named?")
    parser.add_argument("--out", type=Path, default=Path("runs/near-misses"))
    parser.add_argument("--misses", type=int, default=10, help="most near misses of each program")
    parser.add_argument("--program", action="append", help="a stock program (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    hide = [partial(disguise, seed=args.seed) for disguise in (distract, permute, rotate)]
    result = false_names_study(
        args.program,
        misses_of_each=args.misses,
        disguises=[("bare", []), ("disguised", hide)],
        seed=args.seed,
    )
    print(pd.DataFrame(result.totals()).T.to_string())
    for name, winner, share in result.wrong_names:
        print(f"wrong: {name} named {winner} (told apart by {share:.1%} of interventions)")
    for name, winner, share in result.rare_names:
        print(f"rarely apart: {name} named {winner} (told apart by {share:.3%} of interventions)")
    own = result.data["named"]
    unnamed = own.model.values[own == 0].tolist()
    print("not named when listed:", ", ".join(unnamed) or "none")
    print(result.save(args.out))


if __name__ == "__main__":
    main()
