"""Weights: an ordinary model, whose state is overwritten and whose length is bounded."""

from __future__ import annotations

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.compiler.assembly import LOGIT
from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.programs import (
    get_program,
    has_seen,
    list_programs,
    sel_width,
    select,
    shift_right,
    tokens,
    var,
    where,
)
from tests.compiler.compiled_properties import all_of_it_is_described, holds_nothing_else
from tests.compiler.small_models import stock_model
from tests.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")


@pytest.mark.parametrize("name", list_programs())
def test_a_compiled_model_is_an_ordinary_looped_transformer(name):
    model = stock_model(name).model
    assert type(model) is LoopedTransformer
    config = model.config
    assert (config.norm, config.final_norm, config.loop_norm) == ("none", False, False)
    assert (config.act_fn, config.injection) == ("relu", "concat")
    assert (config.initial_state, config.positions, config.n_ctx) == ("embedding", "absolute", 7)
    assert config.causal and config.d_vocab == len(get_program(name).inputs)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", list_programs())
def test_the_state_keeps_the_variables_and_the_injection_brings_the_rest(name):
    compiled = stock_model(name)
    weights = compiled.model.state_dict()
    keeps, injects = weights["recall.state.weight"], weights["recall.input.weight"]
    for matrix in (keeps, injects):
        assert torch.equal(matrix, torch.diag(matrix.diagonal()))
    assert not (keeps * injects).any()
    for feature in compiled.circuit.features:
        if feature.role != "scratch":
            write = compiled.circuit.directions[feature.id].write
            expected = write if feature.role == "variable" else torch.zeros_like(write)
            assert torch.equal(write @ keeps, expected)
            assert torch.equal(write @ injects, write - expected)


@pytest.mark.parametrize("name", list_programs())
def test_every_neuron_and_head_is_described_and_the_state_holds_nothing_else(name):
    compiled = stock_model(name)
    all_of_it_is_described(compiled)
    generator = torch.Generator().manual_seed(0)
    n_tokens = len(compiled.program.inputs)
    holds_nothing_else(compiled, torch.randint(n_tokens, (50, 7), generator=generator), n_loops=5)


def test_a_model_looks_ahead_only_if_the_program_does():
    ahead = sel_width(select(tokens, tokens, "==", causal=False)) % 3
    assert compile_program(program({"u": tokens}, {"u": u}), max_length=4).model.config.causal
    compiled = compile_program(program({"u": ahead}, {"u": shift_right(u)}), max_length=4)
    assert not compiled.model.config.causal


@pytest.mark.parametrize("step", [u, (u + tokens) % 3, has_seen(tokens, u), shift_right(u)])
def test_a_longer_input_than_it_was_compiled_for_is_refused(step):
    compiled = compile_program(program({"u": tokens}, {"u": step}), max_length=4)
    assert compiled.model.config.n_ctx == 4
    compiled.model(torch.zeros(1, 4, dtype=torch.int64), n_loops=2)
    with pytest.raises(InputError, match=r"sequence length.*4.*5"):
        compiled.model(torch.zeros(1, 5, dtype=torch.int64), n_loops=2)


def test_logits_say_the_answer_and_nothing_where_there_is_none():
    finish = where(tokens, tokens, -1)
    compiled = compile_program(program({"u": 0}, {"u": u}, finish), max_length=2)
    logits = compiled.model(every_input(compiled.program, 1), n_loops=1)[:, 0]
    assert logits.tolist() == [[0, 0, 0], [0, LOGIT, 0], [0, 0, LOGIT]]
    constant = compile_program(program({"u": 0}, {"u": u}, 1), max_length=2)
    assert constant.model(torch.tensor([[0]]), n_loops=1).tolist() == [[[0, LOGIT]]]


def test_a_model_of_too_many_weights_is_refused_before_it_is_built():
    names = [f"v{k}" for k in range(12)]
    many = program(
        dict.fromkeys(names, tokens),
        {name: shift_right(var(name)) for name in names},
        n_tokens=1_000,
    )
    with pytest.raises(InputError) as caught:
        compile_program(many, max_length=4)
    assert "program small" in caught.value.what and "max_length=4" in caught.value.what
