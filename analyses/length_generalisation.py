"""Exact match against problem length, far beyond training: one figure.

python analyses/length_generalisation.py --run runs/demo --out length.html
"""

from pathlib import Path

import typer

from loopinterp.training import Run, evaluate


def main(
    run: Path = Path("runs/demo"), out: Path = Path("length.html"), samples: int = 300
) -> None:
    """Evaluate a run at 1 to 8 times its training length."""
    trained = Run.load(run)
    lengths = [trained.cutoff * k for k in (1, 2, 3, 4, 6, 8)]
    result = evaluate(
        trained.model(), trained.task(), lengths, n_samples=samples, trained_up_to=trained.cutoff
    )
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
