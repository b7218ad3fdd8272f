"""Every probe passes one conformance suite; scikit-learn and the first-order conditions judge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from torch.nn.functional import cross_entropy, one_hot

from loopinterp.core.errors import InputError
from loopinterp.probing import PROBES, LinearProbe, LogisticProbe, RidgeProbe, online_code_length

EVERY_PROBE = pytest.mark.parametrize("probe", [cls() for cls in PROBES.values()], ids=list(PROBES))
ORACLES: dict[str, Any] = {
    "ridge": lambda alpha: RidgeClassifier(alpha=alpha),
    "logistic": lambda alpha: LogisticRegression(C=1 / alpha, tol=1e-10, max_iter=10_000),
}


def classes_of(x: torch.Tensor, n_classes: int, seed: int = 1) -> torch.Tensor:
    """Noisy classes that depend on the first features, so that no probe is perfect."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*x.shape[:-1], n_classes, generator=generator, dtype=x.dtype)
    return (x[..., :n_classes] + noise).argmax(-1)


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5


@EVERY_PROBE
def test_a_fresh_probe_has_the_settings_and_is_not_fitted(probe: LinearProbe) -> None:
    x = features(90, 5)
    fitted = type(probe)(alpha=0.25).fit(x, classes_of(x, 2))
    copy = fitted.fresh()
    assert copy.get_params() == {"alpha": 0.25} and "0.25" in repr(copy)
    assert not hasattr(copy, "coef_")
    with pytest.raises(NotFittedError):
        copy.predict(x)


@pytest.mark.parametrize("name", list(PROBES))
@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize("alpha", [0.3, 20.0])
def test_coefficients_are_those_of_scikit_learn(name: str, n_classes: int, alpha: float) -> None:
    x = features(200, 6)
    y = classes_of(x, n_classes)
    ours = PROBES[name](alpha=alpha).fit(x, y)
    theirs = ORACLES[name](alpha).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(ours.coef_, np.atleast_2d(theirs.coef_), atol=1e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x.numpy()))
    scores = theirs.decision_function(x.numpy())
    np.testing.assert_allclose(ours.decision_function(x), scores, atol=1e-4)
    if isinstance(ours, LogisticProbe):
        np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.sampled_from([1e-3, 1.0, 50.0]),
    n_classes=st.sampled_from([2, 3, 5]),
)
def test_the_solutions_leave_no_gradient(seed: int, alpha: float, n_classes: int) -> None:
    x = features(3, 80, 5, seed=seed)
    y = classes_of(x, n_classes, seed=seed)
    for cls in PROBES.values():
        probe = cls(alpha=alpha).fit(x, y)
        coef, intercept = probe.coef_.requires_grad_(), probe.intercept_.requires_grad_()
        scores = x @ coef.mT + intercept[:, None]
        if cls is RidgeProbe:
            classes = one_hot(y, n_classes)[..., 1 if n_classes == 2 else 0 :]
            loss = 0.5 * (scores - (2.0 * classes - 1)).square().sum()
        else:
            zero = torch.zeros_like(scores)
            scores = torch.cat([zero, scores], 2) if n_classes == 2 else scores
            loss = cross_entropy(scores.mT, y, reduction="sum")
        loss = loss + alpha / 2 * coef.square().sum()
        for gradient in torch.autograd.grad(loss, (coef, intercept)):
            assert gradient.abs().max() < 80 * 2e-6


@EVERY_PROBE
@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_grid_is_its_cells_one_by_one(probe: LinearProbe, n_classes: int) -> None:
    x = features(3, 2, 80, 5)
    y = classes_of(x, n_classes)
    grid = probe.fresh().fit(x, y)
    assert tuple(grid.coef_.shape) == (3, 2, 1 if n_classes == 2 else n_classes, 5)
    scores, predicted = grid.score(x, y), grid.predict(x)
    for cell in np.ndindex(3, 2):
        one = probe.fresh().fit(x[cell], y[cell])
        torch.testing.assert_close(grid.coef_[cell], one.coef_)
        torch.testing.assert_close(grid.intercept_[cell], one.intercept_)
        assert torch.equal(predicted[cell], one.predict(x[cell]))
        assert float(scores[cell]) == float(one.score(x[cell], y[cell]))


