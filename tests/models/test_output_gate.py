from __future__ import annotations

from typing import Any

import torch

from tests.models.variants import build, some_inputs


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
