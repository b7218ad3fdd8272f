"""Persistence of carries, against programs that hold them for a known time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.comparison import injected_carry_study
from loopinterp.comparison.injected_carry import ERASED, INJECTED, MOST
from loopinterp.comparison.variable_figures import _recovery
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.tasks import Addition, Parity

N = 24


@pytest.fixture(scope="module")
def result():
    names = ("ripple", "sticky_ripple", "ripple_held_3", "ripple_held_by_token")
    models = [compile_program(name, max_length=N + 1).model for name in names]
    generator = torch.Generator().manual_seed(0)
    batch = Addition().sample(N, batch_size=96, generator=generator)
    return injected_carry_study(models, batch, names=names, per_cell=8)


@pytest.mark.parametrize(
    ("program", "injected"), [("ripple", 1), ("ripple_held_3", 3), ("sticky_ripple", MOST)]
)
def test_a_injected_carry_lives_as_long_as_the_program_holds_it(result, program, injected):
    lives = result.counts(program, INJECTED)
    assert lives[injected] == lives.sum() > 50
    assert result.counts(program, ERASED)[1] == result.counts(program, ERASED).sum() > 50


def test_the_persistence_is_told_by_token(result):
    program = "ripple_held_by_token"
    tokens = {str(t): result.quantile(0.5, program, token=t) for t in result.data.token.values}
    assert tokens["a=1 b=0"] == 2
    assert tokens["a=0 b=1"] == 3


def test_there_is_no_injected_carry_where_the_left_neighbour_decides(result):
    counts = result.data["count"].sel(kind=INJECTED, left_token="a=1 b=1")
    assert int(counts.sum()) == 0  # a generating neighbour always sends a carry
    counts = result.data["count"].sel(kind=ERASED, left_token="a=0 b=0")
    assert int(counts.sum()) == 0


def test_it_is_said_and_drawn_from_the_saved_result(result, tmp_path):
    again = load_result(result.save(tmp_path))
    said = [finding.value for finding in again.findings()]
    assert said[:3] == ["1 loop", f"{MOST} loops or more", "3 loops"]
    assert len(again.findings()) == 4
    assert len(again.figures()) == 1


def test_only_carries_seen_to_end_count_as_recovered(result):
    plain, sticky, *_ = (result.counts(program) for program in result.data.model.values)
    assert plain[:MOST].sum() == plain.sum() > sticky[:MOST].sum() == 0
    lives = [np.bincount([1, MOST, MOST, MOST]), sticky, plain, np.zeros(MOST + 1)]
    partly, none, every, nothing = map(_recovery, lives)
    assert "25%" in partly and "none" in none and len({partly, none, every, nothing}) == 4
    assert "never changes" in _recovery(np.bincount([0, 0], minlength=MOST + 1))


def test_additions_that_are_too_short_are_refused():
    model = compile_program("ripple", max_length=9).model
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InputError) as refused:
        injected_carry_study(model, Addition().sample(8, batch_size=32, generator=generator))
    assert refused.value.what == "batch"


def test_inputs_of_another_task_are_refused():
    generator = torch.Generator().manual_seed(0)
    batch = Parity().sample(torch.tensor([4, 6]), generator=generator)
    with pytest.raises(InputError) as refused:
        injected_carry_study(compile_program("ripple", max_length=9).model, batch)
    assert refused.value.what == "data"
