"""Solvers find the fixed points that repel the loop, which iteration cannot."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, RESULTS, put
from analyses.unstable_points import FILE, NAME, PAGE, as_table, stability, unstable_points


class Cubic:
    """h -> h + s h (1 - h^2): fixed points -1, 0, 1 with slopes 1 - 2s, 1 + s, 1 - 2s."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def embed(self, inputs: Tensor) -> Tensor:
        return inputs[..., None].double() + 0.3

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h + self.slope * h * (1 - h**2)

    def readout(self, h: Tensor) -> Tensor:
        return torch.cat([h, -h], -1)


class Contraction(Cubic):
    """h -> h / 2 + e: one fixed point, with slope 1/2 everywhere."""

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return 0.5 * h + e


INPUTS = torch.zeros(3, 1, dtype=torch.long)


def test_a_point_that_repels_the_loop_is_found_beside_its_limit() -> None:
    points = unstable_points(Cubic(0.5), INPUTS)
    assert (points["limit"], points["solved"], points["unstable"]) == (1, 1, 1)
    assert points["largest_radius"] == pytest.approx(1.5, abs=1e-3)
    assert stability(points) == "contradicted"


def test_where_the_loop_has_no_limit_its_fixed_points_are_found_all_the_same() -> None:
    points = unstable_points(Cubic(1.4), INPUTS)  # slope -1.8 at the two others
    assert points["limit"] == 0 and points["solved"] == 1 and points["unstable"] == 1
    assert points["largest_radius"] == pytest.approx(2.4, abs=1e-3)


def test_a_contraction_has_no_unstable_point_and_the_search_proves_nothing() -> None:
    points = unstable_points(Contraction(0.0), INPUTS)
    assert (points["limit"], points["unstable"]) == (1, 0)
    assert points["largest_radius"] == pytest.approx(0.5, abs=1e-3)
    assert stability(points) == "not decided"


def test_the_page_is_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, {NAME: as_table(pd.read_csv(RESULTS / FILE))}) == text
