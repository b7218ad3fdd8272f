"""RASP-L on a batch against one sequence at a time in NumPy.

    python -m analyses.benchmarks.rasp

Batches have 4,096 sequences of 64 tokens. For each primitive, library function and program the
table gives the time of the batch, and how many times as long NumPy takes for as many sequences,
one by one: as the published code does it, with a Python call for every pair of positions, and
(``vectorised``) with NumPy's own operations on whole rows. NumPy is timed on ``--sample`` sequences
and its time scaled up; the results of both are compared on those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from analyses.benchmarks import numpy_rasp
from analyses.benchmarks.timing import CLOCKS, parser, settle
from loopinterp import programs
from loopinterp.programs import (
    Selector,
    Seq,
    full,
    get_program,
    indices,
    kqv,
    list_programs,
    sel_width,
    select,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.tasks import get_task

BATCH, LENGTH = 4096, 64
PRIMITIVE, PROGRAM = 50, 100
"""Targets: NumPy's time over the batch's."""

same = select(tokens, var("u"), "==")
u, v = var("u"), var("v")
PRIMITIVES: dict[str, Seq | Selector] = {
    "full": full(3),
    "indices": indices,
    "tok_map": tok_map(tokens, {i: i * i for i in range(-3, 4)}, default=9),
    "seq_map (add)": tokens + u,
    "seq_map (and)": tokens & u,
    "seq_map (mod)": tokens % 7,
    "select": same,
    "select (relation)": select(tokens, u, [(i, -i) for i in range(-3, 4)]),
    "sel_width": sel_width(same),
    "aggr mean": programs.aggr(same, v),
    "aggr max": programs.aggr(same, v, "max"),
    "aggr min": programs.aggr(same, v, "min"),
    "kqv": kqv(tokens, u, v, "<", default=-1),
}
LIBRARY: dict[str, Seq] = {
    "shift_right": shift_right(tokens),
    "cumsum": programs.cumsum(tokens),
    "where": where(tokens, u, v),
    "mask": programs.mask(tokens, u),
    "maximum": programs.maximum(tokens),
    "minimum": programs.minimum(tokens),
    "argmax": programs.argmax(tokens),
    "argmin": programs.argmin(tokens),
    "num_prev": programs.num_prev(tokens, u),
    "has_seen": programs.has_seen(tokens, u),
    "firsts": programs.firsts(tokens, u),
    "lasts": programs.lasts(tokens, u),
    "index_select": programs.index_select(tokens, u),
    "first_true": programs.first_true(tokens),
    "mode": programs.mode(tokens),
    "binary_mode": programs.binary_mode(tokens),
    "induct": programs.induct(tokens, u, 1),
    "induct_kqv": programs.induct_kqv(tokens, u, v, 1),
    "induct_prev": programs.induct_prev(tokens, u, -1),
}


def best(run: Callable[[], Any], rounds: int, clock: str) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    run()
    seconds = []
    for _ in range(rounds):
        start = CLOCKS[clock]()
        run()
        seconds.append(CLOCKS[clock]() - start)
    return max(min(seconds), 1e-9)


def compare(
    batched: Callable[[], torch.Tensor],
    one: Callable[[int, bool], Any],
    *,
    sample: int,
    rounds: int,
    clock: str,
) -> dict[str, float]:
    """Milliseconds of the batch, and NumPy's time for as many sequences over it."""
    result = batched()
    for row in range(sample):
        for vectorised in (False, True):
            assert (one(row, vectorised) == result[row].numpy()).all(), row
    mine = best(batched, rounds, clock)
    row = {"milliseconds": 1e3 * mine}
    for name, vectorised in (("ratio", False), ("ratio_vectorised", True)):
        theirs = best(lambda: [one(i, vectorised) for i in range(sample)], 2, clock)  # noqa: B023
        row[name] = theirs * BATCH / sample / mine
    return row


def time_expression(expr: Seq | Selector, **options: Any) -> dict[str, float]:
    g = torch.Generator().manual_seed(0)
    x, a, b = torch.randint(-4, 5, (3, BATCH, LENGTH), generator=g)
    rows = [tensor.numpy() for tensor in (x, a, b)]

    def one(i: int, vectorised: bool) -> Any:
        variables = {"u": rows[1][i], "v": rows[2][i]}
        return numpy_rasp.evaluate(expr, rows[0][i], variables, vectorised=vectorised)

    return compare(lambda: programs.evaluate(expr, x, {"u": a, "v": b}), one, **options)


def time_program(name: str, **options: Any) -> dict[str, float]:
    """A whole run, with the trace of every variable at every loop on our side."""
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    n = max(n for n in range(1, LENGTH + 1) if task.n_positions(n) <= LENGTH)
    g = torch.Generator().manual_seed(0)
    x = task.sample(n, batch_size=BATCH, generator=g).inputs
    loops, rows = program.n_loops(n), x.numpy()

    def one(i: int, vectorised: bool) -> Any:
        return numpy_rasp.run(program, rows[i], loops, vectorised=vectorised)

    row = compare(lambda: program.trace(x, loops).outputs[-1], one, **options)
    return {**row, "loops": loops, "positions": x.shape[1]}


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--sample", type=int, default=8, help="sequences that NumPy is timed on")
    given = options.parse_args()
    settle(given)
    how = {"sample": given.sample, "rounds": given.rounds, "clock": given.clock}
    tables = {
        "primitives": {name: time_expression(x, **how) for name, x in PRIMITIVES.items()},
        "library": {name: time_expression(x, **how) for name, x in LIBRARY.items()},
        "programs": {name: time_program(name, **how) for name in list_programs()},
    }
    ripple, g = get_program("ripple"), torch.Generator().manual_seed(0)
    pairs = get_task("addition").sample(64, batch_size=BATCH, generator=g).inputs
    seconds = best(lambda: ripple.trace(pairs, ripple.n_loops(64)), given.rounds, given.clock)
    for title, rows in tables.items():
        target = PROGRAM if title == "programs" else PRIMITIVE
        print(f"\n{title}: at least {target} times as fast as one by one (published style)")
        for name, row in rows.items():
            met = "" if row["ratio"] >= target else "   below"
            print(
                f"  {name:20} {row['milliseconds']:9.2f} ms   {row['ratio']:9.0f} x"
                f"   vectorised {row['ratio_vectorised']:7.1f} x{met}"
            )
    print(f"\ntrace of 4,096 ripple additions of 64 bits: {seconds:.3f} s, to be below 1 s")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"tables": tables, "ripple_64_bit_trace_seconds": seconds}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
