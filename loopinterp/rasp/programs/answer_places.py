"""What the programs with full-output prediction share: where an answer stands, and a clock.

Their inputs are ``BOS prompt = EOS …``, and the answer is read from the ``=`` on: the place of a
position is how far behind the ``=`` it stands.
"""

from __future__ import annotations

from loopinterp.rasp.expr import Seq
from loopinterp.rasp.language import indices, kqv, ne, tokens, var, where

BEFORE = -1
"""Place of the positions before the ``=``."""


def position_of(token: int, name: str, *, default: int = BEFORE) -> Seq:
    """Where that token stands, from there on; ``default`` before it."""
    return kqv(tokens, token, indices, "==", default=default, name=name)


def place_behind(equals: Seq) -> Seq:
    """How far a position is behind the ``=``; -1 before it."""
    return where(equals >= 0, indices - equals, BEFORE)


left = var("left")
"""Loops until what moves is held; -1 where it is never held."""

running = ne(left, 0)
countdown = where(left > 0, left - 1, left)
