"""The nodes of an expression graph: immutable and interned, so that equality is identity."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH = 5_000
"""Deepest expression; deeper ones are refused when they are built."""

Node = TypeVar("Node")

_NODES: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


class _Interned(type):
    """Calling the class gives the one node that has those fields."""

    def __call__(cls: Callable[..., Node], *args: Any, **kwargs: Any) -> Node:
        node = type.__call__(cls, *args, **kwargs)  # type: ignore[arg-type]
        return _NODES.setdefault(node.__reduce__(), node)


class Expr(metaclass=_Interned):
    """A node of an expression graph.

    Attributes:
        children: The nodes it is made from, in order.
        variables: Names of the loop program's variables it reads, itself or below.
        depth: Longest path to a leaf.
    """

    children: tuple[Expr, ...]
    variables: frozenset[str]
    depth: int

    def __post_init__(self) -> None:
        _, values = self.__reduce__()
        flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
        children = tuple(v for v in flat if isinstance(v, Expr))
        self._set("children", children)
        self._set("variables", frozenset().union(*(c.variables for c in children)))
        self._set("depth", 1 + max((c.depth for c in children), default=0))
        if self.depth > MAX_DEPTH:
            raise InputError(
                "expression",
                expected=f"a depth of at most {MAX_DEPTH}",
                given="a deeper one",
                fix="Keep intermediate values in variables of a loop program.",
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        from loopinterp.rasp.expression_code import code

        return code(self)

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, field.name) for field in fields)
