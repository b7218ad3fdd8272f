"""Does a trained ALBERT, whose layers are one, converge to a fixed point?

    python -m analyses.papers.albert_orbits    # from the rows of trained_albert.py

arXiv 2604.11791 (abstract): in many looped language models each layer converges to a fixed point of
its own. PL-BERT loops one layer. A run converges if its last step is below ``STILL``; the claim
holds if most runs do.
"""

from __future__ import annotations

import pandas as pd

from analyses.papers.claims import Claim, above, interval, options, record
from analyses.papers.cyclic_fixed_points import LAYERS, PAPER
from analyses.trained_albert import LAST
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.figures import Series, line_figure

STILL = 1e-3
STEPS = (1, 6, 12, 24, 60, LAST)


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    trained = rows.query("model == 'trained'")
    share = wilson_estimate((trained[f"step {LAST}"] < STILL).sum(), len(trained))
    step = interval(mean_estimate(trained[f"step {LAST}"]))
    found = (
        f"{interval(share, 100, 0)}% of {len(trained)} sentences converge in {LAST} loops; the "
        f"last step is {step} of the state's norm."
    )
    return [Claim(PAPER, LAYERS, "PL-BERT", found, above(share, 0.5))]


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """None: trained_albert.py writes the page."""
    return {}


def main() -> None:
    args = options(__doc__)
    rows = pd.read_csv(args.results / "albert_orbits.csv")
    steps = [f"step {loop}" for loop in STEPS]
    lines = [
        Series(str(model), STEPS, each[steps].mean().tolist())
        for model, each in rows.groupby(rows["model"].str.split().str[0], sort=False)
    ]
    plot = line_figure(lines, x_title="loop", y_title="residual", x_log=True)
    record("albert_orbits", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
