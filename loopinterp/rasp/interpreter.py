"""Runs expressions on whole batches of token sequences at once, on any device.

Every distinct subexpression is computed once, and forgotten after its last use. What does not
depend on the tokens (positions, shifts) keeps a batch axis of 1 until it meets something that
does, so a selector that is the same for all examples is never copied over the batch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from loopinterp.errors import InputError, unknown_name
from loopinterp.rasp import expr as nodes
from loopinterp.rasp.integer_tables import look_up
from loopinterp.rasp.node import Expr, code, postorder
from loopinterp.rasp.ops import OPS
from loopinterp.rasp.selection import Selection
from loopinterp.tasks.sampling import describe_tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


def evaluate(
    expr: nodes.Seq | nodes.Selector,
    tokens: Int[Tensor, "batch pos"],
    variables: Mapping[str, Int[Tensor, "batch pos"]] | None = None,
) -> Int[Tensor, "batch pos"] | Bool[Tensor, "batch query key"]:
    """The values of one expression.

    Args:
        expr: A sequence or a selector.
        tokens: Input tokens [batch, pos], int64.
        variables: Values of the variables it reads.

    Returns:
        Integers [batch, pos] of a sequence, or booleans [batch, query, key] of a selector.

    Raises:
        InputError: that is no expression; the tokens or the values of a variable have a wrong
            dtype or shape; or a variable is missing.

    Example:
        >>> from loopinterp.rasp import shift_right, tokens
        >>> evaluate(shift_right(tokens, 1) + tokens, torch.tensor([[1, 2, 3]])).tolist()
        [[1, 3, 5]]
    """
    if not isinstance(expr, Expr):
        nodes.need_seq(expr, "expression")
    known = isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
    if not known or tokens.ndim != 2 or tokens.shape[1] == 0:
        raise InputError(
            "tokens",
            expected="int64 tokens of shape [batch, pos]",
            given=describe_tensor(tokens),
            fix="Add a batch axis with tokens[None].",
        )
    for name, values in (variables or {}).items():
        check_values(f"values of variable {name!r}", values, tokens, torch.int64)
    return Interpreter(tokens).value(expr, variables or {})


def check_values(what: str, values: object, tokens: Tensor, dtype: torch.dtype) -> None:
    """Check that there is one value of that dtype for each token, on the same device."""
    known = isinstance(values, torch.Tensor)
    given = (values.dtype, values.shape, values.device) if known else None
    if given != (dtype, tokens.shape, tokens.device):
        where = f" on {values.device}" if known else ""
        raise InputError(
            what,
            expected=f"{dtype} of shape {list(tokens.shape)} on {tokens.device}",
            given=describe_tensor(values) + where,
            fix="Pass one value per example and position, as the tokens have.",
        )


_Plan: TypeAlias = list[tuple[Expr, tuple[Expr, ...]]]
"""Nodes in the order in which they are computed, each with those whose last use it is."""


def _planned(order: Sequence[Expr], wanted: Collection[Expr]) -> _Plan:
    found: _Plan = []
    later = set(wanted)
    for node in reversed(order):
        used_up = tuple(dict.fromkeys(child for child in node.children if child not in later))
        later.update(used_up)
        found.append((node, used_up))
    return found[::-1]


class Interpreter:
    """Evaluates lists of nodes on one batch of tokens, where they are; keeps what never changes."""

    def __init__(self, tokens: Int[Tensor, "batch pos"]) -> None:
        self.tokens = tokens
        self.indices = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self._kept: dict[Expr, Tensor | Selection] = {}
        self._changing: dict[tuple[Expr, ...], _Plan] = {}

    def value(self, expr: Expr, variables: Mapping[str, Tensor]) -> Tensor:
        """The value of one expression, of every example."""
        value = self.run([expr], variables)[expr]
        return value.expand(len(self.tokens), *value.shape[1:])

    def run(self, wanted: Collection[Expr], variables: Mapping[str, Tensor]) -> dict[Expr, Tensor]:
        """The values of some nodes, with a batch axis of 1 where all examples have the same."""
        roots = tuple(wanted)
        if roots not in self._changing:
            changing = [node for node in postorder(roots) if node.variables]
            needed = [*roots, *(child for node in changing for child in node.children)]
            fixed = {node for node in needed if not node.variables and node not in self._kept}
            if fixed:
                plan = _planned(postorder(fixed, self._kept), fixed)
                self._kept.update(self._execute(plan, {}, fixed))
            self._changing[roots] = _planned(changing, roots)
        values = self._execute(self._changing[roots], variables, wanted)
        return {x: v.all() if isinstance(v, Selection) else v for x, v in values.items()}

    def _execute(
        self, plan: _Plan, variables: Mapping[str, Tensor], wanted: Collection[Expr]
    ) -> dict[Expr, Tensor | Selection]:
        """Compute the nodes in order, each forgotten after its last use if it is not wanted."""
        values = dict(self._kept)
        for node, used_up in plan:
            values[node] = self._compute(node, values, variables)
            for child in used_up:
                del values[child]
        return {node: values[node] for node in wanted}

    def _compute(
        self, node: Expr, values: Mapping[Expr, Any], variables: Mapping[str, Tensor]
    ) -> Tensor | Selection:
        match node:
            case nodes.Tokens():
                return self.tokens
            case nodes.Indices():
                return self.indices
            case nodes.Full():
                return torch.full_like(self.indices, node.value)
            case nodes.Var():
                if node.name not in variables:
                    raise unknown_name("variable", node.name, variables)
                return variables[node.name]
            case nodes.Elementwise() | nodes.TokMap():
                args = [values[child] for child in node.children]
                return apply_operation(node, args, partial(code, short=True))
            case nodes.ShiftRight():
                return _shift_right(values[node.x], node.n, node.default)
            case nodes.Select():
                return Selection(values[node.k], values[node.q], node.predicate, node.causal)
            case nodes.SelWidth():
                return values[node.selector].width()
            case nodes.Aggregate(mode="mean"):
                return values[node.selector].mean(values[node.value], node.default)
            case nodes.Aggregate():
                return values[node.selector].extreme(values[node.value], node.mode, node.default)
        raise AssertionError(f"no meaning of {type(node).__name__}")


def apply_operation(
    node: nodes.Elementwise | nodes.TokMap,
    args: Sequence[Tensor],
    said: Callable[[Expr], str],
    zero: str = "is 0",
) -> Tensor:
    """An operation or a table on the values of its arguments.

    Args:
        node: The operation or table.
        args: Values of its arguments.
        said: Writes it in errors.
        zero: What errors say of a divisor that has the value 0 here.

    Raises:
        InputError: a division by 0, or a table that lacks a value and has no default.
    """
    if isinstance(node, nodes.Elementwise):
        if node.op in ("floordiv", "mod") and bool((args[1] == 0).any()):
            raise InputError(
                said(node),
                expected="a divisor that is never 0",
                given=f"{node.args[1]!r}, which {zero}",
                fix="Divide by where(x, x, 1) instead of x, or by a constant.",
            )
        return OPS[node.op].apply(*args)
    (x,), (keys, new) = args, node.entries.to(args[0].device)
    if node.default is None:
        known = look_up(x, keys, torch.ones_like(keys), 0).bool()
        if not bool(known.all()):
            missing, number = int(x[~known].min()), len(x.unique())
            raise InputError(
                f"table of {said(node)}",
                expected=f"an entry for each of the {number} values it is given, or a default",
                given=f"none for {missing}, only for {reprlib.repr(keys.tolist())}",
                fix=f"Add {missing} to the table, or pass default=.",
            )
    return look_up(x, keys, new, node.default or 0)


def _shift_right(x: Tensor, n: int, default: int) -> Tensor:
    n = min(n, x.shape[1])
    first = x.new_full((x.shape[0], n), default)
    return torch.cat([first, x[:, : x.shape[1] - n]], dim=1)
