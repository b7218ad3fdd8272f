"""What is found has the wanted values, and nothing shorter has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.decompiler.expression_search import shortest_expression
from loopinterp.programs import tok_map, tokens, var
from loopinterp.programs.expressions import Seq, postorder
from loopinterp.programs.interpreter import Interpreter

A = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
B = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
C = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
ATOMS = [(var(name), values) for name, values in zip("abc", (A, B, C))]


def evaluated(expression: Seq) -> torch.Tensor:
    state = dict(zip("abc", (x[None] for x in (A, B, C))))
    return Interpreter(torch.zeros(1, 8, dtype=torch.int64)).run([expression], state)[expression][0]


@given(st.lists(st.integers(0, 1), min_size=8, max_size=8))
@settings(max_examples=40)
def test_what_is_found_has_the_values_that_were_wanted(wanted: list[int]) -> None:
    target = torch.tensor(wanted)
    expression = shortest_expression(target, ATOMS)
    if expression is not None:
        assert torch.equal(evaluated(expression), target)


@pytest.mark.parametrize(
    ("target", "size"), [(A, 1), (1 - B, 2), (A & B, 3), (A ^ C, 3), (A | (B & C), 5)]
)
def test_nothing_is_longer_than_it_need_be(target: torch.Tensor, size: int) -> None:
    expression = shortest_expression(target, ATOMS)
    assert expression is not None and len(postorder([expression])) == size
    assert size == 1 or shortest_expression(target, ATOMS, largest=size - 1) is None


def test_sums_modulo_are_found_and_a_divisor_is_a_constant() -> None:
    x, y = (torch.arange(25) // 5, torch.arange(25) % 5)
    atoms = [(var("x"), x), (var("y"), y)]
    code = "(var('x') + var('y')) % 5"
    assert repr(shortest_expression((x + y) % 5, atoms)) == code
    assert shortest_expression(x % y.clamp(min=1), atoms, largest=3) is None


def test_words_of_tokens_are_atoms_like_others() -> None:
    word = tok_map(tokens, {3: 1}, default=0, name="generate")
    expression = shortest_expression(A | C, [(word, A), (var("carry"), C)])
    assert expression is not None and "generate" in repr(expression) and "|" in repr(expression)
