"""Components, edges and lags of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.edges.unrolled_graph import UnrolledGraph
from loopinterp.models import LoopedTransformerConfig

SURROUND = {"n_prelude": 1, "n_coda": 1, "n_layers": 2}


def graph(n_loops: int = 3, *, split: bool = False, **changes: Any) -> UnrolledGraph:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, **changes)
    return UnrolledGraph(config, n_loops, split=split)


@pytest.mark.parametrize("split", [False, True])
def test_there_are_as_many_edges_as_pairs_of_one_before_the_other(split: bool) -> None:
    unrolled = graph(split=split, **SURROUND)
    # The prelude's layer, 3 loops of 2, the coda's: at each heads, then the MLP.
    layers, heads, count, written = 8, 2, 0, 1
    for _ in range(layers):
        count += written * heads * (3 if split else 1)
        written += heads
        count += written
        written += 1
    assert int(unrolled.edges.sum()) == count + written
    assert len(unrolled.sender_names) == written
    assert len(set(unrolled.receiver_names)) == len(unrolled.receivers)


@pytest.mark.parametrize("split", [False, True])
def test_tied_edges_part_the_unrolled_ones_by_weights_and_lag(split: bool) -> None:
    unrolled = graph(4, split=split, **SURROUND)
    assert bool(((unrolled.tied_index >= 0) == unrolled.edges).all())
    counts = torch.bincount(unrolled.tied_index[unrolled.edges], minlength=len(unrolled.tied_edges))
    slot = ".k" if split else ""
    expected = {
        ("block.0.mlp", f"block.1.head.0{slot}", 0): 4,
        ("block.0.mlp", "block.0.mlp", 1): 3,
        ("block.1.mlp", "block.0.mlp", 2): 3,  # over 2 loops twice, over 3 once
        ("block.1.mlp", "readout", 0): 1,
        ("block.1.mlp", "coda.0.mlp", 2): 2,
        ("input", "block.1.mlp", 0): 4,
        ("prelude.0.mlp", "block.0.mlp", 0): 4,
        ("coda.0.mlp", "readout", 0): 1,
    }
    multiplicity = {edge: int(counts[unrolled.tied_edges.index(edge)]) for edge in expected}
    assert multiplicity == expected
    assert ("block.1.mlp", "block.0.mlp", 0) not in unrolled.tied_edges


def test_a_name_without_a_loop_is_every_loop() -> None:
    unrolled = graph(3, split=True)
    names = [unrolled.sender_names[k] for k in unrolled.senders_named("block.0.head.1")]
    assert names == [f"{loop}:block.0.head.1" for loop in range(3)]
    slots = [unrolled.receiver_names[k] for k in unrolled.receivers_named("1:block.0.head.0")]
    assert slots == [f"1:block.0.head.0.{slot}" for slot in "qkv"]
    assert len(unrolled.receivers_named(["block.0.head.0.q", "readout"])) == 4
    with pytest.raises(InputError) as caught:
        unrolled.senders_named("3:block.0.head.1")
    assert caught.value.what == "senders"
    with pytest.raises(InputError) as caught:
        graph(0)
    assert caught.value.what == "n_loops"
