"""Programs with a loop inside a loop, compiled, and the rules that stop them.

    python -m analyses.nested_loops

A looped transformer has one loop. A program with two keeps counters in its state: an inner loop
counts up, and the outer one makes a step when it ends. Two such programs are checked against
integers on all short inputs, compiled, and stopped by rules that are not told T(n). The tables go
into docs/results/nested-loops.md.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.comparison import interchange_study
from loopinterp.compiler import Compiled, compare_with_program, compile_program
from loopinterp.models import AnswerHeld, ResidualBelow, run_rules
from loopinterp.programs import (
    UNKNOWN,
    Linear,
    LoopProgram,
    eq,
    full,
    index_select,
    indices,
    kqv,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.tasks import IGNORE, Batch, get_task

SYMBOLS = 4  # digits that are sorted
EQUALS, END, BOS = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
STRIDE = 8  # more than the positions of the numbers


class Squared:
    """n^2, the required number of loops of a loop inside a loop."""

    def __call__(self, n: int) -> int:
        return n * n

    def __repr__(self) -> str:
        return "n^2"


def digits_to_sort(digits: Tensor) -> Batch:
    """Digits ``[batch, n]``, and in ascending order from the ``=`` on.

    ``BOS 2 0 1 = END END`` asks for 0 1 2 at its last three positions.
    """
    n = torch.full((len(digits),), digits.shape[1])
    first, last = (torch.full((len(n), 1), x) for x in (BOS, EQUALS))
    end = torch.full((len(n), digits.shape[1] - 1), END)
    unasked = torch.full((len(n), digits.shape[1] + 1), IGNORE)
    targets = torch.cat([unasked, digits.sort(dim=1).values], dim=1)
    return Batch(torch.cat([first, digits, last, end], dim=1), targets, n, n * n)


def selection_sort() -> LoopProgram:
    """The least digit, then the least of the others, and so on, by a pointer to one digit a loop::

        inner loop      best  <-  min(best, key at ``at``, if it exceeds ``last``);  at <- at + 1
        at its end      last  <-  best;  best <- infinite;  at <- 1;  chosen <- chosen + 1
                        answer at place ``chosen``  <-  best

    A key is a digit with its position, so that equal digits differ. The n-th digit has been chosen
    after n^2 loops; then nothing changes.
    """
    infinite = SYMBOLS * STRIDE
    at, best, last, chosen, n = (var(x) for x in ("at", "best", "last", "chosen", "n"))
    here = kqv(indices, at, var("key"), "==", default=infinite, name="next_key")
    least = smaller(best, where(here > last, here, infinite))
    ends = (chosen < n) & (at >= n)  # the inner loop, in a run that has not ended
    equals = kqv(tokens, EQUALS, indices, "==", default=0, name="equals")
    digit = {k: k // STRIDE for k in range(infinite)}
    return LoopProgram(
        name="selection_sort",
        task="sorted_digits",
        inputs=(*map(str, range(SYMBOLS)), "=", "END", "BOS"),
        prepare={
            "key": where(tokens < SYMBOLS, tokens * STRIDE + smaller(indices, STRIDE - 1), 0),
            "n": where(equals > 0, equals - 1, 0),
            "place": where(equals > 0, indices - equals, UNKNOWN),
            "at": full(1),
            "best": full(infinite),
            "last": full(0),
            "chosen": full(0),
            "answer": full(UNKNOWN),
        },
        step={
            "best": where(ends, infinite, where(chosen < n, least, best)),
            "last": where(ends, least, last),
            "at": where(ends, 1, where(chosen < n, smaller(at + 1, indices), at)),
            "chosen": where(ends, smaller(chosen + 1, indices), chosen),
            "answer": where(
                ends & eq(chosen, var("place")),
                tok_map(least, digit, default=0, name="digit_of_key"),
                var("answer"),
            ),
        },
        finish=var("answer"),
        n_loops=Squared(),
        doc="The least digit of those left, again and again, by a pointer to one digit a loop.",
    )


def repeated_addition() -> LoopProgram:
    """a * b as b added a times, each time by a ripple of carries, for a of two bits::

        inner loop      carry_i  <-  product_{i-1} + b_{i-1} + carry_{i-1} > 1;  left <- left - 1
        at its end      product_i  <-  product_i + b_i + carry_i mod 2;  carry <- 0
                        times  <-  times - 1;  left <- n + 1

    The inner loop makes n + 1 loops and its last one adds. It runs a <= 3 times; then nothing
    changes.
    """
    bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
    asterisk = kqv(tokens, 2, indices, "==", default=UNKNOWN, name="times")
    equals = kqv(tokens, 3, indices, "==", default=UNKNOWN, name="equals")
    place = where(equals >= 0, indices - equals, UNKNOWN)
    size = where(equals >= 0, equals - 3, 0)  # n + 1
    number = index_select(bit, 1) + 2 * index_select(bit, 2)
    product_, carry, left, times = (var(x) for x in ("product", "carry", "left", "times"))
    column = product_ + var("addend") + carry
    ends = (times > 0) & eq(left, 0)
    return LoopProgram(
        name="repeated_addition",
        task="multiplication",
        inputs=("0", "1", "*", "=", "EOS", "BOS"),
        prepare={
            "addend": where(place >= 0, index_select(bit, asterisk + 1 + place), 0),
            "is_digit": (place >= 0) & (place < equals - 2),
            "size": size,
            "product": full(0),
            "carry": full(0),
            "left": size,
            "times": where(equals >= 0, number, 0),
        },
        step={
            "carry": where(ends | eq(times, 0), 0, shift_right(column > 1)),
            "product": where(ends, column % 2, product_),
            "left": where(ends, var("size"), where(times > 0, left - (left > 0), left)),
            "times": where(ends, times - 1, times),
        },
        finish=where(var("is_digit"), product_, 2),
        n_loops=Linear(slope=3, offset=6),
        doc="The second factor is added as often as the first says, each time by a ripple.",
    )


PROGRAMS = {program.name: program for program in (selection_sort(), repeated_addition())}
CHECKED, COMPILED = 5, 4  # the lengths of all inputs, and of the compiled model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "nested_loops.json")
    parser.add_argument("--page", type=Path, default=PAGES / "results" / "nested-loops.md")
    args = parser.parse_args()
    stored = {name: measured(name) for name in PROGRAMS}
    args.results.write_text(json.dumps(stored, indent=1) + "\n")
    print(args.page, "" if rewrite(args.page, tables(stored)) else "(as it was)")


def all_inputs(name: str, n: int) -> Batch:
    """Every input of length n."""
    if name == "selection_sort":
        return digits_to_sort(torch.tensor(list(product(range(SYMBOLS), repeat=n))))
    task: Any = get_task("multiplication")
    return task.encode([(a, b) for a in range(4) for b in range(2**n)], n=n, m=2)


def right_by_loop(program: LoopProgram, batch: Batch, n_loops: int) -> Tensor:
    """Whether the program's whole answer is right after each loop, ``[loop, example]``."""
    outputs = program.trace(batch.inputs, n_loops=n_loops).outputs
    return ((outputs == batch.targets) | (batch.targets == IGNORE)).all(-1)


