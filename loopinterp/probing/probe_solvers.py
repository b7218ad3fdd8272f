"""The two batched solvers behind the probes: ridge in closed form, logistic by Newton's method.

Both take many problems (cells) at once, with a weight for every sample of every cell, and work
in float64 on the device of their input: states of a looped model are often of low rank, and
normal equations in float32 lose their small directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import one_hot, softplus

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

_MAX_HALVINGS = 40
_JITTER = 1e-12


def ridge_solve(
    x: Float[Tensor, "cell sample d"],
    y: Float[Tensor, "cell sample column"],
    weight: Float[Tensor, "cell sample"],
    *,
    alpha: float,
    fit_intercept: bool = True,
) -> tuple[Float[Tensor, "cell column d"], Float[Tensor, "cell column"]]:
    """Weighted ridge regression of every column of every cell.

    ``min sum_i w_i (y_i - x_i c - b)^2 + alpha ||c||^2``, solved by one batched Cholesky
    factorisation; the columns of a cell share it.

    Args:
        x: Inputs, [cell, sample, d].
        y: Real targets, [cell, sample, column].
        weight: Weight of each sample, 0 for a sample that does not belong to the cell.
        alpha: L2 penalty on the coefficients; the intercept is free.
        fit_intercept: Whether there is an intercept (0 otherwise).
    """
    x, y, weight = x.double(), y.double(), weight.double()
    w = weight[..., None]
    if fit_intercept:
        total = w.sum(1, keepdim=True)
        x_mean, y_mean = (w * x).sum(1, keepdim=True) / total, (w * y).sum(1, keepdim=True) / total
        x, y = x - x_mean, y - y_mean
    weighted = (w * x).mT
    gram = weighted @ x
    gram.diagonal(dim1=1, dim2=2).add_(alpha)
    coef = _solve_positive(gram, weighted @ y).mT
    if not fit_intercept:
        return coef, coef.new_zeros(coef.shape[:2])
    return coef, (y_mean - x_mean @ coef.mT).squeeze(1)


def logistic_solve(
    x: Float[Tensor, "cell sample d"],
    y: Int[Tensor, "cell sample"],
    weight: Float[Tensor, "cell sample"],
    *,
    n_classes: int,
    alpha: float,
    fit_intercept: bool = True,
    tol: float = 1e-6,
    max_iter: int = 100,
) -> tuple[Float[Tensor, "cell row d"], Float[Tensor, "cell row"], Int[Tensor, " cell"]]:
    """Weighted L2-regularised logistic regression of every cell, by damped Newton steps.

    ``min sum_i w_i CE(y_i, softmax(C x_i + b)) + alpha/2 ||C||^2``. Two classes have one row
    (the logit of class 1); more have one row each. Cells that have converged leave the batch.

    Args:
        x: Inputs, [cell, sample, d].
        y: Class numbers from 0 to ``n_classes - 1``.
        weight: Weight of each sample.
        n_classes: Number of classes, the same for all cells.
        alpha: L2 penalty on the coefficients; the intercept is free.
        fit_intercept: Whether there is an intercept (0 otherwise).
        tol: A cell has converged when the largest entry of its gradient, divided by the sum of
            its weights, is below this.
        max_iter: Newton steps at most.

    Returns:
        Coefficients, intercepts, and the Newton steps each cell took (-1 where ``max_iter`` of
        them were not enough).
    """
    x, weight = x.double(), weight.double()
    n_cells, _, d = x.shape
    x = torch.cat([x, x.new_full((*x.shape[:2], 1), float(fit_intercept))], dim=2)
    rows = 1 if n_classes == 2 else n_classes
    target = (y[..., None] if rows == 1 else one_hot(y, n_classes)).double()
    penalty = x.new_full((d + 1,), alpha)
    # Without an intercept its column is zero: a penalty keeps the Hessian regular.
    penalty[d] = 0.0 if fit_intercept else 1.0
    theta = x.new_zeros(n_cells, rows, d + 1)
    steps = torch.full((n_cells,), -1, dtype=torch.long, device=x.device)
    active = torch.arange(n_cells, device=x.device)
    for step in range(max_iter + 1):
        xa, ta, wa = (x, target, weight)
        if len(active) < n_cells:
            xa, ta, wa = x[active], target[active], weight[active]
        probability = _probability(theta[active], xa)
        gradient = (wa[..., None] * (probability - ta)).mT @ xa + penalty * theta[active]
        slope = gradient.flatten(1).abs().amax(1) / wa.sum(1)
        open_ = slope > tol
        steps[active[~open_]] = step
        active = active[open_]
        if not len(active) or step == max_iter:
            break
        xa, ta, wa, probability = xa[open_], ta[open_], wa[open_], probability[open_]
        direction = _newton_direction(gradient[open_], probability, xa, wa, penalty)
        theta[active] += _line_search(
            theta[active], direction, gradient[open_], xa, ta, wa, penalty
        )
    return theta[..., :d], theta[..., d], steps


def _probability(theta: Tensor, x: Tensor) -> Tensor:
    logits = x @ theta.mT
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)


def _loss(theta: Tensor, x: Tensor, target: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    logits = x @ theta.mT
    if logits.shape[-1] == 1:
        each = (softplus(logits) - target * logits).squeeze(-1)
    else:
        each = logits.logsumexp(-1) - (target * logits).sum(-1)
    return (weight * each).sum(1) + 0.5 * (penalty * theta.square()).flatten(1).sum(1)


def _newton_direction(
    gradient: Tensor, probability: Tensor, x: Tensor, weight: Tensor, penalty: Tensor
) -> Tensor:
    """``-H^-1 gradient`` for the block matrix ``H_kl = sum_i w_i p_k (1[k=l] - p_l) x_i x_i^T``."""
    n_cells, _, width = x.shape
    rows = probability.shape[-1]
    hessian = x.new_zeros(n_cells, rows, width, rows, width)
    for k in range(rows):
        for m in range(k + 1):
            p, q = probability[..., k], probability[..., m]
            curvature = weight * (p * (1 - p) if k == m else -p * q)
            block = (curvature[..., None] * x).mT @ x
            hessian[:, k, :, m] = block
            hessian[:, m, :, k] = block.mT
    if rows > 1:
        # A constant added to all intercepts changes nothing: hold their sum where it is.
        hessian[:, :, -1, :, -1] += weight.sum(1)[:, None, None] / rows
    hessian = hessian.reshape(n_cells, rows * width, rows * width)
    hessian.diagonal(dim1=1, dim2=2).add_(penalty.repeat(rows))
    return -_solve_positive(hessian, gradient.reshape(n_cells, -1, 1)).reshape(gradient.shape)


def _line_search(
    theta: Tensor,
    direction: Tensor,
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    penalty: Tensor,
) -> Tensor:
    """The Newton step of each cell, halved until it lowers the loss enough (Armijo's rule)."""
    start = _loss(theta, x, target, weight, penalty)
    slope = (gradient * direction).flatten(1).sum(1)
    size = torch.ones_like(start)
    # Near the optimum the decrease is below rounding error: allow for it.
    slack = 1e-12 * start.abs()
    for _ in range(_MAX_HALVINGS):
        end = _loss(theta + size[:, None, None] * direction, x, target, weight, penalty)
        too_far = end > start + 1e-4 * size * slope + slack
        if not too_far.any():
            break
        size = torch.where(too_far, size / 2, size)
    return size[:, None, None] * direction


def _solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix^-1 right`` for symmetric positive matrices; a singular one gets a tiny ridge."""
    scale = matrix.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1.0)
    jitter = (_JITTER * scale)[:, None].expand(matrix.shape[:2])
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(jitter))
    if failed.any():
        factor, _ = torch.linalg.cholesky_ex(
            matrix + torch.diag_embed(1e4 * jitter), check_errors=True
        )
    return torch.cholesky_solve(right, factor)
