"""Retrofitted Llamas: relatives that are none, lost angles, and the initial state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopinterp.adapters import RetrofittedAdapter, adapt
from loopinterp.core.errors import InputError
from tests.adapters.published import retrofitted


def test_layers_with_norms_of_queries_are_refused() -> None:
    model = retrofitted.tiny()
    assert isinstance(adapt(model), RetrofittedAdapter)
    for block in model.transformer["core_block"]:  # type: ignore[union-attr]
        block.attn.q_norm = nn.Identity()  # as in OLMo's layers
    with pytest.raises(InputError, match="Pass inputs="):
        adapt(model)


def test_lost_angles_are_refused() -> None:
    model = retrofitted.tiny()
    model.rotary_emb.inv_freq.zero_()
    with pytest.raises(InputError, match="falling frequencies"):
        adapt(model)


def test_noise_is_drawn_by_the_seed_at_the_published_scale() -> None:
    model = retrofitted.tiny()
    tokens = torch.randint(64, (2, 50), generator=torch.Generator().manual_seed(0))
    first, again, other = (adapt(model, seed=seed) for seed in (0, 0, 1))
    start = first.initial_state(first.embed(tokens))
    assert torch.equal(start, again.initial_state(again.embed(tokens)))
    assert not torch.equal(start, other.initial_state(other.embed(tokens)))
    std = model.config.init_values["std"]
    assert start.abs().max() <= 3 * std and abs(start.std() / std - 1) < 0.1
