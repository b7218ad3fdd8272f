"""Nodes and edges of a circuit, and the layout of its drawing; text has a fixed pitch.

Folded, it is a layered drawing of one block. An edge across several ranks has a place in each, to
pass behind no box; edges to the next loop go around the right side. Unfolded, each loop is a column
of nodes in the order of computation, so every edge leads to the right.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.text import ShortRepr

KINDS = ("input", "variable", "head", "neurons", "readout")

SECTIONS = ("input", "prelude", "loop", "readout")
"""Where a node is; a node of the loop occurs once in every loop."""

ROLES = ("", "value", "key", "query", "gate")
"""What a head reads along an edge; "" if unspecified."""

MOST_NODES = 400
"""Most nodes of a graph that is drawn."""


@dataclass(frozen=True, repr=False)
class GraphNode(ShortRepr):
    """A node of a circuit's graph.

    Attributes:
        kind: One of :data:`KINDS`.
        label: A few words or a line of code.
        section: One of :data:`SECTIONS`.
        stage: Order of computation in the section.
        note: Its place in the model.
        names: Words of the code that refer to it.
        facts: Headings and texts about it.
    """

    id: str
    kind: str
    label: str
    section: str
    stage: int = 0
    note: str = ""
    names: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, repr=False)
class GraphEdge(ShortRepr):
    """An edge from ``source`` to the ``target`` that reads it.

    Attributes:
        lag: 0 within a loop, 1 to the next one, 2 to a later one.
        role: One of :data:`ROLES`.
        effect: Width of the edge; None if not measured.
    """

    source: str
    target: str
    lag: int = 0
    role: str = ""
    effect: float | None = None


@dataclass(frozen=True, repr=False)
class GraphParts(ShortRepr):
    """The nodes and edges of a circuit.

    Attributes:
        edges: Into a variable that the loop writes they have lag 1.
        code: The program as text, or "".
    """

    title: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    code: str = ""

    @property
    def by_id(self) -> dict[str, GraphNode]:
        return {node.id: node for node in self.nodes}

    @checked
    def unfolded(self, n_loops: Loops) -> list[tuple[str, str, int]]:
        """Edges of a run of ``n_loops`` loops: source, target, and the edge's number.

        ``3:head`` is a node inside loop 3, ``3:carry`` the variable after 3 loops. Nodes outside
        have no prefix, and read the last loop.
        """
        edges = []
        for number, edge in enumerate(self.edges):
            source, target = self.by_id[edge.source], self.by_id[edge.target]
            inside = (source.section == "loop", target.section == "loop")
            if inside == (True, True):  # from every loop to the same or a later one
                last = n_loops + (target.kind == "variable")
                for loop in range(min(n_loops, last - edge.lag)):
                    later = loop + edge.lag
                    edges.append((f"{loop}:{source.id}", f"{later}:{target.id}", number))
            elif inside == (True, False):
                last = n_loops if source.kind == "variable" else n_loops - 1
                last = max(last - edge.lag, 0)
                edges.append((f"{last}:{source.id}", target.id, number))
            elif inside == (False, True):
                first, last = 0, n_loops
                if target.kind == "variable":  # at the start, or by every loop
                    first, last = edge.lag, n_loops + 1 if edge.lag else 1
                loops = range(first, last)
                edges += [(source.id, f"{loop}:{target.id}", number) for loop in loops]
            else:
                edges.append((source.id, target.id, number))
        return edges


def asset(name: str) -> str:
    return (Path(__file__).parent / "circuit_assets" / name).read_text(encoding="utf-8")


# Pixels.
_CHAR, LINE = 6.7, 14.0  # of a letter (at most, in any fixed pitch), and between lines
_NODE, ROW = 11.0, 30.0  # a node of the unfolded drawing, and from row to row
_GUTTER, _LANE, _GAP, _PAD = 20.0, 7.0, 12.0, 8.0  # section name, lanes, between and inside boxes
_BETWEEN, _CHANNEL, _HOLD = 30.0, 5.0, 8.0  # between ranks, channels, and edges that pass a rank


@dataclass(frozen=True)
class Place:
    node: str
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...] = ()
    loop: int | None = None

    @property
    def key(self) -> str:
        return self.node if self.loop is None else f"{self.loop}:{self.node}"


@dataclass(frozen=True)
class Route:
    """A drawn edge: its number in the graph, its ends, its SVG path, and the arrowhead's place."""

    edge: int
    source: str
    target: str
    path: str
    tip: tuple[float, float]
    down: bool = True


