r"""Local stability: the spectral radius of :math:`J = \partial\,\mathrm{step} / \partial h`.

Examples of a batch do not influence each other, so the Jacobian of the batch is block-diagonal:
one Jacobian-vector product with a stacked tangent gives the product of every example with its own
vector, and the Arnoldi iteration runs for all examples at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopinterp.dynamics.state_checks import check_finite_state, check_shape
from loopinterp.errors import InputError, check_integer, check_number, check_seed
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Spectrum(ShortRepr):
    r"""Leading eigenvalue of each example's Jacobian.

    Attributes:
        radius: :math:`|\lambda|`; a fixed point is locally stable, and reachable, below 1.
        eigenvalue: :math:`\lambda` itself (of a conjugate pair, the one in the upper half).
        residual: Relative residual of its Ritz pair, :math:`\|Jv - \lambda v\| / |\lambda|`.
        converged: Whether the residual is under the tolerance. Where it is not, the radius is
            the best estimate from below or above; a strongly non-normal Jacobian can also
            converge slowly to a value above the true one.
    """

    radius: Float[Tensor, " batch"]
    eigenvalue: Complex[Tensor, " batch"]
    residual: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]


def jvp(
    step: Callable[[Tensor], Tensor], h: Float[Tensor, "batch ..."], v: Float[Tensor, "batch ..."]
) -> Float[Tensor, "batch ..."]:
    r"""Jacobian-vector product :math:`J(h) v`, by forward-mode differentiation.

    Where a step has an operation without a forward derivative, by two backward ones: the product
    is the derivative of :math:`J(h)^\top u`, which is linear in u, along v.

    Args:
        step: One loop, such as ``bind(model, inputs).step``.
        h: State at which to differentiate.
        v: Tangent, one for each example.

    Raises:
        InputError: If the tangent does not have the shape of the state, or the step has no
            derivative of either kind.
    """
    check_shape(v, h, "tangent", fix="Pass one tangent for each example, shaped like the state.")
    _load_forward_mode()
    # Fused attention has no forward derivative, nor second backward ones; the plain one has.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _plain_encoder_layers():
        try:
            return torch.func.jvp(step, (h,), (v,))[1]
        except RuntimeError:  # an operation has no such derivative, or the step itself is wrong
            return _jvp_by_two_gradients(step, h, v)


def _jvp_by_two_gradients(step: Callable[[Tensor], Tensor], h: Tensor, v: Tensor) -> Tensor:
    with torch.enable_grad():
        h = h.detach().clone().requires_grad_()
        after = step(h)
        u = torch.zeros_like(after, requires_grad=True)
        try:
            (gradient,) = torch.autograd.grad(after, h, u, create_graph=True)
            return torch.autograd.grad(gradient, u, v)[0]
        except RuntimeError as error:
            raise InputError(
                "step",
                expected="a loop that can be differentiated, once forwards or twice backwards",
                given=f"one of which PyTorch says: {error}",
                fix="Write it in PyTorch's own operations, without detach and no_grad; or do "
                "without its Jacobian, as convergence_study does with n_spectral=0.",
            ) from error


@contextmanager
def _plain_encoder_layers() -> Iterator[None]:
    """Keep PyTorch's encoder layers from a fused kernel of theirs, which has no derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@cache
