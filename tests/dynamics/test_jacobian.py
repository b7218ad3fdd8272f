from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loopinterp.core.errors import InputError
from loopinterp.dynamics import dense_jacobian, jvp, spectral_radius, vjp
from loopinterp.dynamics.jacobian import JacobianOperator, Linearised
from tests.dynamics.toys import TRANSFORMERS, linear, random_state, small_transformer


@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_jvp_of_a_transformer_against_finite_differences(options: dict[str, object]) -> None:
    step, h, v = (
        small_transformer(**options).step,
        random_state(3, 4, 8),
        random_state(3, 4, 8).flip(0),
    )
    with torch.no_grad():
        slope = (step(h + 1e-6 * v) - step(h - 1e-6 * v)) / 2e-6
    product = jvp(step, h, v)
    assert not product.requires_grad
    torch.testing.assert_close(product, slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_jvp_of_an_encoder_layer_against_finite_differences(norm_first: bool, frozen: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
        )
    layer = layer.eval().requires_grad_(not frozen)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)

    def step(h: Tensor) -> Tensor:
        return 0.3 * layer(h, src_mask=mask)

    h, v = random_state(3, 4, 8), random_state(3, 4, 8).flip(0)
    with torch.no_grad():
        slope = (step(h + 1e-6 * v) - step(h - 1e-6 * v)) / 2e-6
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(jvp(step, h, v), slope, atol=1e-6, rtol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()
    dense = dense_jacobian(step, h)
    radii = np.abs(np.linalg.eigvals(dense.numpy())).max(1)
    np.testing.assert_allclose(spectral_radius(step, h, tol=1e-8).radius.numpy(), radii, rtol=1e-6)


class _Cube(torch.autograd.Function):
    """``x^3``, which has a backward derivative and no forward one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def test_jvp_where_an_operation_has_no_forward_derivative() -> None:
    h, v, mix = random_state(3, 4, 8), random_state(3, 4, 8).flip(0), random_state(8, 8)
    product = jvp(lambda h: _Cube.apply(h @ mix.T), h, v)  # type: ignore[no-any-return]
    torch.testing.assert_close(product, 3 * (h @ mix.T) ** 2 * (v @ mix.T))
    assert not product.requires_grad
    with pytest.raises(InputError, match="step"):
        jvp(lambda h: _Cube.apply(h.detach()), h, v)  # type: ignore[no-any-return]
    with pytest.raises(RuntimeError, match="shape"):  # its own fault stays its own
        jvp(lambda h: h @ mix[:3], h, v)


def test_dense_jacobian_against_autograd() -> None:
    iteration, h = small_transformer(loop_norm=True), random_state(3, 4, 8)
    jacobian = dense_jacobian(iteration.step, h)
    for row in range(3):
        one = iteration.select(torch.tensor([row]))
        expected = torch.autograd.functional.jacobian(one.step, h[row : row + 1])
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(jacobian[row], expected.reshape(32, 32))


@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_both_products_against_the_dense_jacobian(options: dict[str, object]) -> None:
    step, h = small_transformer(**options).step, random_state(3, 4, 8)
    v = random_state(3, 4, 8).flip(0)
    dense = dense_jacobian(step, h)
    forward = (dense @ v.flatten(1)[..., None]).reshape(h.shape)
    back = (dense.mT @ v.flatten(1)[..., None]).reshape(h.shape)
    torch.testing.assert_close(jvp(step, h, v), forward)
    torch.testing.assert_close(vjp(step, h, v), back)
    assert not vjp(step, h, v).requires_grad


class OnceBackwards(torch.autograd.Function):
    """A square whose gradient has no derivative, but which has a forward one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x = inputs[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * ctx.x * tangent


class OneBackward(torch.autograd.Function):
    """A square with one backward pass for each run, like those of a compiled step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.gone = x.detach(), False
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.gone:
            raise RuntimeError("its buffers were given away")
        ctx.gone = True
        return 2 * ctx.x * gradient


def _partly_without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.norm(dim=-1, keepdim=True)
    return h / size


MATRIX = torch.ones(8, 8).double().triu()


@pytest.mark.parametrize(
    ("step", "runs"),
    [
        (small_transformer(causal=False).step, 2),  # one that is kept, one pushed forward to check
        (lambda h: h.cos() @ MATRIX, 2),
        (lambda h: torch.sign(h) + h.mean(1, keepdim=True), 2),
        (_partly_without_gradients, 4),  # one that is kept in vain, and one for each product
        (OnceBackwards.apply, 4),
        (lambda h: h.detach() * 0, 4),  # J = 0
    ],
)
def test_a_linearised_step_gives_its_products_in_few_runs(
    step: Callable[[Tensor], Tensor], runs: int
) -> None:
    h, calls = random_state(3, 4, 8), 0

    def counted(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return step(h)

    linear, gave_gradients = Linearised(counted, h), step is not _partly_without_gradients
    for v in torch.randn(3, *h.shape, dtype=h.dtype):
        pushed = linear.push(v)
        torch.testing.assert_close(pushed, jvp(step, h, v))
        nudged = (step(h + 1e-6 * v) - step(h - 1e-6 * v)) / 2e-6
        torch.testing.assert_close(pushed, nudged, atol=1e-6, rtol=1e-6)
        if gave_gradients and step(h.clone().requires_grad_()).requires_grad:
            torch.testing.assert_close(linear.pull(v), vjp(step, h, v))
    assert calls == runs


def test_products_are_finite_where_the_derivative_of_a_gradient_is_not() -> None:
    def step(h: Tensor) -> Tensor:
        return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.01) + h / 2

    h = torch.zeros(2, 4).double()
    assert torch.equal(dense_jacobian(step, h).isfinite().all(), torch.tensor(True))
    v = torch.randn(2, 4).double()
    torch.testing.assert_close(Linearised(step, h).push(v), jvp(step, h, v))


def test_a_state_of_one_number_for_each_example_is_linearised() -> None:
    h = torch.tensor([1.0, 2.0])
    assert Linearised(lambda h: h**2, h).push(torch.ones(2)).tolist() == [2.0, 4.0]


def test_a_graph_that_serves_once_is_made_again() -> None:
    h = random_state(3, 4, 8)
    linear = Linearised(OneBackward.apply, h)
    for u in torch.randn(3, *h.shape, dtype=h.dtype):
        torch.testing.assert_close(linear.pull(u), 2 * h * u)


def test_products_in_inference_mode_are_pushed_forward() -> None:
    step, h = small_transformer(causal=False).step, random_state(3, 4, 8)
    expected = Linearised(step, h).push(h.cos())
    with torch.inference_mode():
        torch.testing.assert_close(Linearised(step, h).push(h.cos()), expected)


def test_products_at_chosen_positions_are_those_of_a_block() -> None:
    step, h = small_transformer(causal=False).step, random_state(3, 4, 8)
    v, dense = random_state(3, 4, 8).flip(0), dense_jacobian(step, h).unflatten(2, (4, 8))
    dense = dense.unflatten(1, (4, 8))
    by_example = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]]).bool()
    same = torch.tensor([False, True, False, True])
    for positions, mask in (
        ([1, -1], same.expand(3, -1)),
        (same, same.expand(3, -1)),
        (by_example, by_example),
    ):
        for product, letters in ((jvp, "bpdqe,bqe->bpd"), (vjp, "bpdqe,bpd->bqe")):
            masked = v * mask[..., None]
            expected = torch.einsum(letters, dense, masked) * mask[..., None]
            torch.testing.assert_close(product(step, h, v, positions=positions), expected)
    operator = JacobianOperator(step, h, by_example)
    assert operator.sizes.tolist() == [16, 8, 24]
    drawn = operator.random_vector(torch.Generator().manual_seed(0)).unflatten(1, (4, 8))
    assert ((drawn != 0).any(2) == by_example).all()


def test_a_loop_without_a_backward_derivative_is_refused() -> None:
    with pytest.raises(InputError, match="step"):
        vjp(lambda h: h.detach(), torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "positions", [[], [4], [-5], torch.ones(3), torch.ones(2, 3).bool(), torch.zeros(4).bool()]
)
def test_positions_that_are_not_there_are_refused(positions: Any) -> None:
    with pytest.raises(InputError, match="positions"):
        jvp(torch.cos, torch.zeros(3, 4, 2), torch.zeros(3, 4, 2), positions=positions)


def test_a_state_without_positions_has_none_to_choose() -> None:
    with pytest.raises(InputError, match="positions"):
        vjp(linear(torch.eye(2)), torch.zeros(1, 2), torch.zeros(1, 2), positions=[0])


def test_bad_vectors_are_refused() -> None:
    with pytest.raises(InputError, match="tangent"):
        jvp(torch.cos, torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InputError, match="cotangent"):
        vjp(torch.cos, torch.zeros(2, 3), torch.zeros(2, 4))
