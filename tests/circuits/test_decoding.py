from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.circuits import Decodability, decodability
from loopinterp.circuits.alignment import delayed
from loopinterp.errors import InputError
from loopinterp.rasp import get_program
from loopinterp.results import load_result

LOOPS = 5


@pytest.fixture(scope="module")
def ripple(program_model, additions) -> Decodability:
    return decodability(
        program_model("ripple"), additions, ["ripple", "latched_chain"], n_loops=LOOPS
    )


def table(result: Decodability, variable: str) -> np.ndarray:
    return result.accuracy[result.variables.index(variable)]


def test_a_programs_own_variable_is_read_on_the_diagonal(ripple):
    own = table(ripple, "ripple.carry")
    assert np.diagonal(own)[1:].tolist() == [1.0] * LOOPS
    assert np.isnan(own[:, 0]).all()  # all carries are 0 at first
    for loop in range(1, LOOPS):
        assert own[loop, loop + 1 :].max() < 1.0
    assert ripple.best_loop("ripple.carry") == [-1, 1, 2, 3, 4, 5]


def test_a_model_that_lags_shows_it_beside_the_diagonal(program_model, additions):
    late = program_model(delayed(get_program("ripple"), 1))
    result = decodability(late, additions, ["ripple"], n_loops=LOOPS)
    assert np.diagonal(table(result, "ripple.carry"))[1:].tolist() == [1.0] * LOOPS
    # The pending answer keeps the last loop's carry readable: only with the bits it was added to.
    assert (np.diagonal(table(result, "ripple.carry"), -1)[1:] >= 0.5).all()


def test_labels_of_other_examples_cannot_be_read(ripple):
    row = ripple.variables.index("ripple.carry")
    shuffled = ripple.shuffled[row][:, 2:]
    assert abs(np.nanmean(shuffled) - 0.5) < 0.05


def test_the_embedding_alone_does_not_hold_the_carry(ripple):
    row = ripple.variables.index("ripple.carry")
    assert ripple.embedding[row][2:].max() < 0.6


def test_chance_is_one_over_the_number_of_classes(ripple):
    two = ripple.chance[ripple.variables.index("ripple.carry")]
    three = ripple.chance[ripple.variables.index("latched_chain.carry")]
    assert two[1:].tolist() == [0.5] * LOOPS
    assert three[2] == pytest.approx(1 / 3)


def test_a_model_without_weights_has_no_random_twin(ripple):
    assert ripple.random_weights is None


def test_a_random_twin_of_a_transformer_is_made(untrained, additions):
    result = decodability(untrained, additions, ["ripple"], n_loops=2)
    assert result.random_weights is not None
    assert result.random_weights.shape == result.accuracy.shape


def test_variables_that_do_not_depend_on_the_input_are_left_out(program_model, additions):
    result = decodability(program_model("lookahead"), additions, ["lookahead"], n_loops=2)
    assert result.variables == ["lookahead.makes", "lookahead.passes"]


def test_results_go_to_disk_and_back(ripple, tmp_path):
    read = load_result(ripple.save(tmp_path))
    assert isinstance(read, Decodability)
    np.testing.assert_array_equal(read.accuracy, ripple.accuracy)
    assert "1 of 2" in read.summary()[0].text


def test_too_few_examples_are_refused(untrained, additions):
    with pytest.raises(InputError, match="at least 4"):
        decodability(untrained, additions[torch.arange(3)], ["ripple"])
