"""Where the boxes of a drawing stand, one below the other, and where the arrows between them run.

Boxes of one width in a column fit any page, and arrows end at them whatever is written inside: an
arrow to the next box leads straight down, all others run through lanes on the left, one lane for
all that read the same thing. Everything is in pixels, to the right and down from (0, 0), the upper
left corner of the first box; lanes lie at negative x, and heights are negative as on a y-axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loopinterp.rasp.diagram_boxes import Box

WIDTH = 226.0
"""Of a box: a line of :data:`~loopinterp.rasp.diagram_boxes.LINE` characters."""

LINE_HEIGHT, SPACE, PITCH, TIP = 16.0, 22.0, 11.0, 4.0
"""Pixels: of a line of text, between boxes, from lane to lane, and half of an arrow's head."""

MOST_LANES = 106.0
"""Pixels of all lanes: with a box beside them they fit a phone."""

Point = tuple[float, float]
Bus = tuple[Box, str]  # what is read, and as what


@dataclass(frozen=True)
class Column:
    """Boxes with their upper and lower edges, and arrows: what is read as what, point by point."""

    spans: dict[Box, Point]
    arrows: list[tuple[str, list[Point]]]
    lanes: float

    @property
    def lowest(self) -> float:
        return min(bottom for _, bottom in self.spans.values())


def column_of(boxes: Sequence[Box], top: float = 0.0) -> Column:
    """The column of some boxes, each below what it reads.

    Args:
        boxes: Children before parents.
        top: Upper edge of the first one.
    """
    spans: dict[Box, Point] = {}
    for box in boxes:
        bottom = top - LINE_HEIGHT * (1 + len(box.lines)) - 10
        spans[box], top = (top, bottom), bottom - SPACE
    straight: list[tuple[Box, Box, str]] = []
    buses: dict[Bus, list[Box]] = defaultdict(list)
    for above, box in zip([None, *boxes], boxes):
        straight += [(s, box, role) for s, role in box.inputs if s is above][:1]
        for source, role in box.inputs:
            if (source, box, role) not in straight:
                buses[source, role].append(box)
    ports = _ports(spans, buses)
    lane_of = _lanes({bus: [ports[bus], *(ports[bus, r] for r in buses[bus])] for bus in buses})
    pitch = min(PITCH, MOST_LANES / max([1, *(1 + lane for lane in lane_of.values())]))
    arrows = [
        (role, [(WIDTH / 2, spans[source][1]), (WIDTH / 2, spans[box][0] + TIP)])
        for source, box, role in straight
    ]
    for bus, readers in buses.items():
        x, start = -pitch * (1 + lane_of[bus]) - TIP, ports[bus]
        path = [(0.0, start), (x, start)]
        for reader in readers:  # from the one before on, so that no line is drawn twice
            end = ports[bus, reader]
            arrows.append((bus[1], [*path, (x, end), (-TIP, end)]))
            path = [(x, end)]
    n_lanes = 1 + max(lane_of.values(), default=-1)
    return Column(spans, arrows, n_lanes * pitch + 2 * TIP)


def _ports(spans: dict[Box, Point], buses: dict[Bus, list[Box]]) -> dict[Any, float]:
    """The height at which each bus leaves its box, and that at which it comes to each reader."""
    at: dict[Box, list[Any]] = defaultdict(list)
    for bus, readers in buses.items():
        for reader in readers:
            at[reader].append((bus, reader))
    for bus in buses:
        at[bus[0]].append(bus)
    return {
        port: spans[box][0] + (spans[box][1] - spans[box][0]) * (k + 1) / (len(ports) + 1)
        for box, ports in at.items()
        for k, port in enumerate(ports)
    }


def _lanes(heights: dict[Bus, list[float]]) -> dict[Bus, int]:
    """The nearest lane that is free for each bus, short ones first."""
    taken: list[list[Point]] = []
    lane_of = {}
    for bus, ys in sorted(heights.items(), key=lambda item: max(item[1]) - min(item[1])):
        low, high = min(ys), max(ys)
        free = (k for k, others in enumerate(taken) if all(high < a or b < low for a, b in others))
        lane_of[bus] = lane = next(free, len(taken))
        taken[lane:] = taken[lane:] or [[]]
        taken[lane].append((low, high))
    return lane_of
