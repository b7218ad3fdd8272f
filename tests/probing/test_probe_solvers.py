"""The solvers against first-order conditions, and cell by cell."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot

from loopinterp.probing.probe_solvers import logistic_solve, ridge_solve


def problem(seed: int, cells: int = 3, n: int = 40, d: int = 5, n_classes: int = 3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(cells, n, d, generator=generator, dtype=torch.float64) + 1
    y = torch.randint(n_classes, (cells, n), generator=generator)
    weight = torch.rand(cells, n, generator=generator, dtype=torch.float64)
    return x, y, weight


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([1e-3, 1.0, 50.0]), bias=st.booleans())
def test_ridge_leaves_no_gradient(seed: int, alpha: float, bias: bool) -> None:
    x, y, weight = problem(seed)
    targets = one_hot(y, 3).double()
    coef, intercept = ridge_solve(x, targets, weight, alpha=alpha, fit_intercept=bias)
    residual = weight[..., None] * (x @ coef.mT + intercept[:, None] - targets)
    torch.testing.assert_close(residual.mT @ x, -alpha * coef, atol=1e-9, rtol=1e-9)
    if bias:
        torch.testing.assert_close(residual.sum(1), torch.zeros_like(intercept), atol=1e-9, rtol=0)
    else:
        assert not intercept.any()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.sampled_from([1e-3, 1.0, 50.0]),
    n_classes=st.sampled_from([2, 3, 5]),
)
def test_logistic_leaves_no_gradient(seed: int, alpha: float, n_classes: int) -> None:
    x, y, weight = problem(seed, n_classes=n_classes)
    coef, intercept, steps = logistic_solve(
        x, y, weight, n_classes=n_classes, alpha=alpha, tol=1e-9
    )
    assert (steps >= 0).all()
    coef, intercept = coef.requires_grad_(), intercept.requires_grad_()
    logits = x @ coef.mT + intercept[:, None]
    if n_classes == 2:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=2)
    loss = (weight * cross_entropy(logits.mT, y, reduction="none")).sum()
    loss = loss + alpha / 2 * coef.square().sum()
    for gradient in torch.autograd.grad(loss, (coef, intercept)):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("n_classes", [2, 4])
def test_logistic_cells_do_not_touch_each_other(n_classes: int) -> None:
    """Cells leave the batch when they have converged; a hard one must not be disturbed."""
    x, y, weight = problem(0, cells=4, n_classes=n_classes)
    y[2] = (x[2, :, 0] > 1).long()  # separable: takes more steps
    together = logistic_solve(x, y, weight, n_classes=n_classes, alpha=1e-4)
    assert len(set(together[2].tolist())) > 1
    for cell in range(4):
        alone = logistic_solve(
            x[[cell]], y[[cell]], weight[[cell]], n_classes=n_classes, alpha=1e-4
        )
        for one, of_many in zip(alone, together):
            torch.testing.assert_close(one[0], of_many[cell])


def test_steps_that_overshoot_are_halved() -> None:
    """A full Newton step from zero diverges on badly scaled, separable data; ours does not."""
    x = torch.tensor([[[-1e4], [-1.0], [1.0], [2e4], [3e-3]]], dtype=torch.float64)
    y = torch.tensor([[0, 0, 1, 1, 0]])
    coef, intercept, steps = logistic_solve(
        x, y, torch.ones(1, 5), n_classes=2, alpha=1e-6, max_iter=200
    )
    assert steps.item() >= 0
    logits = (x @ coef.mT + intercept[:, None]).squeeze(-1)
    assert torch.equal(logits > 0, y == 1)


def test_running_out_of_steps_is_reported() -> None:
    x, y, weight = problem(0)
    assert (logistic_solve(x, y, weight, n_classes=3, alpha=1.0, max_iter=1)[2] == -1).all()


def test_directions_of_low_rank_states_survive() -> None:
    """States within a plane of a wide space, far from the origin: float32 would lose it."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(64, 2, generator=generator)).Q.mT
    x = torch.randn(1, 500, 2, generator=generator) @ plane + 30.0
    y = ((x - 30.0) @ plane[0] > 0).double()[..., None]
    coef, intercept = ridge_solve(x, 2 * y - 1, torch.ones(1, 500), alpha=1e-2)
    assert torch.cosine_similarity(coef[0, 0], plane[0].double(), dim=0) > 0.99
    predicted = (x.double() @ coef.mT + intercept[:, None]) > 0
    assert (predicted == (y > 0)).double().mean() > 0.98
