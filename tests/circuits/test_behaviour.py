from __future__ import annotations

import numpy as np
import pytest

from loopinterp.circuits.alignment import Alignment
from loopinterp.circuits.behaviour import behaviour_scores
from loopinterp.rasp import get_program


@pytest.fixture(scope="module")
def scores(additions):
    def of(model, names):
        programs = [get_program(name) for name in names]
        return behaviour_scores(model, programs, [Alignment()] * len(names), additions)

    return of


def test_a_program_gives_its_own_models_answers(program_model, scores):
    found = scores(program_model("ripple"), ["ripple", "lookahead"])
    assert (found[:, 0] == 1).all()
    assert found[:, 1].mean() < 0.3


def test_where_a_program_is_undecided_it_gets_one_half(program_model, scores):
    # A latched ripple from BOS and a plain one differ only where the latched one is undecided.
    found = scores(program_model("ripple"), ["ripple", "latched_ripple"])
    assert (found[:, 0] == 1).all()
    assert np.all(found[:, 1] == 0.5)


def test_programs_that_answer_alike_have_nothing_to_compare(program_model, scores):
    # Plain ripple, sticky ripple and carry-save differ only in what they do after a swap.
    found = scores(program_model("ripple"), ["ripple", "sticky_ripple", "carry_save"])
    assert found.shape == (0, 3)


def test_before_its_first_loop_a_program_says_nothing(program_model, additions):
    ripple = get_program("ripple")
    late = behaviour_scores(
        program_model("ripple"), [ripple, ripple], [Alignment(), Alignment(shift=-2)], additions
    )
    assert (late[:, 0] == 1).all()
    assert 0 < late[:, 1].mean() < 1
