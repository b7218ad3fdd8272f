from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    contraction_rates,
    correctness,
    distance_to_limit,
    exact_match,
    readout_entropy,
    readout_kl,
    readout_margin,
    relative_residual,
    run_loops,
    settling_time,
    stable_from,
    update_cosine,
)
from loopinterp.models import bind
from loopinterp.tasks import IGNORE
from tests.dynamics.toys import LinearModel, rotation


def _states(matrix: Tensor, n_loops: int = 20) -> tuple[Tensor, Tensor]:
    model = LinearModel(matrix.double())
    inputs = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return run_loops(bind(model, inputs), n_loops), model.limit(inputs)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_relative_residual_against_loops_over_tokens() -> None:
    states = _random(5, 2, 3, 4)
    residual = relative_residual(states)
    assert residual.shape == (4, 2, 3)
    for loop in range(1, 5):
        for example in range(2):
            for pos in range(3):
                now, before = states[loop, example, pos], states[loop - 1, example, pos]
                expected = math.dist(now, before) / math.hypot(*now)
                assert residual[loop - 1, example, pos].item() == pytest.approx(expected)


def test_the_maximum_norm_over_a_sequence() -> None:
    states = _random(5, 2, 3, 4).flatten(2)
    residual = relative_residual(states, norm="max")
    expected = (states[3] - states[2]).abs().amax(-1) / states[3].abs().amax(-1)
    torch.testing.assert_close(residual[2], expected)


def test_residual_does_not_depend_on_the_scale_of_the_states() -> None:
    states = _random(4, 2, 3, 4)
    torch.testing.assert_close(relative_residual(states), relative_residual(1e-6 * states))


def test_a_state_of_zeros_that_stays_has_residual_zero() -> None:
    assert relative_residual(torch.zeros(3, 2)).tolist() == [0, 0]


def test_distance_falls_by_the_factor_of_the_contraction() -> None:
    states, limit = _states(0.5 * torch.eye(4))
    distance = distance_to_limit(states, limit)
    torch.testing.assert_close(distance[1:], distance[:-1] / 2)
    relative = distance_to_limit(states, limit, relative=True)
    torch.testing.assert_close(relative[0], torch.ones(2, 3, dtype=torch.float64))


def test_a_state_at_a_limit_of_zeros_has_distance_zero() -> None:
    distance = distance_to_limit(torch.tensor([[3.0, 4.0], [0, 0]]), torch.zeros(2), relative=True)
    assert distance.tolist() == [math.inf, 0.0]


@pytest.mark.parametrize("rate", [0.2, 0.9, 1.3])
def test_contraction_rate_of_a_linear_map(rate: float) -> None:
    rates = contraction_rates(_states(rate * torch.eye(4), n_loops=10)[0])
    expected = torch.full((2, 3), rate, dtype=torch.float64)
    torch.testing.assert_close(rates.mean, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rates.asymptotic, expected, atol=1e-6, rtol=1e-6)
    assert (rates.spread < 1e-6).all()


def test_mean_and_spread_count_each_loop_once() -> None:
    # Updates 8, 4, 1: rates 1/2 and 1/4.
    states = torch.tensor([0.0, 8.0, 12.0, 13.0])[:, None]
    rates = contraction_rates(states, last=1)
    assert rates.per_loop.tolist() == [0.5, 0.25]
    assert rates.mean.item() == pytest.approx(0.375)
    assert rates.spread.item() == pytest.approx(0.125)
    assert rates.asymptotic.item() == pytest.approx(0.25)
    both = contraction_rates(states, last=2).asymptotic.item()
    assert both == pytest.approx(math.sqrt(0.5 * 0.25))


def test_the_asymptotic_rate_ends_where_rounding_begins() -> None:
    states, _ = _states(0.5 * torch.eye(4), n_loops=60)
    rates = contraction_rates(states.float())
    torch.testing.assert_close(rates.asymptotic, torch.full((2, 3), 0.5), atol=0.01, rtol=0)
    assert rates.per_loop[-1].isnan().all()


@pytest.mark.parametrize("angle", [0.3, math.pi / 3, math.pi])
def test_update_cosine_of_a_rotation_is_the_cosine_of_its_angle(angle: float) -> None:
    states, _ = _states(rotation(angle, scale=0.8))
    cosine = update_cosine(states)
    assert cosine.shape == (19, 2, 3)
    expected = torch.full_like(cosine, math.cos(angle))
    torch.testing.assert_close(cosine, expected, atol=1e-6, rtol=0)


def test_update_cosine_of_a_state_at_rest_is_undefined() -> None:
    assert update_cosine(torch.ones(5, 2, 3)).isnan().all()


