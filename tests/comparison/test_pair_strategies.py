from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from loopinterp.comparison.pair_strategies import (
    BOTH,
    KIND,
    OTHER_VALUE,
    SAME_VALUE,
    TOKEN,
    SpreadPairs,
    strata_of,
)
from loopinterp.comparison.program_runs import Prediction
from loopinterp.core.errors import InputError
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.programs import LoopProgram, get_program
from loopinterp.tasks import Batch, get_task

N = 8
RIVALS = ["ripple", "sticky_ripple", "latched_chain"]
STRATEGY = SpreadPairs(pairs=120, same_value=30, loops=5)


def drawn(
    names: list[str], strategy: SpreadPairs = STRATEGY, *, seed: int = 0, batch_size: int = 64
) -> tuple[list[LoopProgram], Batch, InterchangePairs]:
    programs = [get_program(name) for name in names]
    generator = torch.Generator().manual_seed(seed)
    task = get_task(programs[0].task, **programs[0].task_settings)
    batch = task.sample(N, batch_size=batch_size, generator=generator)
    return programs, batch, strategy(None, programs, batch, generator)


def differ(programs: list[LoopProgram], pairs: InterchangePairs, k: int) -> bool:
    """Whether a variable differs at the first position of a pair, by the programs' own traces."""
    rows = [pairs.inputs[int(r[k])][None] for r in (pairs.base, pairs.source)]
    loops, at = (int(pairs.loop[k]), int(pairs.source_loop[k])), (0, int(pairs.positions[k, 0]))
    for program in programs:
        both = [program.run(row, n_loops=n).variables for row, n in zip(rows, loops)]
        if any(both[0][v][-1][at] != both[1][v][-1][at] for v in program.variables):
            return True
    return False


@pytest.mark.parametrize("names", [RIVALS, ["parity"], ["copy"], ["token_addition"]])
def test_pairs_share_the_token_and_differ_in_a_variable_unless_they_are_of_the_same_value(names):
    programs, batch, pairs = drawn(names)
    kind = pairs.strata[KIND]
    assert kind.labels == (OTHER_VALUE, SAME_VALUE)
    other = kind.codes == 0
    assert int(other.sum()) == STRATEGY.pairs
    last = int(batch.n_loops[0])
    assert 0 <= int(pairs.source_loop.min()) <= int(pairs.source_loop.max()) <= last
    across = (pairs.source_loop != pairs.loop)[other]
    assert 0.35 < float(across.double().mean()) < 0.75
    assert 0 <= int(pairs.loop.min()) <= int(pairs.loop.max()) < int(batch.n_loops[0])
    assert (pairs.source_loop[pairs.loop == 0] > 0).all()  # into the start goes a later state
    assert len(pairs.loop.unique()) <= STRATEGY.loops
    for k in range(0, len(pairs), 3):
        position = pairs.positions[k, 0]
        base, source = (pairs.inputs[r[k]] for r in (pairs.base, pairs.source))
        assert base[position] == source[position]
        assert pairs.base[k] != pairs.source[k]
        assert differ(programs, pairs, k) == bool(other[k])


@pytest.mark.parametrize("names", [RIVALS, ["parity"], ["copy"]])
def test_a_tenth_of_the_runs_get_a_second_interchange_where_the_source_has_other_values(names):
    programs, batch, pairs = drawn(names, dataclasses.replace(STRATEGY, pairs=600))
    second, same_value = pairs.second, pairs.strata[KIND].codes == 1
    assert second is not None
    made = second.made
    assert not made[same_value].any()
    assert 0.05 < float(made[~same_value].double().mean()) < 0.15
    assert bool((second.loop >= pairs.loop)[made].all())
    assert int(second.loop[made].max()) <= int(batch.n_loops[0])
    again = made & (second.position == pairs.positions[:, 0])
    assert again.any() and (made & ~again).any()
    assert bool((second.loop > pairs.loop)[again].all())
    as_first = dataclasses.replace(
        pairs,
        source=second.source,
        positions=second.position[:, None],
        loop=second.loop,
        source_loop=second.source_loop,
    )
    for k in made.nonzero().squeeze(1).tolist():
        at = as_first.positions[k, 0]
        assert pairs.inputs[pairs.base[k], at] == pairs.inputs[second.source[k], at]
        assert differ(programs, as_first, k)


