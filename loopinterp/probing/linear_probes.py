"""Linear probes for a whole grid of cells, by scikit-learn's solvers.

``X`` [..., n, d] has one probe for each cell of the leading axes. ``y`` [..., n] broadcasts against
it; targets that share an ``X`` share the factorisation of a :class:`RidgeProbe`.
"""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from einops import rearrange
from scipy.linalg import LinAlgWarning
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.validation import check_is_fitted

from loopinterp.core.errors import InputError, check_number, describe_tensor, need

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from typing_extensions import Self


class LinearProbe(BaseEstimator):
    """Base of linear probes over a grid of cells of shape ``grid``.

    Fits are in float64 on the CPU, as float32 loses the small directions of states of low rank.

    Attributes:
        classes_: The classes of the whole grid, sorted.
        coef_: [*grid, rows, d]; one row for two classes (the score of the last), else one for each.
        intercept_: [*grid, rows].

    Args:
        alpha: L2 penalty on the coefficients.
    """

    def __init__(self, *, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def fit(self, X: Float[Tensor, "*#grid n d"], y: Int[Tensor, "*#grid n"]) -> Self:
        """Fit one probe for each cell of the grid."""
        check_number("alpha", self.alpha, least=0)
        _check_features(X)
        _check_labels(y, X)
        self.n_features_in_ = X.shape[-1]
        self.classes_, labels = torch.unique(y, return_inverse=True)
        n_classes = len(self.classes_)
        if n_classes < 2:
            raise InputError(
                "y",
                expected="at least two classes",
                given=f"one class, {self.classes_.tolist()[0]!r}",
                fix="A target that never varies has nothing to probe: choose other samples.",
            )
        grid = torch.broadcast_shapes(X.shape[:-2], y.shape[:-1])
        x = X.detach()[(None,) * (len(grid) + 2 - X.ndim)]  # [*grid, n, d]
        labels = labels.expand(*grid, -1).cpu().numpy()
        self.coef_ = X.new_empty(*grid, 1 if n_classes == 2 else n_classes, X.shape[-1])
        self.intercept_ = X.new_empty(self.coef_.shape[:-1])
        for cell in np.ndindex(*x.shape[:-2]):
            # Along axes on which only y varies a cell has many targets.
            here = tuple(slice(None) if x.shape[axis] == 1 else at for axis, at in enumerate(cell))
            targets = labels[here].reshape(-1, X.shape[-2])
            coef, intercept = self._solve(x[cell].double().cpu().numpy(), targets, n_classes)
            for values, store in ((coef, self.coef_), (intercept, self.intercept_)):
                store[here] = torch.from_numpy(values).to(store).reshape(store[here].shape)
        return self

    def fresh(self) -> Self:
        """An unfitted probe with the same settings."""
        return cast("Self", clone(self))

    def _solve(
        self, x: Float[np.ndarray, "n d"], y: Int[np.ndarray, "target n"], n_classes: int
    ) -> tuple[Float[np.ndarray, "target rows d"], Float[np.ndarray, "target rows"]]:
        """Coefficients and intercepts for each target of one cell, from class numbers."""
        raise NotImplementedError

    def decision_function(self, X: Float[Tensor, "*#grid n d"]) -> Float[Tensor, "*scores"]:
        """Scores ``X coef^T + intercept``: [*grid, n] for two classes, else [*grid, n, class]."""
        check_is_fitted(self)
        _check_features(X, n_features=self.n_features_in_)
        grid = self.coef_.shape[:-2]
        expected = f"leading axes that broadcast with those of the fit, {list(grid)}"
        got, fix = str(list(X.shape[:-2])), "Give samples for each cell, or for all of them."
        need(_broadcast(X.shape[:-2], grid), "X", expected, got, fix)
        coef, intercept = self.coef_.to(X.device), self.intercept_.to(X.device)  # [*grid, rows, d]
        scores = torch.einsum("...nd,...kd->...nk", X.to(coef.dtype), coef)
        scores = scores + intercept[..., None, :]
        return scores.squeeze(-1) if len(self.classes_) == 2 else scores

    def predict(self, X: Float[Tensor, "*#grid n d"]) -> Int[Tensor, "*cell n"]:
        scores = self.decision_function(X)
        index = (scores > 0).long() if len(self.classes_) == 2 else scores.argmax(-1)  # [*cell, n]
        return self.classes_.to(X.device)[index]

    def score(
        self, X: Float[Tensor, "*#grid n d"], y: Int[Tensor, "*#grid n"]
    ) -> Float[Tensor, "*cell"]:
        predicted = self.predict(X)
        _check_labels(y, predicted[..., None])
        return (predicted == y).double().mean(-1)

    def subspace(self) -> Float[Tensor, "*grid rank d"]:
        """Orthonormal basis of the differences between classes, [*grid, classes - 1, d]."""
        check_is_fitted(self)
        coef = self.coef_
        if len(self.classes_) > 2:
            coef = coef - coef.mean(-2, keepdim=True)
        return torch.linalg.svd(coef, full_matrices=False).Vh[..., : len(self.classes_) - 1, :]


class RidgeProbe(LinearProbe):
    """Least squares on -1/+1 targets, one against the rest, with an L2 penalty.

    ``min sum_i (y_i - x_i c - b)^2 + alpha ||c||^2``, as scikit-learn's ``RidgeClassifier``.

    Example:
        >>> x = torch.randn(3, 200, 8, generator=torch.Generator().manual_seed(0))
        >>> y = (x[..., 0] > 0).long()
        >>> RidgeProbe().fit(x, y).coef_.shape
        torch.Size([3, 1, 8])
    """

    def _solve(self, x: np.ndarray, y: np.ndarray, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
        classes = np.arange(n_classes)[1 if n_classes == 2 else 0 :]
        columns = rearrange(y[..., None] == classes, "target n row -> n (target row)")
        targets = 2.0 * columns - 1.0  # -1 or 1, [n, target * row]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", LinAlgWarning)
                ridge = Ridge(alpha=self.alpha).fit(x, targets)
        except LinAlgWarning:
            # States that blow up: the normal equations lose their small directions.
            ridge = Ridge(alpha=self.alpha, solver="svd").fit(x, targets)
        coef: Any = ridge.coef_
        intercept: Any = ridge.intercept_
        return coef.reshape(len(y), -1, x.shape[1]), intercept.reshape(len(y), -1)


class LogisticProbe(LinearProbe):
    """Logistic regression with an L2 penalty: binary for two classes, softmax for more.

    ``min sum_i CE(y_i, x_i) + alpha/2 ||C||^2``, by Newton's method. Slower than
    :class:`RidgeProbe`, with calibrated probabilities. Raise ``alpha`` if scikit-learn warns of no
    convergence.
    """

    def _solve(self, x: np.ndarray, y: np.ndarray, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
        # It has converged where no entry of the mean gradient is greater than the tolerance.
        solver = LogisticRegression(
            C=1 / self.alpha if self.alpha else np.inf, solver="newton-cholesky", tol=1e-6
        )
        # A sample of each class without weight, for cells in which some class does not occur.
        every = np.arange(n_classes)
        x = np.concatenate([x, np.zeros((n_classes, x.shape[1]))])
        weight = np.arange(len(x)) < y.shape[1]
        coefs, intercepts = [], []
        for labels in y:
            with warnings.catch_warnings():
                # Where the Hessian is singular scikit-learn turns to L-BFGS, and need not say so.
                warnings.simplefilter("ignore", LinAlgWarning)
                solver.fit(x, np.concatenate([labels, every]), weight)
            coefs.append(solver.coef_)
            intercepts.append(solver.intercept_)
        return np.stack(coefs), np.stack(intercepts)

    def predict_proba(self, X: Float[Tensor, "*#grid n d"]) -> Float[Tensor, "*cell n classes"]:
        return self.predict_log_proba(X).exp()

    def predict_log_proba(self, X: Float[Tensor, "*#grid n d"]) -> Float[Tensor, "*cell n classes"]:
        """Log of :meth:`predict_proba`, without underflow."""
        scores = self.decision_function(X)
        if len(self.classes_) == 2:
            scores = torch.stack([torch.zeros_like(scores), scores], dim=-1)
        return scores.log_softmax(-1)


PROBES: dict[str, type[LinearProbe]] = {"ridge": RidgeProbe, "logistic": LogisticProbe}
"""Every probe by name."""


def _check_features(x: Any, *, n_features: int | None = None) -> None:
    tensor = isinstance(x, torch.Tensor)
    fits = tensor and x.ndim >= 2 and n_features in (None, x.shape[-1])
    if not fits or not x.is_floating_point() or 0 in x.shape:
        raise InputError(
            "X",
            expected=f"a floating-point tensor [..., n, {n_features or 'd'}], n 1 or more",
            given=describe_tensor(x),
            fix="Give samples on the second last axis and features on the last.",
        )
    # The sum is finite if all values are, at a fraction of the cost, save for an overflow.
    if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        raise InputError(
            "X", expected="finite values", given="NaN or infinity", fix="Check the activations."
        )


def _check_labels(y: Any, x: Tensor) -> None:
    classes = isinstance(y, torch.Tensor) and not y.is_floating_point() and y.numel() > 0
    fits = classes and y.shape[-1:] == x.shape[-2:-1] and _broadcast(y.shape[:-1], x.shape[:-2])
    expected = f"integer classes [..., {x.shape[-2]}], broadcastable with X"
    got = f"{describe_tensor(y)} for X of shape {list(x.shape)}"
    fix = "Give one value for each sample of each cell, torch.as_tensor(y).long()."
    need(fits, "y", expected, got, fix)


def _broadcast(*shapes: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


def online_code_length(
    x: Float[Tensor, "*#grid sample d"],
    y: Int[Tensor, "*#grid sample"],
    *,
    alpha: float = 1.0,
) -> Float[Tensor, "*cell"]:
    """Bits per label of the prequential code, for each cell of a grid.

    Blocks end at n/64, n/32, ..., n samples, from 8 at least. They are sent with the uniform code
    until every class has occurred, then by a :class:`LogisticProbe` trained on all earlier ones.
    Labels of a single class cost nothing.

    Shuffle the activations ``x`` first: labels are sent in their order.
    """
    _check_labels(y, x)
    n = x.shape[-2]
    doubling = [n >> k for k in range(6, -1, -1)]
    ends = [end for end in doubling if end >= 8 or end == n]
    grid = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1])
    if y.ndim > 1 and bool((y != y.flatten(0, -2)[0]).any()):
        # Other cells' labels do not count: each has classes of its own, and a time when all came.
        cells = x.expand(*grid, *x.shape[-2:]).flatten(0, -3), y.expand(*grid, n).flatten(0, -2)
        each = [online_code_length(*cell, alpha=alpha) for cell in zip(*cells)]
        return torch.stack(each).view(grid)
    n_classes = len(torch.unique(y))
    if n_classes == 1:  # labels that never vary need not be sent
        return x.new_zeros(grid, dtype=torch.float64)
    # The first block costs the uniform code; [*cell] bits in all.
    bits = x.new_full(grid, ends[0] * math.log2(n_classes), dtype=torch.float64)
    for start, end in pairwise(ends):
        if len(torch.unique(y[..., :start])) < n_classes:
            bits = bits + (end - start) * math.log2(n_classes)
            continue
        probe = LogisticProbe(alpha=alpha).fit(x[..., :start, :], y[..., :start])
        logs = probe.predict_log_proba(x[..., start:end, :]).double()  # [*cell, n, class]
        index = torch.searchsorted(probe.classes_, y[..., start:end].contiguous())
        coded = logs.gather(-1, index.expand(logs.shape[:-1])[..., None])
        bits = bits - coded.sum((-2, -1)) / math.log(2)
    return bits / n
