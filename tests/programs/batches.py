"""Random batches of sequences for the tests of the language: one example holds a hundred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from loopinterp.programs import Selector, Seq, evaluate

SEQUENCES = 100
"""Sequences in one batch; forty batches are four thousand inputs."""

Row = list[int]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tokens and two variables: few values and so many ties, or many; negative ones or none."""
    low, high = draw(st.sampled_from([(0, 1), (-1, 1), (0, 3), (-4, 4), (-900, 900)]))
    shape = (3, SEQUENCES, draw(st.integers(1, 9)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tokens, u, v = torch.randint(low, high + 1, shape, generator=g)
    return {"tokens": tokens, "u": u, "v": v}


def agree(
    expr: Seq | Selector, definition: Callable[..., Any], data: dict[str, torch.Tensor]
) -> None:
    """Check an expression against a definition that takes one sequence of each kind."""
    got = evaluate(expr, data["tokens"], {name: data[name] for name in "uv"}).tolist()
    rows = zip(*(data[name].tolist() for name in ("tokens", "u", "v")))
    for mine, (x, u, v) in zip(got, rows):
        assert mine == definition(x, u, v), (x, u, v)
