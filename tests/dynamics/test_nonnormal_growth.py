from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.dynamics import non_normality, transient_growth
from loopinterp.errors import InputError
from tests.dynamics.toys import linear, random_state, small_transformer


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def test_growth_of_a_transformer_is_the_norm_of_powers_of_its_dense_jacobian() -> None:
    iteration = small_transformer(causal=False).select(slice(0, 1))
    h = random_state(*iteration.h0.shape)
    jacobian = torch.autograd.functional.jacobian(iteration.step, h)
    assert isinstance(jacobian, torch.Tensor)
    dense = jacobian.reshape(1, h.numel(), h.numel())
    growth = transient_growth(iteration.step, h, 4, tol=1e-3)
    powers = [torch.linalg.matrix_power(dense, t) for t in range(len(growth.norms))]
    norms = torch.stack([torch.linalg.matrix_norm(power, 2) for power in powers])
    assert len(norms) > 2
    torch.testing.assert_close(growth.norms, norms, rtol=1e-3, atol=0)


def test_non_normality_is_one_for_a_rotation_and_grows_with_shear() -> None:
    angle = torch.tensor(1.0, dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    assert non_normality(linear(0.5 * turn), _zeros(1, 2)).ratio.item() == pytest.approx(1)
    shear = torch.tensor([[0.5, 3.0], [0.0, 0.4]], dtype=torch.float64)
    found = non_normality(linear(shear), _zeros(1, 2))
    assert found.ratio.item() == pytest.approx(torch.linalg.svdvals(shear)[0].item() / 0.5)
    nilpotent = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert non_normality(linear(nilpotent), _zeros(1, 2)).ratio.item() > 1e6


def test_transient_growth_of_a_jordan_block_and_where_it_is_closed() -> None:
    block = 0.7 * torch.eye(4, dtype=torch.float64) + torch.diag(
        torch.ones(3, dtype=torch.float64), 1
    )
    exact = [
        torch.linalg.matrix_norm(torch.linalg.matrix_power(block, t), 2).item() for t in range(40)
    ]
    found = transient_growth(linear(block), _zeros(1, 4), 40)
    assert found.largest.item() == pytest.approx(max(exact), rel=0.01)
    assert found.at.item() == int(np.argmax(exact)) and found.closed.all()
    assert len(found.norms) == 1 + next(t for t, norm in enumerate(exact) if norm < 1)
    short = transient_growth(linear(block), _zeros(1, 4), 3)
    assert not short.closed.any() and short.at.item() == 3
    calm = transient_growth(linear(0.5 * torch.eye(2).double()), _zeros(1, 2))
    assert (calm.largest.item(), calm.at.item(), len(calm.norms)) == (1.0, 0, 2)


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="tol"):
        transient_growth(torch.cos, torch.zeros(1, 2), tol=0.0)
    with pytest.raises(InputError, match="max_vectors"):
        transient_growth(torch.cos, torch.zeros(1, 2), max_vectors=0)
    with pytest.raises(InputError, match="state"):
        transient_growth(torch.cos, torch.full((1, 2), torch.inf))
    with pytest.raises(InputError, match="n_loops"):
        transient_growth(torch.cos, torch.zeros(1, 2), 0)
