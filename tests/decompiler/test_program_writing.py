"""Tables as programs; delays that are read out of a table are those of its program."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.compiler import compile_program
from loopinterp.decompiler import TransitionTable, decompile, response_times
from loopinterp.decompiler.program_writing import Messages, program_of
from loopinterp.tasks import Addition, get_task
from tests.decompiler.test_transition_table import INPUTS, answers, drawn

KILL, FIRST, SECOND, GENERATE = 0, 1, 2, 3


def delays(program: str) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(token, answer before, answer after) -> least and most loops."""
    model = compile_program(program, max_length=7).model
    settings = {"examples": 16, "contexts": 8, "tries": 2, "tolerances": [0.0]}
    found = decompile(model, Addition(), n=4, lengths=[2], **settings).automaton
    assert found is not None
    inputs = Addition().sample(6, batch_size=64, generator=torch.Generator().manual_seed(0)).inputs
    table = response_times(found, inputs, n_loops=16)
    assert (table["ways"] >= 1).all()
    return {(t, b, a): (least, most) for t, b, a, least, most, _ in table.itertuples(index=False)}


def test_a_program_that_holds_nothing_follows_after_one_loop() -> None:
    found = delays("ripple")
    assert {key[0] for key in found} == {KILL, FIRST, SECOND, GENERATE}
    assert set(found.values()) == {(1, 1)}


def test_a_carry_that_is_held_goes_so_many_loops_later() -> None:
    held = 3
    found = delays("ripple_held_3")
    for token in (KILL, GENERATE):  # there the answer is the carry
        assert found[token, 0, 1] == (1, 1)
        assert found[token, 1, 0] == (held, held)
    for token in (FIRST, SECOND):  # and here its inverse
        assert found[token, 1, 0] == (1, 1)
        assert found[token, 0, 1] == (held, held)


def test_what_never_forgets_has_no_way_back() -> None:
    found = delays("sticky_ripple")
    assert (KILL, 0, 1) in found and (KILL, 1, 0) not in found


def test_of_inputs_that_the_table_does_not_know_nothing_is_said() -> None:
    automaton = TransitionTable.from_entries(
        {0: 1}, start={(-1, 0): 0}, step={((-1, 0), (0, 0)): 0}, answers={(0, 0): 1}
    )
    assert not len(response_times(automaton, torch.tensor([[5, 5]]), n_loops=3))
    assert not len(response_times(automaton, torch.tensor([[0]]), n_loops=3))


@given(st.integers(0, 10_000))
def test_a_program_says_what_its_table_says(seed: int) -> None:
    automaton = drawn(seed)
    program = program_of(automaton, get_task("prefix_sum"), readable=False)
    assert torch.equal(program.trace(INPUTS, 5).outputs, answers(automaton))


def test_the_shortest_way_to_write_it_says_the_same() -> None:
    automaton = drawn(0, sizes=(2, 2, 1))
    program = program_of(automaton, get_task("prefix_sum"))
    assert torch.equal(program.trace(INPUTS, 5).outputs, answers(automaton))


@given(st.integers(0, 10_000))
def test_messages_make_what_the_left_neighbours_make(seed: int) -> None:
    automaton = drawn(seed)
    messages = Messages.of(automaton)
    for (left, own), value in automaton.steps.items():
        assert messages.becomes[own, messages.sends[left]] == value
    assert messages.n <= 1 + len(automaton.cells)
