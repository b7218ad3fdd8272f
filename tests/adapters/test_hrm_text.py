"""HRM-Text: its prefix, its gate, and the norm at the end of a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import HRMTextAdapter, adapt
from loopinterp.core.errors import InputError
from loopinterp.models import generate
from tests.adapters.published import hrm_text


def _tokens() -> Tensor:
    return torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("n_prefix", [0, 1, 3, 7, 9])
def test_a_prefix_sees_all_of_itself(n_prefix: int) -> None:
    published, tokens = hrm_text.tiny(prefix_lm=True), _tokens()
    model = adapt(published, n_prefix=n_prefix)
    inside = (torch.arange(7) < n_prefix).long().expand(2, -1)
    with torch.no_grad():
        native = published(tokens, token_type_ids=inside, use_cache=False).logits
    logits, cache = model.run_with_cache(tokens)
    assert (model(tokens) - native).abs().max() <= 1e-5
    assert (logits - native).abs().max() <= 1e-5
    seen = cache["blocks.0.attn.hook_pattern"] > 0
    assert torch.equal(seen, model.visible(7).expand_as(seen))
    if n_prefix > 1:
        with pytest.raises(InputError, match="causal"):
            generate(model, [[1, 2]], n_loops=1, max_new_tokens=1)


@pytest.mark.parametrize(
    "sampler",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.8},
    ],
)
def test_the_models_own_generate_writes_the_same_tokens(sampler: dict[str, Any]) -> None:
    for n_loops in (2,) if sampler else (1, 2, 4):  # a token is drawn from the last loop alike
        published: Any = hrm_text.tiny(H_cycles=n_loops, initializer_range=0.3)
        how: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None}
        how["attention_mask"] = torch.ones_like(_tokens())  # else made of the padding token
        options = {"do_sample": bool(sampler), "top_k": 0 if sampler else None, **sampler}
        torch.manual_seed(5)
        native = published.generate(_tokens(), **how, **options)[:, 7:]
        how = {"n_loops": n_loops, "max_new_tokens": 10, "seed": 5, **sampler}
        new = generate(adapt(published), _tokens(), **how)
        assert torch.equal(new, native) and len(new.unique()) > (5 if sampler else 1)


def test_a_prefix_of_a_model_that_knows_none_is_refused() -> None:
    with pytest.raises(InputError, match="n_prefix"):
        adapt(hrm_text.tiny(), n_prefix=2)


def test_a_closed_gate_lets_a_head_say_nothing() -> None:
    model, tokens = adapt(hrm_text.tiny()), _tokens()
    assert isinstance(model, HRMTextAdapter)
    shut = [("blocks.0.attn.hook_gate", lambda gate, hook: gate * 0)]
    with model.hooks(shut, n_loops=1):
        _, cache = model.run_with_cache(tokens, n_loops=1)
    assert cache["blocks.0.hook_attn_out"].abs().max() == 0
    assert cache["blocks.0.attn.hook_z"].abs().max() > 0  # what the head read, before the gate


def test_the_norm_that_ends_a_stack_makes_its_part_of_the_state() -> None:
    model, tokens = adapt(hrm_text.tiny()), _tokens()
    _, cache = model.run_with_cache(tokens, n_loops=2)
    for layer, part in ((5, "hook_z_L"), (7, "hook_z_H")):
        last = cache[f"loops.1.blocks.{layer}.hook_resid_post"]
        rms = last.square().mean(-1, keepdim=True).sqrt()
        assert (cache[f"loops.1.blocks.{layer}.ln_cycle.hook_scale"] - rms).abs().max() < 1e-5
        assert torch.equal(
            cache[f"loops.1.blocks.{layer}.ln_cycle.hook_normalized"], cache[f"loops.1.{part}"]
        )
        assert (last / rms - cache[f"loops.1.{part}"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 24, "num_attention_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"num_hidden_layers": 1, "H_cycles": 3, "L_cycles": 1},
        {"hidden_act": "gelu", "embedding_scale": 2.0},
    ],
)
def test_any_sizes(sizes: dict[str, Any]) -> None:
    published, tokens = hrm_text.tiny(**sizes), _tokens()
    with torch.no_grad():
        for name, weight in published.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    model = adapt(published)
    logits, cache = model.run_with_cache(tokens)
    assert (logits - published(tokens, use_cache=False).logits).abs().max() <= 1e-5
    assert cache.nbytes == model.cache_nbytes(2, 7)
