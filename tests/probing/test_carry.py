"""The carry study on models whose front is known exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.probing import CarryStudyResult, LogisticProbe, carry_study
from loopinterp.results import load_result
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.parity import Parity
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


def arrived(result: CarryStudyResult, reach: int = 1) -> np.ndarray:
    return np.asarray(result.chain_lengths) <= reach * np.asarray(result.loops)[:, None]


@pytest.mark.parametrize("scores", ["accuracy", "shared_probe", "last_loop_probe", "short_to_long"])
def test_every_probe_sees_exactly_the_carries_that_have_arrived(
    ripple: CarryStudyResult, scores: str
) -> None:
    expected = np.where(arrived(ripple), 1.0, 0.5)
    np.testing.assert_array_equal(getattr(ripple, scores), expected)


def test_the_front_moves_one_position_a_loop(ripple: CarryStudyResult) -> None:
    np.testing.assert_array_equal(ripple.first_loop, ripple.chain_lengths)
    assert ripple.speed == pytest.approx(1.0)
    assert (ripple.resolved, ripple.unresolved) == (1.0, 0.5)
    assert ripple.summary()[0].good


def test_a_front_of_two_positions_a_loop_is_told_apart() -> None:
    result = study_of(CarryToy(reach=2))
    np.testing.assert_array_equal(result.accuracy == 1.0, arrived(result, reach=2))
    np.testing.assert_array_equal(result.first_loop, [1, 1, 2, 2, 3, 3, 4, 4])
    assert result.speed == pytest.approx(2.0, rel=0.1)
    assert result.unresolved == 1.0
    assert not result.summary()[0].good


def test_controls_stay_at_chance(ripple: CarryStudyResult) -> None:
    np.testing.assert_array_equal(ripple.majority, 0.5)
    np.testing.assert_array_equal(ripple.random_model, 0.5)
    assert abs(ripple.embedding - 0.5).max() < 0.3
    # Two features of state cannot hold random labels of dozens of contexts.
    assert ripple.control_task.mean() < 0.7
    np.testing.assert_array_equal(ripple.selectivity, ripple.accuracy - ripple.control_task)


def test_a_model_that_never_moves_has_no_wavefront() -> None:
    result = study_of(CarryToy(frozen=True))
    assert np.isnan(result.first_loop).all()
    assert np.isnan(result.speed)
    assert result.summary()[0].value == "no wavefront"


def test_a_position_or_two_make_no_wavefront(ripple: CarryStudyResult) -> None:
    """What a model with random weights passes on must not be reported as a speed."""
    short = np.asarray(ripple.chain_lengths) <= 3
    result = dataclasses.replace(ripple, accuracy=np.where(short, ripple.accuracy, 0.5))
    assert np.isfinite(result.first_loop).sum() == 3
    assert np.isnan(result.speed)
    assert "3 of 8 chain lengths" in result.summary()[0].text


def test_code_length_falls_as_the_front_advances(ripple: CarryStudyResult) -> None:
    assert ripple.code_length[0] == pytest.approx(1.0, abs=0.02)
    assert (np.diff(ripple.code_length[:9]) < 0).all()
    unseen = 1 - np.arange(9) / 8
    assert (ripple.code_length[:9] > unseen - 0.02).all()
    assert ripple.code_length[8] < 0.25
    np.testing.assert_allclose(ripple.code_length_random_model, 1.0, atol=0.02)


def test_own_bits_are_in_the_embedding_and_carries_are_not(ripple: CarryStudyResult) -> None:
    pooled = dict(zip(ripple.variables, np.nanmean(ripple.variable_embedding, axis=1)))
    assert min(pooled["generate"], pooled["propagate"]) > 0.9
    assert abs(pooled["carry in"] - 0.5) < 0.1


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (study_of(CarryToy(), seed=5) for _ in range(2))
    for name in CarryStudyResult.AXES:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_other_probes_and_loops_can_be_chosen() -> None:
    result = study_of(CarryToy(), probe=LogisticProbe(), loops=[2, 5], max_chain=5)
    assert result.accuracy.shape == (2, 5)
    np.testing.assert_array_equal(result.accuracy == 1.0, arrived(result))
    assert "LogisticProbe" in result.provenance.config["probe"]


def test_without_a_random_model_the_weights_are_shuffled() -> None:
    result = carry_study(CarryToy(), Addition(), loops=[0, 4], **SIZES)  # type: ignore[arg-type]
    assert result.random_model.shape == result.accuracy.shape


def test_a_result_comes_back_from_disk(ripple: CarryStudyResult, tmp_path) -> None:
    again = load_result(ripple.save(tmp_path))
    assert isinstance(again, CarryStudyResult)
    for name in CarryStudyResult.AXES:
        np.testing.assert_array_equal(getattr(again, name), getattr(ripple, name))
    assert again.loops == ripple.loops


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": Parity()}, "the addition task"),
        ({"max_chain": 15}, r"1\.\.14"),
        ({"n_train": 0}, "n_pairs"),
        ({"loops": []}, "loops"),
        ({"loops": [3, 2]}, "increasing"),
        ({"n_short": 3}, "n_short"),
    ],
)
def test_bad_arguments_are_named(options: dict, said: str) -> None:
    arguments = {"task": Addition(), **SIZES, **options}
    with pytest.raises(InputError, match=said):
        carry_study(CarryToy(), **arguments)


def test_gradients_are_not_kept_and_the_model_is_unchanged() -> None:
    model = CarryToy()
    before = model.rotation.detach().clone()
    study_of(model)
    assert torch.equal(model.rotation, before)
    assert model.rotation.grad is None
