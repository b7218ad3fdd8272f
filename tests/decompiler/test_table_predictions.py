"""A table that is right but for one entry: where runs leave it, and how it is repaired."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.decompiler.interchange_runs import (
    InterchangeTrajectories,
    Runs,
    TablePrediction,
    n_wrong,
    repaired,
    repaired_on_draws,
    unexplained_steps,
)
from loopinterp.decompiler.region_refinement import _Refinement, refine
from loopinterp.decompiler.transition_table import TransitionTable
from loopinterp.interventions.pairs import balanced_pairs
from loopinterp.programs import (
    UNKNOWN,
    Linear,
    LoopProgram,
    eq,
    full,
    get_program,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks import Addition, get_task

GENERATES, PROPAGATES = 3, 1
"""Tokens of an addition that make a carry and that hand one on."""

N = 4


def runs_of(model: object, n: int, seed: int) -> InterchangeTrajectories:
    batch = inputs_of(Addition(), (n,), 60, seed=seed)
    runs = Runs(model, batch, Addition().n_loops(n))
    return InterchangeTrajectories.drawn(runs, 2000, torch.Generator().manual_seed(seed))


def ripple() -> tuple[_Refinement, list[InterchangeTrajectories]]:
    """A ripple read at two lengths, and runs that its table was not made from."""
    model = compile_program(get_program("ripple"), max_length=7).model
    runs, others = ([runs_of(model, n, seed) for n in (4, 6)] for seed in (0, 1))
    return refine(runs, others, most_values=4), others


def late_xor() -> LoopProgram:
    """A running XOR that answers nothing before news of BOS has come."""
    left = shift_right(var("value"), default=UNKNOWN)
    step = where(
        eq(tokens, 2),
        0,
        where(eq(left, UNKNOWN), UNKNOWN, left ^ tok_map(tokens, {1: 1}, default=0)),
    )
    return LoopProgram(
        name="late_xor",
        task="prefix_sum",
        inputs=("0", "1", "BOS", "PAD"),
        prepare={"value": full(UNKNOWN)},
        step={"value": step},
        finish=var("value"),
        n_loops=Linear(offset=1),
    )


def names(refinement: _Refinement) -> dict[tuple[int, int], int]:
    return {(t, v): v for t, size in refinement.regions.sizes.items() for v in range(size)}


def test_one_wrong_entry_is_where_runs_leave_and_the_share_is_of_its_steps() -> None:
    refinement, others = ripple()
    regions = refinement.regions
    values = {y: v for v, y in enumerate(regions.answers[PROPAGATES])}
    carried, clear = values[0], values[1]  # a digit of 1 + 0 answers 0 once a carry is there
    step = refinement.table.step.clone()
    left = regions.answers[GENERATES].index(0)  # 1 + 1 without a carry
    assert int(step[GENERATES, left, PROPAGATES, clear]) == carried
    step[GENERATES, left, PROPAGATES, clear] = clear
    wrong = replace(refinement.table, step=step)
    rows = unexplained_steps(wrong, regions.values, others, names(refinement))
    first = rows.iloc[0]
    kind = tuple(int(first[name]) for name in ("left", "left_value", "token", "value"))
    assert kind == (GENERATES, left, PROPAGATES, clear)
    assert first["otherwise"] == 1 and first["exits"] > 10
    # Counted by hand: two neighbours of these tokens and values, while a run is not over.
    steps = 0
    for each in others:
        for part in each.both:
            v = regions.values(part)
            for run, row in enumerate(part.tokens.tolist()):
                for p in range(1, len(row)):
                    if (row[p - 1], row[p]) == (GENERATES, PROPAGATES):
                        here = (v[:-1, run, p - 1] == left) & (v[:-1, run, p] == clear)
                        steps += int((here & part.within[1:, run]).sum())
    assert first["steps"] == steps


def test_a_right_table_is_not_left() -> None:
    refinement, others = ripple()
    for each in others:
        prediction = TablePrediction.of(refinement.table, each)
        exits = prediction.exits([refinement.regions.values(part) for part in each.both])
        right = prediction.changed[:, prediction.effective].all(0).double().mean()
        assert int(exits[refinement.table.known.flatten()].sum()) == 0
        assert right == 1 or int(exits.sum()) > 0


def clean(seed: int) -> Runs:
    model = compile_program("ripple", max_length=N + 1).model
    return Runs(model, inputs_of(Addition(), (N,), 32, seed=seed), Addition().n_loops(N))


@pytest.fixture(scope="module")
def learnt() -> tuple[TransitionTable, InterchangeTrajectories]:
    """A table of a ripple that is right about runs with injected states, and these."""
    runs = clean(0)
    generator = torch.Generator().manual_seed(0)
    drawn = InterchangeTrajectories.drawn(runs, 1500, generator, across_loops=True)
    table = refine([drawn], [drawn], most_values=4).table
    values = table.follow(runs.batch.inputs, runs.n_loops)
    pairs = balanced_pairs(runs.batch, values, 800, generator)
    tried = InterchangeTrajectories.after(runs, pairs)
    assert n_wrong(table, [tried]) > 0, "pairs that no run has had are not as before"
    return repaired(table, [tried]), tried


def test_a_right_table_is_not_changed(
    learnt: tuple[TransitionTable, InterchangeTrajectories],
) -> None:
    table, runs = learnt
    assert n_wrong(table, [runs]) == 0
    assert torch.equal(repaired(table, [runs]).step, table.step)


def test_any_entry_that_matters_is_repaired(
    learnt: tuple[TransitionTable, InterchangeTrajectories],
) -> None:
    table, runs = learnt
    broken = 0
    for at in table.known.nonzero()[::5].tolist():
        step = table.step.clone()
        step[tuple(at)] = 1 - step[tuple(at)]
        wrong = replace(table, step=step)
        if not n_wrong(wrong, [runs]):
            continue
        broken += 1
        assert n_wrong(repaired(wrong, [runs]), [runs]) == 0
    assert broken >= 4


def test_rounds_end_with_a_table_that_new_inputs_do_not_break(
    learnt: tuple[TransitionTable, InterchangeTrajectories],
) -> None:
    table, runs = learnt
    step = table.step.clone()
    step[3, 0, 1, 1] = 1 - step[3, 0, 1, 1]  # beside a generating position
    wrong = replace(table, step=step)
    assert n_wrong(wrong, [runs]) > 0
    generator = torch.Generator().manual_seed(1)
    after, left = repaired_on_draws(
        wrong, lambda k: [clean(5 + k)], number=800, generator=generator
    )
    assert left == 0
    assert n_wrong(after, [runs]) == 0


def test_undecided_answers_are_counted_as_any_other() -> None:
    task = get_task("prefix_sum")
    model = compile_program(late_xor(), max_length=6).model

    def drawn(seed: int) -> InterchangeTrajectories:
        runs = Runs(model, inputs_of(task, (5,), 40, seed=seed), task.n_loops(5))
        return InterchangeTrajectories.drawn(runs, 4000, torch.Generator().manual_seed(seed))

    others = drawn(1)
    assert (others.clean.answers == UNKNOWN).any() and (others.clean.answers >= 0).any()
    found = refine([drawn(0)], [others], most_values=4)
    assert found.regions.answers == {0: (UNKNOWN, 0, 1), 1: (UNKNOWN, 0, 1), 2: (UNKNOWN, 0)}
    for token, answers in found.regions.answers.items():
        assert found.table.answers[token, : len(answers)].tolist() == [*answers]
    prediction = TablePrediction.of(found.table, others)
    assert prediction.clean.all() and prediction.changed.all()
