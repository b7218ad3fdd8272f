"""An entry of a table that is wrong is found by what the table says of answers, and mended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopinterp.circuits.decompiler.behaviour import Runs
from loopinterp.circuits.decompiler.counted_table import CountedTable, Said
from loopinterp.circuits.decompiler.counterexample_rounds import mended
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns, planted
from loopinterp.circuits.decompiler.region_refinement import refine
from loopinterp.circuits.decompiler.table_repair import n_wrong, repaired
from loopinterp.rasp import compile_program
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.tasks import Addition

N = 4


def undisturbed(seed: int) -> Runs:
    model = compile_program("ripple", max_length=N + 1).model
    return Runs(model, inputs_of(Addition(), (N,), 32, seed=seed), Addition().n_loops(N))


@pytest.fixture(scope="module")
def learnt() -> tuple[CountedTable, ExchangeRuns]:
    """A table of a ripple that is right about runs with planted states, and these."""
    runs = undisturbed(0)
    generator = torch.Generator().manual_seed(0)
    made = ExchangeRuns.of(runs, 1500, generator, across_loops=True)
    table = refine([made], [made], most_values=4).table
    values = table.follow(runs.batch.inputs, table.start[runs.batch.inputs], runs.n_loops)
    tried = ExchangeRuns.after(runs, planted(runs.batch, values, 800, generator))
    assert n_wrong(Said.of(table, tried)) > 0, "pairs that no run has had are not as before"
    return repaired(table, [tried]), tried


def test_a_table_that_is_right_is_left_alone(learnt: tuple[CountedTable, ExchangeRuns]) -> None:
    table, runs = learnt
    assert n_wrong(Said.of(table, runs)) == 0
    assert torch.equal(repaired(table, [runs]).step, table.step)


def test_any_entry_that_matters_is_mended(learnt: tuple[CountedTable, ExchangeRuns]) -> None:
    table, runs = learnt
    broken = 0
    for at in table.seen.nonzero()[::5].tolist():
        step = table.step.clone()
        step[tuple(at)] = 1 - step[tuple(at)]
        wrong = replace(table, step=step)
        if not n_wrong(Said.of(wrong, runs)):
            continue
        broken += 1
        assert n_wrong(Said.of(repaired(wrong, [runs]), runs)) == 0
    assert broken >= 4


def test_rounds_end_with_a_table_that_new_inputs_do_not_break(
    learnt: tuple[CountedTable, ExchangeRuns],
) -> None:
    table, runs = learnt
    step = table.step.clone()
    step[3, 0, 1, 1] = 1 - step[3, 0, 1, 1]  # beside a generating position
    wrong = replace(table, step=step)
    assert n_wrong(Said.of(wrong, runs)) > 0
    generator = torch.Generator().manual_seed(1)
    found, left = mended(wrong, lambda k: [undisturbed(5 + k)], number=800, generator=generator)
    assert left == 0
    assert n_wrong(Said.of(found, runs)) == 0
