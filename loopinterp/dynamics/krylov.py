"""Krylov methods on all examples at once: Arnoldi with restarts, and Golub-Kahan.

Projected matrices are float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.dynamics.jacobian import JacobianOperator

    Product = Callable[[Tensor], Tensor]

CHECK_EVERY = 8
"""New vectors between solutions of the projected problem."""


@dataclass(frozen=True)
class _RitzPairs:
    values: np.ndarray  # [batch, k]
    residuals: np.ndarray  # relative, [batch, k]
    vectors: Tensor | None  # of norm 1, [batch, k, size]


class KrylovSchur:
    """Arnoldi on each example's operator, restarted when its space is full.

    ``A V = V S + v b``: columns of V are rows of ``basis``, S is the upper block of ``projected``
    and b the row below it. A restart keeps the leading part of the Schur form, conjugate pairs
    together.

    Source: Stewart, A Krylov-Schur algorithm for large eigenproblems, SIAM J. Matrix Anal. 23
    (2001); without restarts, Saad, Numerical Methods for Large Eigenvalue Problems, chapter 6.
    """

    def __init__(
        self,
        operator: JacobianOperator,
        k: int,
        max_vectors: int,
        *,
        start: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.operator, self.k, self.generator = operator, k, generator
        self.most = min(max_vectors, int(operator.sizes.max()))
        n, size = operator.like.shape
        self.rows = torch.arange(n)
        self.basis = operator.like.new_zeros(n, self.most + 1, size)  # V [batch, vector, size]
        self.basis[:, 0] = start
        self.projected = torch.zeros(n, self.most + 1, self.most, dtype=torch.float64)  # S, b
        self.length = torch.zeros(n, dtype=torch.int64)  # vectors of each example

    @property
    def exhausted(self) -> Tensor:
        return self.length >= self.operator.sizes

    def grow(self) -> None:
        """One product and one new vector, for examples with room."""
        for row in (~self.exhausted & (self.length == self.most)).nonzero().flatten().tolist():
            self._restart(row)
        at, active = self.length, ~self.exhausted
        w = self.operator.product(self.basis[self.rows, at])
        spanned = self.basis[:, : int(at.max()) + 1]  # [batch, vector, size]
        unit, coefficients, norm = orthogonalise(spanned, w)
        full = at + 1 >= self.operator.sizes  # the next vector would fill the space
        lost = (norm == 0) & ~full & active
        unit = _renewed(unit, lost, spanned, self.operator, self.generator)
        norm = torch.where(full, 0, norm)
        rows, at = self.rows[active], at[active]
        self.projected[rows, : spanned.shape[1], at] = coefficients[active]
        self.projected[rows, at + 1, at] = norm[active]
        self.basis[rows, at + 1] = torch.where(full[:, None].to(unit.device), 0, unit)[active]
        self.length = self.length + active

    def ritz(self, vectors: bool = False) -> _RitzPairs:
        """The k leading pairs so far; needs k vectors."""
        n, k = len(self.rows), self.k
        values, residuals = np.zeros((n, k), complex), np.full((n, k), np.inf)
        shape = (n, k, self.basis.shape[2]) if vectors else (0,)
        ritz_vectors = torch.zeros(shape, dtype=torch.complex128, device=self.basis.device)
        floor = torch.finfo(self.basis.dtype).eps ** (2 / 3)
        for length, rows in _by_length(self.length):
            square = self.projected[rows, :length, :length]  # S [row, length, length]
            # Torch rather than NumPy: its threads are the ones that the caller has limited.
            value, vector = (part.numpy() for part in torch.linalg.eig(square))
            # Of a conjugate pair the upper one, so that the answer does not depend on rounding.
            order = np.lexsort((value.imag, np.abs(value).round(12)), axis=-1)[:, ::-1][:, :k]
            value = np.take_along_axis(value, order, 1)
            vector = np.take_along_axis(vector, order[:, None], 2)
            below = self.projected[rows, length, :length].numpy()
            leftover = np.abs(np.einsum("rl,rlk->rk", below, vector))  # |b y| [row, k]
            # An eigenvalue that is 0 beside the others is known as well as rounding allows.
            smallest = floor * square.abs().amax(dim=(1, 2)).numpy()[:, None]
            values[rows] = value
            residuals[rows] = leftover / np.maximum(np.maximum(np.abs(value), smallest), 1e-300)
            if vectors:
                spanned = self.basis[rows, :length].cpu().to(torch.complex128)
                leading = torch.from_numpy(vector).mT @ spanned  # [row, k, size]
                ritz_vectors[rows] = leading.to(ritz_vectors.device)
        return _RitzPairs(values, residuals, ritz_vectors if vectors else None)

    def _restart(self, row: int) -> None:
        """Keep the leading part of the Schur form, cut at the largest gap."""
        m = self.most
        n_kept, schur, turn = _leading_schur(self.projected[row, :m].numpy(), self.k)
        below = self.projected[row, m].numpy() @ turn[:, :n_kept]  # b in the new basis
        self.projected[row] = 0
        self.projected[row, :n_kept, :n_kept] = torch.from_numpy(schur[:n_kept, :n_kept])
        self.projected[row, n_kept, :n_kept] = torch.from_numpy(below)
        turned = torch.from_numpy(turn[:, :n_kept].copy()).to(self.basis).T @ self.basis[row, :m]
        self.basis[row, :n_kept] = turned
        self.basis[row, n_kept] = self.basis[row, m]
        self.basis[row, n_kept + 1 :] = 0
        self.length[row] = n_kept


def _leading_schur(square: np.ndarray, k: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Schur vectors to keep, the ordered real Schur form, its orthogonal matrix."""
    from scipy.linalg import LinAlgError, schur

    m = len(square)
    fewest, most = k + (m - k) // 3, max(k + (m - k) // 3, k + 2 * (m - k) // 3)
    size = np.sort(np.abs(np.linalg.eigvals(square)))[::-1]  # moduli, largest first
    gaps = size[fewest - 1 : most] / np.maximum(size[fewest : most + 1], 1e-300)
    last = fewest - 1 + int(gaps.argmax())
    bound = max(np.sqrt(size[last] * size[last + 1]), size[last] / 2)
    try:
        ordered: Any = schur(square, sort=lambda re, im: np.hypot(re, im) >= bound)
        form, turn, n_kept = ordered
    except LinAlgError:  # equal moduli, which no order tells apart: any part is as good
        form, turn = schur(square)[:2]
        n_kept = last + 1
    n_kept = min(max(int(n_kept), fewest), m - 2)
    # A 2 x 2 block is a conjugate pair, which is kept or left as one.
    return n_kept + int(form[n_kept, n_kept - 1] != 0), form, turn


