r"""Products with the Jacobian :math:`J = \partial\,\mathrm{step} / \partial h` and its transpose.

The Jacobian of a batch is block-diagonal, so one product serves every example.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import check_finite_state, check_shape, chunks
from loopinterp.models.iteration import Iteration
from loopinterp.models.taps import no_fast_path, recording_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Positions = Sequence[int] | Bool[Tensor, " pos"] | Bool[Tensor, "batch pos"]


_ONE_EACH = "Pass one for each example, shaped like the state."


def jvp(
    step: Callable[[Tensor], Tensor],
    h: Float[Tensor, "batch ..."],
    v: Float[Tensor, "batch ..."],
    *,
    positions: Positions | None = None,
) -> Float[Tensor, "batch ..."]:
    """Jacobian-vector product :math:`J(h) v`, by forward-mode differentiation.

    If an operation has no forward derivative, two backward passes replace it.

    Args:
        step: One loop, such as ``bind(model, inputs).step``.
        positions: Take the block of J from these positions to these positions, 0 elsewhere:
            indices, or a mask ``[pos]`` or ``[batch, pos]``.
    """
    check_shape("tangent", v.shape, h.shape, fix=_ONE_EACH)
    mask = position_mask(h, positions)
    return _masked(push_forward(step, h, _masked(v, mask))[1], mask)


def vjp(
    step: Callable[[Tensor], Tensor],
    h: Float[Tensor, "batch ..."],
    u: Float[Tensor, "batch ..."],
    *,
    positions: Positions | None = None,
) -> Float[Tensor, "batch ..."]:
    r"""Vector-Jacobian product :math:`J(h)^\top u`, by reverse-mode differentiation.

    Arguments are those of :func:`jvp`.

    Example:
        >>> shear = torch.tensor([[1.0, 3.0], [0.0, 1.0]])
        >>> vjp(lambda h: h @ shear.T, torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[1., 3.]])
    """
    check_shape("cotangent", u.shape, h.shape, fix=_ONE_EACH)
    mask = position_mask(h, positions)
    h, after = _recorded(step, h)
    try:
        return _masked(_gradient(after, h, _masked(u, mask)), mask)
    except RuntimeError as error:
        raise _not_differentiable(error, "backwards") from error


def push_forward(
    step: Callable[[Tensor], Tensor], h: Tensor, v: Tensor
) -> tuple[Float[Tensor, "batch ..."], Float[Tensor, "batch ..."]]:
    """The state after the loop, and the tangent carried there."""
    _load_forward_mode()
    with torch.no_grad(), _differentiable_kernels():
        try:
            return torch.func.jvp(step, (h,), (v,))  # type: ignore[return-value]
        except RuntimeError:  # an operation has no such derivative, or the step itself is wrong
            pass
    h, after = _recorded(step, h)
    try:
        u, gradient = _transposed(h, after)
        return after.detach(), _gradient(gradient, u, v)
    except RuntimeError as error:
        raise _not_differentiable(error, "once forwards or twice backwards") from error


def _recorded(step: Callable[[Tensor], Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the state, and the one after the step as a function of it."""
    with recording_gradients(), _differentiable_kernels():
        h = h.detach().clone().requires_grad_()
        return h, step(h)


