"""An independent reading of the language: one sequence at a time, in Python integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from loopinterp.programs import Seq, full, indices, tokens, var
from loopinterp.programs.expressions import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    SelWidth,
    ShiftRight,
    Tokens,
    TokMap,
    Var,
)
from loopinterp.programs.language import (
    aggregate,
    eq,
    larger,
    ne,
    sel_width,
    select,
    seq_map,
    shift_right,
    smaller,
    tok_map,
    where,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": lambda x, y: int(x < y),
    "le": lambda x, y: int(x <= y),
    "gt": lambda x, y: int(x > y),
    "ge": lambda x, y: int(x >= y),
    "and": lambda x, y: int(bool(x) and bool(y)),
    "or": lambda x, y: int(bool(x) or bool(y)),
    "xor": lambda x, y: int(bool(x) != bool(y)),
    "not": lambda x: int(not x),
    "neg": operator.neg,
    "abs": abs,
    "eq": lambda x, y: int(x == y),
    "ne": lambda x, y: int(x != y),
    "smaller": min,
    "larger": max,
    "where": lambda c, x, y: x if c else y,
}

PREDICATES: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "true": lambda k, q: True,
}


def read(node: Any, x: list[int], variables: Mapping[str, list[int]]) -> list:
    """The values of a sequence, or the rows (queries) of a selector."""

    def sub(child: Any) -> list:
        return read(child, x, variables)

    positions = range(len(x))
    if isinstance(node, Tokens):
        return list(x)
    if isinstance(node, Indices):
        return list(positions)
    if isinstance(node, Full):
        return [node.value] * len(x)
    if isinstance(node, Var):
        return list(variables[node.name])
    if isinstance(node, TokMap):
        table = dict(node.table)
        return [
            table[v] if node.default is None else table.get(v, node.default) for v in sub(node.x)
        ]
    if isinstance(node, Elementwise):
        return [OPERATIONS[node.op](*values) for values in zip(*map(sub, node.args))]
    if isinstance(node, ShiftRight):
        value = sub(node.x)
        return [value[i - node.n] if i >= node.n else node.default for i in positions]
    if isinstance(node, Select):
        k, q = sub(node.k), sub(node.q)
        predicate = node.predicate
        holds = (
            PREDICATES[predicate]
            if isinstance(predicate, str)
            else lambda a, b: (a, b) in predicate
        )
        return [
            [holds(k[j], q[i]) and (j <= i or not node.causal) for j in positions]
            for i in positions
        ]
    if isinstance(node, SelWidth):
        return [sum(row) for row in sub(node.selector)]
    if isinstance(node, Aggregate):
        value = sub(node.value)
        return [reduce([v for v, on in zip(value, row) if on], node) for row in sub(node.selector)]
    raise TypeError(node)


def reduce(chosen: list[int], node: Aggregate) -> int:
    if not chosen:
        return node.default
    if node.mode == "mean":
        total = sum(chosen)
        return abs(total) // len(chosen) * (1 if total >= 0 else -1)
    return max(chosen) if node.mode == "max" else min(chosen)


SMALL = st.integers(-3, 3)
LEAVES: list[Seq] = [tokens, indices, var("u"), var("v")]
TWO_PLACED = ["add", "sub", "mul", "lt", "le", "gt", "ge", "and", "or", "xor"]


def _selectors(inner: st.SearchStrategy) -> st.SearchStrategy:
    predicates = st.sampled_from(list(PREDICATES)) | st.lists(st.tuples(SMALL, SMALL), max_size=4)
    return st.builds(select, inner, inner, predicates, causal=st.booleans())


def _grow(inner: st.SearchStrategy) -> st.SearchStrategy:
    tables = st.dictionaries(SMALL, SMALL, max_size=4)
    modes = st.sampled_from(["mean", "max", "min"])
    return st.one_of(
        st.builds(seq_map, st.sampled_from(TWO_PLACED), inner, inner),
        st.builds(
            lambda f, x, y: f(x, y), st.sampled_from([eq, ne, smaller, larger]), inner, inner
        ),
        st.builds(lambda f, x: f(x), st.sampled_from([abs, operator.neg, operator.invert]), inner),
        # A divisor that is never 0.
        st.builds(
            lambda op, x, y: seq_map(op, x, where(y, y, 1)),
            st.sampled_from(["floordiv", "mod"]),
            inner,
            inner,
        ),
        st.builds(where, inner, inner, inner),
        st.builds(tok_map, inner, tables, default=SMALL),
        st.builds(shift_right, inner, st.integers(1, 9), default=SMALL),
        st.builds(aggregate, _selectors(inner), inner, modes, SMALL),
        st.builds(sel_width, _selectors(inner)),
    )


SEQUENCES = st.recursive(st.sampled_from(LEAVES) | st.builds(full, SMALL), _grow, max_leaves=12)
SELECTORS = _selectors(SEQUENCES)
