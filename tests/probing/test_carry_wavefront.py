"""The carry study on models whose front is known exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule, WithVocabulary
from loopinterp.probing import CarryStudyResult, LogisticProbe, carry_study
from loopinterp.probing.carry_wavefront import VARIABLES, sample_chains
from loopinterp.tasks import Parity
from loopinterp.tasks.addition import Addition
from tests.probing.toys import CarryToy

SIZES = {"n": 16, "max_chain": 8, "n_short": 8, "n_train": 16, "n_test": 16}


def study_of(model: CarryToy, **options: object) -> CarryStudyResult:
    return carry_study(
        model,
        Addition(),
        random_model=CarryToy(frozen=True),
        **{**SIZES, **options},  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def ripple() -> CarryStudyResult:
    return study_of(CarryToy())


@pytest.fixture(scope="module")
def two_a_loop() -> CarryStudyResult:
    return study_of(CarryToy(reach=2))


def arrived(result: CarryStudyResult, reach: int = 1) -> np.ndarray:
    grid = result.data["accuracy"]
    return (grid["chain_length"] <= reach * grid["loop"]).transpose(*grid.dims).values


@pytest.mark.parametrize("scores", ["accuracy", "shared_probe", "last_loop_probe", "short_to_long"])
def test_every_probe_sees_exactly_the_carries_that_have_arrived(
    ripple: CarryStudyResult, scores: str
) -> None:
    expected = np.where(arrived(ripple), 1.0, 0.5)
    np.testing.assert_array_equal(ripple.data[scores], expected)


def test_the_front_moves_one_position_a_loop(ripple: CarryStudyResult) -> None:
    np.testing.assert_array_equal(ripple.first_loop, ripple.data["chain_length"])
    assert ripple.speed == pytest.approx(1.0)
    assert (ripple.resolved, ripple.unresolved) == (1.0, 0.5)
    (finding,) = ripple.findings()
    assert finding.good and "1.00 positions" in finding.value


def test_a_front_of_two_positions_a_loop_is_told_apart(two_a_loop: CarryStudyResult) -> None:
    result = two_a_loop
    np.testing.assert_array_equal(result.data["accuracy"] == 1.0, arrived(result, reach=2))
    np.testing.assert_array_equal(result.first_loop, [1, 1, 2, 2, 3, 3, 4, 4])
    assert result.speed == pytest.approx(2.0, rel=0.1)
    assert (result.resolved, result.unresolved) == (1.0, 0.5)


def test_the_half_that_cannot_fail_is_labelled_as_that(
    ripple: CarryStudyResult, two_a_loop: CarryStudyResult
) -> None:
    for reach, result in ((1, ripple), (2, two_a_loop)):
        assert result.reach == reach
        np.testing.assert_array_equal(result.data["in_reach"], arrived(result, reach))
        (finding,) = result.findings()
        assert finding.good and "From the first loop" in finding.text
        assert f"({reach} position" in finding.text and "light cone" in finding.text


def test_a_model_that_could_see_further_is_judged_by_where_it_does_not_read() -> None:
    unbounded = CarryToy()
    unbounded.reach = None  # type: ignore[assignment]
    # Its step reads one position a loop all the same: now that is a finding.
    unbounded.step = CarryToy().step  # type: ignore[method-assign]
    result = study_of(unbounded)
    assert result.reach is None and result.data["in_reach"].all()
    (finding,) = result.findings()
    assert finding.good and "light cone" not in finding.text and "at most 0.50" in finding.text


def test_a_late_carry_is_not_said_to_be_read_as_soon_as_it_can_arrive(
    ripple: CarryStudyResult,
) -> None:
    late = dataclasses.replace(ripple, reach=2)
    (finding,) = late.findings()
    assert not finding.good and "From the first loop" not in finding.text
    assert "moves 1.00 positions" in finding.text and "at least 0.50" in finding.text


@pytest.mark.parametrize("mapped", [False, True])
def test_a_prelude_moves_the_light_cone(mapped: bool) -> None:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=6,
        d_vocab_out=2,
        n_prelude=2,
        attention_window=1,
        positions="relative",
        relative_window=1,
    )
    model = LoopedTransformer(config)
    result = carry_study(
        WithVocabulary(model) if mapped else model,
        Addition(),
        loops=range(4),
        **SIZES,  # type: ignore[arg-type]
    )
    assert (result.reach, result.reach_before) == (1, 2)
    beyond = ~result.data["in_reach"]
    assert bool(beyond.any()) and bool((beyond == (result.ahead > 0)).all())
    read, random = (result.data[name].values for name in ("accuracy", "random_model"))
    assert abs(read[beyond.values] - 0.5).max() < 0.15
    assert not np.array_equal(read, random)  # the control is the model with shuffled weights


def test_there_is_no_light_cone_after_a_prelude_that_sees_all() -> None:
    settings = {"d_vocab": 6, "d_vocab_out": 2, "n_prelude": 1, "windowed_surround": False}
    config = LoopedTransformerConfig(d_model=8, n_heads=2, attention_window=1, **settings)  # type: ignore[arg-type]
    result = carry_study(LoopedTransformer(config), Addition(), loops=range(2), **SIZES)  # type: ignore[arg-type]
    assert result.reach is None and bool(result.data["in_reach"].all())


def test_controls_stay_at_chance(ripple: CarryStudyResult) -> None:
    data = ripple.data
    np.testing.assert_array_equal(data["majority"], 0.5)
    np.testing.assert_array_equal(data["random_model"], 0.5)
    assert abs(data["embedding"] - 0.5).max() < 0.3
    # Two features of state cannot hold random labels of dozens of contexts.
    assert data["control_task"].mean() < 0.7
    assert ripple.selectivity.equals(data["accuracy"] - data["control_task"])


def test_a_model_that_never_moves_has_no_wavefront() -> None:
    result = study_of(CarryToy(frozen=True), max_chain=4)
    assert np.isnan(result.first_loop).all()
    assert np.isnan(result.speed)
    assert result.findings()[0].value == "no wavefront"


def test_a_position_or_two_make_no_wavefront(ripple: CarryStudyResult) -> None:
    """What a model with random weights passes on must not be reported as a speed."""
    accuracy = ripple.data["accuracy"]
    few = accuracy.where(accuracy["chain_length"] <= 3, 0.5)
    result = dataclasses.replace(ripple, data=ripple.data.assign(accuracy=few))
    assert np.isfinite(result.first_loop).sum() == 3
    assert np.isnan(result.speed)
    assert "3 of 8" in result.findings()[0].text


def test_carries_that_are_all_read_at_once_are_not_said_to_be_too_few(
    ripple: CarryStudyResult,
) -> None:
    accuracy = ripple.data["accuracy"]
    at_once = accuracy.where(accuracy["loop"] == 0, 1.0)
    result = dataclasses.replace(ripple, data=ripple.data.assign(accuracy=at_once))
    assert result.speed == np.inf
    (finding,) = result.findings()
    assert finding.value == "no wavefront" and "too few" not in finding.text
    assert "8 of 8" in finding.text and "no later" in finding.text


def test_code_length_falls_as_the_front_advances(ripple: CarryStudyResult) -> None:
    bits = ripple.data["code_length"].values
    assert bits[0] == pytest.approx(1.0, abs=0.02)
    assert (np.diff(bits[:9]) < 0).all()
    unseen = 1 - np.arange(9) / 8
    assert (bits[:9] > unseen - 0.02).all()
    assert bits[8] < 0.25
    np.testing.assert_allclose(ripple.data["code_length_random_model"], 1.0, atol=0.02)


def test_own_bits_are_in_the_embedding_and_carries_are_not(ripple: CarryStudyResult) -> None:
    pooled = ripple.data["variable_embedding"].mean("chain_length").to_series()
    assert min(pooled["generate"], pooled["propagate"]) > 0.9
    assert abs(pooled["carry in"] - 0.5) < 0.1


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (study_of(CarryToy(), loops=[1, 4], seed=5) for _ in range(2))
    assert first.data.identical(second.data)
    assert not first.data.identical(study_of(CarryToy(), loops=[1, 4], seed=6).data)


def test_other_probes_and_loops_can_be_chosen() -> None:
    result = study_of(CarryToy(), probe=LogisticProbe(), loops=[2, 5], max_chain=5)
    accuracy = result.data["accuracy"]
    assert accuracy.shape == (2, 5)
    np.testing.assert_array_equal(accuracy == 1.0, arrived(result))
    assert "LogisticProbe" in result.provenance.config["probe"]


def test_a_result_comes_back_from_disk(ripple: CarryStudyResult, tmp_path) -> None:
    again = load_result(ripple.save(tmp_path))
    assert isinstance(again, CarryStudyResult)
    assert again.data.identical(ripple.data) and again.findings() == ripple.findings()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"task": Parity()}, "task of the carry study"),
        ({"max_chain": 15}, "max_chain"),
        ({"max_chain": "a"}, "max_chain"),
        ({"n_train": 0}, "n_train"),
        ({"loops": []}, "loops"),
        ({"loops": [3, 2]}, "loops"),
        ({"n_short": 3}, "n_short"),
        ({"n": 2}, "n"),
        ({"threshold": 1.5}, "threshold"),
    ],
)
def test_bad_arguments_are_named(options: dict, what: str) -> None:
    arguments = {"task": Addition(), **SIZES, **options}
    with pytest.raises(InputError) as caught:
        carry_study(CarryToy(), **arguments)
    assert caught.value.what == what


def test_a_model_of_a_fixed_depth_is_probed_up_to_it() -> None:
    model: Any = CarryToy()
    model.loop_rule = LoopRule(3)
    short: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "loops"}
    result = carry_study(model, Addition(), **short)
    assert result.data["loop"].values.tolist() == [0, 1, 2, 3]
    model.loop_rule = LoopRule(1)
    with pytest.raises(InputError) as caught:
        carry_study(model, Addition(), **short)
    assert caught.value.what == "model"
    assert carry_study(model, Addition(), loops=[0, 2], **short).data.sizes["loop"] == 2


def test_gradients_are_not_kept_and_the_model_is_unchanged() -> None:
    model = CarryToy()
    before = model.rotation.detach().clone()
    study_of(model, loops=[1, 4])
    assert torch.equal(model.rotation, before)
    assert model.rotation.grad is None


FORMATS = pytest.mark.parametrize("task", [Addition(), Addition(format="features")])


@FORMATS
def test_every_carry_is_what_python_says(task: Addition, generator: torch.Generator) -> None:
    sample = sample_chains(task, 12, max_chain=7, n_pairs=5, generator=generator)
    a, b = task.operands(sample.inputs)
    assert sample.row.shape == sample.pos.shape == sample.carry.shape == (7, 10)
    for chain in range(7):
        for k in range(10):
            row, bit = int(sample.row[chain, k]), int(sample.pos[chain, k]) - task.offset
            bits = [(int(x), int(y)) for x, y in zip(a[row], b[row])][task.offset :]
            travelled, source = 1, bit - 1
            while source >= 0 and bits[source][0] != bits[source][1]:
                travelled, source = travelled + 1, source - 1
            assert source >= 0  # a chain that runs back to the start has none
            assert travelled == chain + 1
            low = [sum(pair[side] << i for i, pair in enumerate(bits[:bit])) for side in (0, 1)]
            carry = sum(low) >> bit
            x, y = bits[bit]
            expected = {
                "carry in": carry,
                "carry out": (x + y + carry) >> 1,
                "generate": x & y,
                "propagate": x ^ y,
                "sum": (x + y + carry) & 1,
            }
            variables = dict(zip(VARIABLES, sample.variables[:, chain, k].tolist()))
            assert variables == expected


@FORMATS
def test_pairs_differ_in_the_carry_and_not_in_what_lies_between(
    task: Addition, generator: torch.Generator
) -> None:
    sample = sample_chains(task, 20, max_chain=10, n_pairs=30, generator=generator)
    first, second = sample.row[:, ::2], sample.row[:, 1::2]
    assert torch.equal(sample.pos[:, ::2], sample.pos[:, 1::2])
    assert torch.equal(sample.carry[:, ::2], 1 - sample.carry[:, 1::2])
    for chain in range(10):
        for x, y, pos in zip(first[chain], second[chain], sample.pos[chain, ::2]):
            between = slice(int(pos) - chain, int(pos))
            assert torch.equal(sample.inputs[x, between], sample.inputs[y, between])
            source = int(pos) - chain - 1
            assert not torch.equal(sample.inputs[x, source], sample.inputs[y, source])
        # No addition gives two carries to a chain length: the pairs are independent.
        assert len(set(first[chain].tolist())) == 30


def test_positions_and_own_bits_are_mixed(generator: torch.Generator) -> None:
    sample = sample_chains(Addition(), 24, max_chain=12, n_pairs=40, generator=generator)
    for chain in range(12):
        assert len(set(sample.pos[chain].tolist())) > 4
        propagate_share = sample.variables[VARIABLES.index("propagate"), chain].float().mean()
        assert 0.4 < propagate_share < 0.95


@pytest.mark.parametrize("n_pairs", [1, 40])
def test_half_of_the_short_chains_are_read_where_they_end(
    n_pairs: int, generator: torch.Generator
) -> None:
    sample = sample_chains(Addition(), 24, max_chain=12, n_pairs=n_pairs, generator=generator)
    goes_on = sample.variables[VARIABLES.index("propagate"), :, ::2].sum(-1)
    assert goes_on[:4].tolist() == [n_pairs - n_pairs // 2] * 4


def test_the_same_generator_gives_the_same_sample() -> None:
    first, second = (
        sample_chains(
            Addition(), 10, max_chain=5, n_pairs=4, generator=torch.Generator().manual_seed(9)
        )
        for _ in range(2)
    )
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.pos, second.pos)
    assert torch.equal(first.carry, second.carry)
