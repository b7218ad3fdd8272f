"""Stages 1 and 2: which programs compile, and the finite set of values of every expression.

Sets are found by abstract interpretation: an operation's set is the image of its arguments' sets;
the variables' sets are the least that contain ``prepare`` and are closed under ``step``. Each value
gets a direction, so every set must be small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, cast

import numpy as np
import torch
from pydantic import Field

from loopinterp.compiler.features import (
    Feature,
    FeatureFunction,
    constant,
    fuse,
    of_feature,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import (
    Expr,
    Select,
    Seq,
    ShiftRight,
    Var,
    postorder,
    rewritten,
    selects,
)
from loopinterp.programs.interpreter import apply_operation
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import Task

MAX_LENGTH = 512  # longest sequence a model is compiled for: each position has a direction
_MAX_VALUES = 1_024  # most values of one expression: each is a direction of the residual stream
Values = np.ndarray  # sorted distinct integers
# Expressions as functions of leaves, as far as that is followed
_Known = dict[Expr, FeatureFunction]


@dataclass(frozen=True)
class ValidatedProgram:
    """A program ready for the compiler: every variable has a step, and shorthands are expanded."""

    program: LoopProgram
    prepare: dict[str, Seq]
    step: dict[str, Seq]
    finish: Seq
    selects: dict[Select, Select]  # -> those of the program in their place, whose names traces know
    max_length: int
    causal: bool  # whether all selections are, so that the model's attention can be

    @cached_property
    def domains(self) -> dict[Expr, Values]:
        """:func:`infer_domains`."""
        return infer_domains(self)

    @property
    def roots(self) -> dict[str, Iterable[Seq]]:
        parts = {"prepare": self.prepare.values(), "step": self.step.values()}
        return {**parts, "finish": [self.finish]}

    def where(self, node: Expr) -> str:
        part = next((f" in {part}" for part, x in self.roots.items() if node in postorder(x)), "")
        return f"{node!r}{part} of program {self.program.name}"


def positions_of(task: Task, n: int) -> int:
    """Positions of a task's inputs of length n; refused if no model is compiled for so many."""
    n_positions = task.n_positions(n)
    expected, got = f"a length of at most {MAX_LENGTH} positions", f"{n}, of {n_positions}"
    need(n_positions <= MAX_LENGTH, "max_length", expected, got, "Pass a smaller one.")
    return n_positions


@checked
def validate(
    program: LoopProgram | str, max_length: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
) -> ValidatedProgram:
    """Expand the shorthands (shifts) of a program, and find its selections."""
    program = get_program(program)
    # Every node with every shift in it replaced by what it stands for.
    plain = rewritten(
        program.expressions, lambda _, new: new.expanded if isinstance(new, ShiftRight) else new
    )
    chosen = selects(program.expressions)
    return ValidatedProgram(
        program=program,
        prepare={name: cast(Seq, plain[x]) for name, x in program.prepare.items()},
        step={
            name: cast(Seq, plain[program.step[name]]) if name in program.step else Var(name)
            for name in program.prepare
        },
        finish=cast(Seq, plain[program.finish]),
        selects={cast(Select, plain.get(node, node)): node for node in chosen[::-1]},
        max_length=max_length,
        causal=all(select.causal for select in chosen),
    )


def infer_domains(source: ValidatedProgram) -> dict[Expr, Values]:
    """The values of every sequence of a program, on inputs of up to ``max_length`` positions.

    Raises:
        InputError: If an expression has too many values, or values it cannot work with.

    Example:
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
        known = {**fixed, **{Var(name): _leaf(values) for name, values in state.items()}}
        _infer(source, roots, known)
        grown = {n: np.union1d(state[n], _values(known[x])) for n, x in source.step.items()}
        for name, values in grown.items():
            if len(values) > _MAX_VALUES:
                raise _too_many(f"variable {name!r} of program {source.program.name}", values)
        if all(len(grown[name]) == len(state[name]) for name in state):
            return {node: _values(function) for node, function in known.items()}
        state = grown


def applied(
    source: ValidatedProgram, node: nodes.TokMap | nodes.Elementwise, args: Iterable[np.ndarray]
) -> np.ndarray:
    tensors = [torch.from_numpy(np.array(arg)) for arg in args]
    return apply_operation(node, tensors, source.where, possible=True).numpy()


def _values(function: FeatureFunction) -> Values:
    return np.array(function.values)


def _leaf(values: Values) -> FeatureFunction:
    return of_feature(Feature("", tuple(values.tolist())))


def _infer(source: ValidatedProgram, roots: Iterable[Expr], known: _Known) -> None:
    for node in postorder(roots, known):
        if not isinstance(node, Seq):
            continue
        match node:
            case nodes.Full():
                function = constant(node.value)
            case nodes.TokMap() | nodes.Elementwise():
                function = _of_operation(source, node, known)
            case nodes.Tokens():
                function = _leaf(np.arange(len(source.program.inputs)))
            case nodes.Indices():
                function = _leaf(np.arange(source.max_length))
            case nodes.Aggregate():
                values = _values(known[node.value])
                selector = node.selector
                assert isinstance(selector, Select)
                one_key = isinstance(selector.k, nodes.Indices) and selector.predicate == "=="
                if node.mode == "mean" and not one_key and len(values) > 1:
                    # A mean of several lies between them, and is truncated. A part of a span
                    # beyond the limit suffices: it is refused below.
                    span = min(int(values[-1]) - int(values[0]), 2 * _MAX_VALUES)
                    values = values[0] + np.arange(span + 1)
                function = _leaf(np.union1d(values, [node.default]))
            case nodes.SelWidth():
                function = _leaf(np.arange(source.max_length + 1))
            case _:
                raise AssertionError(f"no domain of {type(node).__name__}")
        known[node] = function
        if len(function.values) > _MAX_VALUES:
            raise _too_many(source.where(node), _values(function))


def _of_operation(
    source: ValidatedProgram, node: nodes.TokMap | nodes.Elementwise, known: _Known
) -> FeatureFunction:
    """An operation as a function of the leaves of its arguments, so that one read twice has one
    value.

    Beyond 2**16 combinations of leaves, the values of the arguments are combined instead.
    """
    functions = [known[child] for child in node.children]
    apply = partial(applied, source, node)
    fused = fuse(apply, functions, most=2**16)
    if fused is not None:
        return fused
    if isinstance(node, nodes.Elementwise) and node.op == "where":
        return _leaf(np.union1d(_values(functions[1]), _values(functions[2])))
    fused = fuse(apply, [_leaf(_values(function)) for function in functions], most=2**22)
    if fused is None:
        number = int(np.prod([len(function.values) for function in functions]))
        raise _too_many(source.where(node), got=f"{number:,} combinations of its arguments")
    return _leaf(_values(fused))


def _too_many(what: str, values: Values | None = None, *, got: str = "") -> InputError:
    if values is not None:
        got = f"at least {len(values):,}, the largest of them {int(values[-1]):,}"
    expected = f"at most {_MAX_VALUES:,} values, each of which gets a direction"
    fix = "Bound it with smaller(x, indices) or x % m, list fewer tokens, or lower max_length."
    return InputError(what, expected=expected, given=got, fix=fix)
