"""The comparison of model and program: it finds what was changed, and where."""

from __future__ import annotations

import pytest
import torch

from loopinterp.compiler import (
    Compiled,
    add_noise,
    check_disguise,
    compare_with_program,
    compile_program,
    compiled,
    rotate,
    superpose,
)
from loopinterp.compiler.compiled import _unevenness
from loopinterp.core.errors import InputError
from loopinterp.programs import (
    has_seen,
    index_select,
    num_prev,
    sel_width,
    select,
    shift_right,
    tokens,
    var,
)
from tests.compiler.compiled_properties import exact
from tests.compiler.small_models import logits_of, small_model
from tests.compiler.small_programs import every_input, program

u = var("u")
INPUTS = torch.cartesian_prod(*[torch.arange(4)] * 3)


@pytest.fixture
def ripple() -> Compiled:
    return compile_program("ripple", max_length=3)


def test_every_value_of_every_loop_is_compared(ripple):
    agreement = compare_with_program(ripple, INPUTS, n_loops=5)
    assert agreement.values == 6 * INPUTS.numel()
    assert exact(agreement)
    assert (agreement.wrong_values, agreement.wrong_answers) == ({"carry": 0}, 0)
    assert set(agreement.attention_error) == {"shift_1"}


def test_the_comparison_is_the_same_in_parts(ripple, monkeypatch):
    with torch.no_grad():
        ripple.model.state_dict()["block.1.mlp.fc_out.bias"] += 0.3
    at_once = compare_with_program(ripple, INPUTS, n_loops=4)
    monkeypatch.setattr(compiled, "_CHUNK", 1)
    parts = compare_with_program(ripple, INPUTS, n_loops=4)
    assert parts.wrong_values == at_once.wrong_values
    assert parts.wrong_answers == at_once.wrong_answers
    assert parts.state_error == pytest.approx(at_once.state_error, abs=1e-5)
    assert parts.attention_error == pytest.approx(at_once.attention_error, abs=1e-5)


@torch.no_grad()
def test_a_head_that_looks_elsewhere_is_found_out(ripple):
    ripple.model.state_dict()["block.1.attn.qkv.weight"].zero_()
    agreement = compare_with_program(ripple, INPUTS, n_loops=2)
    # In place of the key before it, position 2 sees three keys alike.
    assert agreement.attention_error["shift_1"] == pytest.approx(2 / 3)
    assert agreement.wrong_values["carry"] > 0 and agreement.wrong_answers > 0
    assert not agreement.exact


@torch.no_grad()
def test_a_wrong_rule_is_found_out(ripple):
    ripple.model.state_dict()["block.0.mlp.fc_out.weight"].neg_()
    agreement = compare_with_program(ripple, INPUTS, n_loops=2)
    assert agreement.wrong_values["carry"] > 0 and agreement.state_error > 0.5
    assert agreement.attention_error["shift_1"] < 1e-3


@torch.no_grad()
def test_a_wrong_readout_is_found_out_and_the_state_is_right(ripple):
    ripple.model.state_dict()["unembedding.weight"].neg_()
    agreement = compare_with_program(ripple, INPUTS, n_loops=2)
    assert agreement.wrong_answers == 3 * INPUTS.numel() and agreement.wrong_values == {"carry": 0}
    assert not agreement.exact


@torch.no_grad()
def test_a_small_error_shows_before_anything_is_wrong(ripple):
    ripple.model.state_dict()["block.1.mlp.fc_out.bias"][-1] += 0.01
    ripple.model.state_dict()["block.1.mlp.fc_out.bias"][:] += 0.01
    agreement = compare_with_program(ripple, INPUTS, n_loops=3)
    assert agreement.exact and 0.005 < agreement.state_error < 0.1


