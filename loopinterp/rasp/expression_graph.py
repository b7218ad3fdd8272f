"""A program or an expression as a graph: what is read, the heads that select, and the maps.

A box is what one part of a transformer would do. Sources are the tokens, the positions and
the variables; a head is one selection with what it reads; a map is a whole elementwise formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from loopinterp.errors import InputError
from loopinterp.plotting.circuit_graph import CircuitGraph
from loopinterp.plotting.circuit_parts import MOST_NODES, GraphEdge, GraphNode
from loopinterp.rasp import expr as nodes
from loopinterp.rasp.node import Expr, code, postorder
from loopinterp.rasp.program import LoopProgram

PARTS = {"prelude": "prepare", "loop": "step", "readout": "finish"}
"""Section of the drawing -> the part of a program that it shows."""

_INPUTS = {"tokens": "tokens", "indices": "positions"}


@dataclass(eq=False)
class Box:
    """A source, head or map: what it does in words, and the whole of it as code.

    ``inputs`` are the boxes that it reads, each as a value, key or query, or as nothing else ("").
    """

    kind: str
    title: str
    does: str
    code: str
    inputs: list[tuple[Box, str]] = field(default_factory=list)


def expression_boxes(results: Mapping[str, nodes.Seq]) -> dict[Expr, Box]:
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
    if len(own) > MOST_NODES:
        raise InputError(
            "what to draw",
            expected=f"at most {MOST_NODES} boxes",
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
    return box_of


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
            return Box("source", whole, "", whole)
        case nodes.TokMap() if node.name:
            otherwise = "" if node.default is None else f", else {node.default}"
            what = f"{text(node.x)}: {dict(node.table)}{otherwise}"
            return Box("map", node.name, what, whole)
        case nodes.TokMap() | nodes.Elementwise():
            return Box("map", f"map {next(numbers['map'])}", text(node), whole)
        case nodes.ShiftRight():
            what = f"{text(node.x)}, {node.n} to the left"
            return Box("head", node.selector.name or "shift", what, whole)
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
    return Box("head", select.name or f"head {next(numbers['head'])}", what, whole)


def program_graph(program: LoopProgram) -> CircuitGraph:
    """The graph of a program's expressions: prepare, a loop, finish."""
    parts = {
        "prelude": dict(program.prepare),
        "loop": dict(program.step),
        "readout": {"output": program.finish},
    }
    title = f"{program.name}: T(n) = {program.n_loops}"
    return _graph(title, parts, variables=program.variables, text=str(program))


def expression_graph(x: nodes.Seq) -> CircuitGraph:
    """The graph of an expression."""
    variables = tuple(sorted(x.variables))
    return _graph(
        code(x, short=True)[:60], {"readout": {"output": x}}, variables=variables, text=""
    )


def _graph(
    title: str,
    parts: Mapping[str, Mapping[str, nodes.Seq]],
    *,
    variables: tuple[str, ...],
    text: str,
) -> CircuitGraph:
    found: dict[str, GraphNode] = {
        f"var {name}": GraphNode(f"var {name}", "variable", name, "loop", -1, "variable", (name,))
        for name in variables
    }
    edges: dict[GraphEdge, None] = {}
    for section, results in parts.items():
        boxes = expression_boxes(results)
        place: dict[Box, str] = {}
        stage: dict[Box, int] = {}
        for expr, box in boxes.items():
            if isinstance(expr, nodes.Var):
                place[box], stage[box] = f"var {expr.name}", -1
                continue
            if box.kind == "source":
                place[box], stage[box] = box.title, -1
                found[box.title] = GraphNode(box.title, "input", _INPUTS[box.title], "input")
                continue
            stage[box] = 1 + max((stage[child] for child, _ in box.inputs), default=-1)
            place[box] = f"{section} {len(found)}"
            found[place[box]] = _node(place[box], box, section, stage[box])
            edges.update(
                {GraphEdge(place[c], place[box], role=role): None for c, role in box.inputs}
            )
        for name, x in results.items():
            to, lag = (f"var {name}", int(section == "loop")) if section != "readout" else (name, 0)
            if section == "readout":
                last = 1 + max(stage.values(), default=0)
                found[name] = GraphNode(name, "readout", name, section, max(last, 0))
            if x in boxes:
                edges[GraphEdge(place[boxes[x]], to, lag=lag)] = None
    return CircuitGraph(title, tuple(found.values()), tuple(edges), text)


def _node(name: str, box: Box, section: str, stage: int) -> GraphNode:
    kind = "head" if box.kind == "head" else "neurons"
    unnamed = box.kind == "map" and box.title.startswith("map ")
    label = f"{box.title}: {box.does}" if kind == "head" or unnamed else box.title
    names = () if unnamed else (box.title,)
    facts = (("Computes", box.does), ("As code", box.code))
    return GraphNode(name, kind, label, section, stage, names=names, facts=facts)
