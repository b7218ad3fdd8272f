"""Heads of whole models, in the prelude, the block and the coda, against selectors of programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.circuits.head_matching import HeadMatch
from loopinterp.circuits.layer_sections import head_name
from loopinterp.circuits.model_heads import head_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.rasp import Linear, LoopProgram, full, get_program, kqv, tokens, var
from loopinterp.rasp.compiler import compile_program
from loopinterp.saved_results import load_result
from loopinterp.tasks import get_task
from loopinterp.tasks.task import Batch

EVERYTHING = kqv(full(0), full(0), tokens, "true", mode="max", name="everything")


@pytest.fixture
def program() -> LoopProgram:
    """Looks everywhere before the loop; at what is new in each loop; at what is left after it."""
    x = var("x")
    return LoopProgram(
        name="three_parts",
        task="prefix_sum",
        inputs=("0", "1", "2", "3", "4"),
        prepare={"x": tokens, "most": EVERYTHING},
        step={"x": kqv(x, x - 1, x - 1, ">=", mode="max", name="at least as much")},
        finish=kqv(x, full(1), x, "==", mode="max", name="ones that are left"),
        n_loops=Linear(),
    )


@pytest.fixture
def batch(generator) -> Batch:
    inputs = torch.randint(5, (12, 6), generator=generator)
    return Batch(inputs, torch.zeros_like(inputs), torch.full((12,), 6), torch.full((12,), 3))


def build(**settings: Any) -> LoopedTransformer:
    config: dict[str, Any] = {
        "d_model": 16,
        "n_heads": 2,
        "d_vocab": 5,
        "d_vocab_out": 5,
        "init_std": 1.0,
    }
    return LoopedTransformer(LoopedTransformerConfig(**config, **settings), seed=0)


def look_everywhere(layer: Any) -> None:
    with torch.no_grad():
        layer.attn.qkv.weight.zero_()
        layer.attn.qkv.bias.zero_()


@pytest.mark.parametrize("section", ["prelude", "block", "coda"])
def test_heads_of_every_section_are_found(program, batch, section):
    model = build(n_prelude=1, n_layers=2, n_coda=2)
    look_everywhere(getattr(model, section)[-1])
    found = head_study(model, batch, [program])
    assert found.heads[:4] == ["prelude 0.0", "prelude 0.1", "head 0.0", "head 0.1"]
    assert found.heads[4:] == [
        "head 1.0",
        "head 1.1",
        "coda 0.0",
        "coda 0.1",
        "coda 1.0",
        "coda 1.1",
    ]
    k = found.selectors.index("everything")
    last = len(getattr(model, section)) - 1
    assert found.computes[k] == [head_name(section, last, h, n_layers=2) for h in range(2)]


def test_selectors_of_finish_are_those_after_the_last_loop(program, batch):
    found = head_study(build(n_coda=1), batch, [program])
    x = program.trace(batch.inputs, n_loops=3).variables["x"][-1].tolist()
    shares = [
        sum(key == 1 for key in row[: q + 1]) / (q + 1)
        for row in x
        for q in range(6)
        if 1 in row[: q + 1]
    ]
    k = found.selectors.index("ones that are left")
    np.testing.assert_allclose(found.data["mass_even"][:, k], np.mean(shares), atol=1e-6)


def test_a_selection_of_finish_that_step_makes_too_has_its_own_name(batch):
    x = var("x")
    both = kqv(x, full(1), x, "==", mode="max", name="ones")
    program = LoopProgram(
        name="twice",
        task="prefix_sum",
        inputs=("0", "1", "2", "3", "4"),
        prepare={"x": tokens},
        step={"x": (both + x) % 5},
        finish=both,
        n_loops=Linear(),
    )
    found = head_study(build(n_coda=1), batch, [program])
    assert found.names == [["ones"], ["finish.ones"]]


def test_heads_of_a_model_are_matched_to_all_programs(untrained, additions, tmp_path):
    short = additions[torch.arange(8)]
    found = head_study(untrained, short, ["ripple", "sticky_ripple", "lookahead"])
    assert found.selectors == ["shift_1", "span_back"] or found.selectors == [
        "span_back",
        "shift_1",
    ]
    assert found.heads == ["head 0", "head 1"]
    assert found.data["mass"].shape == (int(short.n_loops.max()), 2, 2)
    shift = found.selectors.index("shift_1")
    np.testing.assert_allclose(
        found.data["mass_even"][:, shift], 0.5, atol=1e-6
    )  # a window of two keys
    read = load_result(found.save(tmp_path))
    assert isinstance(read, HeadMatch)
    assert read.assigned == found.assigned


@pytest.mark.parametrize("name", ["ripple", "lookahead", "binary_sum", "one_shot", "abacus_ripple"])
def test_every_head_that_computes_a_selector_is_identified(name):
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    batch = task.sample(3, batch_size=32, generator=torch.Generator().manual_seed(0))
    compiled = compile_program(name, max_length=batch.inputs.shape[1])
    found = head_study(compiled.model, batch, [program])
    n_layers = compiled.model.config.n_layers
    known = {selector: k for k, names in enumerate(found.names) for selector in names}
    for node in compiled.circuit.heads:
        head = head_name(node.section, node.layer, node.head, n_layers=n_layers)
        assert head in found.computes[known[node.selector]], (head, node.selector)
    for k, heads in enumerate(found.computes):
        assert found.assigned[k] in heads
