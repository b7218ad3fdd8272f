from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import ReachabilityResult, Status, reachability_study
from loopinterp.tasks import Batch
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones, rotation


def batch(n_examples: int = 6) -> Batch:
    """Inputs that differ from example to example."""
    ones = batch_of_ones(n_examples)
    ones.inputs.copy_(torch.arange(n_examples)[:, None] + torch.arange(3))
    return ones


class FromHalf(MapModel):
    """Starts at 1/2 in each feature."""

    def initial_state(self, e: Tensor) -> Tensor:
        return 0.5 * torch.ones_like(e)


def study_of(function: Callable[[Tensor, Tensor], Tensor], **options: Any) -> ReachabilityResult:
    return reachability_study(FromHalf(function), batch(), **options)


def wells(h: Tensor, e: Tensor) -> Tensor:
    """In each feature, limits at -1 and 1, and one at 0 that repels."""
    return h - 0.1 * (h**3 - h)


@cache
def of_wells() -> ReachabilityResult:
    return study_of(wells)


def value(estimate: Any) -> np.ndarray:
    return estimate.sel(estimate="value").values


def test_a_contraction_has_one_limit_for_each_input() -> None:
    result = reachability_study(LinearModel(0.5 * torch.eye(2)), batch())
    assert (value(result.reached()) == 1).all() and (value(result.recovered()) == 1).all()
    assert (result.data["n_limits"] == 1).all() and value(result.one_limit()) == 1
    assert result.own_limit_differs().all()
    np.testing.assert_allclose(result.data["alignment"], 1, atol=1e-4)
    starts, perturbed = result.findings()
    assert starts.good is True and starts.value.endswith("100%")
    assert perturbed.value == "recovers from 3×" and result.figures() == []  # nothing but ones
    # From its own limit nothing has to be done; from elsewhere it takes loops.
    assert (result.data["loops"].sel(start="zeros") > 5).all()


def test_the_limits_of_two_inputs_are_compared_as_a_control() -> None:
    result = reachability_study(
        LinearModel(0.5 * torch.eye(2)), batch(2), positions="all", n_others=1
    )
    a, b = (2 * torch.stack([torch.arange(3.0) + k, torch.ones(3)], -1).flatten() for k in (0, 1))
    distance = (a - b).norm()
    expected = [distance / a.norm(), distance / b.norm()]
    np.testing.assert_allclose(result.data["other_distance"], expected, rtol=1e-3)
    cosine = torch.cosine_similarity(a, b, dim=0)
    np.testing.assert_allclose(result.data["other_alignment"], [cosine] * 2, rtol=1e-3)


def test_wells_are_told_apart() -> None:
    result = of_wells()
    # Zeros stay where they are, noise falls into any well, and all own limits are one.
    assert (result.data["status"].sel(start=["own", "zeros"]) == Status.CONVERGED).all()
    reached = dict(zip(result.data["start"].values, value(result.reached())))
    assert reached["own"] == reached["other 1"] == 1 and reached["zeros"] == reached["noise 1"] == 0
    assert (result.data["n_limits"] >= 3).all() and value(result.one_limit()) == 0
    np.testing.assert_allclose(result.data["distance"].sel(start="zeros"), 1, rtol=1e-4)
    assert result.findings()[0].good is None


def test_a_kick_within_the_well_is_undone_and_one_beyond_it_is_not() -> None:
    result = study_of(wells, n_draws=8, kicks=(0.1, 1.0))
    back = value(result.recovered())
    assert back[0] == 1 and 0 < back[1] < 0.9
    assert result.findings()[1].value == "recovers from 0.1×"
    answers = result.data["kick_exact"].mean(("draw", "batch"))
    assert answers[0] == 1 and answers[1] < 1


def test_a_limit_that_all_inputs_share_is_no_success() -> None:
    result = study_of(lambda h, e: h / 2 + 1 + 0 * e)
    assert value(result.one_limit()) == 1 and not result.own_limit_differs().any()
    (finding, _) = result.findings()
    assert finding.good is None and finding.value.endswith("100%")


def test_where_every_state_stays_each_start_has_a_limit_of_its_own() -> None:
    result = study_of(lambda h, e: h + 0 * e, n_noise=1, n_others=1)
    # The own limits of all examples are their common start.
    assert (result.data["n_limits"] == 3).all()
    assert value(result.reached()).tolist() == [1, 0, 0, 1]
    assert value(result.recovered())[-1] == 0


def test_cycles_are_limits_that_are_compared_where_they_are_nearest() -> None:
    # Each position flips about its own token, however it started: a cycle of period 2, as wide as
    # the start was far. From "other" and back from kicks it is another cycle, and the phase of the
    # same one does not matter.
    def flip(h: Tensor, e: Tensor) -> Tensor:
        return e - (h - e) / (h - e).norm(dim=-1, keepdim=True).clamp_min(1e-6)

    result = study_of(flip, n_loops=80)
    assert (result.data["period"] == 2).all()
    assert result.has_limit().all() and value(result.reached().sel(start="own")) == 1
    here, there = (result.data["alignment"].sel(start=name) for name in ("own", "zeros"))
    np.testing.assert_allclose(here, 1, atol=1e-5)
    assert there.notnull().all()


def test_without_a_limit_nothing_is_claimed() -> None:
    result = reachability_study(LinearModel(rotation(1.0)), batch(), n_loops=40)
    assert not result.has_limit().any()
    assert result.data["distance"].isnull().all() and np.isnan(value(result.reached())).all()
    (finding,) = result.findings()
    assert finding.good is False and finding.value == "no limit found"
    assert result.figures() == []


def test_the_figures_show_the_control(tmp_path: Path) -> None:
    starts, perturbed = load_result(of_wells().save(tmp_path)).figures()
    plot: Any = starts.plot
    (bars,) = plot.data
    assert list(bars.y) == ["own", "zeros", "noise 1", "noise 2", "other 1", "other 2"]
    assert "6 of 6 inputs share their limit" in starts.control
    assert perturbed.data is not None and perturbed.data["back"][0] == 1


def test_the_same_seed_gives_the_same_numbers() -> None:
    few: dict[str, Any] = {"n_loops": 40, "kicks": (1.0,), "n_noise": 1, "n_others": 1}
    runs = [study_of(wells, seed=seed, **few).data["kick_distance"].values for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kicks": ()}, "kicks"),
        ({"kicks": (0.1, 0.1)}, "kicks"),
        ({"kicks": (-1.0,)}, "kicks"),
        ({"n_others": 6}, "n_others"),
        ({"n_noise": -1}, "n_noise"),
        ({"n_loops": 0}, "n_loops"),
        ({"same": 0.0}, "same"),
        ({"tol": -1.0}, "tol"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        study_of(wells, **options)


def test_one_example_is_too_few() -> None:
    with pytest.raises(InputError) as caught:
        reachability_study(FromHalf(wells), batch_of_ones(1))
    assert caught.value.what == "len(data)"