@dataclass(frozen=True)
class Bidiagonal:
    """State of Golub-Kahan: ``A V = U B`` and ``A^T U = V B^T + beta v e^T``.

    ``upper`` is B [batch, length, length]; ``beta`` and ``lengths`` are [batch]. With an exhausted
    space B is shorter, in the corner, and beta 0. ``right`` is V [batch, ., size].
    """

    upper: Tensor
    beta: Tensor
    lengths: Tensor
    right: Tensor

    def extremes(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest values and the smallest, [batch, k + 1], and their residuals."""
        values = np.full((len(self.beta), k + 1), np.nan)
        residuals = np.full_like(values, np.inf)
        some, floor = [*range(k), -1], torch.finfo(self.right.dtype).eps ** (2 / 3)
        for length, rows in _by_length(self.lengths):
            left, value, _ = torch.linalg.svd(self.upper[rows, :length, :length])
            # Residual norm of each singular triplet, [row, value]
            leftover = self.beta[rows, None] * left[:, -1].abs()
            residual = leftover / torch.maximum(value, floor * value[:, :1]).clamp_min(1e-300)
            values[rows], residuals[rows] = value.numpy()[:, some], residual.numpy()[:, some]
        return values, residuals

    def leading_right(self) -> Tensor:
        """Right singular vector of each example's largest value, [batch, size]."""
        vectors = torch.zeros_like(self.right[:, 0])
        for length, rows in _by_length(self.lengths):
            right = torch.linalg.svd(self.upper[rows, :length, :length])[2]
            leading = right[:, :1].to(vectors) @ self.right[rows, :length]  # [row, 1, size]
            vectors[rows] = leading[:, 0]
        return vectors


def golub_kahan(
    operator: JacobianOperator,
    change: Callable[[Product], Product] | None = None,
    *,
    max_vectors: int,
    seed: int = 0,
    start: Tensor | None = None,
) -> Iterator[Bidiagonal]:
    """Bidiagonalise J, or ``change`` of products with J and its transpose.

    One vector at a time, orthogonalised fully and twice, up to the whole space.

    Source: Golub and Kahan, SIAM J. Numer. Anal. 2 (1965).
    """
    forward, backward = operator.product, operator.transposed_product
    if change is not None:
        forward, backward = change(forward), change(backward)
    generator = torch.Generator().manual_seed(seed)
    sizes = operator.sizes
    most = min(max_vectors, int(sizes.max()))
    n, size = operator.like.shape
    right = operator.like.new_zeros(n, most + 1, size)  # V [batch, vector, size]
    left = operator.like.new_zeros(n, most, size)  # U [batch, vector, size]
    right[:, 0] = operator.random_vector(generator) if start is None else start
    upper = torch.zeros(n, most, most, dtype=torch.float64)  # B, upper bidiagonal
    for k in range(most):
        full, over = (k + 1 >= sizes), (k >= sizes)
        unit, coefficients, norm = orthogonalise(left[:, :k], forward(right[:, k]))
        unit = _renewed(unit, (norm == 0) & ~over, left[:, :k], operator, generator)
        left[:, k] = torch.where(over[:, None].to(unit.device), 0, unit)
        upper[:, :k, k], upper[:, k, k] = coefficients, norm
        unit, _, beta = orthogonalise(right[:, : k + 1], backward(left[:, k]))
        beta = torch.where(full, 0, beta)
        unit = _renewed(unit, (beta == 0) & ~full, right[:, : k + 1], operator, generator)
        right[:, k + 1] = torch.where(full[:, None].to(unit.device), 0, unit)
        lengths = sizes.clamp_max(k + 1)
        yield Bidiagonal(upper[:, : k + 1, : k + 1], beta, lengths, right[:, : k + 1])


def _renewed(
    unit: Tensor,
    lost: Tensor,
    spanned: Tensor,
    operator: JacobianOperator,
    generator: torch.Generator,
) -> Tensor:
    """A new direction for examples whose space has become invariant."""
    if not lost.any():
        return unit
    fresh = orthogonalise(spanned, operator.random_vector(generator))[0]
    return torch.where(lost[:, None].to(unit.device), fresh, unit)


def _by_length(lengths: Tensor) -> Iterator[tuple[int, Tensor]]:
    for length in lengths.unique().tolist():
        yield length, (lengths == length).nonzero().flatten()


def orthogonalise(basis: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gram-Schmidt of every example, done twice: unit vector, coefficients, norm of the rest.

    If only rounding is left, vector and norm are 0.
    """
    size = w.norm(dim=1)
    coefficients = torch.zeros(basis.shape[:2], dtype=torch.float64)
    for _ in range(2):
        projection = (basis @ w[:, :, None]).squeeze(-1)  # [batch, vector]
        w = w - (projection[:, None] @ basis).squeeze(1)  # [batch, size]
        coefficients += projection.cpu().double()
    norm = w.norm(dim=1)
    exhausted = norm <= 4 * torch.finfo(w.dtype).eps * size
    unit = w / torch.where(exhausted, 1, norm)[:, None]
    unit = torch.where(exhausted[:, None], 0, unit)
    return unit, coefficients, torch.where(exhausted, 0, norm).cpu().double()
