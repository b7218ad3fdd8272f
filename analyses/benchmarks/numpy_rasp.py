"""RASP-L for one sequence at a time in NumPy: the yardstick that batches are compared with.

It reads the same expressions, primitive by primitive as arXiv 2310.16028 defines them. Selection
asks a Python predicate about every pair of positions, as the published code does; with
``vectorised=True`` NumPy compares all pairs at once instead, and maps whole arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loopinterp.programs import LoopProgram
from loopinterp.programs.expressions import (
    Aggregate,
    Elementwise,
    Expr,
    Full,
    Indices,
    Select,
    SelWidth,
    ShiftRight,
    Tokens,
    TokMap,
    Var,
    postorder,
)

Array = np.ndarray[Any, Any]

PREDICATES: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "true": lambda k, q: (k == k) & (q == q),
}

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda x, y: (x != 0) & (y != 0),
    "or": lambda x, y: (x != 0) | (y != 0),
    "xor": lambda x, y: (x != 0) ^ (y != 0),
    "not": lambda x: x == 0,
    "neg": operator.neg,
    "abs": abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "smaller": np.minimum,
    "larger": np.maximum,
    "where": lambda c, x, y: np.where(c != 0, x, y),
}
SCALAR = {"smaller": min, "larger": max, "where": lambda c, x, y: x if c else y}


def evaluate(expr: Expr, x: Array, variables: Mapping[str, Array], *, vectorised: bool) -> Array:
    """The values of an expression on one sequence."""
    values: dict[Expr, Array] = {}
    for node in postorder([expr]):
        values[node] = _compute(node, values, x, variables, vectorised)
    return values[expr]


def run(program: LoopProgram, x: Array, n_loops: int, *, vectorised: bool) -> Array:
    """The answer of a program to one sequence."""
    state = _assign(program.prepare, x, {}, vectorised)
    for _ in range(n_loops):
        state = {**state, **_assign(program.step, x, state, vectorised)}
    return evaluate(program.finish, x, state, vectorised=vectorised)


def _assign(
    parts: Mapping[str, Any], x: Array, state: Mapping[str, Array], vectorised: bool
) -> dict[str, Array]:
    values: dict[Expr, Array] = {}
    for node in postorder(parts.values()):
        values[node] = _compute(node, values, x, state, vectorised)
    return {name: values[node] for name, node in parts.items()}


def _compute(
    node: Any,
    values: Mapping[Expr, Array],
    x: Array,
    variables: Mapping[str, Array],
    vectorised: bool,
) -> Array:
    if isinstance(node, Tokens):
        return x
    if isinstance(node, Indices):
        return np.arange(len(x), dtype=int)
    if isinstance(node, Full):
        return np.full_like(x, node.value, dtype=int)
    if isinstance(node, Var):
        return variables[node.name]
    if isinstance(node, TokMap):
        table = dict(node.table)
        return np.array([table.get(int(value), node.default) for value in values[node.x]])
    if isinstance(node, Elementwise):
        args = [values[arg] for arg in node.args]
        if vectorised:
            return OPERATIONS[node.op](*args).astype(int)
        function = SCALAR.get(node.op, OPERATIONS[node.op])
        return np.array([function(*each) for each in zip(*args)]).astype(int)
    if isinstance(node, ShiftRight):
        places = np.arange(len(x), dtype=int)
        back = _select(places, places - node.n, "==", True, vectorised)
        return _aggregate(back, values[node.x], "mean", node.default)
    if isinstance(node, Select):
        k, q = values[node.k], values[node.q]
        return _select(k, q, node.predicate, node.causal, vectorised)
    if isinstance(node, SelWidth):
        return np.dot(values[node.selector], np.ones(len(x))).astype(int)
    assert isinstance(node, Aggregate)
    return _aggregate(values[node.selector], values[node.value], node.mode, node.default)


def _select(k: Array, q: Array, predicate: Any, causal: bool, vectorised: bool) -> Array:
    if isinstance(predicate, str):
        holds = PREDICATES[predicate]
        if vectorised:
            selected = holds(k[None, :], q[:, None])
            return np.tril(selected) if causal else selected
    else:
        pairs = set(predicate)
        holds = lambda a, b: (a, b) in pairs  # noqa: E731
    selected = np.zeros((len(q), len(k)), dtype=bool)
    for i in range(len(q)):
        for j in range(i + 1 if causal else len(k)):
            selected[i, j] = holds(k[j], q[i])
    return selected


def _aggregate(selected: Array, value: Array, mode: str, default: int) -> Array:
    if mode == "mean":
        count = np.dot(selected, np.ones(len(value)))
        out = np.full(len(value), default, dtype=float)
        np.divide(np.dot(selected, value), count, out=out, where=count != 0)
        return out.astype(int)
    reduce = np.max if mode == "max" else np.min
    out = np.full_like(value, default)
    for i, row in enumerate(selected):
        seen = np.flatnonzero(row)
        if len(seen):
            out[i] = reduce(value[seen])
    return out
