"""Models trained to a circuit: they run their program, with its variables where they were put."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopinterp.benchmark import (
    TRAINED,
    TRAINED_MODELS,
    BenchmarkModel,
    KnownCircuit,
    benchmark_models,
    circuit_training,
    eap_graph,
    own_edge_method,
    score_edges,
    score_variables,
    train_to_circuit,
)
from loopinterp.benchmark.known_models import agreement
from loopinterp.compiler import Compiled
from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformerConfig
from loopinterp.programs import get_program

SHIPPED = [model for model in benchmark_models() if model.disguise == TRAINED]


def known_circuit(about: BenchmarkModel) -> KnownCircuit:
    return KnownCircuit(about, about.compiled, *about.pairs(), {})


@pytest.fixture(scope="module")
def quick() -> Compiled:
    return train_to_circuit("prefix_xor", n=3, steps=5, d_model=16)


def test_the_models_that_ship_are_of_three_tasks_at_least() -> None:
    assert len(SHIPPED) >= 8
    assert len({model.task.name for model in SHIPPED}) >= 3
    folders = {folder.name for folder in TRAINED_MODELS.iterdir()}
    assert {model.program_name for model in SHIPPED} == folders


@pytest.mark.parametrize("about", SHIPPED, ids=lambda model: model.name)
def test_a_trained_model_runs_its_program_where_it_was_put(about: BenchmarkModel) -> None:
    known = known_circuit(about)
    assert agreement(known.compiled, known.base, about.n_loops) > 0.998
    circuit = known.compiled.circuit
    iia = score_variables(lambda *_: {v: circuit.subspace(v) for v in circuit.variables}, known)
    assert iia["iia"].item() >= 0.99
    assert iia["random"].item() < 0.5  # a change of equal norm elsewhere


@pytest.mark.parametrize("about", SHIPPED[:3], ids=lambda model: model.name)
def test_most_values_are_read_where_the_circuit_says_after_a_loop(about: BenchmarkModel) -> None:
    known = known_circuit(about)
    model, circuit = known.compiled.model, known.compiled.circuit
    states = model(known.base, n_loops=about.n_loops, return_type="states")
    trace = known.compiled.program.trace(known.base, about.n_loops)
    answered = about.task.targets(known.base) >= 0
    for variable in circuit.variables:
        right = circuit.decode(variable, states) == trace.variables[variable]
        assert right[1:, answered].double().mean() > 0.95


def test_weights_are_learnt_and_not_the_compiled_ones() -> None:
    (about,) = (model for model in SHIPPED if model.program_name == "ripple")
    config = about.compiled.model.config
    assert isinstance(config, LoopedTransformerConfig) and config.loop_norm
    assert config.d_model == 64


def test_edges_of_a_trained_model_are_refused() -> None:
    known = known_circuit(SHIPPED[0])
    with pytest.raises(InputError) as caught:
        score_edges(own_edge_method("random"), known)
    assert caught.value.what == "known"
    with pytest.raises(InputError) as caught:
        eap_graph(known)
    assert caught.value.what == "known"


def test_places_are_orthogonal_and_as_large_as_the_variable(tmp_path: Path) -> None:
    trained = train_to_circuit("carry_save", n=2, steps=2, d_model=16)
    first, second = (trained.circuit.subspace(name) for name in ("sum", "carry"))
    assert first.shape == second.shape == (2, 16)
    assert (first @ second.mT).abs().max() < 1e-4
    trained.save(tmp_path)
    again = Compiled.load(tmp_path)
    assert torch.equal(again.circuit.subspace("sum"), first)


def test_the_same_seed_gives_the_same_model(quick: Compiled) -> None:
    torch.manual_seed(5)  # which is not to matter
    again = train_to_circuit("prefix_xor", n=3, steps=5, d_model=16)
    other = train_to_circuit("prefix_xor", n=3, steps=5, d_model=16, seed=1)
    for one, same, different in zip(*(m.model.parameters() for m in (quick, again, other))):
        assert torch.equal(one, same)
        assert not torch.equal(one, different) or one.std() == 0 or one.ndim == 1


def test_a_circuit_of_variables_alone(quick: Compiled) -> None:
    circuit = quick.circuit
    assert (circuit.heads, circuit.neurons, circuit.edges) == ((), (), ())
    assert circuit.disguises == (TRAINED,)
    assert [*circuit.variables] == [*get_program("prefix_xor").variables]


@pytest.mark.slow
def test_training_comes_to_follow_interchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_training, "_RATE", 1e-2)  # so short a training has no time
    monkeypatch.setattr(circuit_training, "_WARM_UP", 20)
    monkeypatch.setattr(circuit_training, "_BATCH", 16)
    trained = train_to_circuit("prefix_xor", n=3, steps=250, d_model=32)
    about = BenchmarkModel("prefix_xor", TRAINED)
    known = KnownCircuit(about, trained, *about.pairs(), {})
    places = {"prefix": trained.circuit.subspace("prefix")}
    assert score_variables(lambda *_: places, known)["iia"].item() > 0.8


@pytest.mark.parametrize("numbers", [{"n": 0}, {"steps": 0}, {"d_model": 4}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(InputError):
        train_to_circuit("prefix_xor", **numbers)


def test_more_values_than_places_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        train_to_circuit("prefix_mod_5", n=6, steps=1, d_model=8)
    assert caught.value.what == "d_model"
