"""What is recorded at a tap, and its gradient."""

from __future__ import annotations

import torch

from tests.models.variants import build, some_inputs


def test_the_gradient_of_what_the_loss_does_not_depend_on_is_zero() -> None:
    model = build("plain", n_loops=3)
    x = some_inputs(model)
    cut = model.site("resid_post", loop=1, layer=0)
    with model.hooks(fwd_hooks=[(cut, lambda a, hook: torch.zeros_like(a))]):
        _, cache = model.run_with_cache(x, incl_bwd=True, loss_fn=lambda y: y.sum())
    before = [cache.cache_dict[f"blocks.{loop}.attn.hook_z_grad"] for loop in range(3)]
    assert [bool(g.any()) for g in before] == [False, False, True]
    assert before[0].shape == cache["blocks.0.attn.hook_z"].shape