@EVERY_PROBE
@pytest.mark.parametrize(
    ("x_grid", "y_grid"),
    [
        ((), ()),
        ((), (3,)),
        ((4,), ()),
        ((4,), (3, 1)),
        ((4, 1), (1, 3)),
        ((4, 1), (4, 3)),
        ((2, 1, 1), (1, 3, 2)),
        ((1, 3), (2, 1, 1)),
    ],
)
def test_many_targets_share_one_x(
    probe: LinearProbe, x_grid: tuple[int, ...], y_grid: tuple[int, ...]
) -> None:
    x, many = features(*x_grid, 60, 5), features(*y_grid, 60, 5, seed=7)
    y = classes_of(many, 2)
    grid = torch.broadcast_shapes(x_grid, y_grid)
    fitted = probe.fresh().fit(x, y)
    assert fitted.coef_.shape == (*grid, 1, 5) and fitted.predict(x).shape == (*grid, 60)
    every_x, every_y = x.expand(*grid, 60, 5), y.expand(*grid, 60)
    for cell in np.ndindex(*grid):
        one = probe.fresh().fit(every_x[cell], every_y[cell])
        torch.testing.assert_close(fitted.coef_[cell], one.coef_)
        torch.testing.assert_close(fitted.intercept_[cell], one.intercept_)


@EVERY_PROBE
@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_cell_with_one_class_says_that_class(probe: LinearProbe, n_classes: int) -> None:
    x = features(2, 40, 3)
    y = classes_of(x, n_classes)
    y[1] = 1
    fitted = probe.fresh().fit(x, y)
    assert fitted.score(x, y)[1] == 1.0
    if isinstance(fitted, LogisticProbe):
        assert (fitted.predict_proba(x)[1, :, 1] > 0.999).all()


@EVERY_PROBE
def test_states_that_never_vary_are_probed_without_fuss(probe: LinearProbe) -> None:
    """The initial state of many models is zero: a probe of it says the majority class."""
    x, y = torch.zeros(40, 6), torch.tensor([0] * 25 + [1] * 15)
    fitted = probe.fresh().fit(x, y)
    assert fitted.score(x, y) == pytest.approx(25 / 40)
    torch.testing.assert_close(fitted.coef_, torch.zeros(1, 6))


@EVERY_PROBE
@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_subspace_is_all_that_the_probe_reads(probe: LinearProbe, n_classes: int) -> None:
    x = features(2, 150, 7)
    fitted = probe.fresh().fit(x, classes_of(x, n_classes))
    basis = fitted.subspace()
    assert basis.shape == (2, n_classes - 1, 7)
    torch.testing.assert_close(
        basis @ basis.mT, torch.eye(n_classes - 1).double().expand(2, -1, -1)
    )
    inside = x @ basis.mT @ basis
    assert torch.equal(fitted.predict(inside), fitted.predict(x))
    outside = fitted.decision_function(x - inside)
    constant = fitted.decision_function(torch.zeros_like(x))
    if n_classes > 2:  # a shift common to all classes is no reading
        outside, constant = (v - v.mean(-1, keepdim=True) for v in (outside, constant))
    torch.testing.assert_close(outside, constant)


@EVERY_PROBE
def test_coefficients_point_towards_the_last_of_two_classes(probe: LinearProbe) -> None:
    x = features(2, 150, 7)
    fitted = probe.fresh().fit(x, 5 * classes_of(x, 2))
    assert (fitted.predict(x + 1e4 * fitted.coef_) == 5).all()
    assert (fitted.predict(x - 1e4 * fitted.coef_) == 0).all()


def test_half_precision_states_are_solved_in_double() -> None:
    x = features(200, 4).bfloat16()
    y = classes_of(x.double(), 2)
    low, high = RidgeProbe().fit(x, y), RidgeProbe().fit(x.double(), y)
    assert low.coef_.dtype == torch.bfloat16
    torch.testing.assert_close(low.coef_, high.coef_.bfloat16())


