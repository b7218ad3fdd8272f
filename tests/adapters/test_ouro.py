"""Ouro's gate: the probabilities of its own forward, from ours."""

from __future__ import annotations

import pytest
import torch

from loopinterp.adapters import adapt
from loopinterp.core.errors import InputError
from tests.adapters.published import ouro


def test_exit_probabilities_are_those_of_the_published_forward() -> None:
    published = ouro.tiny()
    model, tokens = adapt(published), torch.arange(10).view(2, 5)
    exits = published(tokens).exits  # [batch, pos, loop], the last takes what is left
    _, cache = model.run_with_cache(tokens, names_filter="hook_exit_gate")
    stop = cache.stack("hook_exit_gate").squeeze(-1)
    left = torch.cat((torch.ones(1, 2, 5), (1 - stop).cumprod(0)))
    ours = torch.cat((stop[:-1] * left[:-2], left[-2:-1])).permute(1, 2, 0)
    assert torch.allclose(ours, exits, atol=1e-5)
    assert torch.allclose(ours.sum(-1), torch.ones(2, 5))


def test_layers_with_a_sliding_window_are_refused() -> None:
    published = ouro.tiny()
    published.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(InputError, match="sliding"):
        adapt(published)


def test_angles_that_were_lost_in_loading_are_refused() -> None:
    published = ouro.tiny()
    published.model.rotary_emb.inv_freq.zero_()
    with pytest.raises(InputError, match="inv_freq"):
        adapt(published)
