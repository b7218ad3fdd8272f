"""Scores as a table and figures show them."""

import numpy as np
import xarray as xr

from loopinterp.benchmark.ground_truth_study_views import rightness


def test_scores_are_turned_so_that_1_is_right_and_stay_between_0_and_1():
    keys = ["probe finds", "probe finds nothing else", "random change", "no other head"]
    value = np.array([[0.75, 0.25, 0.5, 3.0], [1.0, -0.25, 0.0, 0.0]])
    asked = xr.Dataset({"value": (("model", "check"), value)}, coords={"check": keys})
    assert rightness(asked).values.tolist() == [[0.75, 0.75, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0]]
