"""Stage 2, infer domains: the finite set of values that every expression can take.

Each value will have a direction of its own, so every set must be finite and small. The sets are
those of abstract interpretation: a set of an operation is the image of the sets of its arguments,
and those of the variables are the least ones that hold what ``prepare`` gives and are closed under
``step``. They may hold values that never occur, and never lack one that does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import expr as nodes
from loopinterp.rasp.compiler.lower.feature_functions import (
    FeatureFunction,
    constant,
    distinct,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.validate import ValidatedProgram
from loopinterp.rasp.interpreter import apply_operation
from loopinterp.rasp.node import Expr, postorder

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
    fixed: _Known = {}
    _infer(source, source.prepare.values(), fixed)
    state = {name: _values(fixed[x]) for name, x in source.prepare.items()}
    roots = [*source.step.values(), source.finish]
    _infer(source, [node for node in postorder(roots) if not node.variables], fixed)
    while True:
        known = {**fixed, **{nodes.Var(name): _leaf(values) for name, values in state.items()}}
        _infer(source, roots, known)
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


def _infer(source: ValidatedProgram, roots: Iterable[Expr], known: _Known) -> None:
    for node in postorder(roots, known):
        if isinstance(node, nodes.Seq):
            known[node] = _of_node(source, node, known)


def _of_node(source: ValidatedProgram, node: nodes.Seq, known: _Known) -> FeatureFunction:
    match node:
        case nodes.Full():
            return constant(node.value)
        case nodes.TokMap() | nodes.Elementwise():
            function = _of_operation(source, node, known)
        case nodes.Tokens():
            function = _leaf(np.arange(len(source.program.inputs)))
        case nodes.Indices():
            function = _leaf(np.arange(source.max_length))
        case nodes.Aggregate():
            function = _leaf(_of_aggregate(node, _values(known[node.value])))
        case nodes.SelWidth():
            function = _leaf(np.arange(source.max_length + 1))
        case _:
            raise AssertionError(f"no domain of {type(node).__name__}")
    if len(function.values) > MAX_VALUES:
        if isinstance(node, nodes.Tokens):
            what, given = f"tokens of program {source.program.name}", f"{len(function.values):,}"
            raise _too_many(what, given, "input tokens", "List fewer inputs.")
        _check_size(source.where(node), _values(function))
    return function


def _of_operation(
    source: ValidatedProgram, node: nodes.TokMap | nodes.Elementwise, known: _Known
) -> FeatureFunction:
    """An operation as a function of what its arguments are functions of.

    ``where(x > 0, x - 1, x)`` has no value that x has not: what an expression reads twice is the
    same both times.
    """
    functions = [known[child] for child in node.children]

    apply = partial(applied, source, node)
    fused = fuse(apply, functions, most=RELATED_COMBINATIONS)
    if fused is not None:
        return fused
    if isinstance(node, nodes.Elementwise) and node.op == "where":
        return _leaf(_both(_values(functions[1]), _values(functions[2])))
    apart = [_leaf(_values(function)) for function in functions]
    fused = fuse(apply, apart, most=MAX_COMBINATIONS)
    if fused is None:
        combinations = int(np.prod([len(function.values) for function in functions]))
        raise _too_many(source.where(node), f"{combinations:,} combinations of its arguments")
    return _leaf(_values(fused))


def applied(
    source: ValidatedProgram, node: nodes.TokMap | nodes.Elementwise, args: Iterable[np.ndarray]
) -> np.ndarray:
    """A table or an operation on arrays of one shape; see :func:`apply_operation`."""
    tensors = [torch.from_numpy(np.array(arg)) for arg in args]
    return apply_operation(node, tensors, source.where, zero="may be 0").numpy()


def _of_aggregate(node: nodes.Aggregate, values: Values) -> Values:
    selector = node.selector
    assert isinstance(selector, nodes.Select)
    one_key = isinstance(selector.k, nodes.Indices) and selector.predicate == "=="
    if node.mode == "mean" and not one_key and len(values) > 1:
        # A mean of several lies between them, and is truncated.
        span = min(int(values[-1]) - int(values[0]), 2 * MAX_VALUES)  # too many, if that many
        values = values[0] + np.arange(span + 1)
    return _both(values, np.array([node.default]))


def _check_size(what: str, values: Values) -> None:
    if len(values) > MAX_VALUES:
        raise _too_many(what, f"{len(values):,} or more, up to {int(values[-1]):,}")


def _too_many(
    what: str,
    given: str,
    values: str = "values",
    fix: str = "Bound it with smaller(x, indices) or x % m, or compile for a smaller max_length.",
) -> InputError:
    expected = f"at most {MAX_VALUES:,} {values}, each of which gets a direction"
    return InputError(what, expected=expected, given=given, fix=fix)
