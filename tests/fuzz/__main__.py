"""``python -m tests.fuzz --cases 2000 --seed 0``: odd commands, damaged runs and odd calls.

Every finding is printed with its number; ``--only NUMBER`` makes that case again.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="Make this case alone.")
    parser.add_argument("--kind", choices=("words", "damaged", "call"), help="Only such cases.")
    chosen = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # Before anything is imported that asks for them: no network, no more threads than one.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    from tests.fuzz.harness import KINDS, LIMIT, Bench

    kinds = (chosen.kind,) if chosen.kind else KINDS

    faulthandler.enable()
    ended: Counter[str] = Counter()
    faults = 0
    numbers = range(chosen.cases) if chosen.only is None else [chosen.only]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        start = time.perf_counter()
        for number in numbers:
            faulthandler.dump_traceback_later(3 * LIMIT, exit=True)
            began = time.perf_counter()
            outcome = bench.case(chosen.seed, number, kinds)
            ended[f"{outcome.kind}: {outcome.ended}"] += 1
            if outcome.fault or chosen.only is not None:
                faults += bool(outcome.fault)
                print(f"--- case {number}, {outcome.kind}: {outcome.what[:300]}")
                print(f"{outcome.ended} {outcome.fault.strip()}", flush=True)
            elif (took := time.perf_counter() - began) > 5:
                print(f"--- case {number} took {took:.1f} s: {outcome.what[:200]}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - start
    print(*(f"{count:6} {what}" for what, count in sorted(ended.items())), sep="\n")
    each = 1000 * seconds / len(numbers)
    print(f"{len(numbers)} cases in {seconds:.0f} s ({each:.0f} ms each), {faults} findings")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
