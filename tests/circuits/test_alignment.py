from __future__ import annotations

import pytest
import torch

from loopinterp.circuits.alignment import (
    Alignment,
    Prediction,
    agreement,
    alignments,
    delayed,
    predict,
)
from loopinterp.circuits.alignment_choice import halves, rate_alignments
from loopinterp.circuits.pairs import PLACES, swap_pairs
from loopinterp.circuits.runs import AT_THE_END, DELAYS, prepare_swaps
from loopinterp.errors import InputError
from loopinterp.rasp import (
    UNKNOWN,
    Linear,
    LoopProgram,
    counterfactual,
    get_program,
    shift_right,
    var,
)
from loopinterp.rasp.programs.addition import INPUTS, generate, propagate

# A ripple written with the carries OUT of each position.
CARRY_OUT = LoopProgram(
    name="ripple_out",
    task="addition",
    inputs=INPUTS,
    prepare={"out": generate},
    step={"out": generate | (propagate & shift_right(var("out")))},
    finish=propagate ^ shift_right(var("out")),
    n_loops=Linear(),
)


@pytest.fixture(scope="module")
def pairs(program_model):
    return swap_pairs(program_model("ripple"), n=16, per_place=8, max_chain=6)


@pytest.mark.parametrize("name", ["ripple", "latched_chain", "sticky_ripple"])
def test_predictions_are_the_programs_counterfactuals_pair_by_pair(name, pairs):
    program = get_program(name)
    said = predict(program, pairs, delays=DELAYS)
    for k in range(0, len(pairs), 5):
        base, source = pairs.base[k : k + 1], pairs.source[k : k + 1]
        loop = int(pairs.loop[k])
        mask = torch.zeros_like(base, dtype=torch.bool)
        mask[0, int(pairs.position[k])] = True
        trace = counterfactual(program, base, source, "carry", loop, mask, n_loops=pairs.n_loops)
        plain = program.trace(base, n_loops=pairs.n_loops)
        for d, delay in enumerate(DELAYS):
            at = pairs.n_loops if delay == AT_THE_END else loop + delay
            assert torch.equal(said.swapped[d, k], trace.outputs[at, 0])
            assert torch.equal(said.base[d, k], plain.outputs[at, 0])


def _flips(program, pairs, place, delay, carry=None):
    said = predict(program, pairs, delays=(delay,))
    rows = torch.arange(len(pairs))
    chosen = pairs.place == PLACES.index(place)
    if carry is not None:
        chosen &= pairs.carry == carry
    changed = said.base != said.swapped
    bits = [changed[0, rows, pairs.position + k][chosen] for k in range(3)]
    return [float(bit.float().mean()) for bit in bits]


@pytest.mark.parametrize("place", PLACES[1:4])
def test_a_plain_ripple_flips_back_and_the_change_runs_on(pairs, place):
    program = get_program("ripple")
    assert _flips(program, pairs, place, 0) == [1, 0, 0]
    assert _flips(program, pairs, place, 1) == [0, 1, 0]
    assert _flips(program, pairs, place, 2) == [0, 0, 1]


def test_a_latched_chain_holds_what_is_resolved(pairs):
    program = get_program("latched_chain")
    assert _flips(program, pairs, "ahead", 1) == [0, 0, 0]
    assert _flips(program, pairs, "at", 1) == [1, 1, 0]
    assert _flips(program, pairs, "at", 2) == [1, 1, 1]
    assert _flips(program, pairs, "one behind", 1) == [1, 0, 0]
    assert _flips(program, pairs, "two or more behind", 2) == [1, 0, 0]


def test_a_sticky_ripple_holds_a_carry_but_not_its_absence(pairs):
    program = get_program("sticky_ripple")
    assert _flips(program, pairs, "two or more behind", 1, carry=0) == [1, 1, 0]
    assert _flips(program, pairs, "two or more behind", 1, carry=1) == [0, 0, 0]


@pytest.mark.parametrize("name", ["ripple", "latched_chain", "carry_save", "lookahead"])
def test_the_plain_alignment_suits_a_programs_own_model_best(name, program_model):
    model = program_model(name)
    run = prepare_swaps(model, swap_pairs(model, n=12, per_place=4, max_chain=5))
    rated = rate_alignments(get_program(name), run, run.swap())
    every = torch.ones(len(run.pairs), dtype=torch.bool)
    assert rated.best(every) == Alignment()


def test_variables_may_lie_one_position_to_the_left(program_model):
    model = program_model("ripple")
    run = prepare_swaps(model, swap_pairs(model, n=12, per_place=4, max_chain=5))
    rated = rate_alignments(CARRY_OUT, run, run.swap())
    every = torch.ones(len(run.pairs), dtype=torch.bool)
    best = rated.best(every)
    assert best.offset == 1
    said = predict(CARRY_OUT, run.pairs, alignment=best, delays=run.delays)
    assert (agreement(said, run.base, run.swap(), run.pairs.scored) == 1).all()


def test_a_model_that_answers_a_loop_late_is_recognised(program_model):
    late = delayed(get_program("latched_chain"), 1)
    model = program_model(late)
    run = prepare_swaps(model, swap_pairs(model, n=12, per_place=4, max_chain=5))
    rated = rate_alignments(get_program("latched_chain"), run, run.swap())
    assert rated.best(torch.ones(len(run.pairs), dtype=torch.bool)).lag == 1


def test_delayed_programs_answer_what_they_knew(additions):
    program = get_program("ripple")
    early = program.trace(additions.inputs, n_loops=4).outputs
    late = delayed(program, 2).trace(additions.inputs, n_loops=6).outputs
    assert (late[:2] == UNKNOWN).all()
    assert torch.equal(late[2:], early)


def test_agreement_by_hand():
    u = UNKNOWN
    said = Prediction(
        base=torch.tensor([[[0, 0, u, u, 1, 0]]]), swapped=torch.tensor([[[1, 0, u, 1, u, 0]]])
    )
    base = torch.tensor([[[0, 1, 1, 0, 1, 0]]])
    scored = torch.tensor([[True] * 5 + [False]])
    # flips; unchanged (whatever the model says); undecided, so unchanged; decided; says nothing.
    right = torch.tensor([[[1, 1, 1, 1, 0, 1]]])
    assert agreement(said, base, right, scored).tolist() == [[0.5]]
    for bit in range(4):
        wrong = right.clone()
        wrong[..., bit] ^= 1
        assert agreement(said, base, wrong, scored).tolist() == [[0.0]]


def test_halves_split_every_place_evenly(pairs):
    half = halves(pairs.place)
    assert torch.bincount(pairs.place[half]).tolist() == [4] * len(PLACES)


def test_a_shift_before_the_first_loop_is_refused(pairs):
    with pytest.raises(InputError, match="shift"):
        predict(get_program("ripple"), pairs, alignment=Alignment(shift=-9), delays=(0,))


def test_alignments_start_with_the_plain_one_and_are_all_different():
    found = list(alignments())
    assert found[0] == Alignment()
    assert len(set(found)) == len(found)
    assert len({str(a) for a in found}) == len(found)
