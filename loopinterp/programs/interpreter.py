"""Runs expressions on batches of token sequences, and the traces of programs' runs.

Each distinct subexpression is computed once and freed after its last use. Values that do not depend
on the tokens have a batch axis of 1.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from loopinterp.core.errors import InputError, UnknownKeyError, check_choice, need, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import Expr, code, postorder
from loopinterp.programs.selection import OPS, Selection


def evaluate(
    expr: nodes.Seq | nodes.Selector,
    tokens: Int[Tensor, "batch pos"],
    variables: Mapping[str, Int[Tensor, "batch pos"]] | None = None,
) -> Int[Tensor, "batch pos"] | Bool[Tensor, "batch query key"]:
    """The values of one expression: integers of a sequence, booleans of a selector.

    Example:
        >>> from loopinterp.programs import shift_right, tokens
        >>> evaluate(shift_right(tokens, 1) + tokens, torch.tensor([[1, 2, 3]])).tolist()
        [[1, 3, 5]]
    """
    if not isinstance(expr, Expr):
        nodes.need_seq(expr, "expression")
    is_int64 = isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
    fits = is_int64 and tokens.ndim == 2 and tokens.shape[1]
    expected, fix = "int64 tokens of shape [batch, pos]", "Add a batch axis with tokens[None]."
    need(fits, "tokens", expected, tokens, fix)
    for name, values in (variables or {}).items():
        check_values(f"values of variable {name!r}", values, tokens, torch.int64)
    return Interpreter(tokens).value(expr, variables or {})


def check_values(what: str, values: object, tokens: Tensor, dtype: torch.dtype) -> None:
    """Raise unless ``values`` has this dtype, and the tokens' shape and device."""
    is_tensor = isinstance(values, torch.Tensor)
    kind = (values.dtype, values.shape, values.device) if is_tensor else None
    expected = f"{dtype} of shape {list(tokens.shape)} on {tokens.device}"
    fix = "Pass one value per example and position, as the tokens have."
    need(kind == (dtype, tokens.shape, tokens.device), what, expected, values, fix)


# Nodes in the order of computation, each with those whose last use it is
_Plan: TypeAlias = list[tuple[Expr, tuple[Expr, ...]]]
# For some results, while some values are known: further ones that read no variable and are kept,
# how to compute these, and how to compute the results
Plans: TypeAlias = dict[tuple[tuple[Expr, ...], tuple[Expr, ...]], tuple[set[Expr], _Plan, _Plan]]


def _planned(order: Sequence[Expr], results: Collection[Expr]) -> _Plan:
    plan: _Plan = []
    later = set(results)
    for node in reversed(order):  # a child that no later node reads is used up
        used_up = tuple(dict.fromkeys(child for child in node.children if child not in later))
        later.update(used_up)
        plan.append((node, used_up))
    return plan[::-1]


def _plans(roots: tuple[Expr, ...], known: Collection[Expr]) -> tuple[set[Expr], _Plan, _Plan]:
    changing = [node for node in postorder(roots) if node.variables]
    needed = [*roots, *(child for node in changing for child in node.children)]
    fixed = {node for node in needed if not node.variables and node not in known}
    return fixed, _planned(postorder(fixed, known), fixed), _planned(changing, roots)


class Interpreter:
    """Evaluates nodes on one batch of tokens; ``plans`` are kept for other batches."""

    def __init__(self, tokens: Int[Tensor, "batch pos"], plans: Plans | None = None) -> None:
        self.tokens = tokens
        self.indices = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self._plans: Plans = {} if plans is None else plans
        self._fixed: dict[Expr, Tensor | Selection] = {}
        self._changing: dict[tuple[Expr, ...], _Plan] = {}

    def value(self, expr: Expr, variables: Mapping[str, Tensor]) -> Tensor:
        value = self.run([expr], variables)[expr]
        return value.expand(len(self.tokens), *value.shape[1:])

    def run(self, results: Collection[Expr], variables: Mapping[str, Tensor]) -> dict[Expr, Tensor]:
        """The values of some nodes, with a batch axis of 1 where all examples agree."""
        roots = tuple(results)
        if roots not in self._changing:
            # What reads no variable is computed once, and kept for all runs.
            key = roots, tuple(self._fixed)
            if key not in self._plans:
                self._plans[key] = _plans(roots, self._fixed)
            fixed, plan, self._changing[roots] = self._plans[key]
            self._fixed.update(self._execute(plan, {}, fixed))
        values = self._execute(self._changing[roots], variables, roots)
        return {x: v.matrix() if isinstance(v, Selection) else v for x, v in values.items()}

    def _execute(
        self, plan: _Plan, variables: Mapping[str, Tensor], results: Collection[Expr]
    ) -> dict[Expr, Tensor | Selection]:
        values: dict[Expr, Any] = dict(self._fixed)
        for node, used_up in plan:
            match node:
                case nodes.Elementwise() | nodes.TokMap():
                    args = [values[child] for child in node.children]
                    value = apply_operation(node, args, _short_code)
                case nodes.Var():
                    if node.name not in variables:
                        raise unknown_name("variable", node.name, variables)
                    value = variables[node.name]
                case nodes.Tokens():
                    value = self.tokens
                case nodes.Indices():
                    value = self.indices
                case nodes.Full():
                    value = torch.full_like(self.indices, node.value)
                case nodes.ShiftRight():
                    x = values[node.x]
                    n = min(node.n, x.shape[1])
                    first = x.new_full((x.shape[0], n), node.default)
                    value = torch.cat([first, x[:, : x.shape[1] - n]], dim=1)
                case nodes.Select():
                    k, q = values[node.k], values[node.q]
                    value = Selection(k, q, node.predicate, node.causal)
                case nodes.SelWidth():
                    value = values[node.selector].width()
                case nodes.Aggregate(mode="mean"):
                    value = values[node.selector].mean(values[node.value], node.default)
                case nodes.Aggregate():
                    selection = values[node.selector]
                    value = selection.extreme(values[node.value], node.mode, node.default)
                case _:
                    raise AssertionError(f"no meaning of {type(node).__name__}")
            values[node] = value
            for child in used_up:
                del values[child]
        return {node: values[node] for node in results}


