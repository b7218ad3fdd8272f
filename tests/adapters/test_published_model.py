"""Norms and rotations of published layers, against PyTorch and against complex numbers."""

from __future__ import annotations

import pytest
import torch

from loopinterp.adapters.published_model import (
    gated,
    join_heads,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.models.taps import ChangingTap


@pytest.mark.parametrize("weighted", [False, True])
def test_the_norm_is_pytorchs_and_that_of_its_parts(weighted: bool) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    norm = torch.nn.RMSNorm(5, eps=0.1, elementwise_affine=weighted)
    if weighted:
        torch.nn.init.uniform_(norm.weight)
    weight = norm.weight if weighted else None
    assert torch.allclose(rms_norm(x, weight, 0.1), norm(x), atol=1e-6)
    tap = ChangingTap({"ln1.hook_scale": lambda scale: scale * 2})
    assert torch.allclose(rms_norm(x, weight, 0.1, tap, "ln1"), norm(x) / 2, atol=1e-6)
    tap = ChangingTap({"ln1.hook_normalized": torch.zeros_like})
    assert not rms_norm(x, weight, 0.1, tap, "ln1").any()


def test_half_precision_is_normed_in_single() -> None:
    x = 300 * torch.ones(1, 4, dtype=torch.float16)  # whose squares are no float16
    assert torch.equal(rms_norm(x, None, 0.0), torch.ones(1, 4, dtype=torch.float16))


def test_halves_are_rotated_as_complex_numbers() -> None:
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    angle = torch.rand(3, 4)
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angle)
    tables = angle.repeat(1, 2).cos(), angle.repeat(1, 2).sin()
    expected = torch.cat((turned.real, turned.imag), -1)
    assert torch.allclose(rotate_halves(x, tables), expected, atol=1e-6)


def test_heads_are_split_and_joined() -> None:
    x = torch.arange(12.0).view(1, 2, 6)
    heads = split_heads(x, 3)
    assert heads[0, 1].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert torch.equal(join_heads(heads), x)


def test_neurons_are_the_gate_times_the_rest() -> None:
    pre, linear = torch.tensor([[[-1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])
    assert gated(pre, linear, torch.relu).tolist() == [[[0.0, 8.0]]]
    tap = ChangingTap({"mlp.hook_pre": torch.neg, "mlp.hook_pre_linear": lambda x: x + 1})
    assert gated(pre, linear, torch.relu, tap).tolist() == [[[4.0, 0.0]]]
