"""A transition table runs as its entries say, and equal cells are merged."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.decompiler.transition_table import EDGE, Cell, TransitionTable
from loopinterp.programs.language import UNKNOWN

INPUTS = torch.cartesian_prod(*[torch.tensor([0, 1, 2])] * 4)


def drawn(seed: int, sizes: tuple[int, int, int] = (2, 3, 1)) -> TransitionTable:
    """An automaton of three tokens, at random."""
    chance = random.Random(seed)
    known = dict(enumerate(sizes))
    cells: list[Cell] = [(token, v) for token, size in known.items() for v in range(size)]
    start = {token: chance.randrange(size) for token, size in known.items()}
    return TransitionTable.from_entries(
        known,
        start={(left, own): start[own] for left in (-1, *known) for own in known},
        step={
            (left, own): chance.randrange(known[own[0]]) for left in (EDGE, *cells) for own in cells
        },
        answers={cell: chance.choice([UNKNOWN, 0, 1]) for cell in cells},
    )


def answers(automaton: TransitionTable, n_loops: int = 5) -> torch.Tensor:
    return automaton.read(INPUTS, automaton.run(INPUTS, n_loops))


def test_a_table_by_hand_is_run_as_it_says() -> None:
    # A position takes over what its left neighbour has, and adds its own token.
    cells: list[Cell] = [(token, v) for token in (0, 1) for v in (0, 1)]
    automaton = TransitionTable.from_entries(
        {0: 2, 1: 2},
        start=dict.fromkeys([(left, own) for left in (-1, 0, 1) for own in (0, 1)], 0),
        step={(left, own): left[1] ^ own[0] for left in (EDGE, *cells) for own in cells},
        answers={cell: cell[1] for cell in cells},
    )
    tokens = torch.tensor([[1, 0, 1, 1]])
    *_, last = automaton.run(tokens, 4)
    assert last.tolist() == [[1, 1, 0, 1]]  # the running sum modulo 2
    (_, after) = automaton.run(tokens, 1, values=torch.tensor([[0, 1, 0, 0]]))
    assert after.tolist() == [[1, 0, 0, 1]]


@given(st.integers(0, 10_000))
def test_values_that_are_one_are_merged_and_no_others(seed: int) -> None:
    automaton = drawn(seed)
    # A second name for each value of token 1, which steps and answers like the first.
    twice = {0: 2, 1: 6, 2: 1}

    def first(cell: Cell) -> Cell:
        return cell if cell[0] != 1 else (1, cell[1] % 3)

    cells: list[Cell] = [(token, v) for token, size in twice.items() for v in range(size)]
    chance = random.Random(seed)
    doubled = TransitionTable.from_entries(
        twice,
        start=automaton.starts,
        step={
            (left, own): automaton.steps[first(left), first(own)]
            + (3 * chance.randrange(2) if own[0] == 1 else 0)
            for left in (EDGE, *cells)
            for own in cells
        },
        answers={cell: automaton.answer_of[first(cell)] for cell in cells},
    )
    merged = doubled.merged()
    assert merged.sizes == automaton.merged().sizes
    assert torch.equal(answers(merged), answers(automaton))
    assert merged.merged().sizes == merged.sizes


def test_cells_that_the_table_does_not_have_are_refused_or_keep_their_value() -> None:
    table = TransitionTable.from_entries(
        {0: 2}, start={(-1, 0): 0}, step={(EDGE, (0, 0)): 1}, answers={(0, 0): 0, (0, 1): 1}
    )
    tokens = torch.tensor([[0]])
    assert table.run(tokens, 1).flatten().tolist() == [0, 1]
    for bad, n_loops in ((tokens, 2), (torch.tensor([[0, 0]]), 0), (torch.tensor([[5]]), 0)):
        with pytest.raises(KeyError):
            table.run(bad, n_loops)
    assert table.follow(tokens, 3).flatten().tolist() == [0, 1, 1, 1]


@given(st.integers(0, 10_000))
def test_a_table_has_the_entries_that_it_was_made_from(seed: int) -> None:
    table = drawn(seed)
    again = TransitionTable.from_entries(
        table.sizes, start=table.starts, step=table.steps, answers=table.answer_of
    )
    for name in ("start", "step", "known", "answers"):
        assert torch.equal(getattr(again, name), getattr(table, name))
