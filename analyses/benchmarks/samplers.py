"""How long the samplers of all tasks take.

    python -m analyses.benchmarks.samplers

Each draws 4,096 examples of mixed lengths, n uniform in 1..20 (sudoku 1..12, mazes 1..5), of each
of its distributions, with the answers. Chess puzzles, which need a file, are left out. The samplers
take turns in rounds, and the table gives medians; next-token tasks are timed in their own settings
and around each full-output task, with a pause.
"""

from __future__ import annotations

import json
import random
from statistics import median

import torch

from analyses.benchmarks.timing import CLOCKS, parser, settle
from loopinterp.tasks import FullOutput, Task, get_task, list_tasks

EXAMPLES, LONGEST = 4096, 20
MILLISECONDS = 50
"""Target of each."""


def tasks() -> dict[str, Task]:
    """Every task in its own settings, and full-output tasks token by token."""
    made = {
        name: get_task(name) for name in list_tasks() if name != "chess_puzzles"
    }  # needs a file
    wrapped = [name for name, task in made.items() if isinstance(task, FullOutput)]
    return made | {f"next_token of {x}": get_task("next_token", of=x, n_pause=1) for x in wrapped}


def seconds(task: Task, distribution: str, clock: str, seed: int) -> float:
    g = torch.Generator().manual_seed(seed)
    longest = {"sudoku": 12, "maze": 5}.get(task.name, LONGEST)
    n = torch.randint(1, longest + 1, (EXAMPLES,), generator=g)
    start = CLOCKS[clock]()
    task.sample(n, generator=g, distribution=distribution)
    return CLOCKS[clock]() - start


def main() -> None:
    given = parser(__doc__, rounds=20).parse_args()
    settle(given)
    ways = [(name, task, kind) for name, task in tasks().items() for kind in task.distributions]
    taken: dict[tuple[str, str], list[float]] = {(name, kind): [] for name, _, kind in ways}
    order = random.Random(0)
    for seed in range(given.rounds + 1):
        for name, task, kind in order.sample(ways, len(ways)):
            taken[name, kind].append(seconds(task, kind, given.clock, seed))
    # The first round warms up.
    rows = {f"{name} {kind}": 1e3 * median(taken[name, kind][1:]) for name, _, kind in ways}
    for name, milliseconds in sorted(rows.items(), key=lambda row: -row[1]):
        over = "" if milliseconds < MILLISECONDS else f"   over {MILLISECONDS}"
        print(f"  {name:42} {milliseconds:8.2f} ms{over}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"milliseconds": rows, "target": MILLISECONDS}) + "\n")


if __name__ == "__main__":
    main()
