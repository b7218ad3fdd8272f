"""Subspaces on the benchmark: the circuit's own are right, and others are not."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from loopinterp.benchmark import (
    Exercise,
    KnownCircuit,
    benchmark_models,
    by_means,
    by_probing,
    score_variables,
)
from loopinterp.errors import InputError

if TYPE_CHECKING:
    from loopinterp.rasp import LoopProgram


@cache
def known_circuit(name: str) -> KnownCircuit:
    (about,) = benchmark_models([name])
    return KnownCircuit(about, about.compiled, *about.pairs(), {})


@pytest.fixture(params=["ripple.rotated-permuted", "carry_save.noisy"])
def known(request: pytest.FixtureRequest) -> KnownCircuit:
    return known_circuit(request.param)


def test_the_subspaces_of_the_circuit_are_right(known: KnownCircuit) -> None:
    circuit = known.compiled.circuit
    (row,) = score_variables(
        lambda *_: {name: circuit.subspace(name) for name in circuit.variables}, known
    ).to_dict("records")
    assert row["iia"] == row["found"] == 1
    assert row["low"] < row["iia"] <= row["high"]
    assert row["random"] < 0.5


@pytest.mark.parametrize(("method", "least"), [(by_probing, 0.95), (by_means, 0.5)])
def test_those_that_are_found_are_better_than_chance(
    known: KnownCircuit, method: Any, least: float
) -> None:
    (row,) = score_variables(method, known).to_dict("records")
    assert row["found"] == 1
    assert row["iia"] > max(least, row["random"] + 0.3)


def test_directions_at_random_are_not(known: KnownCircuit) -> None:
    generator = torch.Generator().manual_seed(0)

    def anywhere(exercise: Exercise, program: LoopProgram) -> dict[str, torch.Tensor]:
        width = exercise.model.config.d_model
        return {v: torch.randn(1, width, generator=generator) for v in program.variables}

    (row,) = score_variables(anywhere, known).to_dict("records")
    assert row["iia"] < 0.5


def test_variables_without_a_subspace_are_not_found() -> None:
    known = known_circuit("carry_save.noisy")
    carry = known.compiled.circuit.subspace("carry")
    (row,) = score_variables(lambda *_: {"carry": carry}, known).to_dict("records")
    assert row["found"] == 0.5
    (row,) = score_variables(lambda *_: {"carry": carry[:0]}, known).to_dict("records")
    assert row["found"] == 0
    assert row["iia"] != row["iia"]


@pytest.mark.parametrize(
    "subspaces",
    [{"carry": torch.ones(1, 3)}, {"carry": torch.ones(14)}, {"age": torch.ones(1, 14)}],
)
def test_what_is_no_subspace_is_refused(subspaces: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InputError, match="rows of d_model"):
        score_variables(lambda *_: subspaces, known_circuit("carry_save.noisy"))
