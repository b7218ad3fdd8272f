"""Rival programs held against the models of one or more runs by interchange interventions.

python analyses/circuit_vs_program.py --run runs/demo --run runs/seed-1 --out programs.html
"""

from pathlib import Path
from typing import Annotated

import typer

from loopinterp.app.session import open_run
from loopinterp.comparison import compare_programs


def main(
    run: Annotated[list[Path] | None, typer.Option(help="A run; several may be given.")] = None,
    out: Path = Path("programs.html"),
    n: Annotated[list[int] | None, typer.Option(help="Lengths of the inputs.")] = None,
    samples: int = 512,
) -> None:
    """Compare the models of runs of one task with every stock program of that task."""
    runs = [open_run(folder) for folder in run or [Path("runs/demo")]]
    result = compare_programs(
        [studied.model for studied in runs],
        runs[0].programs(),
        [runs[0].sample(length, samples) for length in n or [24, 48]],
        names=[studied.name for studied in runs],
    )
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
