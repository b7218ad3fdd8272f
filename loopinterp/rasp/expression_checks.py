"""Checks of the plain values that expressions hold: integers, tables, relations."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

from loopinterp.errors import InputError

MAX_TABLE = 65_536
"""Most entries in a table of ``tok_map``, and most input tokens of a program."""

MAX_RELATION = 4_096
"""Most (key, query) pairs of a predicate."""

_INT64 = range(-(2**63), 2**63)


def check_int(x: object, what: str) -> None:
    """Check that ``x`` is an integer of 64 bits (and no bool)."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise InputError(
            what, expected="an integer", given=reprlib.repr(x), fix="Sequences hold integers only."
        )
    if x not in _INT64:
        raise InputError(
            what,
            expected="an integer of 64 bits",
            given=f"one of {x.bit_length()} bits",
            fix="Use a number from -2**63 to 2**63 - 1.",
        )


def check_table(table: Mapping[int, int]) -> None:
    """Check the table of a ``tok_map``: its size and its entries."""
    if len(table) > MAX_TABLE:
        raise InputError(
            "table of tok_map",
            expected=f"at most {MAX_TABLE:,} entries",
            given=f"{len(table):,}",
            fix="Write the function with operators (x * x % 7), or give most values a default.",
        )
    for value in (*table, *table.values()):
        check_int(value, "entry in the table of tok_map")


def check_relation(pairs: object, k: object, q: object) -> None:
    """Check the (key, query) pairs for which the predicate of ``select(k, q, pairs)`` holds."""
    if not isinstance(pairs, Sequence) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs[: MAX_RELATION + 1]
    ):
        raise InputError(
            f"predicate of select(k={k!r}, q={q!r})",
            expected="a function of two tokens: a name such as '==', or (key, query) pairs",
            given=reprlib.repr(pairs),
            fix='Write select(k, q, "=="), or list the pairs: [(0, 1), (1, 0)].',
        )
    if len(pairs) > MAX_RELATION:
        raise InputError(
            f"predicate of select(k={k!r}, q={q!r})",
            expected=f"at most {MAX_RELATION:,} (key, query) pairs",
            given="more",
            fix="Map keys and queries with tok_map first, and compare what comes out.",
        )
    for value in (v for pair in pairs for v in pair):
        check_int(value, "token in the predicate of select")
