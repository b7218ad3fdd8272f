"""Weights of several models in one operation, against each model alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopinterp.models.stacked_weights import linear, norm


def _of(n_models: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_models + sum(shape))
    return torch.randn(n_models, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("biased", [True, False])
def test_each_model_maps_and_norms_its_own_rows(biased: bool) -> None:
    x, weight, scale = _of(3, 7, 4), _of(3, 5, 4), _of(3, 4)
    bias, shift = (_of(3, 5), _of(3, 4) + 1) if biased else (None, None)
    mapped, normed = linear(x, weight, bias), norm(x, scale, shift, 1e-5)
    for model in range(3):
        own, moved = (None if b is None else b[model] for b in (bias, shift))
        torch.testing.assert_close(mapped[model], F.linear(x[model], weight[model], own))
        if moved is None:
            alone = F.rms_norm(x[model], (4,), scale[model], 1e-5)
        else:
            alone = F.layer_norm(x[model], (4,), scale[model], moved, 1e-5)
        torch.testing.assert_close(normed[model], alone)


def test_weights_of_one_model_give_the_numbers_of_pytorch() -> None:
    x, weight, bias = _of(2, 3, 4), _of(5, 4), _of(5)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(norm(x, weight[0], None, 1e-5), F.rms_norm(x, (4,), weight[0], 1e-5))
