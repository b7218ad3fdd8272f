from __future__ import annotations

import numpy as np

from loopinterp.dynamics.figures.aggregates import (
    exact_match_table,
    quantiles_by_loop,
    quantiles_by_position,
    right_from,
)


def test_quantiles_count_the_counted_tokens_only() -> None:
    values = np.arange(2 * 3 * 4, dtype=float).reshape(2, 3, 4)
    counted = np.zeros((3, 4), int)
    counted[:, 1] = 1
    low, middle, high = quantiles_by_loop(values, counted)
    assert middle.tolist() == [5, 17] and low.tolist() == [1, 13] and high.tolist() == [5, 17]
    by_pos = quantiles_by_position(values, counted)
    assert by_pos.shape == (3, 2, 4)
    assert by_pos[1, :, 1].tolist() == [5, 17]
    assert np.isnan(by_pos[:, :, [0, 2, 3]]).all()


def test_never_is_larger_than_any_loop_and_nan_is_left_out() -> None:
    values = np.array([[3.0, 1.0], [np.inf, 1.0], [np.inf, np.nan]])
    _, middle, _ = quantiles_by_position(values, np.ones((3, 2), int))
    assert middle.tolist() == [np.inf, 1.0]


def test_right_from_counts_to_the_end() -> None:
    # Columns: always right, right from 2 on, right then lost, never, not asked.
    right = np.array([[[1, 0, 1, 0, -1]], [[1, 0, 1, 0, -1]], [[1, 1, 0, 0, -1]]])
    assert right_from(right)[0, :4].tolist() == [0, 2, np.inf, np.inf]
    assert np.isnan(right_from(right)[0, 4])


def test_exact_match_needs_every_asked_position() -> None:
    right = np.array([[[1, -1, 1], [0, -1, 1]], [[1, -1, 1], [1, -1, 1]]])
    table = exact_match_table(right)
    assert table["exact_match"].tolist() == [0.5, 1.0]
    assert (table["low"] < table["exact_match"]).all()
