"""One layer against PyTorch's own modules with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopinterp.core.errors import ConfigError
from loopinterp.models.layers import MLP, Attention, Layer, Norm, Softening
from loopinterp.models.positions import AttentionContext
from tests.models.coded_model import coded
from tests.models.variants import build, some_inputs


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def test_attention_equals_torch_multihead_attention() -> None:
    config = build("plain").config
    ours = Attention(config)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    assert theirs.in_proj_weight is not None and theirs.in_proj_bias is not None
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        ours.qkv.weight.copy_(theirs.in_proj_weight)
        ours.qkv.bias.copy_(theirs.in_proj_bias)
        ours.out.weight.copy_(theirs.out_proj.weight)
        ours.out.bias.copy_(theirs.out_proj.bias)
    x = _x()
    mask = torch.full((5, 5), float("-inf")).triu(1)
    expected = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
    got = ours(x, AttentionContext(is_causal=True))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_weights_under_transformer_lens_names_compute_the_same() -> None:
    attn = Attention(build("plain").config)
    x = _x()
    q = torch.einsum("bpd,hde->bphe", x, attn.W_Q) + attn.b_Q
    k = torch.einsum("bpd,hde->bphe", x, attn.W_K) + attn.b_K
    v = torch.einsum("bpd,hde->bphe", x, attn.W_V) + attn.b_V
    pattern = (torch.einsum("bqhe,bkhe->bhqk", q, k) / 8**0.5).softmax(-1)
    z = torch.einsum("bhqk,bkhe->bqhe", pattern, v)
    out = torch.einsum("bqhe,hed->bqd", z, attn.W_O) + attn.b_O
    torch.testing.assert_close(attn(x, AttentionContext()), out, atol=1e-6, rtol=0)
    mlp = MLP(build("plain").config)
    hidden = torch.nn.functional.gelu(x @ mlp.W_in + mlp.b_in)
    torch.testing.assert_close(mlp(x), hidden @ mlp.W_out + mlp.b_out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_equals_its_formula(kind: str) -> None:
    norm = Norm(build("plain", norm_type=kind).config)
    nn.init.normal_(norm.weight)
    x = _x()
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    if norm.bias is not None:
        nn.init.normal_(norm.bias)
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_recording_a_norm_in_half_precision_leaves_the_run_as_it_is(kind: str) -> None:
    model = build("plain", norm_type=kind)
    for module in model.modules():
        if isinstance(module, Norm):
            nn.init.uniform_(module.weight, 0.5, 2)
    half = build("plain", norm_type=kind).bfloat16()
    half.load_state_dict(model.state_dict())
    tokens = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))
    norms = [name for name in half.addresses(3).addresses if ".ln" in name]
    logits, cache = half.run_with_cache(tokens, n_loops=3, names_filter=norms)
    assert torch.equal(logits, half(tokens, n_loops=3))
    _, exact = model.run_with_cache(tokens, n_loops=3, names_filter=norms)
    for name in norms:
        assert cache[name].shape == exact[name].shape and cache[name].dtype == torch.bfloat16
        assert (cache[name].float() - exact[name]).abs().max() < 0.1, name


@pytest.mark.parametrize("norm_first", [True, False])
def test_layer_equals_torch_encoder_layer(norm_first: bool) -> None:
    config = build("plain", norm="pre" if norm_first else "post", act_fn="relu").config
    layer = Layer(config, tied=True)
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    assert layer.ln1 is not None and layer.ln2 is not None
    pairs = [
        (layer.attn.qkv.weight, theirs.self_attn.in_proj_weight),
        (layer.attn.qkv.bias, theirs.self_attn.in_proj_bias),
        (layer.attn.out.weight, theirs.self_attn.out_proj.weight),
        (layer.attn.out.bias, theirs.self_attn.out_proj.bias),
        (layer.mlp.fc_in.weight, theirs.linear1.weight),
        (layer.mlp.fc_in.bias, theirs.linear1.bias),
        (layer.mlp.fc_out.weight, theirs.linear2.weight),
        (layer.mlp.fc_out.bias, theirs.linear2.bias),
        (layer.ln1.weight, theirs.norm1.weight),
        (layer.ln2.bias, theirs.norm2.bias),
    ]
    with torch.no_grad():
        for mine, other in pairs:
            assert mine is not None
            nn.init.normal_(other, std=0.3)
            mine.copy_(other)
    x = _x()
    # In training mode PyTorch does not take its own fused path; there is no dropout.
    expected = theirs.train()(x)
    got = layer(x, None, AttentionContext())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def inputs(batch: int = 5, n_pos: int = 7) -> torch.Tensor:
    return torch.randint(6, (batch, n_pos), generator=torch.Generator().manual_seed(0))


@given(n_bits=st.integers(1, 5), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_a_loop_rounds_its_state_to_one_of_a_few(n_bits, seed):
    model = coded(n_bits, seed=seed)
    states = model(inputs(), n_loops=4, return_type="states")
    different = states.flatten(0, 2).mul(1e4).round().unique(dim=0)
    assert len(different) <= 2**n_bits
    code = model.code
    assert code is not None
    bits = torch.where(states[1:] @ torch.linalg.pinv(code.write.weight).T >= 0, 1.0, -1.0)
    torch.testing.assert_close(code.state(bits), states[1:])  # n_bits <= d_model: U has full rank


def test_the_bits_are_the_signs_of_what_is_read_off_the_normed_state():
    model = coded()
    states, cache = model.run_with_cache(inputs(), n_loops=3, return_type="states")
    code = model.code
    assert code is not None
    norm = model.ln_loop
    assert norm is not None
    normed = cache.stack("ln_loop.hook_normalized") * norm.weight + norm.bias
    z = normed @ code.read.weight.T + code.read.bias
    torch.testing.assert_close(cache.stack("hook_code_pre"), z)
    assert torch.equal(cache.stack("hook_code"), torch.where(z >= 0, 1.0, -1.0))
    start = -code.write.weight.sum(1) + code.write.bias  # all bits are -1
    torch.testing.assert_close(states[0], start.expand_as(states[0]))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_logit_attribution_goes_through_the_code(norm):
    model = coded(norm=norm)
    x = inputs()
    logits, cache = model.run_with_cache(x, n_loops=3)
    expected = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(1))
    parts = cache.logit_attribution(expected)
    given_logits = logits.gather(-1, expected[..., None])[..., 0]
    total = torch.tensor(parts.sum("component").values, dtype=logits.dtype)
    torch.testing.assert_close(total, given_logits, atol=1e-4, rtol=1e-4)


@given(hard=st.floats(0, 1), gain=st.floats(0.5, 4))
@settings(max_examples=20, deadline=None)
def test_soft_signs_are_hard_ones_in_a_share_and_have_a_gradient(hard, gain):
    model = coded()
    code = model.code
    assert code is not None
    h = torch.randn(64, 40, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    softening = Softening(hard, gain, 0.0, torch.Generator().manual_seed(3))
    with code.softened(softening):
        soft = code._bits(code.read(h))
    share = float((soft.abs() == 1).float().mean())
    assert abs(share - hard) < 0.03
    (gradient,) = torch.autograd.grad(soft.sum(), h)
    z = code.read(h)
    (smooth,) = torch.autograd.grad(torch.tanh(gain * z).sum(), h)
    torch.testing.assert_close(gradient, smooth)  # of hard bits too
    assert torch.equal(code._bits(z), torch.where(z >= 0, 1.0, -1.0))  # hard again outside


@pytest.mark.parametrize(
    "changes",
    [
        {"state_code": None},
        {"initial_state": "zeros"},
        {"state_code": 0},
        {"state_code": 17},
        {"injection": "none"},
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes):
    with pytest.raises(ConfigError):
        coded(**changes)


def gated() -> Any:
    return build("gated").double().eval()


def test_a_gate_scales_what_a_sublayer_writes() -> None:
    model = gated()
    _, cache = model.run_with_cache(some_inputs(model), n_loops=2)
    for at in ("loops.1.blocks.0", "loops.0.blocks.1"):
        weights = model.block[int(at[-1])]
        before, mid = cache[f"{at}.hook_resid_pre"], cache[f"{at}.hook_resid_mid"]
        for part, stream, written in (
            ("attn", before, mid - before),
            ("mlp", mid, cache[f"{at}.hook_resid_post"] - mid),
        ):
            gate = getattr(weights, f"{part}_gate")
            share = torch.sigmoid(stream @ gate.weight.T + gate.bias)
            torch.testing.assert_close(cache[f"{at}.hook_{part}_gate"], share)
            torch.testing.assert_close(cache[f"{at}.hook_{part}_out"], written)
        neurons = cache[f"{at}.mlp.hook_post"]
        plain = neurons @ weights.mlp.fc_out.weight.T + weights.mlp.fc_out.bias
        torch.testing.assert_close(
            cache[f"{at}.hook_mlp_out"], plain * cache[f"{at}.hook_mlp_gate"]
        )


def test_a_gate_that_is_shut_leaves_the_stream_as_it_is() -> None:
    model = gated()
    shut = [(f"blocks.{k}.hook_{part}_gate", lambda x, hook: x * 0) for k in range(4)
            for part in ("attn", "mlp")]  # fmt: skip
    with torch.no_grad():
        model.recall.state.weight.copy_(torch.eye(16))  # so that a loop adds the input and no more
        model.recall.input.weight.copy_(torch.eye(16))
        x = some_inputs(model)
        states = model.run_with_hooks(x, n_loops=2, return_type="states", fwd_hooks=shut)
        e = model.embed(x)
    for loop in range(3):
        torch.testing.assert_close(states[loop], loop * e)


def test_a_gate_that_is_open_is_the_pre_norm() -> None:
    model = gated()
    plain = build("gated", norm="pre").double().eval()
    with torch.no_grad():
        for layer in model.block:
            for gate in (layer.attn_gate, layer.mlp_gate):
                gate.weight.zero_()
                gate.bias.fill_(50.0)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "gate" not in k})
    x = some_inputs(model)
    torch.testing.assert_close(model(x, n_loops=3), plain(x, n_loops=3))
