"""Maps of the plane whose basins are known, and a trained model; each with its own oracle."""

from __future__ import annotations

import dataclasses
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
from loopinterp.dynamics import (
    BasinMapResult,
    Status,
    basin_map,
    find_limits,
    measures,
    reachability_study,
)
from loopinterp.dynamics.basins import _corner_states, _StatePlane
from loopinterp.models import bind
from loopinterp.tasks import Batch
from loopinterp.zoo import pretrained_run
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones, random_state, rotation

CORNERS = {"e1": torch.tensor([[3.0, 0]]).double(), "e2": torch.tensor([[0, 2.0]]).double()}
"""With a limit on the x-axis left of 3 they give the axes of the plane their own directions."""


class Planar(MapModel):
    """A map of the plane in float64 that starts at (1/2, 1/8)."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(function)
        self.matrix = self.matrix.double()

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.tensor([0.5, 0.125]).double().expand_as(e).clone()


def batch(n_examples: int = 2) -> Batch:
    """Inputs 1, 2, … of one position."""
    ones = batch_of_ones(n_examples, n_pos=1, ignored=0)
    ones.inputs.copy_(torch.arange(1, n_examples + 1)[:, None])
    return ones


def mapped(function: Callable[[Tensor, Tensor], Tensor], **options: Any) -> BasinMapResult:
    options = {"corners": CORNERS, "points": 31, "extent": 2.0} | options
    return basin_map(Planar(function), batch(), **options)


def starts(result: BasinMapResult, own: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the state that each cell starts from."""
    x, y = np.meshgrid(result.data["x"], result.data["y"])
    return own[0] + result.unit * x, own[1] + result.unit * y


def newton(h: Tensor, e: Tensor) -> Tensor:
    """Newton's step for z^3 = 1."""
    z = torch.view_as_complex(h.contiguous())
    return torch.view_as_real(z - (z**3 - 1) / (3 * z**2))


def well(x: Tensor) -> Tensor:
    """Limits at -1 and 1; 0 repels."""
    return 1.5 * x - 0.5 * x**3


def wells(h: Tensor, e: Tensor) -> Tensor:
    return torch.stack([h[..., 0] - 0.1 * (h[..., 0] ** 3 - h[..., 0]), h[..., 1] / 2], dim=-1)


def test_newtons_method_has_the_three_basins_that_numpy_finds() -> None:
    result = mapped(newton, points=41, same=0.1)
    assert result.unit == pytest.approx(1, abs=1e-6)
    x, y = starts(result, (1, 0))
    z, largest = x + 1j * y, np.zeros(x.shape)
    with np.errstate(all="ignore"):
        for _ in range(200):
            z = z - (z**3 - 1) / (3 * z**2)
            largest = np.fmax(largest, abs(z))
    roots = np.exp(2j * np.pi / 3 * np.array([0, 1, -1]))
    # Next to 0 a step leads so far away that the search says it diverged.
    nearest = np.where(largest > 1e6, -1, np.abs(z[..., None] - roots).argmin(-1))
    reached = result.data["reached"].values
    assert reached[20, 20] == 0 and (reached == -1).sum() == 1
    # The same parts of the plane, whatever their numbers; 0 is the own one in both.
    pairs = {*zip(reached.ravel().tolist(), nearest.ravel().tolist())}
    assert len(pairs) == 4 and {(0, 0), (-1, -1)} < pairs
    assert all(len({*side}) == 4 for side in zip(*pairs))
    limits = result.limits()
    np.testing.assert_allclose(limits["distance"], [0, 3**0.5, 3**0.5], atol=1e-4)
    # The answer is right where the first feature is above 0, as that of 1 alone is.
    assert limits["exact"].tolist() == [1, 0, 0]
    assert (result.data["status"].values[reached >= 0] == Status.CONVERGED).all()