def check(name: str, longest: int) -> None:
    """On all inputs up to a length: right after T(n) loops, unchanged after, and not one before."""
    program = PROGRAMS[name]
    for n in range(1, longest + 1):
        n_loops = program.n_loops(n)
        right = right_by_loop(program, all_inputs(name, n), n_loops + 2 * n).all(-1)
        assert right.int().argmax() == n_loops, (name, n)
        assert right[n_loops:].all(), (name, n)


def measured(name: str) -> dict[str, Any]:
    """A compiled program: its size, its agreement, where rules stop it, and interchanges."""
    check(name, CHECKED)
    program = PROGRAMS[name]
    n_loops = program.n_loops(COMPILED)
    batch = all_inputs(name, COMPILED)
    batch = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))[:64]]
    compiled = compile_program(program, max_length=batch.inputs.shape[1])
    agreement = compare_with_program(compiled, batch.inputs, n_loops=n_loops + COMPILED)
    assert agreement.exact, name
    config = compiled.model.config
    return {
        "loops": str(program.n_loops),
        "required": n_loops,
        "layers": config.n_layers,
        "d_model": config.d_model,
        "stops": stops(compiled, program, batch, n_loops),
        "interchanges": interchanges(compiled, program, batch, n_loops),
    }


def stops(
    compiled: Compiled, program: LoopProgram, batch: Batch, n_loops: int
) -> list[dict[str, Any]]:
    """Share of answers that are right, and mean loops, where rules stop that are not told n."""
    right = right_by_loop(program, batch, 3 * n_loops)
    holds = (1, COMPILED, COMPILED + 2, 2 * COMPILED, 3 * COMPILED)
    everywhere = {"residual below 0.001, whole state": ResidualBelow(1e-3)}
    answer = {
        "residual below 0.001, answer": ResidualBelow(1e-3),
        **{f"answer held for {k}": AnswerHeld(k) for k in holds},
    }
    rows = []
    for rules, mask in ((everywhere, None), (answer, batch.targets != IGNORE)):
        found = run_rules(
            compiled.model, batch.inputs, [*rules.values()], max_loops=3 * n_loops, mask=mask
        )
        for rule, at in zip(rules, found):
            share = float(right.gather(0, at[None]).float().mean())
            rows.append({"rule": rule, "right": share, "loops": float(at.float().mean())})
    return rows


def interchanges(
    compiled: Compiled, program: LoopProgram, batch: Batch, n_loops: int
) -> list[dict[str, Any]]:
    """Whole-run accuracy after interchanges of each variable, and after a random change."""
    rows = []
    for variable in program.step:
        result = interchange_study(
            compiled.model,
            batch,
            program,
            subspaces={variable: compiled.circuit.subspace(variable)},
            n_loops=n_loops,
            loops=range(0, n_loops, COMPILED - 1),
            pairs_per_loop=16,
        )
        (share, _, _, pairs), control = result.pooled(), result.pooled("a random change")
        row = {"variable": variable, "pairs": pairs, "followed": share, "random": control[0]}
        rows.append(row)
    return rows


def tables(stored: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    sizes = [
        [name, x["loops"], x["layers"], x["d_model"], x["required"]] for name, x in stored.items()
    ]
    rules = [
        [name, row["rule"], f"{row['right']:.2f}", f"{row['loops']:.1f}", x["required"]]
        for name, x in stored.items()
        for row in x["stops"]
    ]
    changed = [
        [name, row["variable"], row["pairs"], f"{row['followed']:.2f}", f"{row['random']:.2f}"]
        for name, x in stored.items()
        for row in x["interchanges"]
    ]
    width = [f"T({COMPILED})"]
    return {
        "sizes": table(["program", "T(n)", "layers of the block", "width", *width], sizes),
        "stops": table(["program", "rule", "right", "mean loops", *width], rules),
        "interchanges": table(
            ["program", "variable", "pairs", "whole runs followed", "after a random change"],
            changed,
        ),
    }


if __name__ == "__main__":
    main()