def test_without_other_loops_or_a_second_interchange_there_are_none():
    _, _, pairs = drawn(RIVALS, dataclasses.replace(STRATEGY, other_loops=0.0, repeated=0.0))
    assert torch.equal(pairs.source_loop, pairs.loop)
    assert pairs.second is None or not pairs.second.made.any()


def test_every_two_rivals_are_told_apart_by_many_pairs():
    programs, _, pairs = drawn(RIVALS)
    natural = torch.full((len(pairs), pairs.longest + 1, N + 1), -3, dtype=torch.int16)
    said = [Prediction(p, pairs).claims(natural) for p in programs]
    for first, second in itertools.combinations(said, 2):
        assert int(first.differ(second).any(-1).sum()) >= STRATEGY.pairs // 4


def test_token_classes_are_spread_evenly():
    _, _, pairs = drawn(["ripple"], SpreadPairs(pairs=240, same_value=0, loops=5), batch_size=256)
    both = strata_of(pairs, get_program("ripple"))[BOTH]
    counts = torch.bincount(both.codes)
    assert len(counts) == 16 and counts.max() <= 4 * counts.min()


def test_other_positions_of_an_exchange_have_the_same_token_too():
    _, _, pairs = drawn(RIVALS, dataclasses.replace(STRATEGY, sites=3))
    assert pairs.positions.shape[1] == 3
    base, source = (pairs.inputs[r].gather(1, pairs.positions) for r in (pairs.base, pairs.source))
    assert torch.equal(base[:, 0], source[:, 0])
    free = pairs.positions > 0  # where no other position has the same token, the first column
    assert torch.equal(base[free], source[free])


def test_the_same_seed_gives_the_same_pairs_and_another_one_others():
    first, again, another = (drawn(RIVALS, seed=s)[2] for s in (0, 0, 1))
    assert torch.equal(first.base, again.base) and torch.equal(first.positions, again.positions)
    assert not torch.equal(first.base, another.base)


def test_inputs_that_differ_in_nothing_are_refused():
    program = get_program("ripple")
    batch = get_task("addition").sample(4, batch_size=2, generator=torch.Generator().manual_seed(0))
    alike = dataclasses.replace(batch, inputs=batch.inputs[:1].expand(2, -1))
    with pytest.raises(InputError) as refused:
        STRATEGY(None, [program], alike, torch.Generator().manual_seed(0))
    assert refused.value.what == "batch"


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": 1},
        {"same_value": -1},
        {"loops": 0},
        {"sites": 0},
        {"other_loops": 1.5},
        {"repeated": -0.1},
    ],
)
def test_impossible_numbers_are_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        SpreadPairs(**change)


def test_strata_say_token_left_token_when_and_where():
    program, _, pairs = drawn(["ripple"])
    names = program[0].inputs
    strata = strata_of(pairs, program[0])

    def label(stratum: str, k: int) -> str:
        return strata[stratum].labels[int(strata[stratum].codes[k])]

    thirds = ("first third", "second third", "last third")
    source_loop = "loop of the source"
    for k in range(len(pairs)):
        row, at, loop = pairs.inputs[pairs.base[k]], int(pairs.positions[k, 0]), int(pairs.loop[k])
        own, left = names[row[at]], names[row[at - 1]]
        assert label(TOKEN, k) == own
        if at:
            assert (label("left token", k), label(BOTH, k)) == (left, f"{own} after {left}")
        else:
            assert int(strata["left token"].codes[k]) == int(strata[BOTH].codes[k]) == -1
        assert label("loop", k) == thirds[3 * max(loop - 1, 0) // (pairs.n_loops - 1)]
        earlier = int(pairs.source_loop[k]) - loop
        loops = "the same" if not earlier else "a later one" if earlier > 0 else "an earlier one"
        assert label(source_loop, k) == loops
        assert pairs.second is not None
        again = int(pairs.second.position[k]) == at
        where = "at the same position" if again else "at another position"
        assert label("second interchange", k) == (where if pairs.second.made[k] else "none")
        assert label("position", k) == thirds[3 * max(at - 1, 0) // N]
