"""One layer against PyTorch's own modules with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopinterp.models.positions import AttentionContext
from loopinterp.models.transformer_layer import MLP, Attention, Layer, Norm
from tests.models.variants import build


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
