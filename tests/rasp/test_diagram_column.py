"""Boxes in a column: every arrow ends at its boxes, and lanes keep apart."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings

from loopinterp.rasp import get_program, list_programs
from loopinterp.rasp.diagram_boxes import Box, expression_boxes
from loopinterp.rasp.diagram_column import TIP, WIDTH, Column, column_of
from tests.rasp.reference import SEQUENCES

pytestmark = pytest.mark.usefixtures("quick")


def box_at(column: Column, x: float, y: float) -> Box | None:
    """The box with a point on its edge, or in front of it by the length of an arrow's head."""
    for box, (top, bottom) in column.spans.items():
        beside = x in (0, -TIP) and bottom < y < top
        if beside or (x == WIDTH / 2 and y in (top + TIP, bottom)):
            return box
    return None


def read(column: Column) -> Counter[tuple[Box, Box, str]]:
    """What the arrows say: from box, to box, as what."""
    found: Counter[tuple[Box, Box, str]] = Counter()
    source = None
    for role, arrow in column.arrows:
        source = box_at(column, *arrow[0]) or source  # else it goes on in the lane of the last one
        target = box_at(column, *arrow[-1])
        assert source and target
        found[source, target, role] += 1
    return found


def check(boxes: list[Box]) -> None:
    column = column_of(boxes)
    assert read(column) == Counter((s, box, role) for box in boxes for s, role in box.inputs)
    assert all(above > below for (_, above), (below, _) in pairwise(column.spans.values()))
    upright = [
        (x, *sorted((y, z)))
        for _, arrow in column.arrows
        for (x, y), (w, z) in pairwise(arrow)
        if x == w < 0
    ]
    for (x, _, high), (w, low, _) in pairwise(sorted(upright)):
        assert x < w or high <= low, "two lanes lie on each other"
    assert all(-column.lanes <= x for x, *_ in upright)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES)
def test_arrows_of_any_expression_lead_from_what_is_read_to_its_reader(expr):
    check(expression_boxes({"output": expr}))


@pytest.mark.parametrize("name", list_programs())
def test_arrows_of_a_program_do(name):
    check(expression_boxes(dict(get_program(name).step)))


def test_what_several_boxes_read_has_one_lane():
    source = Box("source", "x", [], "x")
    readers = [Box("map", name, [], name, [(source, "")]) for name in "abc"]
    column = column_of([source, *readers])
    lanes = {x for _, arrow in column.arrows for x, _ in arrow if x < -TIP}
    assert len(lanes) == 1
