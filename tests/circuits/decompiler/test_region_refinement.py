"""Regions of states as values, on models whose values are known and on one of real numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loopinterp.circuits import decompile
from loopinterp.circuits.decompiler.behaviour import Runs
from loopinterp.circuits.decompiler.counted_table import Said
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns
from loopinterp.circuits.decompiler.held_out import TRAJECTORY
from loopinterp.circuits.decompiler.region_refinement import Refinement, refine
from loopinterp.rasp import compile_program, get_program
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.tasks import Addition, get_task


def runs_of(model: object, n: int, seed: int = 0, number: int = 4000) -> ExchangeRuns:
    batch = inputs_of(Addition(), (n,), 80, seed=seed)
    runs = Runs(model, batch, Addition().n_loops(n))
    return ExchangeRuns.of(runs, number, torch.Generator().manual_seed(seed))


def refined(name: str, n: int = 5) -> tuple[Refinement, ExchangeRuns]:
    model = compile_program(get_program(name), max_length=n + 1).model
    own, others = [runs_of(model, n)], [runs_of(model, n, seed=1)]
    return refine(own, others, most_values=6), runs_of(model, n, 2)


def test_what_is_held_back_is_said_of_a_ripple_by_its_answers_alone() -> None:
    found, other = refined("ripple")
    said = Said.of(found.table, other)
    assert said.matters.any() and said.undisturbed.all()
    # What is not right begins with two neighbours that no run had side by side.
    assert said.right[:, said.matters].all(0).double().mean() > 0.97
    assert found.table.consistency == 1
    assert found.regions.cuts == ()


def test_a_carry_that_is_held_needs_values_that_no_answer_shows() -> None:
    found, other = refined("ripple_held_2")
    said = Said.of(found.table, other)
    assert found.scores[-1] > found.scores[0] + 0.1
    assert sum(found.regions.sizes.values()) > sum(map(len, found.regions.answers.values()))
    assert said.right[:, said.matters].all(0).double().mean() > 0.95


def test_the_regions_say_of_a_state_what_the_table_was_counted_with() -> None:
    found, other = refined("ripple_held_2")
    of = other.undisturbed
    values = found.regions.values(of.tokens.expand_as(of.answers), of.states, of.answers)
    cells = {*zip(of.tokens.expand_as(values).flatten().tolist(), values.flatten().tolist())}
    assert cells <= {(t, v) for t, n in found.regions.sizes.items() for v in range(n)}
    for token in found.regions.answers:
        here = of.tokens.expand_as(values) == token
        assert torch.equal(found.table.answers[token, values[here]], of.answers[here])


def test_an_exchange_that_is_felt_is_kept_and_undisturbed_runs_are_the_models() -> None:
    model = compile_program(get_program("ripple"), max_length=6).model
    runs = runs_of(model, 5)
    felt = ((runs.exchanged.answers != runs.natural) & runs.counted).any(-1).any(0)
    assert 0.4 < felt.double().mean() < 0.6
    h = model(runs.undisturbed.tokens, n_loops=6).argmax(-1)
    assert torch.equal(runs.undisturbed.answers[-1], h)


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
    found = decompile(leaky(0.45), Addition(), n=5, sharp=False, examples=80, n_exchanges=5000)
    whole = found.evidence.loc[found.evidence["what"] == TRAJECTORY]
    assert whole["value"].max() > 0.95 and whole["value"].min() > 0.75  # the longer, the less
    assert (found.program is not None) == (whole["low"].min() >= 0.9)
    assert found.automaton is not None and max(found.automaton.sizes.values()) > 2


def test_what_reads_farther_is_not_cut_into_regions() -> None:
    program = get_program("lookahead")
    model = compile_program(program, max_length=6).model
    found = decompile(model, get_task("addition"), n=5, sharp=False, n_exchanges=200)
    assert found.program is None and "more than the left neighbour" in found.reason
