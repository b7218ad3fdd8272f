"""How the state settles as loops go on, with the accuracy beside it: one figure.

python analyses/convergence.py --run runs/demo --out convergence.html
"""

from pathlib import Path

import torch
import typer

from loopinterp.dynamics import convergence_study
from loopinterp.training import Run


def main(
    run: Path = Path("runs/demo"),
    out: Path = Path("convergence.html"),
    n: int = 48,
    samples: int = 32,
) -> None:
    """Follow every token of some examples of length n."""
    trained = Run.load(run)
    generator = torch.Generator().manual_seed(0)
    batch = trained.task.sample(n, batch_size=samples, generator=generator)
    result = convergence_study(trained.model(), batch)
    result.figures()[0].plot.write_html(out, include_plotlyjs=True)
    print(out, *(finding.text for finding in result.findings()), sep="\n")


if __name__ == "__main__":
    typer.run(main)
