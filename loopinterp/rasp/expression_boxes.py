"""An expression graph in boxes: what is read, the heads that select, and the maps between them.

A box is what one part of a transformer would do. Sources are the tokens, the positions and the
variables; a head is one selection with what it reads; a map is a whole elementwise formula.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from loopinterp.errors import InputError
from loopinterp.rasp.expr import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    SelWidth,
    Seq,
    ShiftRight,
    Tokens,
    TokMap,
    Var,
)
from loopinterp.rasp.expression_code import code
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr

LINE = 30
"""Characters in a line of a box."""

MOST_BOXES = 400
"""Boxes of the largest graph that is drawn."""


@dataclass(eq=False)
class Box:
    """One box.

    Attributes:
        kind: ``"source"``, ``"head"``, ``"map"`` or ``"result"``.
        title: Its name.
        lines: What it does, in short lines.
        code: The whole expression.
        inputs: (box, role) of what it reads; the role is value, key, query or "".
    """

    kind: str
    title: str
    lines: list[str]
    code: str
    inputs: list[tuple[Box, str]] = field(default_factory=list)


def expression_boxes(results: Mapping[str, Seq]) -> list[Box]:
    """The boxes behind some named results, children before parents.

    Raises:
        InputError: there are too many to be looked at.
    """
    nodes = [n for n in postorder(results.values()) if not isinstance(n, Full | Select)]
    parents = Counter(child for node in nodes for child, _ in _reads(node))
    parents.update(results.values())
    in_a_formula = {child for node in nodes if _is_map(node) for child in node.children}
    named = {node for node in nodes if getattr(node, "name", None)} | set(results.values())
    own = [
        node
        for node in nodes
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
    numbers: Counter[str] = Counter()
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
    return isinstance(node, Elementwise | TokMap)


def _reads(node: Expr) -> list[tuple[Expr, str]]:
    """What a node reads, and as what."""
    if isinstance(node, ShiftRight):
        return [(node.x, "value")]
    if isinstance(node, Aggregate | SelWidth):
        select = node.selector
        assert isinstance(select, Select)  # there is no other selector
        value = [(node.value, "value")] if isinstance(node, Aggregate) else []
        return [(select.k, "key"), (select.q, "query"), *value]
    return [(child, "") for child in node.children]


def _inputs(node: Expr, box_of: Mapping[Expr, Box]) -> list[tuple[Box, str]]:
    """The boxes that a box reads: those of its node, and of the maps that it swallowed."""
    found: dict[tuple[Box, str], None] = {}
    stack = _reads(node)[::-1]
    while stack:
        child, role = stack.pop()
        if child in box_of:
            found[box_of[child], role] = None
        elif not isinstance(child, Full):
            stack += [(below, role) for below, _ in _reads(child)][::-1]
    return list(found)


def _box(node: Expr, names: Mapping[Expr, str], numbers: Counter[str]) -> Box:
    whole = code(node, short=True)
    if isinstance(node, Tokens | Indices | Var):
        return Box("source", whole, [], whole)

    def text(x: Expr) -> str:
        return str(x.value) if isinstance(x, Full) else code(x, short=True, names=names)

    if isinstance(node, TokMap) and node.name:
        otherwise = "" if node.default is None else f", else {node.default}"
        what = f"{text(node.x)}: {dict(node.table)}{otherwise}"
        return Box("map", node.name, wrapped(what), whole)
    if _is_map(node):
        return Box("map", _numbered("map", numbers), wrapped(text(node)), whole)
    if isinstance(node, ShiftRight):
        what = f"{text(node.x)}, {node.n} to the left"
        return Box("head", node.selector.name or "shift", wrapped(what), whole)
    assert isinstance(node, Aggregate | SelWidth) and isinstance(node.selector, Select)
    select = node.selector
    holds = select.predicate if isinstance(select.predicate, str) else "in pairs with"
    where = f"where {text(select.k)} {holds} {text(select.q)}"
    if holds == "true":
        where = "of all before"
    if isinstance(node, SelWidth):
        what = f"number of keys {where}"
    else:
        what = f"{node.mode} of {text(node.value)} {where}, else {node.default}"
    return Box("head", select.name or _numbered("head", numbers), wrapped(what), whole)


def _numbered(kind: str, numbers: Counter[str]) -> str:
    numbers[kind] += 1
    return f"{kind} {numbers[kind]}"


def wrapped(text: str) -> list[str]:
    """A text in the lines of a box, cut off after six."""
    lines = textwrap.wrap(text, LINE, break_long_words=True)
    return lines if len(lines) <= 6 else [*lines[:6], "…"]
