"""A step of five seeds trained together, against a step of each in turn, in batches of 32.

    python -m analyses.benchmarks.seeds_together

The loops are one batch with the weights of all seeds, the rest of a step (data, clipping,
optimiser, average) is each seed's own. This saves the cost of starting operations: much on a GPU,
little on one core, where products of matrices take most of the time.
"""

from __future__ import annotations

from itertools import product

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.training import RECIPES, CurriculumConfig, Trainer
from loopinterp.training.seeds import advance_together

SEEDS = range(5)
ADDITION = RECIPES["addition"].replace(batch_size=32)
NO_WINDOW = {"positions": "none", "relative_window": None, "attention_window": None}
SETTINGS = {
    "addition": ADDITION,
    "addition without a window": ADDITION.replace(model=ADDITION.model.replace(**NO_WINDOW)),
    "parity": RECIPES["parity"].replace(batch_size=32),
    "parity without a window": RECIPES["parity-no-window"].replace(batch_size=32),
}
LENGTHS = (6, 12)


def main() -> None:
    options = parser(__doc__, rounds=7, device=True).parse_args()
    settle(options)
    tables = {}
    for (name, config), n in product(SETTINGS.items(), LENGTHS):
        fixed = config.replace(
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
        title = f"{len(SEEDS)} seeds of {name}, n uniform in 1..{n}"
        tables[title] = compare(
            ways, rounds=options.rounds, clock=options.clock, device=options.device
        )
    show(tables, path=options.json)


if __name__ == "__main__":
    main()
