"""What a model of the zoo takes to load, its task included, against reading its weights alone.

python -m analyses.benchmarks.zoo_loading
"""

from __future__ import annotations

from functools import partial

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp import list_pretrained, load_pretrained
from loopinterp.core.storage import read_tensors
from loopinterp.training.run import WEIGHTS


def load(name: str) -> None:
    run = load_pretrained(name)
    run.model()
    run.task()


def main() -> None:
    options = parser(__doc__, rounds=10).parse_args()
    settle(options)
    tables = {}
    for name in list_pretrained().index:
        weights = load_pretrained(name).folder / WEIGHTS
        ways = {
            "weights alone": partial(read_tensors, weights),
            "model and task": partial(load, name),
        }
        tables[name] = compare(ways, rounds=options.rounds, clock=options.clock)
    show(tables, path=options.json)


if __name__ == "__main__":
    main()
