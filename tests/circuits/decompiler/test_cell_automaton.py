"""An automaton runs as its table says, and as the program that it is written as."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.circuits.decompiler.automaton_program import Messages, program_of
from loopinterp.circuits.decompiler.cell_automaton import EDGE, Cell, CellAutomaton
from loopinterp.rasp import Linear
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks import get_task

INPUTS = torch.cartesian_prod(*[torch.tensor([0, 1, 2])] * 4)


def drawn(seed: int, sizes: tuple[int, int, int] = (2, 3, 1)) -> CellAutomaton:
    """An automaton of three tokens, at random."""
    chance = random.Random(seed)
    known = dict(enumerate(sizes))
    cells: list[Cell] = [(token, v) for token, size in known.items() for v in range(size)]
    start = {token: chance.randrange(size) for token, size in known.items()}
    return CellAutomaton(
        sizes=known,
        start={(left, own): start[own] for left in (-1, *known) for own in known},
        step={
            (left, own): chance.randrange(known[own[0]]) for left in (EDGE, *cells) for own in cells
        },
        answers={cell: chance.choice([UNKNOWN, 0, 1]) for cell in cells},
    )


def answers(automaton: CellAutomaton, n_loops: int = 5) -> torch.Tensor:
    runs = automaton.run(INPUTS, n_loops)
    return torch.stack([automaton.read(INPUTS, values) for values in runs])


def test_a_table_by_hand_is_run_as_it_says() -> None:
    # A position takes over what its left neighbour has, and adds its own token.
    cells: list[Cell] = [(token, v) for token in (0, 1) for v in (0, 1)]
    automaton = CellAutomaton(
        sizes={0: 2, 1: 2},
        start=dict.fromkeys([(left, own) for left in (-1, 0, 1) for own in (0, 1)], 0),
        step={(left, own): left[1] ^ own[0] for left in (EDGE, *cells) for own in cells},
        answers={cell: cell[1] for cell in cells},
    )
    tokens = torch.tensor([[1, 0, 1, 1]])
    *_, last = automaton.run(tokens, 4)
    assert last.tolist() == [[1, 1, 0, 1]], "the running sum modulo 2"
    (_, after) = automaton.run(tokens, 1, values=torch.tensor([[0, 1, 0, 0]]))
    assert after.tolist() == [[1, 0, 0, 1]]


@given(st.integers(0, 10_000))
def test_a_program_says_what_its_table_says(seed: int) -> None:
    automaton = drawn(seed)
    program = program_of(automaton, get_task("prefix_sum"), n_loops=Linear(), readable=False)
    assert torch.equal(program.trace(INPUTS, 5).outputs, answers(automaton))


@pytest.mark.parametrize("seed", range(2))
def test_the_shortest_way_to_write_it_says_the_same(seed: int) -> None:
    automaton = drawn(seed, sizes=(2, 2, 1))
    program = program_of(automaton, get_task("prefix_sum"), n_loops=Linear())
    assert torch.equal(program.trace(INPUTS, 5).outputs, answers(automaton))


@given(st.integers(0, 10_000))
def test_values_that_are_one_are_merged_and_no_others(seed: int) -> None:
    automaton = drawn(seed)
    # A second name for each value of token 1, which steps and answers like the first.
    twice = {0: 2, 1: 6, 2: 1}

    def first(cell: Cell) -> Cell:
        return cell if cell[0] != 1 else (1, cell[1] % 3)

    cells: list[Cell] = [(token, v) for token, size in twice.items() for v in range(size)]
    chance = random.Random(seed)
    doubled = CellAutomaton(
        sizes=twice,
        start=automaton.start,
        step={
            (left, own): automaton.step[first(left), first(own)]
            + (3 * chance.randrange(2) if own[0] == 1 else 0)
            for left in (EDGE, *cells)
            for own in cells
        },
        answers={cell: automaton.answers[first(cell)] for cell in cells},
    )
    merged = doubled.merged()
    assert merged.sizes == automaton.merged().sizes
    assert torch.equal(answers(merged), answers(automaton))
    assert merged.merged().sizes == merged.sizes


@given(st.integers(0, 10_000))
def test_messages_make_what_the_left_neighbours_make(seed: int) -> None:
    automaton = drawn(seed)
    messages = Messages.of(automaton)
    for (left, own), value in automaton.step.items():
        assert messages.becomes[own, messages.sends[left]] == value
    assert messages.n <= 1 + len(automaton.cells)
