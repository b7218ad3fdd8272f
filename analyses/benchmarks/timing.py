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

A GPU is given work and goes on by itself, so with ``--device cuda`` the clock waits for it before
it starts and before it stops. What is then counted is also said as a share of the card's peak in
bfloat16: the operations that PyTorch counts in matrix products and attention, over those that the
card could have made (:data:`PEAKS`). What is computed in float32 can reach a part of it only.
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
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import FlopCounterMode

_HOPPER, _AMPERE = 1979e12 / 2, 312e12
PEAKS = {
    "H200": _HOPPER,
    "H100 80GB HBM3": _HOPPER,
    "H100 PCIe": 1513e12 / 2,
    "A100-SXM4-40GB": _AMPERE,
    "A100-SXM4-80GB": _AMPERE,
    "A100-PCIE-40GB": _AMPERE,
    "A100 80GB PCIe": _AMPERE,
}
"""Dense bfloat16 operations a second of cards, by the name that the driver gives them. Source:
NVIDIA's data sheets of the A100, H100 and H200; those of Hopper count with sparsity, which makes it
twice as many. A card that is not here has no share of its peak."""


def peak_of(card: str) -> float | None:
    """Dense bfloat16 operations a second of a card; None where that is not known.

    Example:
        >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA H100 NVL")
        (989500000000000.0, None)
    """
    return PEAKS.get(card.removeprefix("NVIDIA "))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_ON_A_GPU = ("per_second", "share_of_bf16_peak")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "children": _children}


def compare(
    ways: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    clock: str = "wall",
    least: float = 0.05,
    device: str = "cpu",
) -> dict[str, dict[str, float]]:
    """Seconds of each way, and its ratio to the first.

    Args:
        ways: Name -> what to time; the first is the yardstick.
        rounds: How often each is timed.
        clock: ``wall``, ``cpu``, or ``children`` (the cpu of processes that were started).
        least: Seconds that one timing should last; short calls are repeated within it.
        device: Where it is computed.
    """
    first = next(iter(ways))
    repeats = max(1, round(least / _seconds(ways[first], 1, clock, device)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names, order = list(ways), random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            seconds[name].append(_seconds(ways[name], repeats, clock, device))
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
        if device != "cpu":
            rows[name] |= of_peak(ways[name], median(seconds[name]), device)
    return rows


def of_peak(run: Callable[[], Any], seconds: float, device: str) -> dict[str, float]:
    """Runs a second, their operations, and the share of the card's peak where that is known."""
    with FlopCounterMode(display=False) as counted:
        run()
    flops = float(counted.get_total_flops())
    found = {"per_second": 1 / seconds, "flops": flops}
    peak = peak_of(torch.cuda.get_device_name(device))
    return found if peak is None else found | {"share_of_bf16_peak": flops / seconds / peak}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], Any], repeats: int, clock: str, device: str) -> float:
    run()
    gc.collect()
    gc.disable()
    _wait(device)
    start = CLOCKS[clock]()
    for _ in range(repeats):
        run()
    _wait(device)
    taken = CLOCKS[clock]() - start
    gc.enable()
    return taken / repeats


def settle(options: argparse.Namespace) -> None:
    """Set threads and allocator as the options say, or say that there is no such device."""
    device = getattr(options, "device", "cpu")
    if device != "cpu":
        need_gpu(f"--device {device}")
    if device != "cpu" and options.clock != "wall":
        stop("--clock: what a GPU does takes no time of the process; leave it out")
    torch.set_num_threads(options.threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if options.allocator == "keep" and mallopt is not None:
        for parameter, nbytes in ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 1 << 28)):
            mallopt(parameter, nbytes)
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # the largest that glibc accepts


def need_gpu(what: str) -> None:
    """End with status 2 where there is no GPU."""
    if not torch.cuda.is_available():
        stop(f"{what}: this machine has no GPU that PyTorch can use")


def stop(why: str) -> NoReturn:
    """Say in one sentence what was wrong with the command."""
    print(why, file=sys.stderr)
    raise SystemExit(2)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:  # one timing has no quartiles
        raise argparse.ArgumentTypeError(f"expected an integer of 2 or more, got {text!r}")
    return int(text)


def parser(doc: str | None, *, rounds: int, device: bool = False) -> argparse.ArgumentParser:
    """Options that all benchmarks share; with ``device``, one of those that a GPU can run."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--rounds", type=_rounds, default=rounds, help="timings of each way")
    made.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    made.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what to count")
    made.add_argument("--allocator", choices=["keep", "system"], default="keep")
    if device:
        made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
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
                + "".join(f"  {row[key]:.3g} {key}" for key in _ON_A_GPU if key in row)
            )
    if path is not None:
        write(tables, path, targets=targets)


def write(
    tables: Mapping[str, Mapping[str, Mapping[str, float]]],
    path: Path,
    *,
    targets: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Write the rows as JSON, with the machine."""
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    machine |= {"python": platform.python_version(), "processor": platform.machine()}
    if torch.cuda.is_available():
        machine["card"] = torch.cuda.get_device_name()
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "tables": tables, "targets": targets or {}}
    path.write_text(json.dumps(document, indent=1) + "\n")
