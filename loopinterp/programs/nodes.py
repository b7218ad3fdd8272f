"""Nodes of an expression graph: interned, walked without recursion, written as code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from loopinterp.core.errors import InputError

# The deepest expression; characters of code after which a subexpression is left out as ``…``
MAX_DEPTH, MAX_LENGTH = 5_000, 2_000
_Node = TypeVar("_Node")
_NODES: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


class _Interned(type):
    """Calling the class returns the one node with these fields."""

    def __call__(cls: Callable[..., _Node], *args: Any, **kwargs: Any) -> _Node:
        node = type.__call__(cls, *args, **kwargs)  # type: ignore[arg-type]
        # An equal node that somebody holds takes the place of the new one.
        return _NODES.setdefault(node.__reduce__(), node)


class Expr(metaclass=_Interned):
    """A node of an expression graph."""

    form: ClassVar[str]  # how it is written, in terms of its fields
    children: tuple[Expr, ...]  # the nodes it is made from, in order
    variables: frozenset[str]  # of the loop program, that it or a node below reads
    depth: int  # longest path to a leaf

    def __post_init__(self) -> None:
        _, values = self.__reduce__()
        # Fields are nodes, tuples of nodes, or plain values.
        flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
        children = tuple(v for v in flat if isinstance(v, Expr))
        self._set("children", children)
        self._set("variables", frozenset().union(*(c.variables for c in children)))
        self._set("depth", 1 + max((c.depth for c in children), default=0))
        if self.depth > MAX_DEPTH:
            expected, got = f"a depth of at most {MAX_DEPTH}", "a deeper one"
            fix = "Keep intermediate values in variables of a loop program."
            raise InputError("expression", expected=expected, given=got, fix=fix)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        """This node's code, given that of the nodes below it; see :func:`code`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return self.form.format(**{name: text.get(x, x) for name, x in fields.items()})

    def __repr__(self) -> str:
        return code(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, field.name) for field in fields)


def postorder(roots: Iterable[Expr], known: Collection[Expr] = ()) -> list[Expr]:
    """Every node below the roots, once, children before parents; ``known`` ones are left out."""
    seen = set(known)
    order: list[Expr] = []
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
    return order


def code(expr: Expr, *, short: bool = False, names: Mapping[Expr, str] | None = None) -> str:
    """The expression as code of :mod:`loopinterp.programs.language`; a very large one is abridged.

    ``short`` writes named tables by name only; ``names`` replaces subexpressions.
    """
    text = dict(names or {})
    for node in postorder([expr], text):
        written = node.written(text, short=short)
        text[node] = written if len(written) <= MAX_LENGTH else "…"
    return text[expr]


def rewritten(roots: Iterable[Expr], change: Callable[[Expr, Expr], Expr]) -> dict[Expr, Expr]:
    """Every node below the roots -> ``change(node, node rebuilt from changed children)``."""
    new: dict[Expr, Expr] = {}

    def renewed(field: Any) -> Any:
        if isinstance(field, tuple):
            return tuple(map(renewed, field))
        return new[field] if isinstance(field, Expr) else field

    for node in postorder(roots):
        kind, fields = node.__reduce__()
        new[node] = change(node, kind(*map(renewed, fields)))
    return new
