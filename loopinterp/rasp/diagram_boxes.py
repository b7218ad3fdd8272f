"""An expression graph or a circuit in boxes: what is read, the heads that select, and the maps.

A box is what one part of a transformer does, or would do. Sources are the tokens, the positions and
the variables; a head is one selection with what it reads; a map is a whole elementwise formula.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from loopinterp.errors import InputError
from loopinterp.rasp import expr as nodes
from loopinterp.rasp.compiler.circuit import Circuit, FeatureNode, HeadNode, NeuronGroup
from loopinterp.rasp.node import Expr, code, postorder

LINE = 30
"""Characters in a line of a box."""

MOST_BOXES = 400
"""Boxes of the largest graph that is drawn."""


PARTS = {"prelude": "prelude", "block": "loop", "coda": "readout"}
"""What the sections of a model are called in a drawing."""


@dataclass(eq=False)
class Box:
    """A source, head, map or result: what it does in short lines, and the whole of it as code.

    ``inputs`` are the boxes that it reads, each as a value, key or query, or as nothing else ("").
    """

    kind: str
    title: str
    lines: list[str]
    code: str
    inputs: list[tuple[Box, str]] = field(default_factory=list)


def expression_boxes(results: Mapping[str, nodes.Seq]) -> list[Box]:
    """The boxes behind some named results, children before parents.

    Raises:
        InputError: there are too many to be looked at.
    """
    unseen = nodes.Full | nodes.Select
    drawn = [node for node in postorder(results.values()) if not isinstance(node, unseen)]
    parents = Counter(child for node in drawn for child, _ in _reads(node))
    parents.update(results.values())
    in_a_formula = {child for node in drawn if _is_map(node) for child in node.children}
    named = {node for node in drawn if getattr(node, "name", None)} | set(results.values())
    own = [
        node
        for node in drawn
        if not _is_map(node) or node in named or parents[node] != 1 or node not in in_a_formula
    ]
    if len(own) > MOST_BOXES:
        raise InputError(
            "what to draw",
            expected=f"at most {MOST_BOXES} boxes",
            given=str(len(own)),
            fix="Draw a part of it: any subexpression can be drawn.",
        )
    box_of: dict[Expr, Box] = {}
    names: dict[Expr, str] = {}
    numbers = {"map": count(1), "head": count(1)}
    for node in own:
        box_of[node] = box = _box(node, names, numbers)
        names[node] = box.title
        box.inputs += _inputs(node, box_of)
    ends = []
    for name, x in results.items():
        whole = code(x, short=True)
        line = f"= {box_of[x].title if x in box_of else whole}"
        ends.append(Box("result", name, [line], whole, [(box_of[x], "")] if x in box_of else []))
    return [*box_of.values(), *ends]


def _is_map(node: Expr) -> bool:
    return isinstance(node, nodes.Elementwise | nodes.TokMap)


def _reads(node: Expr) -> list[tuple[Expr, str]]:
    """What a node reads, and as what."""
    if isinstance(node, nodes.ShiftRight):
        return [(node.x, "value")]
    if isinstance(node, nodes.Aggregate | nodes.SelWidth):
        value = [(node.value, "value")] if isinstance(node, nodes.Aggregate) else []
        return [*zip(node.selector.children, ("key", "query")), *value]
    return [(child, "") for child in node.children]


def _inputs(node: Expr, box_of: Mapping[Expr, Box]) -> list[tuple[Box, str]]:
    """The boxes that a box reads: those of its node, and of the maps that it swallowed."""
    found: dict[tuple[Box, str], None] = {}
    stack = _reads(node)[::-1]
    while stack:
        child, role = stack.pop()
        if child in box_of:
            found[box_of[child], role] = None
        elif not isinstance(child, nodes.Full):
            stack += [(below, role) for below, _ in _reads(child)][::-1]
    return list(found)


def _box(node: Expr, names: Mapping[Expr, str], numbers: Mapping[str, Iterator[int]]) -> Box:
    whole = code(node, short=True)

    def text(x: Expr) -> str:
        return str(x.value) if isinstance(x, nodes.Full) else code(x, short=True, names=names)

    match node:
        case nodes.Tokens() | nodes.Indices() | nodes.Var():
            return Box("source", whole, [], whole)
        case nodes.TokMap() if node.name:
            otherwise = "" if node.default is None else f", else {node.default}"
            what = f"{text(node.x)}: {dict(node.table)}{otherwise}"
            return Box("map", node.name, _wrapped(what), whole)
        case nodes.TokMap() | nodes.Elementwise():
            return Box("map", f"map {next(numbers['map'])}", _wrapped(text(node)), whole)
        case nodes.ShiftRight():
            what = f"{text(node.x)}, {node.n} to the left"
            return Box("head", node.selector.name or "shift", _wrapped(what), whole)
    assert isinstance(node, nodes.Aggregate | nodes.SelWidth)
    select = node.selector
    assert isinstance(select, nodes.Select)  # there is no other selector
    holds = select.predicate if isinstance(select.predicate, str) else "in pairs with"
    where = f"where {text(select.k)} {holds} {text(select.q)}"
    if holds == "true":
        where = "of all before"
    if isinstance(node, nodes.SelWidth):
        what = f"number of keys {where}"
    else:
        what = f"{node.mode} of {text(node.value)} {where}, else {node.default}"
    return Box("head", select.name or f"head {next(numbers['head'])}", _wrapped(what), whole)


def _wrapped(text: str) -> list[str]:
    """A text in the lines of a box, cut off after six."""
    lines = textwrap.wrap(text, LINE, break_long_words=True)
    return lines if len(lines) <= 6 else [*lines[:6], "…"]


def circuit_boxes(circuit: Circuit) -> dict[str, list[Box]]:
    """The boxes of each section: persistent features, heads, neurons, and what is written.

    Neurons that wipe are left out; scratch features are the boxes that write them.
    """
    found = {title: _section_boxes(circuit, section) for section, title in PARTS.items()}
    return {title: boxes for title, boxes in found.items() if boxes}


def _section_boxes(circuit: Circuit, section: str) -> list[Box]:
    """The boxes of one section, in the order in which it computes them."""
    features = {f.id: f for f in circuit.features}
    read = {source for source, _ in circuit.edges}
    box_of: dict[str, Box] = {}
    boxes, ends = [], []
    working = (*circuit.heads, *(group for group in circuit.neurons if group.writes))
    nodes = [node for node in working if node.section == section]
    for node in sorted(nodes, key=lambda n: (n.layer, isinstance(n, NeuronGroup))):
        box = _part_box(node, features)
        for source in (source for source, target in circuit.edges if target == node.id):
            if source not in box_of:
                name, n_values = features[source].name, len(features[source].values)
                lines = [f"{n_values} values"] if n_values != 1 else []
                box_of[source] = Box("source", name, lines, name)
                boxes.append(box_of[source])
            box.inputs.append((box_of[source], ""))
        boxes.append(box)
        for target in (target for source, target in circuit.edges if source == node.id):
            if target in read and features[target].role == "scratch":
                box_of[target] = box
            else:  # what nothing reads, the unembedding does
                ends.append((target if target in read else "output", box))
    after = " after a loop" if section == "block" else ""
    return [*boxes, *(Box("result", f"{n}{after}", [], n, [(box, "")]) for n, box in ends)]


def _part_box(node: HeadNode | NeuronGroup, features: Mapping[str, FeatureNode]) -> Box:
    if isinstance(node, HeadNode):
        where = f"layer {node.layer}, head {node.head}"
        return Box("head", node.selector, [where], node.attends_to)
    written = features[node.writes]
    where = f"layer {node.layer}, {len(node.neurons)} neurons: {node.how}"
    if written.role == "variable":
        return Box("map", written.name, [where], written.name)
    return Box("map", "map", [*_wrapped(written.name), where], written.name)
