"""Rival programs of any task, ranked on models whose program is known and on others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopinterp.circuits import NONE, ProgramModel, ProgramRanking, rank_programs
from loopinterp.circuits.ranking.pairs import rival_swaps
from loopinterp.errors import InputError
from loopinterp.probing.probe_controls import with_random_weights
from loopinterp.rasp import (
    UNKNOWN,
    Linear,
    LoopProgram,
    compile_program,
    full,
    get_program,
    kqv,
    larger,
    list_programs,
    shift_right,
    tok_map,
    tokens,
    var,
)
from loopinterp.results import load_result
from loopinterp.tasks import IGNORE, Addition, Batch, PrefixSum

N = 8
DIGITS = 4
BOS = DIGITS


def running_max(name: str, step, prepare=None) -> LoopProgram:
    inputs = (*map(str, range(DIGITS)), "BOS")
    first = {"best": digit if prepare is None else prepare}
    return LoopProgram(name, "max", inputs, first, {"best": step}, var("best"), Linear())


digit = tok_map(tokens, {BOS: 0, **{d: d for d in range(DIGITS)}})
RIPPLE = running_max("ripple", larger(digit, shift_right(var("best"))))
KEEPER = running_max("keeper", larger(var("best"), shift_right(var("best"))))
AT_ONCE = running_max("at once", kqv(digit, digit, digit, "true", mode="max"), full(UNKNOWN))
RIVALS = [RIPPLE, KEEPER, AT_ONCE]


@pytest.fixture(scope="module")
def maxima() -> Batch:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(DIGITS, (96, N), generator=generator)
    inputs = torch.cat([torch.full((96, 1), BOS), digits], 1)
    targets = torch.cat([torch.full((96, 1), IGNORE), digits.cummax(1).values], 1)
    each = torch.full((96,), N)
    return Batch(inputs, targets, each, each)


@pytest.fixture(scope="module")
def keeper(maxima) -> ProgramRanking:
    return rank_programs(ProgramModel(KEEPER, maxima.inputs, n_loops=N), RIVALS, maxima)


@pytest.mark.parametrize("program", RIVALS, ids=lambda p: p.name)
def test_a_compiled_program_of_ones_own_is_named(program, maxima):
    model = compile_program(program, max_length=N + 1).model
    result = rank_programs(model, RIVALS, maxima, swaps_per_loop=24)
    assert result.verdict.winner == program.name
    own = result.programs.index(program.name)
    assert np.nanmin(result.followed[own]) == 1.0
    assert np.delete(result.score, own).max() < 0.6
    assert result.control_score[own] < 0.5
    assert result.alignments[own] == "loop by loop, position by position"
    assert result.solved == 1.0


@pytest.mark.parametrize("name", list_programs("addition"))
def test_every_program_of_addition_is_named_on_its_own_model(name, program_model, additions):
    rivals = list_programs("addition")
    result = rank_programs(program_model(name), rivals, additions, swaps_per_loop=12)
    assert result.verdict.winner == name, result.verdict.reasons
    assert result.score[result.programs.index(name)] == 1.0


def test_programs_that_answer_alike_without_a_swap_are_told_apart_by_one(keeper):
    ripple, own, _ = range(3)
    assert keeper.behaviour[ripple] == keeper.behaviour[own] == 1.0
    assert keeper.duels[own, ripple] == 1.0
    assert keeper.duels[ripple, own] == 0.0
    assert keeper.n_apart[own, ripple] > 100
    assert keeper.common[own, ripple] == keeper.common[ripple, own] == 1.0
    assert keeper.common_control[own, ripple] < 0.8
    text = keeper.duel_text("keeper", "ripple")
    assert "follows them in 100% and 0%" in text
    assert "in 100% and 100%" in text
    with pytest.raises(InputError, match="keeper"):
        keeper.duel_text("keepers", "ripple")


def test_every_swap_tells_two_rivals_apart_at_a_position_with_the_same_token(maxima):
    drawn = rival_swaps(
        RIVALS,
        maxima,
        loops=[1, 3],
        per_loop=20,
        watched=(0, 1, 2),
        generator=torch.Generator().manual_seed(0),
    )
    swaps = drawn.swaps
    rows = torch.arange(len(swaps))
    assert len(swaps) == 40
    assert swaps.place.tolist() == [0] * 20 + [1] * 20
    assert swaps.loop.tolist() == [1] * 20 + [3] * 20
    assert (swaps.base[rows, swaps.position] == swaps.source[rows, swaps.position]).all()
    assert (swaps.position > 0).all()
    assert drawn.apart.flatten(1).any(1).all()
    assert torch.equal(drawn.apart, drawn.apart.mT)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert int(drawn.apart[:, first, second].sum()) >= 40 // 3 - 1


def test_what_two_rivals_say_is_what_their_runs_say(maxima):
    drawn = rival_swaps(
        RIVALS[:2],
        maxima,
        loops=[2],
        per_loop=30,
        watched=(1,),
        generator=torch.Generator().manual_seed(1),
    )
    swaps = drawn.swaps
    rows = torch.arange(len(swaps))
    said = []
    for program in RIVALS[:2]:
        state = program.trace(swaps.base, n_loops=2).variables["best"][-1]
        state[rows, swaps.position] = program.trace(swaps.source, n_loops=2).variables["best"][
            -1, rows, swaps.position
        ]
        said.append(program.run(swaps.base, n_loops=1, variables={"best": state}).outputs[-1])
    assert (said[0] != said[1]).any(1).all()


def test_a_program_that_is_no_rival_is_none_of_these(maxima):
    model = ProgramModel(KEEPER, maxima.inputs, n_loops=N)
    result = rank_programs(model, [RIPPLE, AT_ONCE], maxima)
    assert result.verdict.winner == NONE
    assert "none of the 2" in result.summary()[0].text


def test_two_names_of_one_program_are_not_told_apart(maxima):
    twin = dataclasses.replace(KEEPER, name="twin")
    model = ProgramModel(KEEPER, maxima.inputs, n_loops=N)
    result = rank_programs(model, [KEEPER, twin, RIPPLE], maxima)
    assert result.verdict.winner == NONE
    assert any("overlaps" in reason for reason in result.verdict.reasons)
    assert "No swap of these inputs tells" in result.summary()[1].text
    assert np.isnan(result.duels[0, 1])


def test_a_model_with_shuffled_weights_is_none_of_these(untrained):
    batch = Addition().sample(6, batch_size=48, generator=torch.Generator().manual_seed(0))
    model = with_random_weights(untrained, seed=0)
    result = rank_programs(model, ["ripple", "sticky_ripple"], batch, swaps_per_loop=16)
    assert result.verdict.winner == NONE
    assert result.summary()[0].good is False


def test_a_ranking_is_saved_drawn_and_tabled(keeper, tmp_path):
    again = load_result(keeper.save(tmp_path))
    assert isinstance(again, ProgramRanking)
    assert again.verdict == keeper.verdict
    assert again.table()["program"][0] == "keeper"
    assert len(again.to_frame()) == len(RIVALS) * (N - 1)
    verdict, loops, duels = again.figures()
    assert "random" in verdict.control.lower()
    shown = loops.plot.to_dict()["data"]
    assert {line.get("name") for line in shown} > {"ripple", "keeper"}
    assert "need not add up" in duels.caption


def test_the_same_seed_gives_the_same_numbers(maxima, keeper):
    model = ProgramModel(KEEPER, maxima.inputs, n_loops=N)
    again = rank_programs(model, RIVALS, maxima)
    assert np.array_equal(again.followed, keeper.followed)
    assert np.array_equal(again.control, keeper.control)


def test_bad_arguments_are_named(maxima):
    model = ProgramModel(KEEPER, maxima.inputs, n_loops=N)
    with pytest.raises(InputError, match="two rivals or more"):
        rank_programs(model, [KEEPER], maxima)
    with pytest.raises(InputError, match="each with its own name"):
        rank_programs(model, [KEEPER, KEEPER], maxima)
    with pytest.raises(InputError, match="numbers from 1 to"):
        rank_programs(model, RIVALS, maxima, loops=[N + 1])
    with pytest.raises(InputError, match="numbers from 1 to"):
        rank_programs(model, RIVALS, maxima, loops=[0, 1])
    mixed = PrefixSum().sample(torch.tensor([3, 4]), generator=torch.Generator().manual_seed(0))
    xor = get_program("prefix_xor")
    with pytest.raises(InputError, match="one length"):
        rank_programs(model, [xor, dataclasses.replace(xor, name="twin")], mixed)
    with pytest.raises(InputError, match=r"tokens in 0\.\.3"):
        rank_programs(model, [xor, dataclasses.replace(xor, name="twin")], maxima)
    with pytest.raises(InputError, match="rivals of one task"):
        rank_programs(model, [xor, RIPPLE], maxima)
    same = maxima[torch.zeros(8, dtype=torch.long)]
    with pytest.raises(InputError, match="disagree"):
        rank_programs(model, RIVALS, same)
    with pytest.raises(InputError, match="disagree"):
        rank_programs(model, [KEEPER, dataclasses.replace(KEEPER, name="twin")], maxima)
