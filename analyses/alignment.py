"""In how few directions of the state does each model keep what an exchange of it moves?

python analyses/alignment.py --run runs/demo --run runs/seeds/seed-1 --out alignment.html

Subspaces are fitted on one half of the inputs and scored on the other, at every delay.
"""

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from loopinterp.app.session import open_run
from loopinterp.comparison import SpreadPairs, SubspaceSearch, search_subspaces
from loopinterp.pages import write_results


def main(
    run: Annotated[list[Path] | None, typer.Option(help="A run; several may be given.")] = None,
    out: Path = Path("alignment.html"),
    n: Annotated[list[int] | None, typer.Option(help="Lengths of the inputs.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Ranks that are tried.")] = None,
    program: Annotated[str, typer.Option(help="Its variables are what probes read.")] = "ripple",
    pairs: int = 1024,
    samples: int = 2048,
    steps: int = 150,
    seed: int = 0,
) -> None:
    """Search the subspaces of runs of one task, and print what each carries."""
    found = {}
    for folder in run or [Path("runs/demo")]:
        studied = open_run(folder)
        found[folder.name] = search_subspaces(
            studied.model,
            [studied.sample(length, samples) for length in n or [24, 48]],
            program,
            ranks=rank or (1, 2, 3, 4),
            pairs=SpreadPairs(pairs=pairs, same_value=0),
            steps=steps,
            seed=seed,
        )
        print(f"\n{folder.name}: {found[folder.name].scored_on} pairs that nothing was fitted on")
        print(table(found[folder.name]).to_string(index=False))
        print(*(finding.text for finding in found[folder.name].findings()), sep="\n")
    print(write_results(found, out, title="Directions that carry an exchange"))


def table(search: SubspaceSearch) -> pd.DataFrame:
    """Each subspace: what it carries at its worst delay, and what all the rest does at its best."""
    rest = search.data["complement"].sel(estimate="value").max("delay")
    rows = []
    for name in search.data.subspace.values[:-1]:
        value, low, high = search.worst(name)
        carried = f"{value:.3f} ({low:.3f}-{high:.3f})"
        rows.append((name, carried, f"{float(rest.sel(subspace=name)):.3f}"))
    return pd.DataFrame(rows, columns=["subspace", "carried, at worst", "all but it, at best"])


if __name__ == "__main__":
    typer.run(main)
