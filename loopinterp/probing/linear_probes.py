"""Linear probes as scikit-learn estimators, fitted for a whole grid of cells in one batched solve.

With ``X`` of shape [n, d] a probe is an ordinary scikit-learn classifier. With ``X`` of shape
[..., n, d] it is a grid of them: one independent probe for each cell of the leading axes (loop,
site, position group), and ``y`` of shape [..., n] broadcasts against it, so that many targets can
share one ``X``. NumPy arrays give NumPy arrays; tensors stay tensors, on their device.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from loopinterp.errors import InputError, check_number
from loopinterp.probing.probe_arrays import Problem, chunks, fit_problem, own_batch, to_tensor
from loopinterp.probing.probe_solvers import logistic_solve, ridge_solve

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor
    from typing_extensions import Self


class LinearProbe(ClassifierMixin, BaseEstimator):
    """What every linear probe shares: fitting a grid, predicting, scoring, and its directions.

    Subclasses give the solver. The settings are ``alpha``, the L2 penalty on the coefficients, and
    ``fit_intercept``. Attributes after ``fit``, for a grid of shape ``grid`` (empty for
    one cell), ``d`` features and ``rows`` = 1 for two classes or the number of classes for more:

    Attributes:
        classes_: The classes, sorted; one set for the whole grid.
        coef_: [*grid, rows, d].
        intercept_: [*grid, rows].
        n_features_in_: ``d``.
    """

    _shares_factor = False

    def __init__(self, *, alpha: float = 1.0, fit_intercept: bool = True) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit one probe for each cell of the grid.

        Args:
            X: [..., n, d] features.
            y: [..., n] classes; its leading axes broadcast with those of ``X``.
            sample_weight: [..., n] weights, 0 for samples outside a cell; broadcasts likewise.

        Raises:
            InputError: If shapes, devices or dtypes do not fit, a value is not finite, a weight
                is negative, a cell has no samples, or there is only one class.
        """
        check_number("alpha", self.alpha, least=0)
        problem = fit_problem(self, X, y, sample_weight)
        coef, intercept = self._fit_grid(problem)
        self.classes_ = problem.classes
        self.coef_ = problem.restore(coef)
        self.intercept_ = problem.restore(intercept)
        return self

    def fresh(self) -> Self:
        """An unfitted probe with the same settings."""
        return cast("Self", clone(self))

    def _fit_grid(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Solve all cells in chunks that bound the memory; axes along which only ``y`` varies are
        columns of one problem where the solver can share its factorisation."""
        layout = problem.layout(self._shares_factor)
        coefs, intercepts = [], []
        for chosen in chunks(layout.n_cells, bytes_per_cell=16 * problem.x.shape[-2:].numel()):
            cells = layout.cells(chosen)
            coef, intercept = self._solve(*cells, n_classes=len(problem.classes))
            coefs.append(coef)
            intercepts.append(intercept)
        return layout.unfold(torch.cat(coefs)), layout.unfold(torch.cat(intercepts))

    def _solve(
        self,
        x: Float[Tensor, "cell n d"],
        y: Int[Tensor, "cell n label"],
        weight: Float[Tensor, "cell n"],
        *,
        n_classes: int,
    ) -> tuple[Float[Tensor, "cell label rows d"], Float[Tensor, "cell label rows"]]:
        raise NotImplementedError

    def decision_function(self, X: Any) -> Any:
        """Scores ``X coef^T + intercept``: [*grid, n] for two classes, else [*grid, n, class]."""
        scores, restore = self._decide(X)
        return restore(scores)

    def _decide(self, X: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """The scores as a tensor, and the map to the kind ``X`` is of."""
        check_is_fitted(self)
        x, restore = to_tensor(self, X)
        coef, intercept = (
            v if isinstance(v, torch.Tensor) else torch.from_numpy(v)
            for v in (self.coef_, self.intercept_)
        )
        if x.device != coef.device:
            raise InputError(
                "X",
                expected=f"a tensor on {coef.device}, where the probe was fitted",
                given=f"one on {x.device}",
                fix="Move X, or fit on its device.",
            )
        coef = own_batch(coef, x.ndim - 2, core=2)
        scores = torch.einsum("...nd,...kd->...nk", x.to(coef.dtype), coef)
        scores = scores + intercept[..., None, :]
        return (scores.squeeze(-1) if len(self.classes_) == 2 else scores), restore

    def predict(self, X: Any) -> Any:
        """Classes, [*grid, n]."""
        scores, _ = self._decide(X)
        index = (scores > 0).long() if len(self.classes_) == 2 else scores.argmax(-1)
        return self.classes_[index if isinstance(self.classes_, torch.Tensor) else index.numpy()]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Accuracy: a float for one cell, an array over the grid for more.

        Args:
            X: [..., n, d] features.
            y: [..., n] classes.
            sample_weight: [..., n] weights; a cell whose weights are all 0 scores NaN.
        """
        right = self.predict(X) == y
        numpy_out = not isinstance(right, torch.Tensor)
        right = torch.as_tensor(right).double()
        weight = torch.ones_like(right)
        if sample_weight is not None:
            weight = weight * torch.as_tensor(sample_weight, device=right.device)
        accuracy = (right * weight).sum(-1) / weight.sum(-1)
        if accuracy.ndim == 0:
            return float(accuracy)
        return accuracy.numpy() if numpy_out else accuracy

    def direction(self, cls: Any = None) -> Any:
        """Unit vector along which the score of a class grows, [*grid, d].

        Args:
            cls: One of ``classes_``; the last of two by default.

        Raises:
            InputError: If ``cls`` is no class of the probe, or is left out with more than two.
        """
        check_is_fitted(self)
        classes = list(self.classes_.tolist())
        if cls is None and len(classes) == 2:
            cls = classes[-1]
        if cls not in classes:
            raise InputError(
                "class of the direction",
                expected=f"one of {classes}",
                given=repr(cls),
                fix="Pass cls=, one of the probe's classes_.",
            )
        coef = torch.as_tensor(self.coef_)
        row = classes.index(cls)
        vector = coef[..., row, :] if len(classes) > 2 else (1 if row else -1) * coef[..., 0, :]
        unit = torch.nn.functional.normalize(vector, dim=-1)
        return unit if isinstance(self.coef_, torch.Tensor) else unit.numpy()

    def subspace(self) -> Any:
        """Orthonormal rows that span what the probe reads, [*grid, classes - 1, d].

        The span of the differences between the class directions, from their singular value
        decomposition; for two classes the one direction of the probe, up to sign.
        """
        check_is_fitted(self)
        coef = torch.as_tensor(self.coef_)
        if len(self.classes_) > 2:
            coef = coef - coef.mean(-2, keepdim=True)
        rows = torch.linalg.svd(coef, full_matrices=False).Vh[..., : len(self.classes_) - 1, :]
        return rows if isinstance(self.coef_, torch.Tensor) else rows.numpy()


class RidgeProbe(LinearProbe):
    """Least squares on -1/+1 targets, one against the rest, with an L2 penalty.

    ``min sum_i w_i (y_i - x_i c - b)^2 + alpha ||c||^2``, the same as scikit-learn's
    ``RidgeClassifier``. The whole grid is one batched Cholesky solve, and axes along which only
    ``y`` varies (many targets at the same place) share one factorisation.

    Args:
        alpha: L2 penalty.
        fit_intercept: Whether to fit an intercept.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 200, 8, generator=torch.Generator().manual_seed(0))
        >>> y = (x[..., 0] > 0).long()
        >>> RidgeProbe().fit(x, y).coef_.shape
        torch.Size([3, 1, 8])
    """

    _shares_factor = True

    def _solve(
        self, x: Tensor, y: Tensor, weight: Tensor, *, n_classes: int
    ) -> tuple[Tensor, Tensor]:
        if n_classes == 2:
            columns = 2.0 * y.double() - 1.0
        else:
            columns = 2.0 * torch.nn.functional.one_hot(y, n_classes).double().flatten(2) - 1.0
        coef, intercept = ridge_solve(
            x, columns, weight, alpha=self.alpha, fit_intercept=self.fit_intercept
        )
        rows = (y.shape[-1], -1)
        return coef.unflatten(1, rows), intercept.unflatten(1, rows)


class LogisticProbe(LinearProbe):
    """Logistic regression with an L2 penalty: binary for two classes, softmax for more.

    ``min sum_i w_i CE(y_i, x_i) + alpha/2 ||C||^2``, the same as scikit-learn's
    ``LogisticRegression(C=1/alpha)``, by Newton's method on all cells at once. Slower than
    :class:`RidgeProbe`, but its probabilities are calibrated, which code lengths need.

    Args:
        alpha: L2 penalty, 1/C.
        fit_intercept: Whether to fit an intercept.
        tol: Largest entry of the mean gradient at which a cell has converged.
        max_iter: Newton steps at most; cells that need more warn.

    Attributes:
        n_iter_: Newton steps that the slowest cell took.
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_iter: int = 100,
    ) -> None:
        super().__init__(alpha=alpha, fit_intercept=fit_intercept)
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        self._steps: list[Tensor] = []
        super().fit(X, y, sample_weight)
        steps = torch.cat(self._steps)
        stopped = steps < 0
        self.n_iter_ = self.max_iter if stopped.any() else int(steps.max())
        if stopped.any():
            warnings.warn(
                f"LogisticProbe: {int(stopped.sum())} cells did not converge in max_iter="
                f"{self.max_iter} steps. Raise alpha or max_iter.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _solve(
        self, x: Tensor, y: Tensor, weight: Tensor, *, n_classes: int
    ) -> tuple[Tensor, Tensor]:
        coef, intercept, steps = logistic_solve(
            x,
            y.squeeze(-1),
            weight,
            n_classes=n_classes,
            alpha=self.alpha,
            fit_intercept=self.fit_intercept,
            tol=self.tol,
            max_iter=self.max_iter,
        )
        self._steps.append(steps)
        return coef[:, None], intercept[:, None]

    def predict_proba(self, X: Any) -> Any:
        """Probability of each class, [*grid, n, class]."""
        logs, restore = self._log_probability(X)
        return restore(logs.exp())

    def predict_log_proba(self, X: Any) -> Any:
        """Log of :meth:`predict_proba`, without underflow."""
        logs, restore = self._log_probability(X)
        return restore(logs)

    def _log_probability(self, X: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        scores, restore = self._decide(X)
        if len(self.classes_) == 2:
            scores = torch.stack([torch.zeros_like(scores), scores], dim=-1)
        return scores.log_softmax(-1), restore


PROBES: dict[str, type[LinearProbe]] = {"ridge": RidgeProbe, "logistic": LogisticProbe}
"""Every probe by name; the conformance suite runs on each."""
