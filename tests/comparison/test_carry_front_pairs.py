"""Where the front of resolved carries is, and which place of the table each exchange has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loopinterp.comparison.carry_front_pairs import PLACE, PLACES, CarryFrontPairs, front
from loopinterp.comparison.program_runs import ProgramModel
from loopinterp.programs import get_program
from loopinterp.tasks import IGNORE, Addition, Batch

N_BITS = 16
LONGEST = 4  # longer chains that bring a carry are rare among additions of 16 random bits


@pytest.fixture(scope="module")
def additions() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Addition().sample(N_BITS, batch_size=64, generator=generator)


@pytest.fixture(scope="module")
def program_model() -> Callable[[str], ProgramModel]:
    return lambda name: ProgramModel(get_program(name), max_length=N_BITS + 1)


@pytest.mark.parametrize(
    ("program", "resolved"),
    [
        ("ripple", [1, 2, 3, 4, 5]),
        ("late_ripple", [3, 4, 5, 6, 7]),
        ("lookahead", [0, 1, 2, 2, 3]),  # it looks twice as far at each loop
        ("one_shot", [1, 1, 1, 1, 1]),
    ],
)
def test_a_chain_is_resolved_from_the_loop_from_which_the_answers_behind_it_stay_right(
    program, resolved, program_model, additions
):
    assert front(program_model(program), additions)[: LONGEST + 1].tolist() == resolved


def test_an_answer_that_is_not_decided_is_not_right_where_the_sum_bit_is_0(
    program_model, generator
):
    """All propagate behind the first bit, so that every sum bit behind a chain is 0."""
    n = 12
    batch = Addition().sample(n, batch_size=4, generator=generator, distribution="chain")
    assert front(program_model("one_shot"), batch)[: n - 1].tolist() == [1] * (n - 1)


def place_in_the_table(own: bool, next_: bool, after: bool, other: bool) -> str | None:
    """The table of the module, line by line, of bits i, i + 1, i + 2 and i of the source."""
    lines = {
        "ahead": not own and not other,
        "at": own and other and not next_,
        "one behind": own and other and next_ and not after,
        "two or more behind": own and other and next_ and after,
        "planted ahead": not own and other,
        "erased behind": own and next_ and after and not other,
    }
    held = [place for place, holds in lines.items() if holds]
    assert len(held) <= 1
    return held[0] if held else None


@pytest.mark.parametrize("program", ["ripple", "lookahead"])
def test_each_pair_exchanges_an_opposite_carry_at_the_place_it_is_said_to_be_of(
    program, program_model, additions, generator
):
    model, task = program_model(program), Addition()
    pairs = CarryFrontPairs(per_place=40)(model, [get_program(program)], additions, generator)
    tokens, carry = additions.inputs, task.carry_in(additions.inputs)
    resolved = front(model, additions)[task.chain_length_in(tokens)]
    codes = pairs.strata[PLACE].codes
    for base, source, (i,), loop, code in zip(
        pairs.base, pairs.source, pairs.positions, pairs.loop, codes
    ):
        assert tokens[base, i] == tokens[source, i] and carry[base, i] != carry[source, i]
        assert additions.targets[base, i] != IGNORE
        own, next_, after = (bool(resolved[base, i + k] <= loop) for k in range(3))
        other = bool(resolved[source, i] <= loop)
        assert PLACES[code] == place_in_the_table(own, next_, after, other)
    assert len(codes.unique()) >= 5
    assert torch.equal(pairs.loop, pairs.source_loop)
