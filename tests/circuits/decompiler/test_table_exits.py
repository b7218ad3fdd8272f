"""Where runs leave a table: on a table that is right but for one entry."""

from __future__ import annotations

from dataclasses import replace

import torch

from loopinterp.circuits.decompiler.behaviour import Runs
from loopinterp.circuits.decompiler.counted_table import Said
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns
from loopinterp.circuits.decompiler.region_refinement import Refinement, refine
from loopinterp.circuits.decompiler.table_exits import exits_of, unexplained_steps
from loopinterp.rasp import compile_program, get_program
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.tasks import Addition

GENERATES, PROPAGATES = 3, 1
"""Tokens of an addition that make a carry and that hand one on."""


def runs_of(model: object, n: int, seed: int) -> ExchangeRuns:
    batch = inputs_of(Addition(), (n,), 60, seed=seed)
    runs = Runs(model, batch, Addition().n_loops(n))
    return ExchangeRuns.of(runs, 2000, torch.Generator().manual_seed(seed))


def ripple() -> tuple[Refinement, list[ExchangeRuns]]:
    """A ripple read at two lengths, and runs that its table was not made from."""
    model = compile_program(get_program("ripple"), max_length=7).model
    own, others = ([runs_of(model, n, seed) for n in (4, 6)] for seed in (0, 1))
    return refine(own, others, most_values=4), others


def names(found: Refinement) -> dict[tuple[int, int], int]:
    return {(t, v): v for t, size in found.regions.sizes.items() for v in range(size)}


def test_one_wrong_entry_is_where_runs_leave_and_the_share_is_of_its_steps() -> None:
    found, others = ripple()
    values = {y: v for v, y in enumerate(found.regions.answers[PROPAGATES])}
    carried, clear = values[0], values[1]  # a digit of 1 + 0 answers 0 once a carry is there
    step = found.table.step.clone()
    left = found.regions.answers[GENERATES].index(0)  # 1 + 1 without a carry
    assert int(step[GENERATES, left, PROPAGATES, clear]) == carried
    step[GENERATES, left, PROPAGATES, clear] = clear
    wrong = replace(found.table, step=step)
    rows = unexplained_steps(wrong, found.regions, others, names(found))
    first = rows.iloc[0]
    kind = tuple(int(first[name]) for name in ("left", "left_value", "token", "value"))
    assert kind == (GENERATES, left, PROPAGATES, clear)
    assert first["otherwise"] == 1 and first["exits"] > 10
    # Counted by hand: two neighbours of these tokens and values, while a run is not over.
    steps = 0
    for each in others:
        for of in each.both:
            own = found.regions.values(of.tokens.expand_as(of.answers), of.states, of.answers)
            for run, row in enumerate(of.tokens.tolist()):
                for p in range(1, len(row)):
                    if (row[p - 1], row[p]) == (GENERATES, PROPAGATES):
                        here = (own[:-1, run, p - 1] == left) & (own[:-1, run, p] == clear)
                        steps += int((here & of.within[1:, run]).sum())
    assert first["steps"] == steps


def test_what_is_right_is_not_left() -> None:
    found, others = ripple()
    values = [
        tuple(found.regions.values(of.tokens.expand_as(of.answers), of.states, of.answers)
              for of in each.both) for each in others
    ]  # fmt: skip
    for each, own in zip(others, values):
        said = Said.of(found.table, each)
        exits = exits_of(found.table, each, own, said)
        right = said.right[:, said.matters].all(0).double().mean()
        assert int(exits[found.table.seen].sum()) == 0
        assert right == 1 or int(exits.sum()) > 0
