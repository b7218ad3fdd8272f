"""The shortest expression with given values.

Expressions grow from atoms; of those with equal values the first is kept (bottom-up enumeration
modulo observational equivalence; Udupa et al., TRANSIT, PLDI 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from loopinterp.programs.expressions import Seq
from loopinterp.programs.language import full, seq_map
from loopinterp.programs.selection import OPS

_AT_A_TIME = 2**22  # numbers that are computed together
_LOOKED_THROUGH = 2**18  # the same where nothing is kept of them: they stay in the cache
# An operation on smaller expressions, each given by its size and its place there
_Operation: TypeAlias = tuple[str, tuple[tuple[int, int], ...]]
Atom: TypeAlias = tuple[Seq, Int[Tensor, " case"]]  # an expression and its values


def shortest_expression(
    target: Int[Tensor, " case"],
    atoms: Sequence[Atom],
    *,
    largest: int = 8,
) -> Seq | None:
    """An expression of fewest atoms and operations with the target's value in every case, or None.

    Args:
        atoms: Expressions to build with; small constants are added.
        largest: Most atoms and operations of an expression.
    """
    every = torch.stack([target, *(values for _, values in atoms)])
    low, top = int(every.min()), int(every.max())
    ops = ["not", "and", "or", "xor"]
    if low < 0 or top > 1:  # no truth values
        ops += ["eq", "ne", "add", "mod", "smaller", "larger", "where"]
    constants = range(min(low, 0), top + 2)
    leaves = [*atoms, *((full(k), torch.full_like(target, k)) for k in constants)]
    for expression, values in leaves:
        if torch.equal(values, target):
            return expression
    return _search(target, _Bank(leaves), ops, largest)


def _search(
    target: Int[Tensor, " case"], bank: _Bank, ops: Sequence[str], largest: int
) -> Seq | None:
    most = 2000  # expressions kept of each size; beyond that the search is incomplete
    commute = ("and", "or", "xor", "add", "eq", "ne", "smaller", "larger")
    every_case = torch.arange(len(target))
    # Most expressions that are not the target differ from it in one of a few cases.
    few = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))[:8]
    for size in range(2, largest + 1):
        values, operations = [target.new_empty(0, len(target))], []
        # Operations, and sizes of their parts that make an expression of this size.
        shapes = [
            (op, sizes)
            for op in ops
            for sizes in product(range(1, size), repeat=OPS[op].arity)
            if sum(sizes) == size - 1 and (op not in commute or sizes[0] <= sizes[1])
        ]
        for op, sizes in shapes:
            keep = len(operations) < most and size < largest
            cases = every_case if keep else few
            arguments = _arguments(op, [bank.values[size] for size in sizes])
            # Blocks of the operation on all expressions of these sizes.
            parts, numbers = [part[:, cases] for part in arguments], [0] * len(sizes)
            for first, block in _blocks(parts, numbers, _AT_A_TIME if keep else _LOOKED_THROUGH):
                grown = _applied(op, block)  # [case, *part]
                rows = grown.flatten(1)  # [case, row]
                some = rows[few] if keep else rows
                hits = (some == target[few, None]).all(0).nonzero().flatten()
                if len(hits):
                    places = _places(first, grown, hits)
                    made = OPS[op].apply(*(x[at] for x, at in zip(arguments, places)))
                    for hit in hits[(made == target).all(-1)][:1]:
                        return bank.expression(*_operations(op, sizes, first, grown, hit[None]))
                if keep and len(operations) < most:
                    new = bank.new(rows)[: most - len(operations)]
                    values.append(rows[:, new].T)
                    operations += _operations(op, sizes, first, grown, new)
        bank.values[size], bank.operations[size] = torch.cat(values), operations
    return None


def _operations(
    op: str, sizes: tuple[int, ...], first: list[int], grown: Tensor, rows: Int[Tensor, " row"]
) -> Iterator[_Operation]:
    for places in zip(*(each.tolist() for each in _places(first, grown, rows))):
        yield op, tuple(zip(sizes, places))


def _places(
    first: list[int], grown: Tensor, rows: Int[Tensor, " row"]
) -> list[Int[Tensor, " row"]]:
    """Of each part: its place among those of its size."""
    return [start + k for start, k in zip(first, torch.unravel_index(rows, grown.shape[1:]))]


class _Bank:
    """Expressions by size, no two with equal values."""

    def __init__(self, leaves: Sequence[Atom]) -> None:
        rows = torch.stack([values for _, values in leaves])
        # Values are compared by a random linear hash: 64 bits for some 10,000 of them.
        generator = torch.Generator().manual_seed(0)
        self._key = torch.randint(-(2**62), 2**62, rows.shape[1:], generator=generator)[:, None]
        self._seen = torch.empty(0, dtype=torch.int64)
        distinct = self.new(rows.T)
        self.values: dict[int, Tensor] = {1: rows[distinct]}
        self.operations: dict[int, list[_Operation]] = {}
        self._leaves = [leaves[k][0] for k in distinct.tolist()]

    def new(self, rows: Int[Tensor, "case row"]) -> Int[Tensor, " new"]:
        """Rows whose values are new; they count as known afterwards."""
        # Of rows with the same values the first one counts.
        hashes, inverse = (rows * self._key).sum(0).unique(return_inverse=True)
        number = rows.shape[1]
        first = torch.full_like(hashes, number)
        first = first.scatter_reduce(0, inverse, torch.arange(number), "amin")
        fresh = ~torch.isin(hashes, self._seen)
        self._seen = torch.cat([self._seen, hashes[fresh]])
        return first[fresh].sort().values

    def expression(self, operation: _Operation) -> Seq:
        op, parts = operation
        args = (
            self._leaves[k] if size == 1 else self.expression(self.operations[size][k])
            for size, k in parts
        )
        return seq_map(op, *args)


def _arguments(op: str, parts: list[Tensor]) -> list[Tensor]:
    """The arguments; a divisor that is no positive constant is put out of range."""
    if op == "mod":
        divisor = parts[1]
        constant = (divisor == divisor[:, :1]).all(-1, keepdim=True)
        parts[1] = divisor.where(constant & (divisor > 0), 1 << 20)
    return parts


def _blocks(
    parts: list[Tensor], first: list[int], most: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Parts cut to fit in memory, and where each cut starts."""
    lengths = [*map(len, parts)]
    if not all(lengths):
        return
    if math.prod(lengths) * parts[0].shape[-1] <= most or max(lengths) == 1:
        yield first, parts
        return
    k = next(k for k, length in enumerate(lengths) if length > 1)
    for start, half in zip((0, lengths[k] // 2), parts[k].tensor_split(2)):
        cut = [first[k] + start if axis == k else at for axis, at in enumerate(first)]
        yield from _blocks([*parts[:k], half, *parts[k + 1 :]], cut, most)


def _applied(name: str, parts: Sequence[Tensor]) -> Int[Tensor, "*block"]:
    n, n_cases = len(parts), parts[0].shape[-1]
    # Part k varies along axis k after the cases: [case, 1, …, expression, …, 1].
    spread = [
        part.T.contiguous().view(n_cases, *(len(part) if k == axis else 1 for k in range(n)))
        for axis, part in enumerate(parts)
    ]
    return OPS[name].apply(*spread).expand(n_cases, *map(len, parts))
