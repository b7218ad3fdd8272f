from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.comparison.variables import Decodability, _cells_of_other_examples, decodability
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.programs import full, get_program
from loopinterp.programs.program import with_output_lag
from loopinterp.tasks import IGNORE, UniqueSet

LOOPS = 5


@pytest.fixture(scope="module")
def ripple(program_model, additions) -> Decodability:
    return decodability(
        program_model("ripple"), additions, ["ripple", "latched_chain"], n_loops=LOOPS
    )


def table(result: Decodability, variable: str) -> np.ndarray:
    return result.data["accuracy"].sel(variable=variable).values


def test_a_programs_own_variable_is_read_on_the_diagonal(ripple):
    own = table(ripple, "ripple.carry")
    assert np.diagonal(own)[1:].tolist() == [1.0] * LOOPS
    assert np.isnan(own[:, 0]).all()  # all carries are 0 at first
    for loop in range(1, LOOPS):
        assert own[loop, loop + 1 :].max() < 1.0
    carry = ripple.loop_for_loop("accuracy").sel(variable="ripple.carry")
    np.testing.assert_array_equal(carry, np.diagonal(own))


def test_a_model_that_lags_shows_it_beside_the_diagonal(program_model, additions):
    late = program_model(with_output_lag(get_program("ripple"), 1))
    result = decodability(late, additions, ["ripple"], n_loops=LOOPS)
    assert np.diagonal(table(result, "ripple.carry"))[1:].tolist() == [1.0] * LOOPS
    # The pending answer keeps the last loop's carry readable: only with the bits it was added to.
    assert (np.diagonal(table(result, "ripple.carry"), -1)[1:] >= 0.5).all()


def test_labels_of_cells_of_other_examples_cannot_be_read(ripple):
    carry = ripple.data["shuffled"].sel(variable="ripple.carry")
    assert abs(float(carry.sel(program_loop=slice(2, None)).mean()) - 0.5) < 0.05


@pytest.mark.parametrize("n", [4, 5, 9])
def test_no_example_has_its_own_labels_in_the_control(n):
    row, pos = torch.arange(n).repeat_interleave(2), torch.arange(2).repeat(n)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        other = _cells_of_other_examples(row, pos, n, generator)
        paired = row < n // 2 * 2  # one of an odd number is left over
        assert bool((row[other] != row)[paired].all())
        assert torch.equal(pos[other], pos) and torch.equal(row[other] % 2, row % 2)
        assert torch.equal(other.sort().values, torch.arange(2 * n))


def test_the_embedding_alone_does_not_hold_the_carry(ripple):
    carry = ripple.data["embedding"].sel(variable="ripple.carry")
    assert carry.sel(program_loop=slice(2, None)).max() < 0.6


def test_chance_is_one_over_the_number_of_classes(ripple):
    chance = ripple.data["chance"]
    assert chance.sel(variable="ripple.carry").values[1:].tolist() == [0.5] * LOOPS
    three = chance.sel(variable="latched_chain.carry", program_loop=2)
    assert float(three) == pytest.approx(1 / 3)


def test_a_model_without_weights_has_no_random_twin(ripple):
    assert "random_weights" not in ripple.data


def test_a_random_twin_of_a_transformer_is_made(untrained, additions):
    result = decodability(untrained, additions, ["ripple"], n_loops=2)
    assert not result.data["random_weights"].equals(result.data["accuracy"])
    (figure,) = result.figures()
    plot: Any = figure.plot
    titles = [a.text for a in plot.layout.annotations]
    assert titles == ["<b>ripple.carry</b>", "<b>ripple.carry, shuffled weights</b>"]
    assert figure.data is not None and len(figure.data) == 9


def test_variables_that_do_not_depend_on_the_input_are_left_out(program_model, additions):
    result = decodability(program_model("lookahead"), additions, ["lookahead"], n_loops=2)
    assert result.data["variable"].values.tolist() == ["lookahead.makes", "lookahead.passes"]


def test_results_go_to_disk_and_back(ripple, tmp_path):
    read = load_result(ripple.save(tmp_path))
    assert isinstance(read, Decodability)
    assert read.data.identical(ripple.data)
    assert "1 of 2" in read.findings()[0].text


def test_too_few_examples_are_refused(untrained, additions):
    with pytest.raises(InputError) as refused:
        decodability(untrained, additions[torch.arange(3)], ["ripple"])
    assert refused.value.what == "examples" and refused.value.given == "3"


def test_programs_of_another_task_or_none_are_refused(untrained, additions):
    for programs, what in (([], "programs"), (["prefix_xor"], "inputs for program prefix_xor")):
        with pytest.raises(InputError) as refused:
            decodability(untrained, additions, programs)
        assert refused.value.what == what


def test_loops_and_programs_that_leave_nothing_to_read_are_refused(program_model, additions):
    with pytest.raises(InputError, match="n_loops"):
        decodability(program_model("ripple"), additions, ["ripple"], n_loops=0)
    constant = dataclasses.replace(get_program("ripple"), step={"carry": full(0)})
    with pytest.raises(InputError, match="programs"):
        decodability(program_model("ripple"), additions, [constant], n_loops=2)


def test_what_is_read_from_the_input_alone_is_not_passed_off_as_computed(ripple):
    data = ripple.data.copy(deep=True)
    data["embedding"].loc[{"variable": "ripple.carry"}] = 1.0
    assert "input alone" not in ripple.findings()[0].text
    said = dataclasses.replace(ripple, data=data).findings()[0].text
    assert "1 of them" in said and "input alone" in said


def test_what_never_varies_where_answers_stand_is_left_out():
    task = UniqueSet()
    batch = task.sample(6, batch_size=16, generator=torch.Generator().manual_seed(0))
    config = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=task.d_vocab, d_vocab_out=task.d_vocab_out
    )
    model = LoopedTransformer(config)
    found = decodability(model, batch, ["unique_set"], n_loops=2, random_model=None)
    offered = get_program("unique_set").trace(batch.inputs, n_loops=2).variables["offered"]
    asked = batch.targets != IGNORE
    assert len(offered.unique()) > 1 and len(offered[:, asked].unique()) == 1
    names = found.data["variable"].values.tolist()
    assert "unique_set.answer" in names and "unique_set.offered" not in names
