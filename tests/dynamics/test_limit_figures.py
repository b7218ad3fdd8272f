from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.dynamics import BasinMapResult, LocalStabilityResult, local_stability_study
from tests.dynamics.test_basins import mapped, wells
from tests.dynamics.toys import LinearModel, batch_of_ones


@pytest.fixture(scope="module")
def two_wells() -> BasinMapResult:
    """Right in the own well (x > 0), wrong in the other; no cell is on the line between them."""
    return mapped(wells, points=29, extent=1.9)


def test_the_finding_says_how_much_comes_back_and_what_the_rest_is_led_to(
    two_wells: BasinMapResult,
) -> None:
    (finding,) = two_wells.findings()
    share = (two_wells.data["reached"] == 0).mean()
    assert "of 841 initial states" in finding.text and " input 0" in finding.text
    assert finding.value == f"{100 * float(share):.0f}% come back" and finding.good is None
    assert all(part in finding.text for part in ("1 other limit,", " 0%"))
    # The wells are those of all inputs, and the finding says so.
    assert finding.text.endswith("a limit of that input too.")


def test_the_map_names_what_each_cell_is_and_marks_the_corners(two_wells: BasinMapResult) -> None:
    figure = two_wells.figures()[0]
    plot: Any = figure.plot
    here, marks, there, _ = [t for t in plot.data if t.name is None]
    names = [t.name for t in plot.data if t.name is not None]
    categories = ["clean limit (right)", "limit 1 (wrong)", "another limit of the next input"]
    assert names == categories
    labels = np.array(here.text)
    reached = two_wells.data["reached"].values
    assert {*labels[reached == 0]} == {"clean limit (right)"}
    assert {*labels[reached == 1]} == {"limit 1 (wrong)"}
    assert {*np.array(there.text)[reached == 0]} == {"clean limit (right)"}  # under the next input
    assert list(marks.text) == ["clean limit", "e1", "e2"] and (marks.x[0], marks.y[0]) == (0, 0)
    share = float(two_wells.next_reaches_own().sel(estimate="value"))
    assert f" {100 * share:.0f}% " in figure.control  # of the same starts, under the next input
    assert figure.data is not None and len(figure.data) == 841


def test_loops_are_drawn_where_there_is_a_limit() -> None:
    def bounded(h: Tensor, e: Tensor) -> Tensor:
        return torch.where(h.norm(dim=-1, keepdim=True) > 2, 3 * h, wells(h, e))

    result = mapped(bounded, points=9)
    plot: Any = result.figures()[1].plot
    loops = np.array(plot.data[0].z)
    np.testing.assert_array_equal(np.isnan(loops), result.data["reached"].values == -1)
    assert np.isnan(loops).any() and np.nanmin(loops) >= 0
    categories = [t.name for t in result.figures()[0].plot.data if t.name]  # pyright: ignore
    assert "no limit" in categories


def test_smaller_basins_share_a_colour() -> None:
    # Each of the sixteen squares of a chequerboard has a limit of its own.
    result = mapped(lambda h, e: h + 0.5 * ((2 * h).floor() / 2 + 0.25 - h), points=21)
    assert len(result.limits()) > 6
    plot: Any = result.figures()[0].plot
    names = [t.name for t in plot.data if t.name]
    assert "smaller basins" in names and sum(name.startswith("limit ") for name in names) == 3
    lines = [t.name for t in result.figures()[2].plot.data if t.mode != "lines" or not t.fill]  # pyright: ignore
    assert len({*lines}) == 5  # the own one, three others, and the control


MATRIX = torch.tensor([[0.3, -0.4], [0.4, 0.3]])


@pytest.fixture(scope="module")
def result() -> LocalStabilityResult:
    return local_stability_study(
        LinearModel(MATRIX, threshold=0.2), batch_of_ones(3, 1, ignored=0), n_loops=40, k=2
    )


def _changed(result: LocalStabilityResult, **values: object) -> LocalStabilityResult:
    data = result.data.copy(deep=True)
    for name, value in values.items():
        data[name][:] = value
    return dataclasses.replace(result, data=data)


def test_a_limit_is_said_beside_random_states(result: LocalStabilityResult) -> None:
    limit, growth, exponent = result.findings()
    assert limit.section == "limits" and limit.value == "0.50" and limit.good
    assert "3 of 3" in limit.text and "decay" in limit.text
    assert limit.text.count("0.50") == 2  # the second at random states
    assert "1.00 fold" in growth.text and "1.00 times" in growth.text
    assert "-0.69 nats" in exponent.text and "No 95% interval" in exponent.text and exponent.good


def test_nothing_dies_out_where_the_radius_is_one_or_unknown(
    result: LocalStabilityResult,
) -> None:
    grows = _changed(result, eigenvalue_real=1.2).findings()[0]
    assert float(grows.value) > 1 and "at least 1" in grows.text and not grows.good
    unknown = _changed(result, eigenvalue_residual=0.5).findings()[0]
    assert "not measured" in unknown.text and "decay" not in unknown.text
    cycle = _changed(result, turn=2).findings()[0]
    assert "limit cycle" in cycle.text and "largest multiplier" in cycle.text
    more = _changed(result, growth_closed=False).findings()[1]
    closed = result.findings()[1]
    assert "(or more" in more.text and "(or more" not in closed.text


def test_an_exponent_at_rounding_is_not_above_zero(result: LocalStabilityResult) -> None:
    for value, text in ((-3e-8, "is 0.00 nats"), (3e-8, "No 95% interval"), (0.1, "In 3 the 95%")):
        exponent = _changed(result, lyapunov=value).findings()[-1]
        assert text in exponent.text and exponent.good == (value < 0.1)


def test_without_a_limit_no_word_of_stability(result: LocalStabilityResult) -> None:
    none = _changed(result, turn=0)
    text = " ".join(finding.text for finding in none.findings())
    assert none.findings()[0].value == "none found" and "3 examples" in text
    assert not any(word in text for word in ("attract", "stable", "decay"))
    assert none.figures() == []


def test_a_map_of_one_colour_is_not_drawn() -> None:
    uniform = mapped(lambda h, e: h / 2 + e, points=5)
    assert len({*uniform.data["reached"].values.flat}) == 1
    assert [figure.title[:3] for figure in uniform.figures()] == ["How"]
    data = uniform.data.assign(reached=0 * uniform.data["reached"] - 1)
    data["next_reached"] = data["reached"]
    assert dataclasses.replace(uniform, data=data).figures() == []  # nor is an empty one


def test_the_complex_plane_holds_every_eigenvalue_and_the_unit_circle(
    result: LocalStabilityResult,
) -> None:
    (figure,) = result.figures()
    traces: Any = list(figure.plot.select_traces())
    circles, marks = traces[::2], traces[1::2]
    for circle in circles:
        np.testing.assert_allclose(np.hypot(circle.x, circle.y), 1)
    assert len(marks) == 3
    for place, mark in zip(("limit", "start", "random"), marks):
        expected = result.eigenvalues().sel(where=place).values.ravel()
        np.testing.assert_allclose(mark.x, expected.real)
        np.testing.assert_allclose(mark.y, expected.imag)
        assert set(mark.marker.symbol) == {"circle"}
    assert "3 of these" in figure.caption
    assert figure.control.endswith(".") and figure.plot.to_json()
    table = figure.data
    assert table is not None and len(table) == 9 and set(table["regime"]) == {"fixed point"}
    np.testing.assert_allclose(table["radius"], 0.5, rtol=1e-5)
