"""RASP-L: the functions that programs are written with, and its library.

Selection is causal unless ``causal=False``, sequences hold integers, and 0 is false. In the library
``x_j`` runs over j <= i, and x_i is the value at the position itself.

Source: RASP-L, arXiv 2310.16028, which leaves the predicate of ``argmax`` open. Here ``argmax``,
``argmin`` and ``mode`` follow the running extreme, and take the last among equals.

Example:
    >>> from loopinterp.programs import evaluate
    >>> import torch
    >>> def run(x, values): return evaluate(x, torch.tensor([values])).tolist()[0]
    >>> run(cumsum(tokens), [1, 0, 1, 1]), run(argmax(tokens), [2, 1, 5, 5, 3])
    ([1, 1, 2, 3], [0, 0, 2, 3, 3])
    >>> run(mode(tokens), [4, 7, 7, 4, 4]), run(index_select(tokens, indices - 2), [5, 6, 7, 8])
    ([4, 7, 7, 4, 4], [0, 0, 5, 6])
    >>> run(induct(tokens, tokens, 1), [5, 6, 7, 5, 6])
    [0, 0, 0, 6, 7]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from loopinterp.core.errors import InputError, check_integer
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import MAX_RELATION, Selector, Seq, as_seq

UNKNOWN = -1
"""The value of an answer or a variable that is undecided."""

tokens: Seq = nodes.Tokens()
indices: Seq = nodes.Indices()


def full(value: int) -> Seq:
    """The same integer at every position."""
    return nodes.Full(value)


def var(name: str) -> Seq:
    """A variable of the loop program, at the start of the loop."""
    return nodes.Var(name)


def tok_map(
    x: Seq | int, table: Mapping[int, int], *, default: int | None = None, name: str | None = None
) -> Seq:
    """A table (value -> new value) applied at each position.

    Other values become ``default``, or raise an error without one. Printed programs show ``name``.
    """
    if not isinstance(table, Mapping):
        expected, got = "a mapping from integers to integers", f"{type(table).__name__} {table!r}"
        fix = "Write the function as a table, e.g. {0: 1, 1: 0}, so that it can be compiled."
        raise InputError("table of tok_map", expected=expected, given=got, fix=fix)
    return nodes.TokMap(as_seq(x), tuple(table.items()), default, name)


def seq_map(op: str, *args: Seq | int) -> Seq:
    """A named operation at each position, e.g. ``seq_map("add", x, y)``."""
    return nodes.Elementwise(op, tuple(as_seq(arg) for arg in args))


def eq(x: Seq | int, y: Seq | int) -> Seq:
    """1 where the values are equal, else 0 (``x == y`` compares the expressions)."""
    return seq_map("eq", x, y)


def ne(x: Seq | int, y: Seq | int) -> Seq:
    """1 where the values differ, else 0."""
    return seq_map("ne", x, y)


def where(condition: Seq | int, x: Seq | int, y: Seq | int) -> Seq:
    """``x`` where the condition is not 0, else ``y``."""
    return seq_map("where", condition, x, y)


def smaller(x: Seq | int, y: Seq | int) -> Seq:
    """The smaller of two values at each position."""
    return seq_map("smaller", x, y)


def larger(x: Seq | int, y: Seq | int) -> Seq:
    """The larger of two values at each position."""
    return seq_map("larger", x, y)


def select(
    k: Seq | int,
    q: Seq | int,
    predicate: str | Iterable[tuple[int, int]],
    *,
    causal: bool = True,
    name: str | None = None,
) -> Selector:
    """Each query attends to the keys for which ``predicate(key, query)`` holds.

    Args:
        k: Value of each key.
        q: Value of each query.
        predicate: ``"=="``, ``"!="``, ``"<"``, ``"<="``, ``">"``, ``">="`` (key on the left),
            ``"true"``, or the (key, query) pairs for which it holds.
        causal: Select no later position than the query's own.
        name: The selector's name in traces.
    """
    if not isinstance(predicate, str) and isinstance(predicate, Iterable):
        predicate = tuple(islice(predicate, MAX_RELATION + 1))  # it may have no end
    return nodes.Select(as_seq(k), as_seq(q), predicate, causal, name)


def aggregate(selector: Selector, value: Seq | int, mode: str = "mean", default: int = 0) -> Seq:
    """Mean (truncated), ``"max"`` or ``"min"`` of the selected values; ``default`` if none."""
    return nodes.Aggregate(selector, as_seq(value), mode, default)


aggr = aggregate
"""RASP-L's name for :func:`loopinterp.programs.aggregate`."""


def sel_width(selector: Selector) -> Seq:
    """The number of positions each query selects."""
    return nodes.SelWidth(selector)


