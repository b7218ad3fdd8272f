"""Programs that nobody would write: compiled, they do what the interpreter does, loop for loop."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopinterp.compiler import compile_program
from loopinterp.programs import LoopProgram
from tests.compiler.compiled_properties import agrees, all_of_it_is_described, holds_nothing_else
from tests.compiler.random_programs import programs
from tests.compiler.small_programs import every_input

pytestmark = pytest.mark.usefixtures("quick")

LONGEST = {1: 5, 2: 5, 3: 3, 4: 3}
"""Positions of the longest input, for each size of the alphabet: all inputs are tried."""


def check(program: LoopProgram, max_length: int) -> None:
    compiled = compile_program(program, max_length=max_length)
    all_of_it_is_described(compiled)
    for n in {1, max_length - 1, max_length} - {0}:
        tokens = every_input(program, n)
        agrees(compiled, tokens, n_loops=4)
        holds_nothing_else(compiled, tokens, n_loops=2)


ALL = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(ALL, max_examples=30)
@given(programs(), st.integers(1, 6))
def test_random_programs_run_as_they_are_interpreted(program, max_length):
    check(program, min(max_length, LONGEST[len(program.inputs)]))
