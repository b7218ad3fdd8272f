"""Every probe passes one conformance suite; scikit-learn's solvers are the oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from loopinterp.errors import InputError
from loopinterp.probing import PROBES, LinearProbe, LogisticProbe, RidgeProbe
from loopinterp.probing import probe_arrays as arrays_module

EVERY_PROBE = pytest.mark.parametrize("probe", [cls() for cls in PROBES.values()], ids=list(PROBES))
ORACLES: dict[str, Any] = {
    "ridge": lambda alpha: RidgeClassifier(alpha=alpha),
    "logistic": lambda alpha: LogisticRegression(C=1 / alpha, tol=1e-10, max_iter=10_000),
}


def classes_of(x: np.ndarray, n_classes: int, seed: int = 1) -> np.ndarray:
    """Noisy classes that depend on the first features, so that no probe is perfect."""
    rng = np.random.default_rng(seed)
    scores = x[..., :n_classes] + rng.normal(size=(*x.shape[:-1], n_classes))
    return scores.argmax(-1)


def features(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) + 0.5


@EVERY_PROBE
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_scikit_learns_own_conformance_suite(probe: LinearProbe) -> None:
    results = check_estimator(probe, on_fail=None, on_skip=None)
    bad = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not bad
    skipped = {r["check_name"] for r in results if r["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # an experimental switch of SciPy, off by default
    assert len(results) > 40


@EVERY_PROBE
def test_clone_parameters_and_cross_validation(probe: LinearProbe) -> None:
    copy: Any = clone(probe)
    copy.set_params(alpha=0.25)
    assert copy.get_params()["alpha"] == 0.25
    assert probe.get_params()["alpha"] == 1.0
    x = features(90, 5)
    y = np.array(["no", "yes"])[classes_of(x, 2)]
    scores = cross_val_score(make_pipeline(StandardScaler(), copy), x, y, cv=3)
    assert scores.mean() > 0.6
    assert not hasattr(copy, "coef_")


@pytest.mark.parametrize("name", list(PROBES))
@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [0.3, 20.0])
def test_coefficients_are_those_of_scikit_learn(
    name: str, n_classes: int, weighted: bool, alpha: float
) -> None:
    x = features(200, 6)
    y = classes_of(x, n_classes)
    weight = np.random.default_rng(2).random(200) if weighted else None
    ours = PROBES[name](alpha=alpha).fit(x, y, weight)
    theirs = ORACLES[name](alpha).fit(x, y, weight)
    np.testing.assert_allclose(ours.coef_, np.atleast_2d(theirs.coef_), atol=1e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x))
    np.testing.assert_allclose(ours.decision_function(x), theirs.decision_function(x), atol=1e-4)
    if isinstance(ours, LogisticProbe):
        np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-5)


def test_without_an_intercept_too() -> None:
    x = features(100, 4)
    y = classes_of(x, 2)
    for name, oracle in ORACLES.items():
        ours = PROBES[name](fit_intercept=False).fit(x, y)
        theirs = oracle(1.0).set_params(fit_intercept=False).fit(x, y)
        np.testing.assert_allclose(ours.coef_, np.atleast_2d(theirs.coef_), atol=1e-5)
        np.testing.assert_array_equal(ours.intercept_, 0.0)


@EVERY_PROBE
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_grid_is_its_cells_one_by_one(
    probe: LinearProbe, n_classes: int, tensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = features(3, 2, 80, 5)
    y = classes_of(x, n_classes)
    weight = np.random.default_rng(3).random((3, 2, 80))
    weight[0, :, :30] = 0.0
    given = (x, y, weight)
    if tensors:
        given = tuple(torch.from_numpy(v) for v in given)
    monkeypatch.setattr(arrays_module, "CHUNK_BYTES", 16 * 80 * 5 * 4)  # four cells at a time
    grid = probe.fresh().fit(*given)
    assert isinstance(grid.coef_, torch.Tensor) is tensors
    assert tuple(grid.coef_.shape) == (3, 2, 1 if n_classes == 2 else n_classes, 5)
    scores, predicted = grid.score(*given), grid.predict(given[0])
    for cell in np.ndindex(3, 2):
        one = probe.fresh().fit(x[cell], y[cell], weight[cell])
        np.testing.assert_allclose(np.asarray(grid.coef_[cell]), one.coef_, atol=1e-6)
        np.testing.assert_allclose(np.asarray(grid.intercept_[cell]), one.intercept_, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(predicted[cell]), one.predict(x[cell]))
        assert float(scores[cell]) == pytest.approx(one.score(x[cell], y[cell], weight[cell]))


@EVERY_PROBE
def test_many_targets_share_one_x(probe: LinearProbe) -> None:
    x = torch.from_numpy(features(4, 60, 5))
    targets = torch.from_numpy(np.stack([classes_of(x.numpy()[0], 2, seed=s) for s in range(3)]))
    grid = probe.fresh().fit(x, targets[:, None])
    assert grid.coef_.shape == (3, 4, 1, 5)
    assert grid.predict(x).shape == (3, 4, 60)
    for target in range(3):
        for loop in range(4):
            one = probe.fresh().fit(x[loop], targets[target])
            torch.testing.assert_close(grid.coef_[target, loop], one.coef_)
    # Labels between two grid axes, and weights that differ by target.
    weight = torch.from_numpy(np.random.default_rng(4).random((3, 1, 60)))
    weighted = probe.fresh().fit(x[:, None, None], targets[:, None], weight)
    assert weighted.coef_.shape == (4, 3, 1, 1, 5)
    one = probe.fresh().fit(x[2], targets[1], weight[1, 0])
    torch.testing.assert_close(weighted.coef_[2, 1, 0], one.coef_)


@EVERY_PROBE
def test_samples_without_weight_do_not_count_whatever_they_hold(probe: LinearProbe) -> None:
    x = torch.from_numpy(features(50, 4))
    y = torch.from_numpy(classes_of(x.numpy(), 2))
    extended = torch.cat([x, 1e3 * torch.ones(7, 4, dtype=x.dtype)])
    labels = torch.cat([y, torch.full((7,), -100)])
    weight = torch.cat([torch.ones(50), torch.zeros(7)])
    alone, padded = probe.fresh().fit(x, y), probe.fresh().fit(extended, labels, weight)
    assert padded.classes_.tolist() == [0, 1]
    torch.testing.assert_close(padded.coef_, alone.coef_)
    assert padded.score(extended, labels, weight) == alone.score(x, y)


@EVERY_PROBE
def test_a_cell_with_one_class_says_that_class(probe: LinearProbe) -> None:
    x = torch.from_numpy(features(2, 40, 3))
    y = torch.from_numpy(classes_of(x.numpy(), 2))
    y[1] = 1
    fitted = probe.fresh().fit(x, y)
    assert fitted.score(x, y)[1] == 1.0


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
    x = torch.from_numpy(features(2, 150, 7))
    y = torch.from_numpy(classes_of(x.numpy(), n_classes))
    fitted = probe.fresh().fit(x, y)
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
def test_the_direction_of_a_class_points_towards_it(probe: LinearProbe) -> None:
    x = torch.from_numpy(features(2, 150, 7))
    y = torch.from_numpy(classes_of(x.numpy(), 2))
    fitted = probe.fresh().fit(x, y)
    direction = fitted.direction()
    torch.testing.assert_close(direction.norm(dim=-1), torch.ones(2).double())
    torch.testing.assert_close(fitted.direction(0), -direction)
    moved = x + 100 * direction[:, None]
    assert (fitted.predict(moved) == 1).all()
    three = probe.fresh().fit(x, torch.from_numpy(classes_of(x.numpy(), 3)))
    assert three.direction(2).shape == (2, 7)
    with pytest.raises(InputError, match=r"one of \[0, 1, 2\]"):
        three.direction()
    numpy = probe.fresh().fit(x[0].numpy(), y[0].numpy())
    assert isinstance(numpy.direction(), np.ndarray)
    assert isinstance(numpy.subspace(), np.ndarray)


def test_half_precision_states_are_solved_in_double() -> None:
    x = torch.from_numpy(features(200, 4)).bfloat16()
    y = torch.from_numpy(classes_of(x.double().numpy(), 2))
    low, high = RidgeProbe().fit(x, y), RidgeProbe().fit(x.double(), y)
    assert low.coef_.dtype == torch.bfloat16
    torch.testing.assert_close(low.coef_, high.coef_.bfloat16())


def test_logistic_warns_when_it_stops_early() -> None:
    x = features(60, 4)
    y = classes_of(x, 2)
    with pytest.warns(ConvergenceWarning, match="max_iter=1"):
        LogisticProbe(max_iter=1).fit(x, y)
    assert 1 < LogisticProbe().fit(x, y).n_iter_ < 15


def test_a_probe_that_is_not_fitted_says_so() -> None:
    with pytest.raises(NotFittedError):
        RidgeProbe().predict(np.zeros((2, 3)))


X, Y = torch.from_numpy(features(2, 10, 3)), torch.arange(20).reshape(2, 10) % 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((X.long(), Y), "floating values"),
        ((X[0, 0], Y), "floating values"),
        ((X * torch.nan, Y), "finite"),
        ((X, Y[:, :9]), r"\[..., 10\]"),
        ((X, Y[:, None].expand(2, 3, 10)), "broadcastable"),
        ((X, Y.float()), "integer classes"),
        ((X, Y.numpy()), "a tensor on cpu"),
        ((X, torch.zeros_like(Y)), "at least two classes"),
        ((X, Y, -torch.ones(10)), ">= 0"),
        ((X, Y, torch.ones(9)), r"\[..., 10\]"),
        ((X, Y, torch.tensor([[1.0], [0.0]]).expand(2, 10)), "every cell"),
    ],
)
def test_bad_input_is_named(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RidgeProbe().fit(*given)


def test_bad_settings_and_foreign_features_are_named() -> None:
    with pytest.raises(InputError, match="alpha"):
        RidgeProbe(alpha=-1.0).fit(X, Y)
    fitted = RidgeProbe().fit(X, Y)
    with pytest.raises(InputError, match="3 features"):
        fitted.predict(torch.zeros(2, 10, 4))
    with pytest.raises(InputError, match="one of"):
        fitted.direction(7)


@pytest.mark.gpu
def test_a_grid_on_the_gpu_is_that_on_the_cpu() -> None:
    x = torch.from_numpy(features(5, 300, 16)).float()
    y = torch.from_numpy(classes_of(x.numpy(), 3))
    for cls in PROBES.values():
        here, there = cls().fit(x, y), cls().fit(x.cuda(), y.cuda())
        assert there.coef_.is_cuda
        torch.testing.assert_close(there.coef_.cpu(), here.coef_, atol=1e-5, rtol=1e-4)
        with pytest.raises(InputError, match="cuda"):
            there.predict(x)
