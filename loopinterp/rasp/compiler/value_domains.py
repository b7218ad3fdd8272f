"""Stage 2, infer domains: the finite set of values that every expression can take.

Each value will have a direction of its own, so every set must be finite and small. The sets are
those of abstract interpretation: a set of an operation is the image of the sets of its arguments,
and those of the variables are the least ones that hold what ``prepare`` gives and are closed under
``step``. They may hold values that never occur, and never lack one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.lower.feature_functions import (
    FeatureFunction,
    constant,
    distinct,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.validate import ValidatedProgram
from loopinterp.rasp.expr import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    SelWidth,
    Seq,
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

RELATED_COMBINATIONS = 2**16
"""Up to here an operation is tried on what its arguments are made of, not on their values."""

Values = np.ndarray
"""Sorted distinct integers."""


def infer_domains(source: ValidatedProgram) -> dict[Expr, Values]:
    """The values of every sequence of a program, on inputs of up to ``max_length`` positions.

    Raises:
        InputError: an expression has too many values, or a value that it cannot work with; the
            message names it.

    Example:
        >>> from loopinterp.rasp.compiler.validate import validate
        >>> source = validate("copy", max_length=4)
        >>> [infer_domains(source)[x].tolist() for x in source.step.values()]
        [[0, 1, 2], [-1, 0, 1]]
    """
    known: _Known = {}
    _infer(source, source.prepare.values(), known)
    state = {name: _values(known[x]) for name, x in source.prepare.items()}
    roots = [*source.step.values(), source.finish]
    changing = [n for n in postorder(roots) if n.variables and not isinstance(n, Var)]
    _infer(source, [n for n in postorder(roots) if isinstance(n, Seq) and not n.variables], known)
    while True:
        known.update({Var(name): _leaf(values) for name, values in state.items()})
        for node in changing:
            if isinstance(node, Seq):
                known[node] = _of_node(source, node, known)
        grown = {n: _both(state[n], _values(known[x])) for n, x in source.step.items()}
        for name, values in grown.items():
            _check_size(f"variable {name!r} of program {source.program.name}", values)
        if all(len(grown[name]) == len(state[name]) for name in state):
            return {node: _values(function) for node, function in known.items()}
        state = grown


_Known = dict[Expr, FeatureFunction]
"""What an expression is, as far as that is followed: a function of some leaves."""


def _values(function: FeatureFunction) -> Values:
    return np.array(function.values)


def _both(x: Values, y: Values) -> Values:
    return distinct(np.concatenate([x, y]))


def _leaf(values: Values) -> FeatureFunction:
    return of_feature(Feature("", tuple(values.tolist())))


def _infer(source: ValidatedProgram, roots: Iterable[Seq], known: _Known) -> None:
    for node in postorder(roots, known):
        if isinstance(node, Seq):
            known[node] = _of_node(source, node, known)


def _of_node(source: ValidatedProgram, node: Seq, known: _Known) -> FeatureFunction:
    if isinstance(node, Full):
        return constant(node.value)
    if isinstance(node, (TokMap, Elementwise)):
        function = _of_operation(source, node, known)
    elif isinstance(node, Tokens):
        function = _leaf(np.arange(len(source.program.inputs)))
    elif isinstance(node, Indices):
        function = _leaf(np.arange(source.max_length))
    elif isinstance(node, Aggregate):
        function = _leaf(_of_aggregate(node, _values(known[node.value])))
    elif isinstance(node, SelWidth):
        function = _leaf(np.arange(source.max_length + 1))
    else:
        raise AssertionError(f"no domain of {type(node).__name__}")
    if len(function.values) > MAX_VALUES:
        if isinstance(node, Tokens):
            raise _too_many_tokens(source)
        _check_size(source.where(node), _values(function))
    return function


def _of_operation(
    source: ValidatedProgram, node: TokMap | Elementwise, known: _Known
) -> FeatureFunction:
    """An operation as a function of what its arguments are functions of.

    ``where(x > 0, x - 1, x)`` has no value that x has not: what an expression reads twice is the
    same both times.
    """
    args = (node.x,) if isinstance(node, TokMap) else node.args

    def apply(x: list[np.ndarray]) -> np.ndarray:
        return mapped(source, node, x[0]) if isinstance(node, TokMap) else applied(source, node, x)

    functions = [known[arg] for arg in args]
    fused = fuse(apply, functions, most=RELATED_COMBINATIONS)
    if fused is not None:
        return fused
    if isinstance(node, Elementwise) and node.op == "where":
        return _leaf(_both(_values(functions[1]), _values(functions[2])))
    apart = [_leaf(_values(function)) for function in functions]
    fused = fuse(apply, apart, most=MAX_COMBINATIONS)
    if fused is None:
        combinations = int(np.prod([len(function.values) for function in functions]))
        raise _too_many(source.where(node), f"{combinations:,} combinations of its arguments")
    return _leaf(_values(fused))


def mapped(source: ValidatedProgram, node: TokMap, x: np.ndarray) -> np.ndarray:
    """What a table gives for each value.

    Raises:
        InputError: it lacks one, and has no default.
    """
    keys, new = _arrays(node)
    place = np.searchsorted(keys, x).clip(max=max(len(keys) - 1, 0))
    known = keys[place] == x if len(keys) else np.zeros(x.shape, dtype=bool)
    if node.default is None and not known.all():
        missing, number = x[~known].min(), len(distinct(x))
        raise InputError(
            f"table of {source.where(node)}",
            expected=f"an entry for each of the {number} values it is given, or a default",
            given=f"none for {missing}",
            fix=f"Add {missing} to the table, or pass default=.",
        )
    if not len(keys):
        return np.full(x.shape, node.default)
    return np.where(known, new[place], 0 if node.default is None else node.default)


@lru_cache(maxsize=64)
def _arrays(node: TokMap) -> tuple[np.ndarray, np.ndarray]:
    """Keys of a table, in order, and what it gives for them."""
    entries = np.array(sorted(node.table), dtype=np.int64).reshape(-1, 2)
    return entries[:, 0], entries[:, 1]


def applied(source: ValidatedProgram, node: Elementwise, args: list[np.ndarray]) -> np.ndarray:
    """An operation on arrays of one shape.

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


def _of_aggregate(node: Aggregate, values: Values) -> Values:
    selector = node.selector
    assert isinstance(selector, Select)
    one_key = isinstance(selector.k, Indices) and selector.predicate == "=="
    if node.mode == "mean" and not one_key and len(values) > 1:
        # A mean of several lies between them, and is truncated.
        span = min(int(values[-1]) - int(values[0]), 2 * MAX_VALUES)  # too many, if that many
        values = values[0] + np.arange(span + 1)
    return _both(values, np.array([node.default]))


def _check_size(what: str, values: Values) -> None:
    if len(values) > MAX_VALUES:
        raise _too_many(what, f"{len(values):,} or more, up to {int(values[-1]):,}")


def _too_many_tokens(source: ValidatedProgram) -> InputError:
    return InputError(
        f"tokens of program {source.program.name}",
        expected=f"at most {MAX_VALUES:,} input tokens, each of which gets a direction",
        given=f"{len(source.program.inputs):,}",
        fix="List fewer inputs.",
    )


def _too_many(what: str, given: str) -> InputError:
    return InputError(
        what,
        expected=f"at most {MAX_VALUES:,} values, each of which gets a direction",
        given=given,
        fix="Bound it with smaller(x, indices) or x % m, or compile for a smaller max_length.",
    )