def kqv(
    k: Seq | int,
    q: Seq | int,
    v: Seq | int,
    predicate: str | Iterable[tuple[int, int]],
    *,
    mode: str = "mean",
    default: int = 0,
    causal: bool = True,
    name: str | None = None,
) -> Seq:
    """``aggregate(select(k, q, predicate), v)``: one attention head."""
    return aggregate(select(k, q, predicate, causal=causal, name=name), v, mode, default)


def shift_right(x: Seq | int, n: int = 1, *, default: int = 0) -> Seq:
    """The value ``n`` positions before; ``default`` at the first ``n`` positions.

    The selector is named ``shift_{n}``; a shift by 0 is ``x`` itself.

    Example:
        >>> shift_right(tokens, 2), shift_right(tokens, 0)
        (shift_right(tokens, 2, default=0), tokens)
    """
    unmoved = type(n) is int and n == 0
    return as_seq(x) if unmoved else nodes.ShiftRight(as_seq(x), n, default)


# The library.


def mask(x: Seq | int, bool_mask: Seq | int, mask_val: Seq | int = 0) -> Seq:
    """``x`` where the mask is not 0, else ``mask_val``."""
    return where(bool_mask, x, mask_val)


def cumsum(x: Seq | int) -> Seq:
    """How many x_j are not 0."""
    return sel_width(select(x, 0, "!="))


def maximum(x: Seq | int) -> Seq:
    """The largest x_j so far (of two sequences: :func:`loopinterp.programs.larger`)."""
    return kqv(x, x, x, "true", mode="max")


def minimum(x: Seq | int) -> Seq:
    """The smallest x_j so far (of two sequences: :func:`loopinterp.programs.smaller`)."""
    return kqv(x, x, x, "true", mode="min")


def argmax(x: Seq | int) -> Seq:
    """The last j at which x_j is the largest so far."""
    return kqv(x, maximum(x), indices, "==", mode="max")


def argmin(x: Seq | int) -> Seq:
    """The last j at which x_j is the smallest so far."""
    return kqv(x, minimum(x), indices, "==", mode="max")


def num_prev(x: Seq | int, queries: Seq | int) -> Seq:
    """How many x_j equal queries_i."""
    return sel_width(select(x, queries, "=="))


def has_seen(x: Seq | int, queries: Seq | int) -> Seq:
    """1 if some x_j equals queries_i, else 0."""
    return kqv(x, queries, 1, "==")


def firsts(x: Seq | int, queries: Seq | int, *, default: int = -1) -> Seq:
    """The first j at which x_j equals queries_i; ``default`` if there is none."""
    return kqv(x, queries, indices, "==", mode="min", default=default)


def lasts(x: Seq | int, queries: Seq | int, *, default: int = -1) -> Seq:
    """The last j at which x_j equals queries_i; ``default`` if there is none."""
    return kqv(x, queries, indices, "==", mode="max", default=default)


def index_select(x: Seq | int, index: Seq | int, *, default: int = 0) -> Seq:
    """x at position index_i; ``default`` if that is after i or no position."""
    return kqv(indices, index, x, "==", default=default)


def first_true(x: Seq | int, *, default: int = -1) -> Seq:
    """The first j at which x_j is 1; ``default`` if there is none."""
    return firsts(x, 1, default=default)


def mode(x: Seq | int) -> Seq:
    """The most frequent value so far; among equals, the one that reached the count last."""
    return index_select(x, argmax(num_prev(x, x)))


def binary_mode(x: Seq | int) -> Seq:
    """1 if more x_j are 1 than are 0, else 0."""
    return num_prev(x, 1) > num_prev(x, 0)


def induct_kqv(
    k: Seq | int, q: Seq | int, v: Seq | int, offset: int, *, default: int = 0, null_val: int = -999
) -> Seq:
    """The value ``offset`` positions after the first key that equals the query.

    Position i takes v_{j + offset} for the first j with k_j = q_i and j + offset <= i, else
    ``default``. ``null_val`` is a value that ``k`` and ``q`` never take.
    """
    fix = "To look before the key that was found, use induct_prev."
    check_integer("offset of induct", offset, least=0, fix=fix)
    moved = shift_right(k, offset, default=null_val)
    return index_select(v, firsts(moved, q, default=null_val), default=default)


def induct(
    k: Seq | int, q: Seq | int, offset: int, *, default: int = 0, null_val: int = -999
) -> Seq:
    """:func:`induct_kqv` with the keys as values: an induction head."""
    return induct_kqv(k, q, k, offset, default=default, null_val=null_val)


def induct_prev(
    k: Seq | int, q: Seq | int, offset: int, *, default: int = 0, null_val: int = -999
) -> Seq:
    """The key at ``offset`` (which may be negative) from the first key that equals the query."""
    return index_select(k, firsts(k, q, default=null_val) + offset, default=default)
