from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigs
from torch import Tensor

from loopinterp.dynamics import (
    contraction_rates,
    dense_jacobian,
    find_fixed_point,
    jvp,
    run_loops,
    spectral_radius,
)
from loopinterp.errors import InputError
from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig, bind
from tests.dynamics.toys import rotation


def _transformer(**options: object) -> Iteration:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=5,
        d_vocab_out=2,
        injection="input",
        initial_state="zeros",
        **options,  # pyright: ignore[reportArgumentType]
    )
    model = LoopedTransformer(config, seed=1).double()
    return bind(model, torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 1, 4, 0]]))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


VARIANTS: list[dict[str, object]] = [
    {"loop_norm": True},
    {"causal": False, "norm": "sandwich", "norm_type": "rmsnorm"},
    {"positions": "relative", "relative_window": 1, "attention_window": 1},
    {"positions": "rotary", "act_fn": "relu", "n_layers": 2},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_jvp_of_a_transformer_against_finite_differences(options: dict[str, object]) -> None:
    step, h, v = _transformer(**options).step, _random(3, 4, 8), _random(3, 4, 8).flip(0)
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

    h, v = _random(3, 4, 8), _random(3, 4, 8).flip(0)
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
    h, v, mix = _random(3, 4, 8), _random(3, 4, 8).flip(0), _random(8, 8)
    product = jvp(lambda h: _Cube.apply(h @ mix.T), h, v)  # type: ignore[no-any-return]
    torch.testing.assert_close(product, 3 * (h @ mix.T) ** 2 * (v @ mix.T))
    assert not product.requires_grad
    with pytest.raises(InputError, match=r"step: .* differentiated.*n_spectral=0"):
        jvp(lambda h: _Cube.apply(h.detach()), h, v)  # type: ignore[no-any-return]
    with pytest.raises(RuntimeError, match="shape"):  # its own fault stays its own
        jvp(lambda h: h @ mix[:3], h, v)


def test_dense_jacobian_against_autograd() -> None:
    iteration, h = _transformer(loop_norm=True), _random(3, 4, 8)
    found = dense_jacobian(iteration.step, h)
    for row in range(3):
        one = iteration.select(torch.tensor([row]))
        expected = torch.autograd.functional.jacobian(one.step, h[row : row + 1])
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(found[row], expected.reshape(32, 32))


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_spectral_radius_of_each_example_against_dense_eigenvalues(
    options: dict[str, object],
) -> None:
    iteration = _transformer(**options)
    h = find_fixed_point(iteration.step, iteration.h0, tol=1e-9, max_iter=60).state
    found = spectral_radius(iteration.step, h, tol=1e-6)
    dense = torch.linalg.eigvals(dense_jacobian(iteration.step, h)).abs().amax(dim=1)
    torch.testing.assert_close(found.radius, dense, atol=1e-6, rtol=1e-5)
    assert found.converged.all()
    torch.testing.assert_close(found.eigenvalue.abs(), found.radius)


def test_spectral_radius_against_arpack_on_a_state_too_large_to_exhaust() -> None:
    matrix = _random(300, 300) / math.sqrt(300)
    product = LinearOperator(
        shape=(300, 300),
        matvec=lambda v: matrix.numpy() @ v,  # pyright: ignore[reportCallIssue]
        dtype=np.float64,
    )
    expected = eigs(product, k=4, return_eigenvectors=False, v0=np.ones(300))
    h = torch.zeros(2, 3, 100, dtype=torch.float64)
    found = spectral_radius(
        lambda h: (h.flatten(1) @ matrix.T).reshape(h.shape), h, max_vectors=200, tol=1e-8
    )
    assert found.converged.all()
    assert found.radius.tolist() == pytest.approx([np.abs(expected).max()] * 2, rel=1e-6)


def test_analytic_cases() -> None:
    maps = {
        "rotation": (lambda h: h @ rotation(1.0, scale=0.7).T, 0.7),
        "zero": (lambda h: 0 * h, 0.0),
        "negative": (lambda h: -1.5 * h, 1.5),
        "nonlinear": (lambda h: torch.cos(h), math.sin(0.7390851)),
    }
    at = torch.full((3, 2), 0.7390851)
    for name, (step, radius) in maps.items():
        found = spectral_radius(step, at)
        assert found.radius.tolist() == pytest.approx([radius] * 3, abs=1e-5), name
        assert found.converged.all(), name
    upper = spectral_radius(maps["rotation"][0], at).eigenvalue
    torch.testing.assert_close(upper.angle().float(), torch.ones(3))


def test_the_asymptotic_rate_of_a_run_is_the_spectral_radius_at_its_limit() -> None:
    iteration = _transformer(loop_norm=True)
    states = run_loops(iteration, 200)
    rate = contraction_rates(states.flatten(2), last=20).asymptotic
    radius = spectral_radius(iteration.step, states[-1]).radius
    # The leading eigenvalues are complex pairs, so the observed rate sways around the radius.
    torch.testing.assert_close(rate, radius, atol=0.05, rtol=0)


def test_what_has_not_converged_says_so() -> None:
    # Eigenvalues spread evenly on a circle: no Krylov space smaller than all of them tells them.
    shift = torch.eye(50, dtype=torch.float64).roll(1, dims=0)
    found = spectral_radius(
        lambda h: h @ shift.T, torch.zeros(1, 50, dtype=torch.float64), max_vectors=10
    )
    assert not found.converged.any() and (found.residual > 1e-3).all()
    whole = spectral_radius(lambda h: h @ shift.T, torch.zeros(1, 50, dtype=torch.float64))
    assert whole.radius.item() == pytest.approx(1.0)


def test_the_residual_is_that_of_the_leading_ritz_pair() -> None:
    # Two vectors of a space of three: the pair from an orthonormal basis of them, in NumPy.
    matrix = np.array([[2.0, 1.0, 0.0], [1.0, 1.0, 0.5], [0.0, 0.5, -0.5]])
    found = spectral_radius(
        lambda h: h @ torch.from_numpy(matrix).T,
        torch.zeros(1, 3, dtype=torch.float64),
        max_vectors=2,
        seed=5,
    )
    first = torch.randn(1, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[0]
    basis = np.linalg.qr(np.stack([first.numpy(), matrix @ first.numpy()], axis=1)).Q
    values, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
    lead = np.abs(values).argmax()
    value, vector = values[lead], basis @ vectors[:, lead]
    residual = np.linalg.norm(matrix @ vector - value * vector) / abs(value)
    assert found.eigenvalue.item() == pytest.approx(value)
    assert found.residual.item() == pytest.approx(residual) and residual > 0.01


def test_the_seed_decides_the_start_alone() -> None:
    matrix = _random(20, 20)
    radii = [
        spectral_radius(
            lambda h: h @ matrix.T, torch.zeros(1, 20, dtype=torch.float64), seed=s
        ).radius.item()
        for s in range(3)
    ]
    assert radii == pytest.approx([radii[0]] * 3, rel=1e-8)


def test_bad_states_and_options_are_refused() -> None:
    with pytest.raises(InputError, match="state"):
        spectral_radius(torch.cos, torch.full((1, 2), float("nan")))
    with pytest.raises(InputError, match="max_vectors"):
        spectral_radius(torch.cos, torch.zeros(1, 2), max_vectors=0)
    with pytest.raises(InputError, match="tol"):
        spectral_radius(torch.cos, torch.zeros(1, 2), tol=0.0)
    with pytest.raises(InputError, match="tangent"):
        jvp(torch.cos, torch.zeros(2, 3), torch.zeros(2, 4))