def test_settling_time_counts_the_last_crossing() -> None:
    residual = torch.tensor(
        [[0.5, 0.5, 0.01, 0.01], [0.01, 0.5, 0.01, 0.5], [0.01, 0.5, 0.01, 0.02]]
    )
    assert settling_time(residual).tolist() == [2, -1, 1, 3]
    assert settling_time(residual, threshold=0.001).tolist() == [-1] * 4


def test_nan_is_unsettled() -> None:
    assert settling_time(torch.tensor([0.01, float("nan")])).item() == -1


def test_states_that_are_not_finite_are_refused_with_their_loop() -> None:
    states = torch.ones(5, 2, 3)
    states[3, 1] = float("nan")
    for measure in (relative_residual, update_cosine, contraction_rates):
        with pytest.raises(InputError, match="index 3"):
            measure(states)
    assert relative_residual(states, allow_nonfinite=True)[:2].isfinite().all()


def test_too_few_loops_and_misfits_are_refused() -> None:
    with pytest.raises(InputError, match="states"):
        relative_residual(torch.ones(1, 2, 3))
    with pytest.raises(InputError, match="states"):
        update_cosine(torch.ones(2, 2, 3))
    with pytest.raises(InputError, match="limit"):
        distance_to_limit(torch.ones(2, 2, 3), torch.ones(1, 3))
    with pytest.raises(InputError, match="residual"):
        settling_time(torch.ones(0, 3))
    with pytest.raises(InputError, match="threshold"):
        settling_time(torch.ones(3), threshold=0.0)
    with pytest.raises(InputError, match="last"):
        contraction_rates(torch.ones(4, 3), last=0)


@pytest.mark.usefixtures("no_type_checks")
def test_unknown_norm_and_integer_states_are_refused() -> None:
    with pytest.raises(InputError, match="norm"):
        relative_residual(torch.ones(3, 2), norm="l1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="int64"):
        relative_residual(torch.ones(3, 2, dtype=torch.int64))


def _logits(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_kl_and_entropy_against_torch_distributions() -> None:
    logits = _logits(4, 2, 3, 5)
    each = [torch.distributions.Categorical(logits=step) for step in logits]
    kl, entropy = readout_kl(logits), readout_entropy(logits)
    for loop in range(1, 4):
        expected = torch.distributions.kl_divergence(each[loop], each[loop - 1])
        torch.testing.assert_close(kl[loop - 1], expected)
    torch.testing.assert_close(entropy, torch.stack([d.entropy() for d in each]))


def test_kl_of_a_readout_that_does_not_change_is_zero() -> None:
    logits = _logits(1, 3, 5).expand(4, 3, 5)
    assert (readout_kl(logits) == 0).all()


def test_kl_of_a_certain_readout_is_finite() -> None:
    logits = torch.tensor([[0.0, 0.0], [200.0, -200.0], [200.0, -200.0]])
    assert readout_kl(logits).tolist() == pytest.approx([math.log(2), 0.0])


def test_margin_is_the_lead_of_the_first_over_the_second() -> None:
    logits = torch.tensor([[[1.0, 5.0, 3.5], [2.0, 2.0, 0.0]]])
    assert readout_margin(logits).tolist() == [[1.5, 0.0]]


def test_a_readout_of_one_number_has_no_margin() -> None:
    assert readout_margin(torch.zeros(3, 2, 1)).isnan().all()


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(3, 2, 4)
    logits[2] = float("inf")
    for measure in (readout_kl, readout_entropy, readout_margin):
        with pytest.raises(InputError, match="index 2"):
            measure(logits)


def _first_kept(answers: list[int]) -> int:
    """The definition of stable_from, word by word."""
    return next(loop for loop in range(len(answers)) if len({*answers[loop:]}) == 1)


@given(
    answers=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=2, max_size=9)
)
def test_stable_from_against_its_definition(answers: list[list[int]]) -> None:
    loops = stable_from(torch.tensor(answers))
    assert loops.tolist() == [_first_kept(list(column)) for column in zip(*answers)]


def test_one_answer_is_not_kept() -> None:
    with pytest.raises(InputError, match="answers"):
        stable_from(torch.zeros(1, 2, dtype=torch.int64))


def test_only_asked_positions_count_for_exact_match() -> None:
    targets = torch.tensor([[IGNORE, 1, 0], [IGNORE, 1, 1]])
    answers = torch.tensor([[[0, 1, 0], [0, 1, 0]], [[1, 1, 1], [1, 1, 1]]])
    right = correctness(answers, targets)
    assert right.tolist() == [[[-1, 1, 1], [-1, 1, 0]], [[-1, 1, 0], [-1, 1, 1]]]
    assert exact_match(right).tolist() == [[1, 0], [0, 1]]


@pytest.mark.usefixtures("no_type_checks")
def test_answers_of_another_batch_are_refused() -> None:
    with pytest.raises(InputError, match="answers"):
        correctness(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
