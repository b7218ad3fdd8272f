"""Regions of states as values, on models whose values are known and on one of real numbers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.decompiler import decompile
from loopinterp.decompiler.evidence import TRAJECTORY
from loopinterp.decompiler.interchange_runs import InterchangeTrajectories, Runs, TablePrediction
from loopinterp.decompiler.region_refinement import _Refinement, refine
from loopinterp.programs import get_program
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks import Addition, get_task


def runs_of(model: object, n: int, seed: int = 0, number: int = 2000) -> InterchangeTrajectories:
    batch = inputs_of(Addition(), (n,), 40, seed=seed)
    runs = Runs(model, batch, Addition().n_loops(n))
    return InterchangeTrajectories.drawn(runs, number, torch.Generator().manual_seed(seed))


@cache
def refined(name: str, n: int = 5) -> tuple[_Refinement, InterchangeTrajectories]:
    model = compile_program(get_program(name), max_length=n + 1).model
    runs, others = [runs_of(model, n)], [runs_of(model, n, seed=1)]
    return refine(runs, others, most_values=6), runs_of(model, n, 2)


def test_held_back_runs_of_a_ripple_are_predicted_by_its_answers() -> None:
    found, other = refined("ripple")
    prediction = TablePrediction.of(found.table, other)
    assert prediction.effective.any() and prediction.clean.all()
    # Wrong runs begin with two neighbours that no run had side by side.
    assert prediction.changed[:, prediction.effective].all(0).double().mean() > 0.97
    assert found.table.consistency == 1
    assert found.regions.cuts == ()


def test_a_carry_that_is_held_needs_values_that_no_answer_shows() -> None:
    found, other = refined("ripple_held_2")
    prediction = TablePrediction.of(found.table, other)
    assert found.scores[-1] > found.scores[0] + 0.1
    assert sum(found.regions.sizes.values()) > sum(map(len, found.regions.answers.values()))
    assert prediction.changed[:, prediction.effective].all(0).double().mean() > 0.95


def test_the_regions_say_of_a_state_what_the_table_was_counted_with() -> None:
    found, other = refined("ripple_held_2")
    clean = other.clean
    tokens = clean.tokens.expand_as(clean.answers)
    values = found.regions.values(clean)
    cells = {*zip(tokens.flatten().tolist(), values.flatten().tolist())}
    assert cells <= {(t, v) for t, n in found.regions.sizes.items() for v in range(n)}
    for token in found.regions.answers:
        here = tokens == token
        assert torch.equal(found.table.answers[token, values[here]], clean.answers[here])


def leaky(rate: float) -> SimpleNamespace:
    """A ripple whose carry leaks: a real number that moves to its left neighbour's by a rate."""
    generates = torch.tensor([0.0, 0, 0, 1, 0, 0])
    propagates = torch.tensor([0.0, 1, 1, 0, 0, 0])

    def step(h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        generate, propagate, carry = e[..., 0], e[..., 1], h[..., 2]
        out = generate + propagate * (carry > 0.5)
        left = torch.nn.functional.pad(out[:, :-1], (1, 0))
        moved = carry + rate * (left - carry)
        return torch.stack([generate, propagate, moved], dim=-1)

    def readout(h: torch.Tensor) -> torch.Tensor:
        one = (h[..., 2] > 0.5) ^ (h[..., 1] > 0.5)
        return torch.nn.functional.one_hot(one.long(), 2).float()

    return SimpleNamespace(
        embed=lambda x: torch.stack([generates[x], propagates[x], 0.0 * x], dim=-1),
        initial_state=torch.clone,
        step=step,
        readout=readout,
    )


@pytest.mark.slow
def test_a_carry_in_real_numbers_is_read_and_says_how_far() -> None:
    # At a rate of .45 it takes two loops to cross the threshold, and what is left of it counts.
    settings = {"n": 4, "lengths": (4, 6), "examples": 40, "n_exchanges": 1000}
    found = decompile(leaky(0.45), Addition(), sharp=False, **settings)
    whole = found.evidence.loc[found.evidence["what"] == TRAJECTORY]
    assert whole["value"].max() > 0.95 and whole["value"].min() > 0.75  # the longer, the less
    assert (found.program is not None) == (whole["low"].min() >= 0.9)
    assert found.automaton is not None and max(found.automaton.sizes.values()) > 2


def test_what_reads_farther_is_not_cut_into_regions() -> None:
    program = get_program("lookahead")
    model = compile_program(program, max_length=6).model
    settings = {"n": 5, "lengths": (4,), "examples": 16, "n_exchanges": 100}
    found = decompile(model, get_task("addition"), sharp=False, **settings)
    assert found.program is None and found.refusal is not None
    assert found.refusal.code == "reads-farther"