def _load_forward_mode() -> None:
    """Let torch compile its forward derivatives, which it does with functions it has deprecated."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def dense_jacobian(
    step: Callable[[Tensor], Tensor], h: Float[Tensor, "batch ..."]
) -> Float[Tensor, "batch size size"]:
    """The whole Jacobian of each example, for small states: as many products as the state is large.

    Entry ``[b, i, j]`` is the derivative of component ``i`` after the loop by component ``j``
    before it, in the order of ``h.flatten(1)``.
    """
    units = torch.eye(h[0].numel()).to(h).unflatten(1, h.shape[1:])
    columns = [jvp(step, h, unit.expand_as(h).contiguous()).flatten(1) for unit in units]
    return torch.stack(columns, dim=-1)


def spectral_radius(
    step: Callable[[Tensor], Tensor],
    h: Float[Tensor, "batch ..."],
    *,
    tol: float = 1e-3,
    max_vectors: int = 100,
    seed: int = 0,
) -> Spectrum:
    r"""Largest :math:`|\lambda|` of each Jacobian, by Arnoldi on Jacobian-vector products.

    Args:
        step: One loop, such as ``bind(model, inputs).step``.
        h: State of each example, best a fixed point.
        tol: Relative residual of the leading Ritz pair at which an example has converged.
        max_vectors: Largest Krylov space; each vector costs one product and one state of memory.
        seed: Seed of the starting vectors.

    Raises:
        InputError: If the state is empty or not finite, or an option is out of range.

    Source: Saad, Numerical Methods for Large Eigenvalue Problems, chapter 6.

    Example:
        >>> matrix = torch.tensor([[0.5, 1.0], [0.0, -0.9]])
        >>> spectral_radius(lambda h: h @ matrix.T, torch.zeros(1, 2)).radius
        tensor([0.9000])
    """
    check_number("tol", tol, above=0)
    check_integer("max_vectors", max_vectors, least=1)
    check_finite_state(
        h, "state", fix="Differentiate at a fixed point of a run that does not diverge."
    )
    n_examples, size = h.flatten(1).shape
    most = min(max_vectors, size)
    generator = torch.Generator().manual_seed(check_seed(seed))
    first = torch.randn(n_examples, size, generator=generator, dtype=torch.float64)
    basis = h.new_zeros(n_examples, most + 1, size)
    basis[:, 0] = (first / first.norm(dim=1, keepdim=True)).to(h)
    hessenberg = torch.zeros(n_examples, most + 1, most, dtype=torch.float64)
    settled = 0
    value, residual = np.zeros(n_examples, complex), np.full(n_examples, np.inf)
    for k in range(most):
        w = jvp(step, h, basis[:, k].reshape(h.shape)).flatten(1)
        basis[:, k + 1], hessenberg[:, : k + 2, k] = _orthogonalise(basis[:, : k + 1], w)
        # An eigenvalue problem of a few dozen rows: cheap, but not worth solving at each vector.
        if k + 1 == most or k % 8 == 7:
            value, residual = _leading_ritz(hessenberg[:, : k + 2, : k + 1])
            # Twice in a row, so that a smaller eigenvalue that appears first is not taken.
            settled = settled + 1 if (residual <= tol).all() else 0
            if settled == 2:
                break
    return Spectrum(
        radius=torch.from_numpy(np.abs(value)).to(h),
        eigenvalue=torch.from_numpy(value).to(h.device),
        residual=torch.from_numpy(residual).to(h),
        converged=torch.from_numpy(residual <= tol).to(h.device),
    )


def _orthogonalise(basis: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt of every example, done twice; an exhausted Krylov space gives a zero vector."""
    size = w.norm(dim=1)
    coefficients = torch.zeros(w.shape[0], basis.shape[1] + 1, dtype=torch.float64)
    for _ in range(2):
        projection = (basis @ w[:, :, None]).squeeze(-1)
        w = w - (projection[:, None] @ basis).squeeze(1)
        coefficients[:, :-1] += projection.cpu().double()
    norm = w.norm(dim=1)
    exhausted = norm <= 4 * torch.finfo(w.dtype).eps * size
    coefficients[:, -1] = torch.where(exhausted, 0, norm).cpu().double()
    unit = w / torch.where(exhausted, 1, norm)[:, None]
    return torch.where(exhausted[:, None], 0, unit), coefficients


def _leading_ritz(hessenberg: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Leading Ritz value of every example, and the relative residual of its pair."""
    k = hessenberg.shape[2]
    # Torch rather than NumPy: its threads are the ones that the caller has limited.
    values, vectors = (part.numpy() for part in torch.linalg.eig(hessenberg[:, :k]))
    # Of a conjugate pair the upper one, so that the answer does not depend on rounding.
    lead = np.lexsort((values.imag, np.abs(values).round(12)), axis=-1)[:, -1]
    rows = np.arange(len(values))
    value, last = values[rows, lead], vectors[rows, k - 1, lead]
    size = np.abs(value)
    leftover = hessenberg[:, k, k - 1].abs().numpy() * np.abs(last)
    return value, np.where(leftover == 0, 0.0, leftover / np.where(size > 0, size, 1e-300))
