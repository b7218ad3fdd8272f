"""Walking an expression graph without recursion."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loopinterp.rasp.expr import Select, ShiftRight
from loopinterp.rasp.node import Expr


def postorder(roots: Iterable[Expr], known: Collection[Expr] = ()) -> list[Expr]:
    """Every node below the roots, once, children before parents.

    Args:
        roots: Where to start.
        known: Nodes to leave out, with what only they need.

    Example:
        >>> from loopinterp.rasp import tokens
        >>> postorder([(tokens + 1) & (tokens + 1)])
        [tokens, full(1), tokens + 1, (tokens + 1) & (tokens + 1)]
    """
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


def selects(roots: Iterable[Expr]) -> list[Select]:
    """Every selection below the roots; a shift counts as the one that it stands for."""
    nodes = [node.selector if isinstance(node, ShiftRight) else node for node in postorder(roots)]
    return [node for node in dict.fromkeys(nodes) if isinstance(node, Select)]


def selectors(roots: Iterable[Expr]) -> dict[str, Select]:
    """:func:`selects` by name; a selector without a name goes by its code."""
    return {select.name or repr(select): select for select in selects(roots)}