def test_wells_are_parted_by_a_line_and_their_shares_are_those_of_geometry() -> None:
    result = mapped(wells, points=61)
    x, _ = starts(result, (1, 0))
    reached = result.data["reached"].values
    np.testing.assert_array_equal(reached[x > 1e-3], 0)
    # On the line itself the map stays, and that is nearer than what lies beyond it.
    np.testing.assert_array_equal(reached[abs(x) < 1e-3], 1)
    np.testing.assert_array_equal(reached[x < -1e-3], 2)
    np.testing.assert_allclose(result.limits()["distance"], [0, 1, 2], atol=1e-4)
    # All that is nearer than the line at distance 1 comes back, and a start on it does not.
    assert 0.93 < result.radius() < 1
    rings = result.by_distance()
    radius = rings["distance"].values
    expected = 1 - np.arccos(1 / radius.clip(1)) / np.pi
    shares = rings.sel(limit=0)
    assert (shares.sel(estimate="low") <= expected + 0.02).all()
    assert (shares.sel(estimate="high") >= expected - 0.02).all()
    np.testing.assert_allclose(shares.sel(estimate="value"), expected, atol=0.06)
    total = result.shares().sel(estimate="value").sum("limit")
    assert float(total) == pytest.approx(1)
    assert dict(zip(result.data["corner"].values, result.data["corner_reached"].values)) == {
        "e1": 0,
        "e2": 1,  # at x = 0
    }


def test_a_cycle_is_one_limit_whatever_its_phase() -> None:
    def half(h: Tensor, e: Tensor) -> Tensor:
        """Where x > 0 the limit is (1, 0); where x < 0 it is the cycle (-1, 1), (-1, -1)."""
        x, y = h.unbind(-1)
        return torch.stack([well(x), torch.where(x < 0, -well(y), y / 2)], dim=-1)

    result = mapped(half, extent=1.3, points=27)
    x, y = starts(result, (1, 0))
    inside = (abs(x) < 1.7) & (abs(y) < 1.7) & (abs(x) > 1e-3) & (abs(y) > 1e-3)
    cycle = result.data["reached"].values[inside & (x < 0)]
    assert len({*cycle.tolist()}) == 1 and cycle[0] > 0
    assert (result.data["reached"].values[inside & (x > 0)] == 0).all()
    assert result.limits()["period"][cycle[0]] == 2
    assert (result.data["status"].values[inside & (x < 0)] == Status.CYCLE).all()


def test_what_diverges_or_is_not_done_has_no_limit() -> None:
    result = mapped(lambda h, e: torch.where(h.norm(dim=-1, keepdim=True) > 2, 3 * h, wells(h, e)))
    x, y = starts(result, (1, 0))
    far = np.hypot(x, y) > 2
    assert (result.data["reached"].values[far] == -1).all()
    assert (result.data["status"].values[far] == Status.DIVERGED).all()
    assert (result.data["reached"].values[~far & (x > 0.1)] == 0).all()
    assert result.data["distance"].isnull().values[far].all()
    nearest = np.hypot(x - 1, y)[result.data["reached"].values != 0].min()
    assert nearest - 0.1 < result.radius() < nearest


def test_without_an_own_limit_nothing_comes_back_and_others_are_numbered_from_1() -> None:
    def turns(h: Tensor, e: Tensor) -> Tensor:
        outside = h.norm(dim=-1, keepdim=True) > 1
        return torch.where(outside, (h + torch.tensor([8.0, 0])) / 2, h @ rotation(1.0).double().T)

    result = mapped(turns, n_loops=60)
    reached = result.data["reached"].values
    assert set(reached.ravel().tolist()) == {-1, 1} and np.isnan(result.radius())
    assert result.data["distance"].isnull().all()
    (finding,) = result.findings()
    assert finding.value == "no limit found" and finding.good is False
    assert len(result.figures()) == 3


def test_a_space_of_limits_has_no_radius() -> None:
    flattens = torch.tensor([1.0, 0.5]).double()
    result = mapped(lambda h, e: h * flattens, points=5, extent=1.5)
    assert result.radius() == 0 and len(result.limits()) == 5  # one for each column
    assert "0.75×" in result.findings()[0].text  # of the nearest starts


