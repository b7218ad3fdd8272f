"""Nanbeige: the options of its code that the released model leaves off, and lost angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.adapters import NanbeigeAdapter, adapt
from loopinterp.core.errors import InputError
from tests.adapters.published import nanbeige


@pytest.mark.parametrize(
    "option",
    ["enable_double_loop_split", "skip_loop_final_norm", "enable_depth_attention", "qk_layernorm"],
)
def test_further_options_are_refused(option: str) -> None:
    model = nanbeige.tiny()
    setattr(model.config, option, True)
    with pytest.raises(InputError, match=option):
        adapt(model)
    setattr(model.config, option, False)
    assert isinstance(adapt(model), NanbeigeAdapter)


def test_scaled_or_lost_angles_are_refused() -> None:
    model = nanbeige.tiny()
    rotary: Any = model.model.layers[0].self_attn.rotary_emb  # type: ignore[union-attr]
    rotary.scaling_factor = 2.0
    with pytest.raises(InputError, match="rope_scaling"):
        adapt(model)
    rotary.scaling_factor = 1.0
    rotary.inv_freq = torch.zeros_like(rotary.inv_freq)
    with pytest.raises(InputError, match="falling frequencies"):
        adapt(model)


def test_the_loops_are_those_that_the_code_makes() -> None:
    model = nanbeige.tiny()
    model.model.n_loops = 3
    tokens = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(0))
    adapted = adapt(model)
    assert adapted.n_loops == 3
    assert (adapted(tokens) - model(tokens)).abs().max() <= 1e-5