def _transposed(h: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """A vector u, and ``J^T u`` as a function of it, whose derivative along any v is ``J v``."""
    with recording_gradients():
        u = torch.zeros_like(after, requires_grad=True)
        return u, _gradient(after, h, u, create_graph=True)


def _gradient(after: Tensor, by: Tensor, along: Tensor, **options: bool) -> Tensor:
    with _differentiable_kernels():
        return torch.autograd.grad(after, by, along, **options)[0]


def _not_differentiable(error: RuntimeError, how: str) -> InputError:
    return InputError(
        "step",
        expected=f"a loop that can be differentiated, {how}",
        given=f"one of which PyTorch says: {error}",
        fix="Write it in PyTorch's own operations, without detach and no_grad; or do "
        "without its Jacobian, as convergence_study does with n_spectral=0.",
    )


@contextmanager
def _differentiable_kernels() -> Iterator[None]:
    # Fused attention has no forward derivative, nor second backward ones; the plain one has.
    with no_fast_path(), sdpa_kernel(SDPBackend.MATH):
        yield


@cache
def _load_forward_mode() -> None:
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


class Linearised:
    r"""The Jacobian of a step at one state, for many products.

    The step is run once. :math:`J^\top u` is a backward pass through its graph. As it is linear in
    u, :math:`J v` is a backward pass through the graph of that pass. If this is not possible, or
    the first product differs from forward differentiation, every product runs the step again.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], h: Float[Tensor, "batch ..."]) -> None:
        self.step, self.h = step, h.detach()
        self._checked = False

    def push(self, v: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """``J v``."""
        through_graph = self._through_graph(v)
        if through_graph is not None and self._checked:
            return through_graph
        forward = push_forward(self.step, self.h, v)[1]
        if through_graph is not None:
            self._checked = _agree(through_graph, forward)
            if not self._checked:
                self._transposed = None
        return forward

    def _through_graph(self, v: Tensor) -> Tensor | None:
        if self._transposed is None:
            return None
        u, gradient = self._transposed
        try:
            return _gradient(gradient, u, v, retain_graph=True)
        except RuntimeError:  # the gradient has no derivative
            self._transposed = None
            return None

    def pull(self, u: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """``J^T u``."""
        h, after = self._recorded
        try:
            return _gradient(after, h, u, retain_graph=True)
        except RuntimeError:  # a compiled step keeps no graph
            return vjp(self.step, self.h, u)

    _recorded = cached_property(lambda self: _recorded(self.step, self.h))

    @cached_property
    def _transposed(self) -> tuple[Tensor, Tensor] | None:
        """None if the step has no such graph."""
        try:
            return _transposed(*self._recorded)
        except (RuntimeError, InputError):  # of the step, or in inference mode
            return None


def _agree(through_graph: Tensor, forward: Tensor) -> bool:
    # A part under no_grad leaves no graph, and a derivative of a gradient may be infinite.
    both, tolerance = (through_graph - forward, forward), torch.finfo(forward.dtype).eps ** 0.5
    error, size = (x.reshape(len(x), -1).double().norm(dim=1) for x in both)  # [batch]
    return bool(((error <= tolerance * size) | ~size.isfinite()).all())


def dense_jacobian(
    step: Callable[[Tensor], Tensor], h: Float[Tensor, "batch ..."]
) -> Float[Tensor, "batch size size"]:
    """The whole Jacobian of each example, by a product for each component.

    Entry ``[b, i, j]`` is the derivative of component ``i`` after the loop by ``j`` before it.
    """
    units = torch.eye(h[0].numel()).to(h).unflatten(1, h.shape[1:])  # [size, *state]
    linear = Linearised(step, h)
    columns = [linear.push(unit.expand_as(h).contiguous()).flatten(1) for unit in units]  # J e_j
    return torch.stack(columns, dim=-1)


def position_mask(h: Tensor, positions: Positions | None) -> Bool[Tensor, "batch ..."] | None:
    """Mask of a state's components at the positions; None for all."""
    if positions is None:
        return None
    n_pos = h.shape[1] if h.ndim > 2 else 0
    if isinstance(positions, torch.Tensor):
        mask = positions.expand(len(h), -1) if positions.ndim == 1 else positions
    else:
        mask = torch.zeros(len(h), n_pos, dtype=torch.bool)  # [batch, pos]
        for position in positions:
            mask[:, check_integer("positions", position, least=-n_pos, most=n_pos - 1)] = True
    if mask.dtype != torch.bool or mask.shape != (len(h), n_pos) or not mask.any(1).all():
        raise InputError(
            "positions",
            expected="indices, or a mask [pos] or [batch, pos], at least one in each example",
            given=f"{mask.dtype} {tuple(mask.shape)} of a state {tuple(h.shape)}",
            fix="Pass batch.targets != IGNORE, for instance, or None for all.",
        )
    return mask.to(h.device).reshape(*mask.shape, *[1] * (h.ndim - 2)).expand_as(h)


def _masked(v: Tensor, mask: Tensor | None) -> Tensor:
    return v if mask is None else torch.where(mask, v, 0)


class JacobianOperator(ShortRepr):
    """The Jacobian of each example at a state, on flat vectors ``[batch, size]``.

    Restricted to positions, it is the block :math:`P J P`.

    Attributes:
        n_products: Products made so far, with J or its transpose.
    """

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        h: Tensor,
        positions: Positions | None = None,
        n_values: int = 1,
    ) -> None:
        fix = "Differentiate at a fixed point of a run that does not diverge."
        check_finite_state(h, "state", fix=fix)
        self.linear, self.positions = Linearised(step, h), positions
        self.h = self.linear.h
        self.mask = position_mask(h, positions)
        self.like = self.h.flatten(1) if h.ndim > 1 else self.h[:, None]
        self.sizes = torch.full((len(h),), self.like.shape[1])
        if self.mask is not None:
            self.sizes = self.mask.flatten(1).sum(1).cpu()
        self.n_products = 0
        check_integer("k", n_values, least=1, most=int(self.sizes.min()))

    def parts(self, n_vectors: int) -> Iterator[tuple[Int[Tensor, " row"], JacobianOperator]]:
        """Rows of the batch whose vectors fit in memory, each with its operator.

        Only the step of a bound model can be split, and only on a CPU.
        """
        n, step = len(self.h), self.linear.step
        bound: Any = getattr(step, "__self__", None)
        size = 4 * n_vectors * self.like[0].numel() * self.like.element_size()
        n_parts = len(list(chunks(n, size))) if self.h.device.type == "cpu" else 1
        splits = isinstance(bound, Iteration) and step == bound.step and len(bound.e) == n
        if n_parts == 1 or not splits:
            yield torch.arange(n), self
            return
        for rows in torch.arange(n).tensor_split(n_parts):
            positions = self.positions
            if isinstance(positions, torch.Tensor) and positions.ndim == 2:
                positions = positions[rows]
            yield rows, JacobianOperator(bound.select(rows).step, self.h[rows], positions)

    def product(self, v: Float[Tensor, "batch size"]) -> Float[Tensor, "batch size"]:
        self.n_products += 1
        tangent = _masked(v.reshape(self.h.shape), self.mask)
        return _masked(self.linear.push(tangent), self.mask).reshape(self.like.shape)

    def transposed_product(self, u: Float[Tensor, "batch size"]) -> Float[Tensor, "batch size"]:
        self.n_products += 1
        cotangent = _masked(u.reshape(self.h.shape), self.mask)
        return _masked(self.linear.pull(cotangent), self.mask).reshape(self.like.shape)

    def random_vector(self, generator: torch.Generator) -> Float[Tensor, "batch size"]:
        drawn = torch.randn(self.like.shape, generator=generator, dtype=torch.float64)
        if self.mask is not None:
            drawn = torch.where(self.mask.flatten(1).cpu(), drawn, 0)
        return (drawn / drawn.norm(dim=1, keepdim=True)).to(self.like)
