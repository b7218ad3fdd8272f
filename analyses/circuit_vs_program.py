"""Rival programs ranked by interchange interventions on a model: one figure.

python analyses/circuit_vs_program.py --run runs/demo --run runs/seed-1 --out programs.html
"""

from pathlib import Path
from typing import Annotated

import typer

from loopinterp.circuits import compare_programs
from loopinterp.training import Run


def main(
    run: Annotated[list[Path] | None, typer.Option(help="A run; several are pooled.")] = None,
    out: Path = Path("programs.html"),
    n: int = 24,
    pairs: int = 64,
) -> None:
    """Compare the models of one or more runs with every program of addition."""
    runs = run or [Path("runs/demo")]
    models = [Run.load(folder).model() for folder in runs]
    names = [folder.name for folder in runs]
    result = compare_programs(models, names=names, n=n, per_place=pairs)
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
