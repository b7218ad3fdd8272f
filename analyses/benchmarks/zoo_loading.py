"""What a model of the zoo takes to load, its task included, against reading its weights alone.

python -m analyses.benchmarks.zoo_loading
"""

from __future__ import annotations

from functools import partial

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp import list_pretrained
from loopinterp.core.storage import read_tensors
from loopinterp.training.run import WEIGHTS
from loopinterp.zoo import pretrained_run


def load(name: str) -> None:
    run = pretrained_run(name)
    run.model()
    _ = run.task


def main() -> None:
    options = parser(__doc__, rounds=10).parse_args()
    settle(options)
    tables = {}
    for name in list_pretrained().index:
        weights = pretrained_run(name).folder / WEIGHTS
        ways = {
            "weights alone": partial(read_tensors, weights),
            "model and task": partial(load, name),
        }
        tables[name] = compare(ways, rounds=options.rounds, clock=options.clock)
    show(tables, path=options.json)


if __name__ == "__main__":
    main()
