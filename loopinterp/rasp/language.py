"""The words of the language: what programs are written with.

Source: RASP-L, arXiv 2310.16028. Selection is causal unless said otherwise, sequences hold
integers, and 0 is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from loopinterp.errors import InputError
from loopinterp.rasp import expr as nodes
from loopinterp.rasp.expr import Selector, Seq, as_seq
from loopinterp.rasp.expression_checks import MAX_RELATION

UNKNOWN = -1
"""The value by which a program says that it has not decided yet."""

tokens: Seq = nodes.Tokens()
indices: Seq = nodes.Indices()


def full(value: int) -> Seq:
    """The same integer at every position."""
    return nodes.Full(value)


def var(name: str) -> Seq:
    """A variable of the loop program, as it was at the start of the loop."""
    return nodes.Var(name)


def tok_map(
    x: Seq | int, table: Mapping[int, int], *, default: int | None = None, name: str | None = None
) -> Seq:
    """A table applied at each position.

    Args:
        x: The sequence to map.
        table: Value -> new value.
        default: New value of whatever the table lacks; without it, such a value is an error.
        name: What to call the table where the program is shown.

    Example:
        >>> tok_map(tokens, {3: 1}, default=0)
        tok_map(tokens, {3: 1}, default=0)
    """
    if not isinstance(table, Mapping):
        raise InputError(
            "table of tok_map",
            expected="a mapping from integers to integers",
            given=f"{type(table).__name__} {table!r}",
            fix="Write the function as a table, e.g. {0: 1, 1: 0}, so that it can be compiled.",
        )
    return nodes.TokMap(as_seq(x), tuple(table.items()), default, name)


def seq_map(op: str, *args: Seq | int) -> Seq:
    """A named operation on the values at each position, e.g. ``seq_map("add", x, y)``."""
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
    """Each query looks at the keys for which ``predicate(key, query)`` holds.

    Args:
        k: Value of each key.
        q: Value of each query.
        predicate: ``"=="``, ``"!="``, ``"<"``, ``"<="``, ``">"``, ``">="`` (key on the left),
            ``"true"``, or the (key, query) pairs for which it holds.
        causal: Look only at the query's own position and before.
        name: How traces call the selector.

    Raises:
        InputError: the predicate is not a function of two tokens.

    Example:
        >>> select(tokens, tokens, "==", name="same token")
        select(tokens, tokens, '==', name='same token')
    """
    if not isinstance(predicate, str) and isinstance(predicate, Iterable):
        predicate = tuple(islice(predicate, MAX_RELATION + 1))  # it may have no end
    return nodes.Select(as_seq(k), as_seq(q), predicate, causal, name)


def aggregate(selector: Selector, value: Seq | int, mode: str = "mean", default: int = 0) -> Seq:
    """Mean (truncated), ``"max"`` or ``"min"`` of the selected values; ``default`` if none is."""
    return nodes.Aggregate(selector, as_seq(value), mode, default)


def sel_width(selector: Selector) -> Seq:
    """How many positions each query selects."""
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

    Its selector is called ``shift_{n}``; a shift by 0 is ``x`` itself.

    Raises:
        InputError: ``n`` is negative or no integer.

    Example:
        >>> shift_right(tokens, 2), shift_right(tokens, 0)
        (shift_right(tokens, 2, default=0), tokens)
    """
    unmoved = type(n) is int and n == 0
    return as_seq(x) if unmoved else nodes.ShiftRight(as_seq(x), n, default)
