"""Checking what comes into a probe, and laying a broadcast grid out as a flat list of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator
    from torch import Tensor

CHUNK_BYTES = 256 * 2**20
"""Memory that the float64 copies of one chunk of cells may take."""


def to_tensor(
    estimator: BaseEstimator, X: Any, *, reset: bool = False
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """``X`` as a floating tensor [..., n, d], and the map back to the kind ``X`` was.

    Anything that is no tensor and no grid goes through scikit-learn's own validation.

    Raises:
        InputError: If the shape, the dtype or the number of features is wrong, or a value is not
            finite.
    """
    if isinstance(X, torch.Tensor) or _is_grid(X):
        tensor = X.detach() if isinstance(X, torch.Tensor) else torch.from_numpy(X)
        _check_grid(estimator, tensor, reset=reset)
    else:
        from sklearn.utils.validation import validate_data

        array = validate_data(estimator, X, dtype=[np.float64, np.float32], reset=reset)
        tensor = torch.from_numpy(np.array(array))
    if isinstance(X, torch.Tensor):
        return tensor, lambda value: value
    return tensor, lambda value: value.numpy()


def _check_grid(estimator: Any, x: Tensor, *, reset: bool) -> None:
    if x.ndim < 2 or not x.is_floating_point() or 0 in x.shape:
        raise InputError(
            "X",
            expected="floating values of shape [..., n, d], with at least one sample",
            given=f"{x.dtype} of shape {tuple(x.shape)}",
            fix="Give samples on the second last axis and features on the last.",
        )
    # The sum is finite if all values are, at a fraction of the cost, save for an overflow.
    if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        raise InputError(
            "X", expected="finite values", given="NaN or infinity", fix="Check the activations."
        )
    if reset:
        estimator.n_features_in_ = x.shape[-1]
    elif x.shape[-1] != estimator.n_features_in_:
        raise InputError(
            "X",
            expected=f"{estimator.n_features_in_} features, as in fit",
            given=f"X has {x.shape[-1]} features",
            fix="Use activations of the site the probe was fitted on.",
        )


@dataclass(frozen=True)
class Layout:
    """A grid as a flat list of cells, each with all its labels; views, not expanded in memory.

    ``x`` [1, *cells, n, d], ``y`` [1, *cells, n, label] and ``weight`` [1, *cells, n] have an
    axis for each axis of the grid that is none of labels.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    grid: tuple[int, ...]
    label_axes: tuple[int, ...]

    @property
    def n_cells(self) -> int:
        return math.prod(self.x.shape[:-2])

    def cells(self, chosen: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [cell, n, d], classes [cell, n, label] and weights [cell, n] of some cells."""
        index = torch.arange(self.n_cells, device=self.x.device)[chosen]
        at = torch.unravel_index(index, self.x.shape[:-2])
        return self.x[at], self.y[at], self.weight[at]

    def unfold(self, flat: Tensor) -> Tensor:
        """[cell, label, ...] -> [*grid, ...]."""
        cell_axes = [a for a in range(len(self.grid)) if a not in self.label_axes]
        sizes = [self.grid[a] for a in (*cell_axes, *self.label_axes)]
        value = flat.reshape(*sizes, *flat.shape[2:])
        return value.movedim(tuple(range(len(cell_axes), len(self.grid))), self.label_axes)


@dataclass(frozen=True)
class Problem:
    """What ``fit`` was given, checked: classes are numbers, and kinds are remembered."""

    x: Tensor
    y: Tensor
    weight: Tensor
    classes: Any
    restore: Callable[[Tensor], Any]

    def layout(self, share: bool) -> Layout:
        """Flatten the grid; ``share`` turns axes along which only ``y`` varies into labels."""
        rank = max(self.x.ndim - 2, self.y.ndim - 1, self.weight.ndim - 1)
        x = own_batch(self.x, rank, core=2)
        y = own_batch(self.y, rank, core=1)
        weight = own_batch(self.weight, rank, core=1)
        grid = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1], weight.shape[:-1])
        labels = tuple(
            a for a in range(rank) if share and x.shape[a] == weight.shape[a] == 1 < grid[a]
        )
        kept = [a for a in range(rank) if a not in labels]
        cells = (1, *(grid[a] for a in kept))
        y = y.permute(*kept, rank, *labels).reshape(*(y.shape[a] for a in (*kept, rank)), -1)
        return Layout(
            x=x.squeeze(labels).expand(*cells, -1, -1),
            y=y.expand(*cells, -1, -1),
            weight=weight.squeeze(labels).expand(*cells, -1),
            grid=tuple(grid),
            label_axes=labels,
        )


def fit_problem(estimator: Any, X: Any, y: Any, sample_weight: Any) -> Problem:
    """Check what ``fit`` was given.

    Raises:
        InputError: See :meth:`~loopinterp.probing.LinearProbe.fit`.
    """
    if not (isinstance(X, torch.Tensor) or _is_grid(X)):
        from sklearn.utils.multiclass import check_classification_targets
        from sklearn.utils.validation import _check_sample_weight, validate_data

        X, y = validate_data(estimator, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X)
        x, restore = torch.from_numpy(np.array(X)), lambda value: value.numpy()
    else:
        x, restore = to_tensor(estimator, X, reset=True)
    weight = _weights(sample_weight, x, tensors=isinstance(X, torch.Tensor))
    classes, index = _classes(y, x, weight, tensors=isinstance(X, torch.Tensor))
    _check_shapes(x, index, weight)
    return Problem(
        x=x,
        y=index,
        weight=weight,
        classes=classes,
        restore=lambda value: restore(value.to(x.dtype)),
    )


def own_batch(value: Tensor, rank: int, *, core: int) -> Tensor:
    """Leading axes of size 1 in front, so that ``value`` has ``rank`` axes before its core."""
    return value.reshape((1,) * max(rank + core - value.ndim, 0) + tuple(value.shape))


def chunks(n_cells: int, *, bytes_per_cell: int) -> Iterator[slice]:
    """Slices of cells whose copies fit in :data:`CHUNK_BYTES`, one cell at the least."""
    size = max(1, CHUNK_BYTES // max(bytes_per_cell, 1))
    for start in range(0, n_cells, size):
        yield slice(start, min(start + size, n_cells))


def _is_grid(X: Any) -> bool:
    return isinstance(X, np.ndarray) and X.ndim > 2


def _weights(sample_weight: Any, x: Tensor, *, tensors: bool) -> Tensor:
    if sample_weight is None:
        return x.new_ones(x.shape[-2], dtype=torch.float64)
    weight = _same_kind("sample_weight", sample_weight, x, tensors=tensors)
    if weight.ndim == 0 or weight.is_complex() or not bool((weight >= 0).all()):
        raise InputError(
            "sample_weight",
            expected="one finite weight >= 0 for each sample",
            given=f"{weight.dtype} of shape {tuple(weight.shape)}, with negative or NaN values",
            fix="Give 0 to samples that do not belong to a cell.",
        )
    if not bool((weight.sum(-1) > 0).all()):
        raise InputError(
            "sample_weight",
            expected="at least one sample of positive weight in every cell",
            given="a cell without any",
            fix="Leave that cell out of the grid.",
        )
    return weight


def _classes(y: Any, x: Tensor, weight: Tensor, *, tensors: bool) -> tuple[Any, Tensor]:
    """The classes that have weight somewhere, and ``y`` as indices into them.

    Samples without weight may hold any value (an ignore index): they get class 0.
    """
    if tensors:
        labels = _same_kind("y", y, x, tensors=True)
        if labels.is_floating_point():
            raise InputError(
                "y", expected="integer classes", given=str(labels.dtype), fix="Use y.long()."
            )
        counted = _counted(labels, weight, x)
        classes = torch.unique(labels.expand(counted.shape)[counted])
        index = torch.searchsorted(classes, labels.contiguous()).clamp_max(len(classes) - 1)
    else:
        array = np.asarray(y)
        classes, inverse = np.unique(array, return_inverse=True)
        index = torch.from_numpy(inverse.reshape(array.shape))
        counted = _counted(index, weight, x)
        used = torch.unique(index.expand(counted.shape)[counted])
        classes = classes[used.numpy()]
        index = torch.searchsorted(used, index).clamp_max(max(len(used) - 1, 0))
    if len(classes) < 2:
        raise InputError(
            "y",
            expected="at least two classes",
            given=f"one class, {classes.tolist()[0]!r}",
            fix="A target that never varies has nothing to probe: choose other samples.",
        )
    return classes, index


def _counted(labels: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    _check_shapes(x, labels, weight)
    return (weight > 0).expand(torch.broadcast_shapes(labels.shape, weight.shape))


def _same_kind(name: str, value: Any, x: Tensor, *, tensors: bool) -> Tensor:
    if not tensors:
        return torch.from_numpy(np.array(value))
    if not isinstance(value, torch.Tensor) or value.device != x.device:
        given = str(value.device) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(
            name,
            expected=f"a tensor on {x.device}, like X",
            given=given,
            fix=f"Pass torch.as_tensor({name}, device=X.device).",
        )
    return value


def _check_shapes(x: Tensor, y: Tensor, weight: Tensor) -> None:
    for name, value in (("y", y), ("sample_weight", weight)):
        try:
            fits = value.ndim >= 1 and value.shape[-1] == x.shape[-2]
            torch.broadcast_shapes(value.shape[:-1], x.shape[:-2])
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(
                name,
                expected=f"[..., {x.shape[-2]}], broadcastable with the leading axes of X",
                given=f"shape {tuple(value.shape)} for X of shape {tuple(x.shape)}",
                fix="Give one value for each sample of each cell.",
            )
