"""The edges of compiled circuits, and found edges as circuits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopinterp.compiler import Circuit, compile_program, distract, draw, permute, rotate
from loopinterp.core.errors import InputError
from loopinterp.edges import as_circuit, program_edges, wiping_edges
from loopinterp.edges.unrolled_graph import UnrolledGraph
from loopinterp.models import LoopedTransformerConfig
from tests.refusals import naming

RIPPLE = {
    ("input", "block.0.mlp", 0),
    ("block.0.mlp", "block.1.head.0", 0),
    ("block.1.head.0", "block.1.mlp", 0),
    ("block.1.mlp", "block.0.mlp", 1),
    ("input", "coda.0.mlp", 0),
    ("block.1.mlp", "coda.0.mlp", 0),
    ("coda.0.mlp", "readout", 0),
}
CONFIG = LoopedTransformerConfig(
    d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, n_layers=2, n_coda=1
)


def test_the_edges_of_the_ripple_are_those_of_its_program() -> None:
    ripple = compile_program("ripple", max_length=6)
    assert program_edges(ripple) == RIPPLE
    # Its tokens and places are read by the same MLP; places alone by the head: no edge of it.
    assert ("input", "block.1.head.0", 0) not in RIPPLE | wiping_edges(ripple)


@pytest.mark.parametrize("name", ["ripple", "carry_save", "parity", "latched_ripple"])
def test_known_edges_are_in_the_graph_and_a_disguise_moves_heads_alone(name: str) -> None:
    bare = compile_program(name, max_length=7)
    graph = UnrolledGraph(bare.model.config, 4)
    program, wiping = program_edges(bare), wiping_edges(bare)
    assert program and wiping and not program & wiping
    assert program | wiping <= set(graph.tied_edges)
    hidden = rotate(distract(bare, seed=0), seed=0)
    assert (program_edges(hidden), wiping_edges(hidden)) == (program, wiping)
    moved = permute(distract(bare, seed=0), seed=1)
    assert len(program_edges(moved)) == len(program)


def test_groups_of_neurons_are_components_by_name() -> None:
    parity = compile_program("parity", max_length=7)
    edges = program_edges(parity, neurons=True)
    assert ("block.0.neurons.0", "block.0.head.0", 1) in edges  # the bits move on
    assert ("block.0.neurons.1", "block.0.neurons.1", 1) in edges  # the parity counts
    assert ("block.0.neurons.1", "block.0.head.0", 1) not in edges
    assert not any("mlp" in end for edge in edges for end in edge[:2])
    groups = {group.id: group.neurons for group in parity.circuit.neurons}
    graph = UnrolledGraph(parity.model.config, 3, neurons=groups)
    assert edges | wiping_edges(parity, neurons=True) <= set(graph.tied_edges)


def test_found_edges_come_back_from_a_circuit_that_is_saved_and_drawn(tmp_path: Path) -> None:
    edges = RIPPLE | {("block.0.head.1", "block.1.mlp", 1)}
    circuit = as_circuit(edges, CONFIG)
    assert program_edges(circuit) == edges
    circuit.save(tmp_path)
    assert program_edges(Circuit.load(tmp_path)) == edges
    assert len(draw(circuit).edges) >= len(edges)
    unrolled = {(a, b) for a, b, _ in draw(circuit).unfolded(3)}
    assert ("2:state of block.1.mlp", "2:block.0.mlp") in unrolled
    assert ("1:block.1.mlp", "2:state of block.1.mlp") in unrolled


def test_receivers_of_queries_keys_and_values_are_their_head() -> None:
    split = {("block.0.mlp", f"block.1.head.0.{slot}", 0) for slot in "qkv"}
    true_edges = program_edges(as_circuit(split, CONFIG))
    assert true_edges == {("block.0.mlp", "block.1.head.0", 0)}


def test_what_is_no_circuit_or_component_is_refused(no_type_checks: None) -> None:
    with pytest.raises(InputError) as caught:
        program_edges(torch.zeros(1))  # type: ignore[arg-type]
    assert caught.value.what == "known"
    with pytest.raises(InputError) as caught:
        as_circuit({("3:block.0.mlp", "readout", 0)}, CONFIG)
    assert caught.value.what == "edges"
    with pytest.raises(InputError) as caught:
        as_circuit({("block.0.mlp", "readout", 3)}, CONFIG)
    assert caught.value.what == "lag"


def test_edges_between_hooks_are_those_between_their_components() -> None:
    hooks = {
        ("hook_embed", "loops.0.blocks.0.hook_mlp_in", 0),
        ("blocks.1.attn.hook_z", "blocks.1.hook_mlp_in", 0),
        ("coda.0.hook_mlp_out", "readout", 0),
    }
    components = {
        ("input", "block.0.mlp", 0),
        *((f"block.1.head.{k}", "block.1.mlp", 0) for k in range(2)),
        ("coda.0.mlp", "readout", 0),
    }
    assert program_edges(as_circuit(hooks, CONFIG)) == components
    with naming("edges"):
        as_circuit({("blocks.1.attn.hook_y", "readout", 0)}, CONFIG)
