"""Circuits: directions, decoding, unrolling, and files."""

from __future__ import annotations

import json

import pytest
import torch

from loopinterp.compiler import Circuit, compile_program
from loopinterp.compiler.circuit import CIRCUIT_FILE, DIRECTIONS_FILE
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.storage import read_tensors, write_tensors
from loopinterp.programs import list_programs
from tests.compiler.compiled_properties import same
from tests.compiler.small_models import stock_model

RIPPLE = compile_program("ripple", max_length=5)
TOKENS = torch.tensor([[4, 3, 1, 2, 0], [4, 0, 3, 3, 1]])


@pytest.mark.parametrize("name", list_programs())
def test_what_is_written_is_read_and_nothing_else(name):
    circuit = stock_model(name).circuit
    stored = [f for f in circuit.features if f.role != "scratch"]
    write = torch.cat([circuit.directions[f.id].write for f in stored])
    read = torch.cat([circuit.directions[f.id].read for f in stored])
    assert torch.equal(read @ write.T, torch.eye(len(write)))


@pytest.mark.parametrize("name", list_programs())
def test_the_subspace_of_a_variable_is_that_of_its_directions(name):
    circuit = stock_model(name).circuit
    for variable in circuit.variables:
        basis, write = circuit.subspace(variable), circuit.directions_of(variable).write
        assert torch.allclose(basis @ basis.T, torch.eye(len(write)), atol=1e-6)
        assert torch.allclose(write @ basis.T @ basis, write, atol=1e-6)


def test_a_variable_is_decoded_from_any_state():
    states = RIPPLE.model(TOKENS, n_loops=3, return_type="states")
    carries = RIPPLE.program.trace(TOKENS, 3).variables["carry"]
    assert torch.equal(RIPPLE.circuit.decode("carry", states), carries)
    assert torch.equal(RIPPLE.circuit.decode("carry", states[2, 0, 3]), carries[2, 0, 3])


def test_unknown_variables_and_strange_states_are_refused():
    with pytest.raises(InputError) as caught:
        RIPPLE.circuit.directions_of("sum")
    assert caught.value.what == "variable of ripple"
    with pytest.raises(InputError, match="carry"):
        RIPPLE.circuit.subspace("sum")
    with pytest.raises(InputError) as caught:
        RIPPLE.circuit.decode("carry", torch.zeros(2, 3))
    assert caught.value.what == "state"


@pytest.mark.parametrize("name", list_programs())
def test_a_circuit_comes_back_from_its_files_as_it_was(name, tmp_path):
    circuit = stock_model(name).circuit
    circuit.save(tmp_path)
    assert same(Circuit.load(tmp_path), circuit)


def damage(folder, change):
    document = json.loads((folder / CIRCUIT_FILE).read_text())
    change(document)
    (folder / CIRCUIT_FILE).write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("heads"),
        lambda d: d.update(format=99),
        lambda d: d.update(features=[1, 2]),
        lambda d: d.update(features=None),
        lambda d: d["features"][0].pop("values"),
        lambda d: d["neurons"][0].update(surplus=1),
        lambda d: d.update(edges=[["one end"]]),
        lambda d: d["features"][0].update(id="another"),
    ],
)
def test_a_damaged_circuit_is_refused(change, tmp_path):
    RIPPLE.circuit.save(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        Circuit.load(tmp_path)
    assert caught.value.what.startswith("circuit ")


@pytest.mark.parametrize("file", [CIRCUIT_FILE, DIRECTIONS_FILE])
def test_missing_and_broken_files_are_refused(file, tmp_path):
    with pytest.raises(CheckpointError):
        Circuit.load(tmp_path / "nowhere")
    RIPPLE.circuit.save(tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=file):
        Circuit.load(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        Circuit.load(tmp_path)


def test_a_missing_direction_is_named(tmp_path):
    RIPPLE.circuit.save(tmp_path)
    tensors = read_tensors(tmp_path / DIRECTIONS_FILE)
    del tensors["carry.read"]
    write_tensors(tmp_path / DIRECTIONS_FILE, tensors)
    with pytest.raises(CheckpointError, match=r"carry\.read"):
        Circuit.load(tmp_path)