def test_the_control_tells_a_limit_of_this_input_from_one_of_all() -> None:
    result = mapped(lambda h, e: h / 2 + e)
    everywhere, control = result.shares().sel(limit=0), result.next_reaches_own()
    assert everywhere.sel(estimate="value") == 1 and control.sel(estimate="value") == 0
    assert (result.data["next_reached"] == 0).all() and result.radius() == pytest.approx(2)
    assert result.findings()[0].good is True
    shared = mapped(lambda h, e: h / 2 + 1 + 0 * e)
    assert shared.next_reaches_own().sel(estimate="value") == 1
    (finding,) = shared.findings()
    assert finding.good is None and finding.value.startswith("100%")


@cache
def _addition() -> tuple[Any, Batch]:
    run = pretrained_run("addition")
    generator = torch.Generator().manual_seed(0)
    return run.model(), run.task.sample(12, batch_size=3, generator=generator)


def test_each_start_of_a_trained_model_goes_where_it_goes_alone() -> None:
    model, examples = _addition()
    result = basin_map(model, examples, example=1, points=5, corners=("other 1", "zeros"))
    iteration = bind(model, examples.inputs)
    limits = find_limits(iteration, iteration.h0, max_loops=200)
    here, corner = limits.state[1], limits.state[2]
    unit = here.norm()
    assert result.unit == pytest.approx(unit.item(), rel=1e-5)
    # In the two oblique directions of the corners, the plane is that of barycentric mixtures.
    basis = np.column_stack([result.data["corner_x"], result.data["corner_y"]]).T
    for row, column in ((0, 0), (1, 4), (4, 2)):
        place = np.array([result.data["x"].values[column], result.data["y"].values[row]])
        a, b = np.linalg.solve(basis, place)
        start = here + a * (corner - here) + b * (0 - here)
        just = iteration.select(slice(1, 2))
        single = find_limits(just, start[None], max_loops=200)
        gap = (single.state[0] - here)[examples.targets[1] >= 0].norm()
        size = here[examples.targets[1] >= 0].norm()
        cell = result.data.isel(y=row, x=column)
        assert float(cell["distance"]) == pytest.approx((gap / size).item(), abs=1e-3)
        assert abs(int(cell["loops"]) - int(single.loops)) <= 1
        assert int(cell["status"]) == int(single.status)


def test_parts_of_the_grid_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mapped(wells, points=9)
    monkeypatch.setattr(measures, "CHUNK_BYTES", 8 * 16 * 30)  # thirty starts at a time
    assert mapped(wells, points=9).data.equals(full.data)


def test_a_map_and_reachability_agree_on_the_limit_of_the_next_input() -> None:
    model, examples = _addition()
    study = reachability_study(model, examples, n_noise=1, n_others=1, kicks=(0.1,), n_draws=1)
    far = study.data["distance"].sel(start="other 1").values > study.same
    for example in range(len(examples)):
        result = basin_map(
            model, examples, example=example, points=3, corners=("other 1", "noise 1")
        )
        assert (int(result.data["corner_reached"].sel(corner="other 1")) > 0) == far[example]


def test_the_same_seed_gives_the_same_map() -> None:
    noise = {"corners": ("noise 1", "noise 2"), "points": 3}
    maps = [mapped(lambda h, e: h / 2 + e, seed=seed, **noise).data for seed in (1, 1, 2)]
    assert maps[0].equals(maps[1]) and not maps[0].equals(maps[2])


