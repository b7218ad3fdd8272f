"""Stepping a model gives the states of an ordinary run: all of them, or those at chosen places."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import iterate, states_at
from tests.models.looped_toys import Halving
from tests.models.variants import VARIANTS, build, some_inputs

PLACE = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_states_of_an_ordinary_run(name: str) -> None:
    model = build(name)
    inputs = some_inputs(model)
    loops, states = zip(*iterate(model, inputs, 4))
    assert loops == (0, 1, 2, 3, 4)
    torch.testing.assert_close(torch.stack(states), model(inputs, n_loops=4, return_type="states"))


def test_a_run_goes_on_from_a_state() -> None:
    model = build("abacus on q and k")
    inputs = some_inputs(model)
    whole = [h for _, h in iterate(model, inputs, 5)]
    rest = list(iterate(model, inputs, 3, state=whole[2]))
    assert [loop for loop, _ in rest] == [0, 1, 2, 3]
    for (_, ours), theirs in zip(rest, whole[2:]):
        torch.testing.assert_close(ours, theirs)


def test_a_loop_runs_when_it_is_asked_for_and_gradients_are_the_callers() -> None:
    toy, e = Halving(), torch.zeros(1, 2, 1, requires_grad=True)
    run = iterate(toy, e, 100)
    assert not next(run)[1].requires_grad and not toy.rows
    assert next(run)[1].requires_grad and len(toy.rows) == 1
    with torch.no_grad():
        assert not next(iterate(toy, e, 1))[1].requires_grad


@pytest.mark.parametrize("n_loops", [-1, True])
def test_numbers_of_loops_are_checked_before_the_first_state(n_loops: int) -> None:
    with pytest.raises(InputError, match="n_loops"):
        iterate(Halving(), torch.zeros(1, 1, 1), n_loops)
    with pytest.raises(InputError, match="looped model"):
        iterate(object(), torch.zeros(1, 1, 1), 1)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_states_at_chosen_places(batch_size: int, generator: torch.Generator) -> None:
    model = build("demo")
    inputs = some_inputs(model, batch=7, n_pos=6)
    row = torch.randint(7, (2, 9), generator=generator)
    pos = torch.randint(6, (2, 9), generator=generator)
    states, e = states_at(model, inputs, row, pos, loops=[0, 2, 5], batch_size=batch_size)
    with torch.no_grad():
        expected = model(inputs, n_loops=5, return_type="states")
        torch.testing.assert_close(e, model.embed(inputs)[row, pos])
    torch.testing.assert_close(states, expected[[0, 2, 5]][:, row, pos], atol=1e-5, rtol=1e-5)
    assert not states.requires_grad


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("loops", "message"),
    [
        ([], "increasing"),
        ([2, 2], "increasing"),
        ([-1, 2], "integer >= 0, got -1"),
        (["a"], "integer >= 0, got 'a'"),
    ],
)
def test_loops_of_chosen_places_increase(loops: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        states_at(Halving(), torch.zeros(1, 3, 1), PLACE, PLACE, loops=loops)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    rows = torch.tensor([0, row])
    with pytest.raises(InputError, match=rf"row: expected an integer in 0\.\.3, got {row}"):
        states_at(Halving(), torch.zeros(4, 3, 1), rows, PLACE.expand(2), loops=[1])


def test_places_need_inputs() -> None:
    with pytest.raises(InputError, match="at least one"):
        states_at(Halving(), torch.zeros(0, 3, 1), PLACE[:0], PLACE[:0], loops=[1])