def test_selectors_of_every_part_are_compared():
    finish = has_seen(tokens, 1) + index_select(u, u) + num_prev(shift_right(u), tokens)
    loop_program = program(
        {"u": has_seen(tokens, tokens - 1)}, {"u": has_seen(shift_right(u), u)}, finish
    )
    compiled = compile_program(loop_program, max_length=4)
    sections = {head.section for head in compiled.circuit.heads}
    assert sections == {"prelude", "block", "coda"}
    for n_loops in (1, 3):
        agreement = compare_with_program(compiled, every_input(loop_program, 4), n_loops=n_loops)
        assert exact(agreement)
        assert set(agreement.attention_error) == {head.selector for head in compiled.circuit.heads}


@torch.no_grad()
@pytest.mark.parametrize("section", ["prelude", "block", "coda"])
def test_a_wrong_head_is_found_out_in_every_section(section):
    finish = sel_width(select(u, tokens, "=="))
    loop_program = program({"u": has_seen(tokens, 1)}, {"u": has_seen(u, tokens)}, finish)
    compiled = compile_program(loop_program, max_length=4)
    compiled.model.state_dict()[f"{section}.0.attn.qkv.weight"].zero_()
    compiled.model.state_dict()[f"{section}.0.attn.qkv.bias"].zero_()
    agreement = compare_with_program(compiled, every_input(loop_program, 4), n_loops=2)
    (head,) = (h for h in compiled.circuit.heads if (h.section, h.layer) == (section, 0))
    assert agreement.attention_error[head.selector] > 0.2


def test_inputs_are_those_of_the_program(ripple):
    for wrong in (torch.tensor([[6, 0]]), torch.tensor([[-1, 0]]), torch.zeros(2, 0).long()):
        with pytest.raises(InputError):
            compare_with_program(ripple, wrong, n_loops=1)
    with pytest.raises(InputError, match="sequence length"):
        compare_with_program(ripple, torch.zeros(2, 4).long(), n_loops=1)
    for n_loops in (0, -1):
        with pytest.raises(InputError) as caught:
            compare_with_program(ripple, INPUTS, n_loops=n_loops)
        assert caught.value.what == "n_loops"


def test_attention_is_even_over_what_is_selected_and_anything_where_nothing_is():
    selector = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 0, 0]]], dtype=torch.bool)
    even = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6]]])
    assert _unevenness(even, selector) == 0
    assert _unevenness(even.roll(1, dims=-1), selector) == 1
    tilted = even + torch.tensor([0.1, -0.1, 0.0])
    assert _unevenness(tilted, selector) == pytest.approx(0.1)


def test_it_measures_the_largest_differences_at_every_loop(monkeypatch):
    plain = small_model("ripple")
    noisy = add_noise(rotate(plain.compiled, seed=0), relative=0.02, seed=1)
    check = check_disguise(noisy, plain.compiled, plain.inputs, n_loops=plain.n_loops)
    logits = logits_of(noisy, plain.inputs, plain.n_loops)
    assert torch.allclose(check.logits, (logits - plain.logits).abs().amax((1, 2, 3)))
    assert check.logits.min() > 1e-3 and check.reads.min() > 1e-4
    # In the original a read is 0 or 1, so that it is the error that agreement reports.
    assert float(check.reads.max()) == pytest.approx(check.agreement.state_error, abs=1e-6)
    monkeypatch.setattr("loopinterp.compiler.compiled._CHUNK", 1)
    one_by_one = check_disguise(noisy, plain.compiled, plain.inputs, n_loops=plain.n_loops)
    assert torch.allclose(one_by_one.logits, check.logits, atol=1e-5)
    assert torch.allclose(one_by_one.reads, check.reads, atol=1e-5)


def test_it_says_whether_values_and_answers_are_right():
    plain = small_model("ripple")
    for width, steps, is_exact in ((12, 40, True), (4, 5, False)):
        dense = superpose(plain.compiled, d_model=width, seed=0, steps=steps)
        check = check_disguise(dense, plain.compiled, plain.inputs, n_loops=plain.n_loops)
        assert check.exact is is_exact


@pytest.mark.usefixtures("quick")
def test_both_models_need_circuits():
    plain = small_model("ripple")
    with pytest.raises(InputError) as caught:
        check_disguise(plain.compiled, plain.compiled.model, plain.inputs, n_loops=2)  # type: ignore[arg-type]
    assert caught.value.what == "compiled"
