"""Runs expressions on whole batches of token sequences at once, on any device.

Every distinct subexpression is computed once. What does not depend on the tokens (positions,
shifts) keeps a batch axis of 1 until it meets something that does, so a selector that is the
same for all examples is never copied over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, unknown_name
from loopinterp.rasp.expr import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    Selector,
    SelWidth,
    Seq,
    ShiftRight,
    Tokens,
    TokMap,
    Var,
)
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr
from loopinterp.rasp.ops import OPS, PREDICATES

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Largest [batch, query, key] intermediate: bigger batches are aggregated part by part."""

EXACT_IN_FLOAT64 = 2**53


def evaluate(
    expr: Seq | Selector,
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
        InputError: the tokens have a wrong dtype or shape, or a variable is missing.

    Example:
        >>> from loopinterp.rasp import shift_right, tokens
        >>> evaluate(shift_right(tokens, 1) + tokens, torch.tensor([[1, 2, 3]])).tolist()
        [[1, 3, 5]]
    """
    if tokens.dtype != torch.int64 or tokens.ndim != 2 or tokens.shape[1] == 0:
        raise InputError(
            "tokens",
            expected="int64 tokens of shape [batch, pos]",
            given=f"{tokens.dtype} of shape {list(tokens.shape)}",
            fix="Add a batch axis with tokens[None].",
        )
    value = Interpreter(tokens).run(postorder([expr]), variables or {})[expr]
    return value.expand(len(tokens), *value.shape[1:])


class Interpreter:
    """Evaluates lists of nodes on one batch of tokens; what reads no variable is kept.

    Args:
        tokens: Input tokens [batch, pos], int64; their device is where everything is computed.
    """

    def __init__(self, tokens: Int[Tensor, "batch pos"]) -> None:
        self.tokens = tokens
        self.indices = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self._kept: dict[Expr, Tensor] = {}

    def run(self, order: Sequence[Expr], variables: Mapping[str, Tensor]) -> dict[Expr, Tensor]:
        """The value of every node of ``order``, which lists children before parents.

        Values have a batch axis of 1 where they are the same for all examples.
        """
        values: dict[Expr, Tensor] = {}
        for node in order:
            if node.variables:
                values[node] = self._compute(node, values, variables)
            else:
                if node not in self._kept:
                    self._kept[node] = self._compute(node, values, variables)
                values[node] = self._kept[node]
        return values

    def _compute(
        self, node: Expr, values: Mapping[Expr, Tensor], variables: Mapping[str, Tensor]
    ) -> Tensor:
        if isinstance(node, Var):
            if node.name not in variables:
                raise unknown_name("variable", node.name, variables)
            return variables[node.name]
        if isinstance(node, Tokens):
            return self.tokens
        if isinstance(node, Indices):
            return self.indices
        if isinstance(node, Full):
            return torch.full_like(self.indices, node.value)
        return _COMPUTE[type(node)](node, values)


def _elementwise(node: Elementwise, values: Mapping[Expr, Tensor]) -> Tensor:
    args = [values[arg] for arg in node.args]
    if node.op in ("floordiv", "mod") and bool((args[1] == 0).any()):
        raise InputError(
            repr(node),
            expected="a divisor that is nowhere 0",
            given=f"0 as a value of {node.args[1]!r}",
            fix="Guard it with where(divisor, divisor, 1).",
        )
    return OPS[node.op].apply(*args)


def _tok_map(node: TokMap, values: Mapping[Expr, Tensor]) -> Tensor:
    x = values[node.x]
    if not node.table:
        mapped, known = x, torch.zeros_like(x, dtype=torch.bool)
    else:
        keys, new = torch.tensor(node.table, device=x.device).T.contiguous()
        found = torch.searchsorted(keys, x.contiguous()).clamp(max=len(keys) - 1)
        mapped, known = new[found], keys[found] == x
    if node.default is not None:
        return torch.where(known, mapped, node.default)
    if not bool(known.all()):
        raise InputError(
            repr(node),
            expected=f"values of {node.x!r} among {[key for key, _ in node.table]}",
            given=str(int(x[~known][0])),
            fix="Add it to the table, or give tok_map a default.",
        )
    return mapped


def _shift_right(node: ShiftRight, values: Mapping[Expr, Tensor]) -> Tensor:
    x = values[node.x]
    n = min(node.n, x.shape[1])
    first = x.new_full((x.shape[0], n), node.default)
    return torch.cat([first, x[:, : x.shape[1] - n]], dim=1)


def _select(node: Select, values: Mapping[Expr, Tensor]) -> Tensor:
    k, q = values[node.k][:, None, :], values[node.q][:, :, None]
    if isinstance(node.predicate, str):
        selected = PREDICATES[node.predicate](k, q)
    else:
        selected = torch.zeros_like(k == q)
        for key, query in node.predicate:
            selected = selected | ((k == key) & (q == query))
    return selected.tril() if node.causal else selected


def _sel_width(node: SelWidth, values: Mapping[Expr, Tensor]) -> Tensor:
    return values[node.selector].sum(dim=-1)


def _aggregate(node: Aggregate, values: Mapping[Expr, Tensor]) -> Tensor:
    selected, value = values[node.selector], values[node.value]
    batch = max(len(selected), len(value))
    rows = max(CHUNK_ELEMENTS // (selected.shape[1] * selected.shape[2]), 1)
    reduce = _mean if node.mode == "mean" else _extreme
    parts = []
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        some = selected if len(selected) == 1 else selected[part]
        parts.append(reduce(some, value if len(value) == 1 else value[part], node.mode))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return torch.where(selected.any(dim=-1), out, node.default)


def _mean(selected: Tensor, value: Tensor, mode: str) -> Tensor:
    """The truncated mean [batch, query]; anything where nothing is selected."""
    count = selected.sum(dim=-1).clamp(min=1)
    largest = int(value.abs().max()) if value.numel() else 0
    if 0 <= largest * value.shape[1] < EXACT_IN_FLOAT64:
        weights = selected.double()
        if len(weights) == 1:
            total = value.double() @ weights[0].T
        else:
            total = (weights @ value.double()[:, :, None]).squeeze(-1)
        return torch.div(total.long(), count, rounding_mode="trunc")
    total = torch.where(selected, value[:, None, :], 0).sum(dim=-1)
    return torch.div(total, count, rounding_mode="trunc")


def _extreme(selected: Tensor, value: Tensor, mode: str) -> Tensor:
    """The largest or smallest selected value [batch, query]."""
    bounds = torch.iinfo(torch.int64)
    if mode == "max":
        return torch.where(selected, value[:, None, :], bounds.min).amax(dim=-1)
    return torch.where(selected, value[:, None, :], bounds.max).amin(dim=-1)


_COMPUTE: dict[type[Expr], Callable[[Any, Mapping[Expr, Tensor]], Tensor]] = {
    Elementwise: _elementwise,
    TokMap: _tok_map,
    ShiftRight: _shift_right,
    Select: _select,
    SelWidth: _sel_width,
    Aggregate: _aggregate,
}
