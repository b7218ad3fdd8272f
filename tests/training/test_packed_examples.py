"""Rows without padding, against the examples that they are made of, one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.tasks.task import IGNORE
from loopinterp.training.objectives import Asked
from loopinterp.training.packed_examples import Packing

Lengths = list[list[tuple[int, int, int]]]


def examples(most: int = 4) -> st.SearchStrategy[Lengths]:
    """By seed and example: positions that are read, and two numbers of loops."""
    one = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
    many = st.integers(1, most).flatmap(lambda n: st.lists(one, min_size=n, max_size=n))
    return st.integers(1, most).flatmap(
        lambda n: st.lists(st.lists(one, min_size=n, max_size=n), min_size=2, max_size=3)
    ) | many.map(lambda rows: [rows, rows[::-1]])


def asked_of(drawn: Lengths) -> list[Asked]:
    """The first seed is asked twice, the others once; padding differs between seeds."""
    found = []
    for seed, rows in enumerate(drawn):
        width = max(length for length, *_ in rows) + seed
        targets = torch.full((2, len(rows), width), IGNORE)
        for row, (length, *_) in enumerate(rows):
            targets[0, row, length - 1] = row
        loops = torch.tensor([[a, b] for _, a, b in rows]).T
        n_asks = 1 if seed else 2
        found.append(Asked(loops[:n_asks], targets[:n_asks]))
    return found


@settings(max_examples=15)
@given(examples())
def test_a_row_has_each_position_once_and_those_that_run_first(drawn: Lengths) -> None:
    asked = asked_of(drawn)
    packing = Packing.of(asked)
    names = [  # of each position: its example, and its place there
        torch.cartesian_prod(torch.arange(len(rows)), torch.arange(one.targets.shape[-1]))
        .view(len(rows), -1, 2)
        .double()
        for rows, one in zip(drawn, asked)
    ]
    packed = packing.pack(names)
    for seed, (rows, one) in enumerate(zip(drawn, asked)):
        ends = one.loops.amax(0).tolist()
        wanted = [
            [row, pos]
            for row in sorted(range(len(rows)), key=lambda row: -ends[row])
            for pos in range(rows[row][0])
        ]
        assert packed[seed, : len(wanted)].tolist() == wanted
        for loop, (n_examples, n_places) in enumerate(packing.running, 1):
            running = [row for row in range(len(rows)) if ends[row] >= loop]
            assert n_examples[seed] == len(running)
            assert n_places[seed] == sum(rows[row][0] for row in running)


@settings(max_examples=15)
@given(examples())
def test_answers_are_found_where_they_were_asked_for(drawn: Lengths) -> None:
    """Each state names its seed, loop, example and position; so do the answers."""
    asked = asked_of(drawn)
    packing = Packing.of(asked)
    example = packing.order.gather(1, packing.example)
    at = torch.stack([example, packing.pos], -1).double()
    n_places = [at.shape[1], *(max(places) for _, places in packing.running)]
    seed = torch.arange(len(at)).double()[:, None, None].expand(-1, at.shape[1], 1)
    states = [
        torch.cat([seed[:, :n], torch.full_like(seed[:, :n], loop), at[:, :n]], -1)
        for loop, n in enumerate(n_places)
    ]
    answers = packing.answers(states)
    for seed, (rows, one) in enumerate(zip(drawn, asked)):
        for ask, loops in enumerate(one.loops.tolist()):
            for row, (length, *_) in enumerate(rows):
                for pos in range(length):
                    assert answers[seed, ask, row, pos].tolist() == [seed, loops[row], row, pos]


@settings(max_examples=15)
@given(examples())
def test_noise_meets_the_examples_that_run_in_turn(drawn: Lengths) -> None:
    asked = asked_of(drawn)
    packing = Packing.of(asked)
    for loop, (n_examples, n_places) in enumerate(packing.running):
        noise = [torch.randn(n, one.targets.shape[-1], 3) for n, one in zip(n_examples, asked)]
        packed = packing.pack_noise(noise, loop)
        for seed, own in enumerate(noise):
            lengths = packing.lengths[seed, : len(own)].tolist()
            rows = [row[:length] for row, length in zip(own, lengths)]
            wanted = torch.cat([*rows, torch.zeros(max(n_places) - n_places[seed], 3)])
            assert torch.equal(packed[seed], wanted)


def test_a_square_that_is_nearly_full_is_run_whole() -> None:
    nearly = [Asked(torch.ones(1, 8, dtype=torch.long), torch.zeros(1, 8, 9).long())]
    nearly[0].targets[0, 0, -1] = IGNORE
    assert not Packing.of(nearly).is_square
    packing = Packing.of(nearly, square=True)
    assert packing.is_square and packing.n_pos == 9