_short_code = partial(code, short=True)


def apply_operation(
    node: nodes.Elementwise | nodes.TokMap,
    args: Sequence[Tensor],
    describe: Callable[[Expr], str],
    *,
    possible: bool = False,
) -> Tensor:
    """An operation or table on values of a run, or on all ``possible`` values.

    Raises:
        InputError: On division by 0, or if a table lacks a value; ``describe`` names the node.
    """
    if isinstance(node, nodes.Elementwise):
        if node.op in ("floordiv", "mod") and bool((args[1] == 0).any()):
            got = f"{node.args[1]!r}, which {'may be' if possible else 'is'} 0"
            fix = "Divide by where(x, x, 1) instead of x, or by a constant."
            raise InputError(describe(node), expected="a divisor above 0", given=got, fix=fix)
        return OPS[node.op].apply(*args)
    (x,) = args
    if node.default is None:
        known = node.lists(x).bool()
        if not bool(known.all()):
            missing, number = int(x[~known].min()), len(x.unique())
            expected = f"an entry for each of the {number} values it is given, or a default"
            got = f"none for {missing}, only for {reprlib.repr([key for key, _ in node.table])}"
            fix = f"Add {missing} to the table, or pass default=."
            raise InputError(f"table of {describe(node)}", expected=expected, given=got, fix=fix)
    return node.lookup(x)


@dataclass(frozen=True, eq=False, repr=False)
class Intervention(ShortRepr):
    """Set a variable after ``loop`` loops, before the next one and before the output is read."""

    variable: str
    loop: int  # 0 is after ``prepare``, t after t steps
    values: Int[Tensor, "batch pos"]  # int64
    mask: Bool[Tensor, "batch pos"] | None = None  # where to set them; None is everywhere

    @classmethod
    def of_rows(
        cls,
        values: Mapping[str, Int[Tensor, " row"]],
        position: Int[Tensor, " row"],
        loop: Int[Tensor, " row"],
        chosen: Bool[Tensor, " row"],
        n_pos: int,
    ) -> list[Intervention]:
        """In ``chosen`` rows the variables of one position are set; each row has its own loop."""
        here = chosen[:, None] & (position[:, None] == torch.arange(n_pos, device=position.device))
        return [
            cls(name, at, x[:, None].expand_as(here).contiguous(), here & (loop == at)[:, None])
            for at in loop[chosen].unique().tolist()
            for name, x in values.items()
        ]


@dataclass(frozen=True, eq=False, repr=False)
class Trace(ShortRepr):
    """The run of a program. Entry k of a loop axis is after ``start + k`` loops."""

    program: str
    start: int  # loops done before the first entry
    variables: Mapping[str, Int[Tensor, "loops batch pos"]]
    outputs: Int[Tensor, "loops batch pos"]  # the answer at every loop; -1 where undecided
    # By name. Entry k leads from entry k of the variables to entry k + 1.
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]]
    prepare_selectors: Mapping[str, Bool[Tensor, "batch query key"]]

    @property
    def n_loops(self) -> int:
        """Loops done at the end, counted from ``prepare``."""
        return self.start + len(self.outputs) - 1

    def converged(self, variable: str) -> Int[Tensor, "batch pos"]:
        """The first entry from which the variable keeps its final value."""
        check_choice(f"variable of program {self.program}", variable, self.variables)
        return constant_from(self.variables[variable])


def constant_from(values: Shaped[Tensor, "entry ..."]) -> Int[Tensor, ...]:
    # Reversed, the first difference from the end, and every entry before it, count.
    return (values != values[-1]).flip(0).cummax(dim=0).values.sum(dim=0)


class LazySelectors(Mapping[str, "Tensor"]):
    """Selectors by name, computed on access; by loop if ``n_loops`` is given."""

    def __init__(
        self,
        selects: Mapping[str, nodes.Select],
        interpreter: Interpreter,
        variables: Mapping[str, Tensor],
        n_loops: int | None = None,
    ) -> None:
        self._selects, self._interpreter = selects, interpreter
        self._variables, self._n_loops = variables, n_loops

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._selects:
            raise unknown_name("selector", name, self._selects, UnknownKeyError)
        select = self._selects[name]
        if not select.variables:
            once = self._interpreter.value(select, {})  # [batch, query, key], of stride 0 by loop
            return once if self._n_loops is None else once.expand(self._n_loops, *once.shape)
        assert self._n_loops is not None  # what prepare selects reads no variable
        batch, pos = self._interpreter.tokens.shape
        out = self._interpreter.tokens.new_empty((self._n_loops, batch, pos, pos), dtype=torch.bool)
        for loop, selected in enumerate(out):
            state = {name: x[loop] for name, x in self._variables.items()}
            selected[:] = self._interpreter.value(select, state)
        return out

    def __contains__(self, name: object) -> bool:
        return name in self._selects

    def __iter__(self) -> Iterator[str]:
        return iter(self._selects)

    def __len__(self) -> int:
        return len(self._selects)
