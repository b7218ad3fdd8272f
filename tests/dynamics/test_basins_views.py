from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.dynamics import BasinMapResult
from tests.dynamics.test_basins import mapped, wells


@pytest.fixture(scope="module")
def two_wells() -> BasinMapResult:
    """Right in the own well (x > 0), wrong in the other; no cell is on the line between them."""
    return mapped(wells, points=29, extent=1.9)


def test_the_finding_says_how_much_comes_back_and_what_the_rest_is_led_to(
    two_wells: BasinMapResult,
) -> None:
    (finding,) = two_wells.findings()
    share = (two_wells.data["reached"] == 0).mean()
    assert finding.text.startswith("Of 841 starts in a plane through the limit of input 0, ")
    assert finding.value == f"{100 * float(share):.0f}% come back" and finding.good is False
    assert "lead to 1 other limit, the nearest 2 times its size away, where 0%" in finding.text
    # The wells are those of all inputs, and the finding says so.
    assert finding.text.endswith(": it is not this input's own.")


def test_the_map_names_what_each_cell_is_and_marks_the_corners(two_wells: BasinMapResult) -> None:
    figure = two_wells.figures()[0]
    plot: Any = figure.plot
    here, marks, there, _ = [t for t in plot.data if t.name is None]
    names = [t.name for t in plot.data if t.name is not None]
    assert names == [
        "own limit (right)",
        "limit 1 (wrong)",
        "another limit of the next input",
    ]
    said = np.array(here.text)
    reached = two_wells.data["reached"].values
    assert {*said[reached == 0]} == {"own limit (right)"}
    assert {*said[reached == 1]} == {"limit 1 (wrong)"}
    assert {*np.array(there.text)[reached == 0]} == {"own limit (right)"}  # under the next input
    assert list(marks.text) == ["own limit", "e1", "e2"] and (marks.x[0], marks.y[0]) == (0, 0)
    assert "same starts are run under the next input" in figure.control
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
