from __future__ import annotations

import pytest

from analyses import state_geometry


def test_what_is_kept_of_a_model() -> None:
    table = state_geometry.measure("multiplication", [1], 4)
    (row,) = table.to_dict(orient="records")
    assert sum(row[kind] for kind in state_geometry.CLASSES) == pytest.approx(1)
    # As many states as symbols asked, of 64 features: no more directions than those.
    assert 1 < row["rank_end"] < row["gaussian"] < 64
    assert row["embedded"] == pytest.approx(1) and 0 < row["spread_end"] < 1
    cells = state_geometry.as_table(table).splitlines()[-1].split(" | ")
    assert cells[0] == "| multiplication" and cells[5] == f"{row['rank_answered']:.1f}"
