from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopinterp.errors import InputError
from loopinterp.plotting import PALETTE, Series, joined, space_figure

TITLES = ("a", "b", "c")


def test_lines_and_points_in_space() -> None:
    paths = np.arange(12.0).reshape(2, 2, 3)
    x, y, z = joined(paths).T
    lines = [
        Series("path", x, y, colour="blue", markers=False),
        Series("wrong", x, y, markers=False, control=True),
        Series("limit", [1.0], [2.0], markers=True),
    ]
    heights = {"path": z, "wrong": z, "limit": np.array([3.0])}
    figure: Any = space_figure(lines, heights, titles=TITLES)
    path, wrong, limit = figure.data
    assert path.mode == "lines" and path.line.color == PALETTE["blue"]
    np.testing.assert_array_equal(path.z, [2, 5, np.nan, 8, 11, np.nan])
    assert wrong.line.dash == "dash" and path.line.dash is None
    assert limit.mode == "markers" and limit.z.tolist() == [3.0]
    assert figure.layout.scene.zaxis.title.text == "c"


def test_a_line_without_its_heights_is_refused() -> None:
    line = Series("path", [1.0, 2.0], [1.0, 2.0])
    for heights in ({}, {"path": np.zeros(3)}):
        with pytest.raises(InputError, match="heights of line 'path'"):
            space_figure([line], heights, titles=TITLES)
