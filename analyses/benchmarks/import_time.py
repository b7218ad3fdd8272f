"""What ``import loopinterp`` costs, against ``import torch``; each import in a fresh process.

python -m analyses.benchmarks.import_time
"""

from __future__ import annotations

import subprocess
import sys

from analyses.benchmarks.timing import compare, parser, show

TARGETS = {"import": {"loopinterp": 1.15, "loopinterp and torch": 1.15}}
WAYS = {
    "torch": "import torch",
    "loopinterp": "import loopinterp",
    "loopinterp and torch": "import loopinterp, torch",
    "the looped model": "from loopinterp.models import LoopedTransformer",
    "Python alone": "",
}


def main() -> None:
    options = parser(__doc__, rounds=15).parse_args()

    def start(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    ways = {name: (lambda code=code: start(code)) for name, code in WAYS.items()}
    clock = "children" if options.clock == "cpu" else "wall"
    rows = compare(ways, rounds=options.rounds, clock=clock)
    show({"import": rows}, targets=TARGETS, path=options.json)


if __name__ == "__main__":
    main()
