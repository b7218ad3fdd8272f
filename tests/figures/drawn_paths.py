from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from loopinterp.figures.circuit_layout import _CHAR, LINE, Layout, Place

Rect = tuple[float, float, float, float]


def points(path: str, steps: int = 8) -> list[tuple[float, float]]:
    """Points along an SVG path of M, V, H, C and q."""
    found: list[tuple[float, float]] = []
    x = y = 0.0
    for letter, rest in re.findall(r"([MVHCq])([^MVHCq]*)", path):
        n = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", rest)]
        match letter:
            case "M":
                (x, y), way = n, [(n[0], n[1])]
            case "V":
                way = [(x, y + (n[0] - y) * k / steps) for k in range(1, steps + 1)]
            case "H":
                way = [(x + (n[0] - x) * k / steps, y) for k in range(1, steps + 1)]
            case "C":
                ends = [(x, y), (n[0], n[1]), (n[2], n[3]), (n[4], n[5])]
                way = [_bezier(ends, k / steps) for k in range(1, steps + 1)]
            case _:
                way = [(x + n[2], y + n[3])]
        found += way
        x, y = found[-1]
    return found


def knots(path: str) -> list[tuple[float, float]]:
    """The knots of a path of M and C."""
    n = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]
    return list(zip(n[::2], n[1::2]))


def _bezier(ends: list[tuple[float, float]], t: float) -> tuple[float, float]:
    while len(ends) > 1:
        ends = [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in pairwise(ends)]
    return ends[0]


def rect(place: Place) -> Rect:
    w, h = place.width / 2, place.height / 2
    return place.x - w, place.y - h, place.x + w, place.y + h


def meet(a: Rect, b: Rect) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 0.5


def faults(layout: Layout) -> Iterator[str]:
    """Everything that makes a drawing hard to read."""
    frame = (0.0, 0.0, layout.width, layout.height)
    boxes = {place.key: rect(place) for place in layout.places}
    words = {
        label.node: (
            label.x, label.y - LINE * len(label.lines) / 2,
            label.x + _CHAR * max(map(len, label.lines)), label.y + LINE * len(label.lines) / 2,
        )
        for label in layout.labels
    }  # fmt: skip
    for name, box in [*boxes.items(), *words.items()]:
        if box[0] < 0 or box[1] < 0 or box[2] > frame[2] or box[3] > frame[3]:
            yield f"{name} sticks out"
    everything = [*boxes.items(), *((f"label {n}", b) for n, b in words.items())]
    for k, (name, box) in enumerate(everything):
        for other, its in everything[k + 1 :]:
            if meet(box, its):
                yield f"{name} and {other} overlap"
    for place in layout.places:
        if place.lines and max(map(len, place.lines)) * _CHAR > place.width:
            yield f"the words of {place.key} stick out of its box"
    for route in layout.routes:
        across = [] if layout.labels else [b for b in boxes.items() if b[0] != route.source]
        # A curve stays between its knots, which is enough where no box is to be kept clear of.
        for x, y in points(route.path) if across else knots(route.path):
            if not (-0.5 <= x <= frame[2] + 0.5 and -0.5 <= y <= frame[3] + 0.5):
                yield f"the edge {route.source} to {route.target} leaves the drawing"
            for name, (left, top, right, bottom) in [*across, *words.items()]:
                if left + 1 < x < right - 1 and top + 1 < y < bottom - 1:
                    yield f"the edge {route.source} to {route.target} crosses {name}"
