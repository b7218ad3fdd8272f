"""The library of RASP-L, written in its primitives: running values, searches, and induction.

Every function looks at a position and what comes before it, never ahead. ``x_j`` below runs over
j <= i, and x_i is the value at the position itself.

Source: RASP-L, arXiv 2310.16028. Its reference leaves the predicate of ``argmax`` open, so that
``argmax``, ``argmin`` and ``mode`` cannot run there; here they look for the running maximum
itself, which leaves the reference's choice among equals: the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.errors import check_integer
from loopinterp.rasp.language import aggregate, indices, kqv, sel_width, select, shift_right, where

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Seq


def mask(x: Seq | int, bool_mask: Seq | int, mask_val: Seq | int = 0) -> Seq:
    """``x`` where the mask is not 0, else ``mask_val``."""
    return where(bool_mask, x, mask_val)


def cumsum(x: Seq | int) -> Seq:
    """How many x_j are not 0: the running count of a sequence of truth values.

    Example:
        >>> from loopinterp.rasp import evaluate, tokens
        >>> import torch
        >>> evaluate(cumsum(tokens), torch.tensor([[1, 0, 1, 1]])).tolist()
        [[1, 1, 2, 3]]
    """
    return sel_width(select(x, 0, "!="))


def maximum(x: Seq | int) -> Seq:
    """The largest x_j so far (of two sequences: :func:`loopinterp.rasp.larger`)."""
    return kqv(x, x, x, "true", mode="max")


def minimum(x: Seq | int) -> Seq:
    """The smallest x_j so far (of two sequences: :func:`loopinterp.rasp.smaller`)."""
    return kqv(x, x, x, "true", mode="min")


def argmax(x: Seq | int) -> Seq:
    """The last j at which x_j is the largest so far.

    Example:
        >>> from loopinterp.rasp import evaluate, tokens
        >>> import torch
        >>> evaluate(argmax(tokens), torch.tensor([[2, 1, 5, 5, 3]])).tolist()
        [[0, 0, 2, 3, 3]]
    """
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
    """x at position index_i; ``default`` where that is ahead of i, or no position at all.

    Example:
        >>> from loopinterp.rasp import evaluate, tokens
        >>> import torch
        >>> evaluate(index_select(tokens, indices - 2), torch.tensor([[5, 6, 7, 8]])).tolist()
        [[0, 0, 5, 6]]
    """
    return kqv(indices, index, x, "==", default=default)


def first_true(x: Seq | int, *, default: int = -1) -> Seq:
    """The first j at which x_j is 1; ``default`` if there is none."""
    return firsts(x, 1, default=default)


def mode(x: Seq | int) -> Seq:
    """The value that was seen most often so far; among equals, the one that got there last.

    Example:
        >>> from loopinterp.rasp import evaluate, tokens
        >>> import torch
        >>> evaluate(mode(tokens), torch.tensor([[4, 7, 7, 4, 4]])).tolist()
        [[4, 7, 7, 4, 4]]
    """
    return index_select(x, argmax(num_prev(x, x)))


def binary_mode(x: Seq | int) -> Seq:
    """1 if more x_j are 1 than are 0, else 0."""
    return num_prev(x, 1) > num_prev(x, 0)


def induct_kqv(
    k: Seq | int,
    q: Seq | int,
    v: Seq | int,
    offset: int,
    *,
    default: int = 0,
    null_val: int = -999,
) -> Seq:
    """The value of ``v``, ``offset`` positions after the first key that equals the query.

    Position i takes v_{j + offset} for the first j with k_j = q_i and j + offset <= i.

    Args:
        k: Keys.
        q: Queries.
        v: Values.
        offset: How far behind the key its value stands, at least 0.
        default: The value where no key is found.
        null_val: Stands for "no key"; a value that ``k`` and ``q`` never take.

    Raises:
        InputError: ``offset`` is negative, or no integer.

    Example:
        >>> from loopinterp.rasp import evaluate, tokens
        >>> import torch
        >>> evaluate(induct(tokens, tokens, 1), torch.tensor([[5, 6, 7, 5, 6]])).tolist()
        [[0, 0, 0, 6, 7]]
    """
    fix = "To look before the key that was found, use induct_prev."
    check_integer("offset of induct", offset, least=0, fix=fix)
    moved = shift_right(k, offset, default=null_val)
    return index_select(v, firsts(moved, q, default=null_val), default=default)


def induct(
    k: Seq | int, q: Seq | int, offset: int, *, default: int = 0, null_val: int = -999
) -> Seq:
    """:func:`induct_kqv` where the values are the keys themselves: an induction head."""
    return induct_kqv(k, q, k, offset, default=default, null_val=null_val)


def induct_prev(
    k: Seq | int, q: Seq | int, offset: int, *, default: int = 0, null_val: int = -999
) -> Seq:
    """The key at ``offset`` (which may be negative) from the first key that equals the query."""
    return index_select(k, firsts(k, q, default=null_val) + offset, default=default)


aggr = aggregate
"""RASP-L's name for :func:`loopinterp.rasp.aggregate`."""
