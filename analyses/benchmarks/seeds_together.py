"""A step of five seeds trained together, against a step of each in turn: the addition recipe.

    python -m analyses.benchmarks.seeds_together

The loops are one batch, the rest of a step (data, clipping, optimiser, average) is each seed's own.
On one core this saves what it costs to begin an operation, and no arithmetic: much where inputs are
short, nothing where they are long.
"""

from __future__ import annotations

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.training import RECIPES, CurriculumConfig, Trainer
from loopinterp.training.seed_ensemble import advance_together

SEEDS = range(5)
LENGTHS = (2, 6, 12)
TARGET = 0.7


def main() -> None:
    options = parser(__doc__, rounds=7, device=True).parse_args()
    settle(options)
    tables, targets = {}, {}
    for n in LENGTHS:
        fixed = RECIPES["addition"].replace(
            curriculum=CurriculumConfig(kind="none", max_n=n), device=options.device
        )
        alone, together = ([Trainer(fixed.replace(seed=s)) for s in SEEDS] for _ in range(2))
        ways = {
            "in turn": lambda alone=alone: [trainer.step() for trainer in alone],
            "together": lambda together=together: (
                advance_together(together),
                [trainer.read() for trainer in together],
            ),
        }
        title = f"{len(SEEDS)} seeds of addition, n uniform in 1..{n}"
        tables[title] = compare(
            ways, rounds=options.rounds, clock=options.clock, device=options.device
        )
        targets[title] = {"together": TARGET}
    show(tables, targets=targets, path=options.json)


if __name__ == "__main__":
    main()
