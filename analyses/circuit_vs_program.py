"""Which program do models run? Every stock program of their task as a rival: one figure.

python analyses/circuit_vs_program.py --run runs/demo --run runs/seed-1 --out programs.html
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from loopinterp.circuits import SpreadPairs, compare_programs
from loopinterp.rasp import list_programs
from loopinterp.training import Run


def main(
    run: Annotated[list[Path] | None, typer.Option(help="A run; may be repeated.")] = None,
    out: Path = Path("programs.html"),
    n: Annotated[list[int] | None, typer.Option(help="Input length; 24 and 48 by default.")] = None,
    samples: int = 96,
    pairs: int = 768,
) -> None:
    """Compare the models of one or more runs of a task with every program of that task."""
    runs = [Run.load(folder) for folder in run or [Path("runs/demo")]]
    task, generator = runs[0].task(), torch.Generator().manual_seed(0)
    data = [task.sample(k, batch_size=samples, generator=generator) for k in n or [24, 48]]
    result = compare_programs(
        [one.model() for one in runs],
        list_programs(task.name),
        data,
        pairs=SpreadPairs(pairs=pairs),
        names=[one.folder.name for one in runs],
    )
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