def test_a_saved_map_is_the_same(tmp_path: Path) -> None:
    result = mapped(wells, points=5)
    again = load_result(result.save(tmp_path))
    assert isinstance(again, BasinMapResult) and again.data.equals(result.data)
    assert dataclasses.replace(again, data=result.data).limits().equals(result.limits())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"points": 4}, "points"),
        ({"points": 1}, "points"),
        ({"example": 2}, "example"),
        ({"extent": 0.0}, "extent"),
        ({"n_loops": 0}, "n_loops"),
        ({"same": 0.0}, "same"),
        ({"tol": 0.0}, "tol"),
        ({"corners": ("other 1", "other 1")}, "corners"),
        ({"corners": ("other 2", "zeros")}, "corners"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        mapped(wells, **options)
    assert caught.value.what == what


def test_one_example_is_too_few() -> None:
    with pytest.raises(InputError) as caught:
        basin_map(LinearModel(0.5 * torch.eye(2)), batch_of_ones(1))
    assert caught.value.what == "len(data)" and caught.value.given == "1"


def test_a_start_that_is_not_finite_is_refused() -> None:
    class Broken(Planar):
        def initial_state(self, e: Tensor) -> Tensor:
            return torch.full_like(e, torch.nan)

    with pytest.raises(InputError) as caught:
        basin_map(Broken(wells), batch(), points=3)
    assert caught.value.what == "initial state"


def test_the_plane_holds_its_centre_and_corners_and_keeps_distances() -> None:
    centre, first, second = (2 * state for state in random_state(3, 4, 5))
    plane = _StatePlane.through(centre, {"a": first, "b": second})
    assert plane.unit == pytest.approx(centre.norm().item())
    places = torch.tensor([(0.0, 0.0), *plane.corners.values()], dtype=torch.float64)
    held = plane.at(places)
    torch.testing.assert_close(held, torch.stack([centre, first, second]))
    apart = plane.unit * (places[1] - places[2]).norm()
    assert apart.item() == pytest.approx((first - second).norm().item())
    (x, y), (_, across) = plane.corners.values()
    assert x > 0 and y == pytest.approx(0) and across > 0


def test_around_zero_the_unit_is_the_first_corner() -> None:
    plane = _StatePlane.through(
        torch.zeros(1, 2), {"a": torch.tensor([[3.0, 0]]), "b": torch.ones(1, 2)}
    )
    assert plane.unit == 3 and plane.corners["a"] == (1, 0)


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.0])
def test_corners_on_a_line_with_the_centre_are_refused(factor: float) -> None:
    centre, first = random_state(2, 3, 4)
    for corners in (
        {"a": first, "b": centre + factor * (first - centre)},
        {"a": centre, "b": first},
    ):
        with pytest.raises(InputError) as caught:
            _StatePlane.through(centre, corners)
        assert caught.value.what == "corners"


def test_corners_are_taken_by_name_or_as_states_and_chosen_where_limits_differ() -> None:
    model = LinearModel(0.5 * torch.eye(2))
    counted = torch.ones(3, 1, dtype=torch.bool)

    def corners(of: Any, tokens: list[int]) -> dict[str, torch.Tensor]:
        iteration = bind(model, torch.tensor(tokens)[:, None])
        limits = find_limits(iteration, iteration.h0, max_loops=100)
        generator = torch.Generator().manual_seed(0)
        return _corner_states(of, iteration, limits, counted, generator, same=0.01)

    assert [*corners(None, [1, 1, 5])] == ["other 2", "noise 1"]  # 1 and 1 have one limit
    assert [*corners(None, [1, 1, 1])] == ["noise 2", "noise 1"]
    named = corners(("own", "other 1"), [1, 4, 4])
    torch.testing.assert_close(named["own"], torch.zeros(1, 2))
    expected = model.limit(torch.tensor([[4]]))[0]
    torch.testing.assert_close(named["other 1"], expected, atol=1e-3, rtol=0)
    given = {"a": torch.ones(1, 2), "b": torch.eye(2)[:1]}
    assert corners(given, [1, 1, 1]) == given
    wrong = [
        ("corners", ("zeros", "zeros")),
        ("corners", ("noise 3", "zeros")),
        ("corner 'b'", {**given, "b": torch.ones(2, 2)}),
        ("corner 'b'", {**given, "b": torch.full((1, 2), torch.nan)}),
    ]
    for what, of in wrong:
        with pytest.raises(InputError) as caught:
            corners(of, [1, 1, 1])
        assert caught.value.what == what
