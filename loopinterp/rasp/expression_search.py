"""The shortest expression that has given values: tables made readable.

Expressions are grown size by size from atoms; of those that have the same values in all cases only
the first, which is a shortest, is kept (bottom-up enumeration modulo observational equivalence).

Source: Udupa et al., TRANSIT, PLDI 2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.language import full, seq_map
from loopinterp.rasp.ops import OPS

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.expr import Seq

LOGIC = ("not", "and", "or", "xor")
"""Operations for truth values."""

ARITHMETIC = (*LOGIC, "eq", "ne", "add", "mod", "smaller", "larger", "where")
"""Operations for small integers; a remainder is that of division by a constant."""

_COMMUTE = ("and", "or", "xor", "add", "eq", "ne", "smaller", "larger")
_AT_A_TIME = 2**22
_FEW = 24
"""Cases that an expression is tried in first."""

_FAR = 1 << 20
"""In place of a divisor that is no constant above 0: what is divided stays as it is."""


@dataclass(frozen=True)
class Atom:
    """Something to build with, and its value in each case."""

    expression: Seq
    values: Int[Tensor, " case"]


@dataclass(frozen=True)
class _Made:
    """An operation on smaller expressions, each given by its size and its place there."""

    op: str
    parts: tuple[tuple[int, int], ...]


class _Bank:
    """Expressions by size, no two with the same values in all cases."""

    def __init__(self, n_cases: int) -> None:
        self.values: dict[int, Tensor] = {}
        self.made: dict[int, list[Seq | _Made]] = {}
        # Values are told apart by a random linear hash: 64 bits for some 10,000 of them.
        generator = torch.Generator().manual_seed(0)
        self._key = torch.randint(-(2**62), 2**62, (n_cases,), generator=generator)
        self._seen = torch.empty(0, dtype=torch.int64)

    def new(self, rows: Int[Tensor, "row case"]) -> Int[Tensor, " new"]:
        """Places of those whose values no expression had so far; they have them from now on."""
        hashes, inverse = (rows * self._key).sum(-1).unique(return_inverse=True)
        first = torch.full_like(hashes, len(rows))
        first = first.scatter_reduce(0, inverse, torch.arange(len(rows)), "amin")
        fresh = ~torch.isin(hashes, self._seen)
        self._seen = torch.cat([self._seen, hashes[fresh]])
        return first[fresh].sort().values

    def expression(self, made: Seq | _Made) -> Seq:
        if not isinstance(made, _Made):
            return made
        return seq_map(made.op, *(self.expression(self.made[s][k]) for s, k in made.parts))

    def grown(self, op: str, sizes: tuple[int, ...], cases: Tensor) -> Iterator[_Grown]:
        """An operation on all expressions of these sizes, in blocks, in some of the cases."""
        parts = [self._parts(op, k, self.values[size]) for k, size in enumerate(sizes)]
        for first, block in _blocks([part[:, cases] for part in parts], [0] * len(sizes)):
            yield _Grown(op, sizes, first, _applied(op, block))

    def values_of(self, made: _Made) -> Int[Tensor, " case"]:
        """Values of an operation on expressions of the bank, in all cases."""
        parts = [self.values[size][place, None] for size, place in made.parts]
        return _applied(
            made.op, [self._parts(made.op, k, x) for k, x in enumerate(parts)]
        ).flatten()

    def _parts(self, op: str, k: int, values: Tensor) -> Tensor:
        if op == "mod" and k == 1:
            constant = (values == values[:, :1]).all(-1, keepdim=True)
            return values.where(constant & (values > 0), _FAR)
        return values


def _blocks(parts: list[Tensor], first: list[int]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Parts cut so that all choices of one of each fit, in order, and where each cut starts."""
    lengths = [*map(len, parts)]
    if not all(lengths):
        return
    if math.prod(lengths) * parts[0].shape[-1] <= _AT_A_TIME or max(lengths) == 1:
        yield first, parts
        return
    k = next(k for k, length in enumerate(lengths) if length > 1)
    for start, half in zip((0, lengths[k] // 2), parts[k].tensor_split(2)):
        cut = [first[k] + start if axis == k else at for axis, at in enumerate(first)]
        yield from _blocks([*parts[:k], half, *parts[k + 1 :]], cut)


@dataclass(frozen=True)
class _Grown:
    """Values of an operation on every choice of parts, each from some place on.

    ``values`` are [part, ..., case].
    """

    op: str
    sizes: tuple[int, ...]
    first: list[int]
    values: Tensor

    @property
    def rows(self) -> Int[Tensor, "row case"]:
        return self.values.flatten(0, -2)

    def made(self, row: int) -> _Made:
        """What a row is made of."""
        within = torch.unravel_index(torch.tensor(row), self.values.shape[:-1])
        places = (start + int(k) for start, k in zip(self.first, within))
        return _Made(self.op, tuple(zip(self.sizes, places)))


def _applied(name: str, parts: Sequence[Tensor]) -> Int[Tensor, "*part case"]:
    """An operation on every choice of one expression of each part."""
    n, n_cases = len(parts), parts[0].shape[-1]
    spread = [
        part.view(*(len(part) if k == axis else 1 for k in range(n)), n_cases)
        for axis, part in enumerate(parts)
    ]
    return OPS[name].apply(*spread).expand(*map(len, parts), n_cases)


def shortest_expression(
    target: Int[Tensor, " case"],
    atoms: Sequence[Atom],
    *,
    largest: int = 8,
    most: int = 2000,
) -> Seq | None:
    """An expression of fewest atoms and operations with the target's value in every case.

    Where all values are 0 or 1, of :data:`LOGIC`; else of :data:`ARITHMETIC`.

    Args:
        target: Values wanted.
        atoms: What it may be made of; small constants are added.
        largest: Atoms and operations of an expression, at most.
        most: Expressions kept of each size; with more, the search is no longer complete.

    Returns:
        None if there is none of that size.

    Raises:
        InputError: atoms of other cases than the target's, or no case at all.

    Example:
        >>> from loopinterp.rasp import var
        >>> a, b = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
        >>> shortest_expression(a ^ b, [Atom(var("a"), a), Atom(var("b"), b)])
        var('a') ^ var('b')
    """
    for what in (target, *(atom.values for atom in atoms)):
        if what.shape != target.shape or not len(target):
            raise InputError(
                "values of an atom",
                expected=f"one for each of the {len(target)} cases of the target, at least one",
                given=f"shape {list(what.shape)}",
                fix="Give every atom its value in each case.",
            )
    every = torch.stack([target, *(atom.values for atom in atoms)])
    low, top = int(every.min()), int(every.max())
    ops = LOGIC if low >= 0 and top <= 1 else ARITHMETIC
    constants = range(min(low, 0), top + 2)
    leaves = [*atoms, *(Atom(full(k), torch.full_like(target, k)) for k in constants)]
    bank = _Bank(len(target))
    for leaf in leaves:
        if torch.equal(leaf.values, target):
            return leaf.expression
    rows = torch.stack([leaf.values for leaf in leaves])
    kept = bank.new(rows)
    bank.values[1], bank.made[1] = rows[kept], [leaves[k].expression for k in kept.tolist()]
    every_case = torch.arange(len(target))
    few = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))[:_FEW]
    for size in range(2, largest + 1):
        values, made = [target.new_empty(0, len(target))], []
        for op, sizes in _shapes(size, ops):
            # What is not kept only has to be the target: most are not in a few cases already.
            keep = len(made) < most and size < largest
            cases = every_case if keep else few
            for grown in bank.grown(op, sizes, cases):
                for hit in (grown.rows == target[cases]).all(-1).nonzero().flatten().tolist():
                    found = grown.made(hit)
                    if torch.equal(bank.values_of(found), target):
                        return bank.expression(found)
                if keep and len(made) < most:
                    new = bank.new(grown.rows)[: most - len(made)]
                    values.append(grown.rows[new])
                    made += map(grown.made, new.tolist())
        bank.values[size], bank.made[size] = torch.cat(values), made
    return None


def _shapes(size: int, ops: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Operations with sizes of their parts that make an expression of a size."""
    for op in ops:
        for sizes in _shares(OPS[op].arity, size - 1):
            if op not in _COMMUTE or sizes[0] <= sizes[1]:
                yield op, sizes


def _shares(n: int, total: int) -> Iterator[tuple[int, ...]]:
    """Ways to share a size among n parts, each at least 1."""
    if n == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - n + 2):
        for rest in _shares(n - 1, total - first):
            yield (first, *rest)
