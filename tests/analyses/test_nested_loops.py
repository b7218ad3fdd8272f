"""Programs with a loop inside a loop, against Python's integers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from analyses.nested_loops import PROGRAMS, RESULTS, all_inputs, check, tables
from analyses.tables_in_pages import PAGES, put
from loopinterp.tasks import IGNORE


def test_the_page_is_what_is_stored() -> None:
    page = (PAGES / "results" / "nested-loops.md").read_text()
    stored: dict[str, Any] = json.loads((RESULTS / "nested_loops.json").read_text())
    assert put(page, tables(stored)) == page


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_right_after_the_required_loops_and_stay_so(name: str) -> None:
    check(name, 3)


def test_sorted_digits_are_those_of_python() -> None:
    batch = all_inputs("selection_sort", 3)
    for row, targets in zip(batch.inputs.tolist(), batch.targets.tolist()):
        assert [y for y in targets if y != IGNORE] == sorted(row[1:4])


def test_the_outer_loop_of_repeated_addition_makes_as_many_steps_as_the_first_factor() -> None:
    program, n = PROGRAMS["repeated_addition"], 4
    batch = all_inputs("repeated_addition", n)
    first = batch.inputs[:, 1] + 2 * batch.inputs[:, 2]
    times = program.trace(batch.inputs, n_loops=program.n_loops(n)).variables["times"]
    at_the_end = times[:, :, -1]  # [loop, example]
    assert torch.equal(at_the_end[0], first)
    steps = (at_the_end.diff(dim=0) == -1).sum(0)
    assert torch.equal(steps, first)
    gaps = [
        (x == -1).nonzero().flatten().diff().unique().tolist() for x in at_the_end.diff(dim=0).T
    ]
    assert all(gap in ([], [n + 2]) for gap in gaps)