def test_directions_of_low_rank_states_survive() -> None:
    """States within a plane of a wide space, far from the origin: float32 would lose it."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(64, 2, generator=generator)).Q.mT
    x = torch.randn(500, 2, generator=generator) @ plane + 30.0
    y = ((x - 30.0) @ plane[0] > 0).long()
    probe = RidgeProbe(alpha=1e-2).fit(x, y)
    assert torch.cosine_similarity(probe.coef_[0], plane[0], dim=0) > 0.99
    assert probe.score(x, y) > 0.98


def test_a_small_direction_is_read_beside_one_that_blows_up() -> None:
    """Shuffled weights make states that grow without end; warnings are errors here."""
    x = features(200, 4)
    y = (x[:, 0] > 0.5).long()
    assert RidgeProbe().fit(x * torch.tensor([1.0, 1.0, 1.0, 1e12]), y).score(x, y) > 0.9


X, Y = features(2, 10, 3), torch.arange(20).reshape(2, 10) % 2


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((X.long(), Y), "X"),
        ((X[0, 0], Y), "X"),
        ((X.numpy(), Y), "X"),
        ((X * torch.nan, Y), "X"),
        ((X, Y[:, :9]), "y"),
        ((X, Y[:, None].expand(2, 3, 10)), "y"),
        ((X, Y.float()), "y"),
        ((X, Y.numpy()), "y"),
        ((X, torch.zeros_like(Y)), "y"),
    ],
)
def test_bad_input_is_named(given: tuple[Any, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        RidgeProbe().fit(*given)
    assert caught.value.what == what


def test_bad_settings_and_foreign_features_are_named() -> None:
    with pytest.raises(InputError, match="alpha"):
        RidgeProbe(alpha=-1.0).fit(X, Y)
    with pytest.raises(InputError) as caught:
        RidgeProbe().fit(X, Y).predict(torch.zeros(2, 10, 4))
    assert caught.value.what == "X"
    with pytest.raises(InputError) as caught:
        RidgeProbe().fit(X, Y).predict(torch.zeros(3, 10, 3))
    assert caught.value.what == "X"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("labels", [Y[:, :9], Y[:, :1], torch.tensor(1), Y.tile(2, 1), Y.tile(2)])
def test_labels_that_are_not_one_a_sample_have_no_score_or_code(labels: torch.Tensor) -> None:
    """One label was compared with all samples, and labels past the last sample were left out."""
    for measure in (RidgeProbe().fit(X, Y).score, online_code_length):
        with pytest.raises(InputError) as caught:
            measure(X, labels)
        assert caught.value.what == "y"


@pytest.mark.gpu
def test_a_grid_on_the_gpu_is_that_on_the_cpu() -> None:
    x = features(5, 300, 16).float()
    y = classes_of(x, 3)
    for cls in PROBES.values():
        here, there = cls().fit(x, y), cls().fit(x.cuda(), y.cuda())
        assert there.coef_.is_cuda and there.predict(x.cuda()).is_cuda
        torch.testing.assert_close(there.coef_.cpu(), here.coef_, atol=1e-5, rtol=1e-4)
        assert torch.equal(there.predict(x), here.predict(x))


def data(n: int, noise: float, n_classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    scores = x[:, :n_classes] + noise * torch.randn(n, n_classes, generator=generator).double()
    return x, scores.argmax(-1)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_it_is_the_code_one_gets_by_hand(n_classes: int) -> None:
    x, y = data(100, 0.5, n_classes)
    bits, ends = 12 * np.log2(n_classes), [12, 25, 50, 100]
    for start, end in pairwise(ends):
        oracle = LogisticRegression(tol=1e-10, max_iter=5000).fit(x[:start], y[:start])
        probability = oracle.predict_proba(x[start:end])
        bits -= np.log2(probability[np.arange(end - start), y[start:end]]).sum()
    assert float(online_code_length(x, y)) == pytest.approx(bits / 100, abs=1e-5)


def test_a_grid_is_its_cells_and_harder_data_cost_more() -> None:
    x, y = data(512, 0.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    cells = torch.stack([x, x + 0.7 * noise, torch.zeros_like(x)])
    bits = online_code_length(cells, y)
    assert bits.shape == (3,)
    for cell, value in zip(cells, bits):
        torch.testing.assert_close(online_code_length(cell, y), value)
    assert bits[0] < 0.3 < bits[1] < bits[2]
    assert float(bits[2]) == pytest.approx(1.0, abs=0.02)


def test_the_code_of_a_cell_does_not_depend_on_labels_of_others() -> None:
    x, y = data(512, 0.5, 3)
    rare = torch.where((y == 2) & (torch.arange(512) < 200), 0, y)  # class 2 comes late
    constant = torch.ones_like(y)
    labels = torch.stack([y, rare, (y > 0).long(), constant])
    bits = online_code_length(x, labels)
    for each, value in zip(labels, bits):
        torch.testing.assert_close(online_code_length(x, each), value)
    assert bits[3] == 0


def test_blocks_before_every_class_has_occurred_cost_the_uniform_code() -> None:
    x, y = data(128, 0.0)
    late = torch.cat([y[y == 0], y[y == 1]])
    # One class only up to the last block: everything is sent uniformly.
    assert float(online_code_length(x, late)) == 1.0


def test_blocks_double_from_a_few_samples_on() -> None:
    x, y = data(5, 0.5)
    assert float(online_code_length(x, y)) == 1.0  # a single block, sent uniformly


def test_no_labels_have_no_code() -> None:
    x, y = data(5, 0.5)
    with pytest.raises(InputError) as caught:
        online_code_length(x[:0], y[:0])
    assert caught.value.what == "y"
