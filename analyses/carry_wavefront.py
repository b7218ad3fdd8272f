"""Probe accuracy for the carry by loop and chain length, with its controls: one figure.

python analyses/carry_wavefront.py --run runs/demo --out wavefront.html
"""

from pathlib import Path

import typer

from loopinterp.probing import carry_study
from loopinterp.tasks import Addition
from loopinterp.training import Run


def main(
    run: Path = Path("runs/demo"), out: Path = Path("wavefront.html"), n: int = 48, pairs: int = 192
) -> None:
    """Probe additions of n bits; the run must be one of addition."""
    trained = Run.load(run)
    task = trained.task
    if not isinstance(task, Addition):
        raise typer.BadParameter(f"a run of the task addition is needed, not {task.name}")
    result = carry_study(trained.model(), task, n=n, n_train=pairs)
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
