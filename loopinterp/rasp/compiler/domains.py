"""Stage 2, infer domains: the finite set of values that every expression can take.

Each value will have a direction of its own, so every set must be finite and small. The sets are
those of abstract interpretation: a set of an operation is the image of the sets of its arguments,
and those of the variables are the least ones that hold what ``prepare`` gives and are closed under
``step``. They may hold values that never occur, and never lack one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.validate import Source
from loopinterp.rasp.expr import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    Seq,
    SelWidth,
    Tokens,
    TokMap,
    Var,
)
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr
from loopinterp.rasp.ops import OPS

MAX_VALUES = 1_024
"""Most values of one expression: each is a direction of the residual stream."""

MAX_COMBINATIONS = 2**22
"""Most combinations of argument values that one operation is tried on."""

Values = np.ndarray
"""Sorted distinct integers."""


def infer_domains(source: Source) -> dict[Expr, Values]:
    """The values of every sequence of a program, on inputs of up to ``max_length`` positions.

    Raises:
        InputError: an expression has too many values, or a value that it cannot work with; the
            message names it.

    Example:
        >>> from loopinterp.rasp.compiler.validate import validate
        >>> source = validate("copy", max_length=4)
        >>> [infer_domains(source)[x].tolist() for x in source.step.values()]
        [[0, 1, 2], [-1, 0, 1, 2]]
    """
    domains: dict[Expr, Values] = {}
    _infer(source, source.prepare.values(), domains)
    state = {name: domains[x] for name, x in source.prepare.items()}
    steps = [node for node in postorder(source.step.values()) if node.variables]
    _infer(source, source.step.values(), domains, skip=steps)
    while True:
        domains.update({Var(name): values for name, values in state.items()})
        for node in steps:
            if isinstance(node, Seq) and not isinstance(node, Var):
                domains[node] = _of_node(source, node, domains)
        grown = {name: _union(state[name], domains[x]) for name, x in source.step.items()}
        for name, values in grown.items():
            _check_size(source, f"variable {name!r} of program {source.program.name}", values)
        if all(len(grown[name]) == len(state[name]) for name in state):
            break
        state = grown
    _infer(source, [source.finish], domains)
    return domains


def _infer(
    source: Source, roots: Iterable[Seq], domains: dict[Expr, Values], skip: Iterable[Expr] = ()
) -> None:
    skipped = set(skip)
    for node in postorder(roots):
        if isinstance(node, Seq) and node not in domains and node not in skipped:
            domains[node] = _of_node(source, node, domains)


def _of_node(source: Source, node: Seq, domains: dict[Expr, Values]) -> Values:
    if isinstance(node, Tokens):
        values = np.arange(len(source.program.inputs))
    elif isinstance(node, Indices):
        values = np.arange(source.max_length)
    elif isinstance(node, Full):
        values = np.array([node.value])
    elif isinstance(node, TokMap):
        values = np.unique(mapped(source, node, domains[node.x]))
    elif isinstance(node, Elementwise):
        values = _of_elementwise(source, node, [domains[x] for x in node.args])
    elif isinstance(node, Aggregate):
        values = _of_aggregate(node, domains)
    elif isinstance(node, SelWidth):
        values = np.arange(source.max_length + 1)
    else:
        raise AssertionError(f"no domain of {type(node).__name__}")
    _check_size(source, node, values)
    return values


def mapped(source: Source, node: TokMap, x: np.ndarray) -> np.ndarray:
    """What a table gives for each value.

    Raises:
        InputError: it lacks one, and has no default.
    """
    table = dict(node.table)
    missing = [int(v) for v in x.reshape(-1).tolist() if v not in table]
    if missing and node.default is None:
        raise InputError(
            f"table of {source.where(node)}",
            expected=f"an entry for each of the {x.size} values it is given, or a default",
            given=f"none for {missing[0]}",
            fix=f"Add {missing[0]} to the table, or pass default=.",
        )
    new = [table.get(v, node.default) for v in x.reshape(-1).tolist()]
    return np.array(new, dtype=np.int64).reshape(x.shape)


def applied(source: Source, node: Elementwise, args: list[np.ndarray]) -> np.ndarray:
    """An operation on arrays that are broadcast against each other.

    Raises:
        InputError: a division by zero.
    """
    if node.op in ("floordiv", "mod") and bool((args[1] == 0).any()):
        raise InputError(
            source.where(node),
            expected="a divisor that is never 0",
            given=f"{node.args[1]!r}, which may be 0",
            fix="Divide by larger(x, 1), or by a constant.",
        )
    apply: Callable[..., Any] = OPS[node.op].apply
    return apply(*(torch.from_numpy(np.array(x)) for x in args)).numpy()


def _of_elementwise(source: Source, node: Elementwise, args: list[Values]) -> Values:
    if node.op == "where":
        condition, x, y = args
        parts = ([x] if bool(condition.any()) else []) + ([y] if 0 in condition else [])
        return np.unique(np.concatenate(parts))
    combinations = int(np.prod([len(x) for x in args]))
    if combinations > MAX_COMBINATIONS:
        raise _too_many(source.where(node), f"{combinations:,} combinations of its arguments")
    grid = np.meshgrid(*args, indexing="ij")
    return np.unique(applied(source, node, list(grid)))


def _of_aggregate(node: Aggregate, domains: dict[Expr, Values]) -> Values:
    values = domains[node.value]
    selector = node.selector
    assert isinstance(selector, Select)
    one_key = isinstance(selector.k, Indices) and selector.predicate == "=="
    if node.mode == "mean" and not one_key and len(values) > 1:
        # A mean of several lies between them, and is truncated.
        if int(values[-1]) - int(values[0]) > 2 * MAX_VALUES:
            values = np.arange(2 * MAX_VALUES + 1)  # too many, however many exactly
        else:
            values = np.arange(values[0], values[-1] + 1)
    return _union(values, np.array([node.default]))


def _union(x: Values, y: Values) -> Values:
    return np.union1d(x, y)


def _check_size(source: Source, node: Expr | str, values: Values) -> None:
    if len(values) > MAX_VALUES:
        what = node if isinstance(node, str) else source.where(node)
        raise _too_many(what, "more, so far up to " + repr(int(values[-1])))


def _too_many(what: str, given: str) -> InputError:
    return InputError(
        what,
        expected=f"at most {MAX_VALUES:,} values, each of which gets a direction",
        given=given,
        fix="Bound it with smaller(x, indices) or x % m, or compile for a smaller max_length.",
    )