@dataclass(frozen=True)
class Band:
    name: str
    x: float
    y: float
    width: float
    height: float
    upright: bool = False


@dataclass(frozen=True)
class Label:
    node: str
    x: float
    y: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    width: float
    height: float
    places: list[Place]
    routes: list[Route]
    bands: list[Band]
    labels: list[Label] = field(default_factory=list)
    rails: list[tuple[str, float, float, float]] = field(default_factory=list)


def _wrapped(node: GraphNode, letters: int, most: int = 3) -> tuple[str, ...]:
    """A node's label in at most ``most`` lines of ``letters``, cut off."""
    lines = textwrap.wrap(node.label, letters, break_long_words=True) or [node.id[:letters]]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: letters - 1].rstrip()}…"]
    return tuple(lines)


def folded(graph: GraphParts, width: float) -> Layout:
    """One block with arrows around it to the next loop; the width is in pixels."""
    return _Folded(graph, width).layout()


class _Folded:
    def __init__(self, graph: GraphParts, width: float) -> None:
        self.graph, self.width, self.nodes = graph, width, graph.by_id
        self.back, self.targets = set[int](), defaultdict[str, list[str]](list)
        for k, edge in enumerate(graph.edges):
            source, target = self.nodes[edge.source], self.nodes[edge.target]
            again = edge.lag > 0 and target.section == "loop"
            if again or self._stage(source) >= self._stage(target):
                self.back.add(k)  # leads up: to the next loop
            else:
                self.targets[edge.source].append(edge.target)
        looping = dict.fromkeys(graph.edges[k].source for k in sorted(self.back))
        # One lane at the right for each node that the next loop reads.
        self.lane = {source: number for number, source in enumerate(looping)}
        self.right = _LANE * len(self.lane) + (_PAD if self.lane else 0)
        self.room = width - _GUTTER - self.right - 2 * _PAD
        letters = int(min(self.room - 60, 190) // _CHAR)
        self.lines, self.size = {}, {}
        for node in graph.nodes:
            notes = [node.note] if node.note else []
            self.lines[node.id] = lines = (*_wrapped(node, letters), *notes)
            longest = max(len(line) for line in lines)
            self.size[node.id] = max(longest * _CHAR, 30) + 2 * _PAD, LINE * len(lines) + _PAD
        stages = groupby(sorted(graph.nodes, key=self._stage), self._stage)
        self.ranks = [[node.id for node in nodes] for _, nodes in stages]
        self._number_ranks()
        while self._split():
            self._number_ranks()
        self.x = self._arrange()

    @staticmethod
    def _stage(node: GraphNode) -> tuple[int, int]:
        return SECTIONS.index(node.section), node.stage

    def _number_ranks(self) -> None:
        self.rank_of = {node: r for r, rank in enumerate(self.ranks) for node in rank}
        # Where the longest edge out of a node ends.
        self.last = {
            source: max(self.rank_of[target] for target in to)
            for source, to in self.targets.items()
        }

    def _passing(self, r: int) -> list[str]:
        return [source for source, last in self.last.items() if self.rank_of[source] < r < last]

    def _split(self) -> bool:
        """Split the first rank that is too wide; return whether there was one."""
        for r, rank in enumerate(self.ranks):
            passing = len(self._passing(r)) * _HOLD
            needed = sum(self.size[n][0] + _GAP for n in rank) + passing
            if needed - _GAP > self.room and len(rank) > 1:
                # As many boxes as there is room for, at least one, stay in the first rank.
                half, used = 0, passing
                while half < len(rank) - 1 and (
                    half == 0 or used + self.size[rank[half]][0] <= self.room
                ):
                    used += self.size[rank[half]][0] + _GAP
                    half += 1
                half = max(min(half, len(rank) - 1), 1)
                self.ranks[r : r + 1] = [rank[:half], rank[half:]]
                return True
        return False

    def _arrange(self) -> dict[tuple[int, str], float]:
        """x of every box and passing edge in every rank, by sweeps down and up."""
        rows = [[*rank, *self._passing(r)] for r, rank in enumerate(self.ranks)]
        neighbours: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
        # An edge's neighbours in the ranks above and below: its ends, or its places on the way.
        for source, last in self.last.items():
            for r in range(self.rank_of[source], last):
                ends = [end for end in self.targets[source] if self.rank_of[end] == r + 1]
                ends += [source] if r + 1 < last else []
                for end in ends:
                    neighbours[r, source].append((r + 1, end))
                    neighbours[r + 1, end].append((r, source))
        x: dict[tuple[int, str], float] = {}
        for r, row in enumerate(rows):
            x |= self._packed(r, row, [self.room / 2] * len(row))
        best, best_x = float("inf"), x
        for sweep in range(12):
            down = sweep % 2 == 0
            for r in range(len(rows)) if down else range(len(rows) - 1, -1, -1):
                goals = []
                for item in rows[r]:
                    seen = neighbours[r, item]
                    near = [n for n in seen if (n[0] < r) == down] or seen
                    goals.append(fmean(x[n] for n in near) if near else x[r, item])
                order = sorted(range(len(rows[r])), key=lambda k: goals[k])
                rows[r] = [rows[r][k] for k in order]
                x |= self._packed(r, rows[r], [goals[k] for k in order])
            # The drawing with the shortest horizontal way of all edges is kept.
            cost = sum(abs(x[a] - x[b]) for a, near in neighbours.items() for b in near)
            if cost < best - 1e-6:
                best, best_x = cost, dict(x)
        return best_x

    def _packed(
        self, r: int, row: Sequence[str], goals: Sequence[float]
    ) -> dict[tuple[int, str], float]:
        """Places in this order, as near to the goals as possible."""
        from scipy.optimize import isotonic_regression

        boxes = set(self.ranks[r])
        widths = [self.size[item][0] if item in boxes else _HOLD for item in row]
        gaps = [_GAP if {a, b} & boxes else 0.0 for a, b in pairwise(row)]
        spare = self.room - sum(widths) - sum(gaps)
        if spare < 0:  # last resort: narrower gaps
            gaps = [max(gap + spare / max(len(gaps), 1), 0.0) for gap in gaps]
        offsets = [widths[0] / 2] if row else []  # of each from the left end of the row
        for k, gap in enumerate(gaps):
            offsets.append(offsets[-1] + widths[k] / 2 + gap + widths[k + 1] / 2)
        most = max(self.room - (offsets[-1] + widths[-1] / 2 if row else 0), 0.0)
        # Nondecreasing numbers nearest to the goals without gaps and widths.
        free = isotonic_regression([w - o for w, o in zip(goals, offsets)]).x if row else []
        free = [min(max(float(f), 0.0), most) for f in free]
        return {(r, item): f + o for item, f, o in zip(row, free, offsets)}

    def layout(self) -> Layout:
        bands = self._stack()
        self.places = {}
        for r, rank in enumerate(self.ranks):
            middle = self.tops[r] + self.heights[r] / 2
            for node in rank:
                x, (w, h) = _GUTTER + _PAD + self.x[r, node], self.size[node]
                self.places[node] = Place(node, x, middle, w, h, self.lines[node])
        height = bands[-1].y + bands[-1].height + 2
        return Layout(self.width, height, [*self.places.values()], self._routes(), bands)

    def _stack(self) -> list[Band]:
        """The sections, top to bottom; sets top and height of each rank."""
        edges = self.graph.edges
        # Edges to the next loop leave below a rank and enter above one.
        below, above = defaultdict(set), defaultdict(set)
        for k in self.back:
            below[self.rank_of[edges[k].source]].add(edges[k].source)
            above[self.rank_of[edges[k].target]].add(edges[k].source)
        bands, y, start, section = [], 0.0, 0.0, ""
        self.tops: list[float] = []
        self.heights: list[float] = []
        for r, rank in enumerate(self.ranks):
            name = self.nodes[rank[0]].section
            if name != section:
                if section:
                    bands.append(Band(section, 1, start, self.width - 2, y - start, upright=True))
                    y += 14
                start, section = y, name
                y += _PAD
            elif r:
                y += _BETWEEN
            y += _CHANNEL * len(above[r]) + (_PAD if above[r] else 0)
            self.tops.append(y)
            self.heights.append(max(self.size[node][1] for node in rank))
            y += self.heights[-1] + _CHANNEL * len(below[r]) + _PAD
        bands.append(Band(section, 1, start, self.width - 2, y - start, upright=True))
        return [b if b.height > len(b.name) * _CHAR + _PAD else replace(b, name="") for b in bands]

    def _routes(self) -> list[Route]:
        left, edges = _GUTTER + _PAD, self.graph.edges
        entering: dict[str, list[int]] = defaultdict(list)
        comes_from = {}
        for k, edge in enumerate(edges):
            entering[edge.target].append(k)
            at = self.x.get((self.rank_of[edge.target] - 1, edge.source))
            comes_from[k] = self.width if k in self.back or at is None else left + at
        # x at which each edge enters its box: side by side, from left to right.
        port = {}
        for target, arriving in entering.items():
            arriving.sort(key=comes_from.__getitem__)
            place = self.places[target]
            step = min((place.width - 2 * _PAD) / len(arriving), 16)
            for n, k in enumerate(arriving):
                port[k] = place.x + (n - (len(arriving) - 1) / 2) * step
        ends = [top + height for top, height in zip(self.tops, self.heights)]
        routes = []
        for k, edge in enumerate(edges):
            source, target = self.places[edge.source], self.places[edge.target]
            tip = (port[k], target.y - target.height / 2)
            if k in self.back:
                path = self._around(edge.source, tip, self.rank_of[edge.target])
            else:
                path = f"M{source.x:.1f} {source.y + source.height / 2:.1f}"
                r, x = self.rank_of[edge.source], source.x
                path += f"V{ends[r]:.1f}"
                while r + 1 < self.rank_of[edge.target]:
                    y, r = ends[r], r + 1
                    to = left + self.x[r, edge.source]
                    path += _bend(x, y, to, self.tops[r]) + f"V{ends[r]:.1f}"
                    x = to
                path += _bend(x, ends[r], tip[0], self.tops[r + 1]) + f"V{tip[1] - 5:.1f}"
            routes.append(Route(k, edge.source, edge.target, path, tip))
        return routes

    def _around(self, name: str, tip: tuple[float, float], to: int) -> str:
        """The path down, right, up, and back to the top of the node that the next loop reads."""
        source, lane, r = self.places[name], self.lane[name], self.rank_of[name]
        x = self.width - self.right + _LANE * (lane + 0.5)
        # Lanes share the room between the boxes.
        channel = _CHANNEL * (lane * min(1.0, 3 / max(len(self.lane), 1)))
        low = self.tops[r] + self.heights[r] + 4 + channel
        high = self.tops[to] - _PAD - 3 - channel
        start = source.x + min(source.width / 4, 14)
        return (
            f"M{start:.1f} {source.y + source.height / 2:.1f}V{low - 4:.1f}q0 4 4 4"
            f"H{x - 4:.1f}q4 0 4 -4V{high + 4:.1f}q0 -4 -4 -4"
            f"H{tip[0] + 4:.1f}q-4 0 -4 4V{tip[1] - 5:.1f}"
        )


def _bend(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (y + to_y) / 2
    return f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"


def unfolded(graph: GraphParts, n_loops: int, width: float) -> Layout:
    """Each loop a column, each node a row; prelude and readout are one node each."""
    graph, numbers = _outside_as_one(graph)
    rows = sorted(graph.nodes, key=lambda n: (SECTIONS.index(n.section), n.stage))
    letters, side = (27, 34.0) if width > 600 else (15, 18.0)
    names = letters * _CHAR + 18
    after = _NODE + 3 if any(node.kind == "variable" for node in rows) else 0.0
    # Width of a loop's column.
    pitch = (width - names - 2 * side - after) / n_loops
    stages = sorted({n.stage for n in rows if n.section == "loop"})
    y = {n.id: 26.0 + ROW * (k + 0.5) for k, n in enumerate(rows)}
    bottom = 26.0 + ROW * len(rows) + 4
    x_outside = {"input": names + side * 0.2, "prelude": names + side * 0.7, "readout": width - 9.0}
    places: dict[str, Place] = {}
    size = min(_NODE, pitch / 2.6)
    for node in rows:
        if node.section != "loop":
            places[node.id] = Place(node.id, x_outside[node.section], y[node.id], size, size)
            continue
        # Stages of one loop go from left to right inside its column.
        within = pitch * (stages.index(node.stage) + 0.75) / (len(stages) + 0.6)
        columns = [names + side + pitch * loop + within for loop in range(n_loops)]
        if node.kind == "variable":  # once more, after the last loop
            columns.append(width - side - after / 2 + 1)
        for loop, x in enumerate(columns):
            place = Place(node.id, x, y[node.id], size, size, (), loop)
            places[place.key] = place
    section_of = {node.id: node.section for node in rows}
    routes, rails = [], dict[str, tuple[str, float, float, float]]()
    for source, target, number in graph.unfolded(n_loops):
        a, b = places[source], places[target]
        # A node that every loop reads has a rail along its row.
        at_rail = a.loop is None and (b.loop or 0) > 0
        at_rail |= section_of[a.node] == "input" and section_of[b.node] == "readout"
        start = (b.x - min(pitch / 3, 26), a.y) if at_rail else (a.x + a.width / 2, a.y)
        tip = (b.x - b.width / 2 - 1, b.y)
        # From left to right, level at both ends.
        bend = min(max((tip[0] - start[0]) / 2, 4), pitch * 0.6)
        path = (
            f"M{start[0]:.1f} {start[1]:.1f}"
            f"C{start[0] + bend:.1f} {start[1]:.1f} {tip[0] - bend:.1f} {tip[1]:.1f} "
            f"{tip[0] - 3:.1f} {tip[1]:.1f}"
        )
        routes.append(Route(numbers[number], source, target, path, tip, down=False))
        if at_rail:
            farthest = max(start[0], rails[a.node][3] if a.node in rails else start[0])
            rails[a.node] = (a.node, a.y, a.x, farthest)
    bands = [
        Band(f"{loop + 1}", names + side + pitch * loop + 1, 1, pitch - 2, bottom - 2)
        for loop in range(n_loops)
    ]
    labels = [Label(n.id, 14.0, y[n.id], _wrapped(n, letters, 2)) for n in rows]
    return Layout(width, bottom, [*places.values()], routes, bands, labels, [*rails.values()])


def _outside_as_one(graph: GraphParts) -> tuple[GraphParts, list[int]]:
    """The graph with one node each for prelude and readout, and the old numbers of its edges."""
    outside = {"prelude": "neurons", "readout": "readout"}
    name_of = {n.id: n.section if n.section in outside else n.id for n in graph.nodes}
    nodes = [n for n in graph.nodes if name_of[n.id] == n.id and n.id not in outside]
    for name, kind in outside.items():
        parts = [n for n in graph.nodes if n.section == name]
        if parts:
            label, facts = parts[0].label, parts[0].facts
            if len(parts) > 1:
                label = name
                facts = (("Parts", f"{len(parts)}; the folded drawing shows them"),)
            nodes.append(GraphNode(name, kind, label, name, facts=facts))
    first: dict[tuple[str, str, int], int] = {}
    # Of edges that become one, the one of the largest effect stays.
    for number in sorted(range(len(graph.edges)), key=lambda k: -abs(graph.edges[k].effect or 0)):
        edge = graph.edges[number]
        ends = name_of[edge.source], name_of[edge.target]
        if ends[0] != ends[1]:
            first.setdefault((*ends, edge.lag), number)
    edges = [
        replace(graph.edges[number], source=source, target=target)
        for (source, target, _), number in first.items()
    ]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges)), [*first.values()]
