"""Time several ways of doing one thing against the first of them, fairly on a noisy machine.

The ways take turns in rounds, shuffled, so that all see the machine in one mood and none has always
the same one before it. Each runs once untimed before it is timed: otherwise it would pay for the
memory that the one before gave back to the system. A ratio is taken within a round, and the
median over the rounds is reported. On a machine that others use, ``--clock cpu`` counts the time
that this process had instead of the time that passed.

The C library gives freed memory back to the system and takes it again, page by page, a moment
later. Whether it does so in a given loop is an accident of what else lies on the heap, and costs up
to a quarter of the time. So it is told to keep its memory, for all ways alike; ``--allocator
system`` leaves it as it is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "children": _children}


def compare(
    ways: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    clock: str = "wall",
    least: float = 0.05,
) -> dict[str, dict[str, float]]:
    """Seconds of each way, and its ratio to the first.

    Args:
        ways: Name -> what to time; the first is the yardstick.
        rounds: How often each is timed.
        clock: ``wall``, ``cpu``, or ``children`` (the cpu of processes that were started).
        least: Seconds that one timing should last; short calls are repeated within it.
    """
    first = next(iter(ways))
    repeats = max(1, round(least / _seconds(ways[first], 1, clock)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names, order = list(ways), random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            seconds[name].append(_seconds(ways[name], repeats, clock))
    rows = {}
    for name in names:
        ratios = [mine / base for mine, base in zip(seconds[name], seconds[first])]
        low, _, high = quantiles(ratios, n=4)
        rows[name] = {
            "milliseconds": 1e3 * median(seconds[name]),
            "ratio": median(ratios),
            "ratio_quartile_1": low,
            "ratio_quartile_3": high,
        }
    return rows


def _seconds(run: Callable[[], Any], repeats: int, clock: str) -> float:
    run()
    gc.collect()
    gc.disable()
    start = CLOCKS[clock]()
    for _ in range(repeats):
        run()
    taken = CLOCKS[clock]() - start
    gc.enable()
    return taken / repeats


def settle(options: argparse.Namespace) -> None:
    """Set threads and allocator as the options say."""
    torch.set_num_threads(options.threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if options.allocator == "keep" and mallopt is not None:
        for parameter, nbytes in ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 1 << 28)):
            mallopt(parameter, nbytes)
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # the largest that glibc accepts


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds, help="timings of each way")
    made.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    made.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what to count")
    made.add_argument("--allocator", choices=["keep", "system"], default="keep")
    made.add_argument("--json", type=Path, help="also write the numbers to this file")
    return made


def show(
    tables: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    targets: Mapping[str, Mapping[str, float]] | None = None,
    path: Path | None = None,
) -> None:
    """Print one line per way and write JSON if asked."""
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, row in rows.items():
            target = (targets or {}).get(title, {}).get(name)
            verdict = "" if target is None else f"  target {target:.2f}"
            print(
                f"  {name:34} {row['milliseconds']:9.2f} ms   ratio {row['ratio']:5.2f}"
                f"  ({row['ratio_quartile_1']:.2f} to {row['ratio_quartile_3']:.2f}){verdict}"
            )
    if path is not None:
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        machine |= {"python": platform.python_version(), "processor": platform.machine()}
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine, "tables": tables, "targets": targets or {}}
        path.write_text(json.dumps(document, indent=1) + "\n")
