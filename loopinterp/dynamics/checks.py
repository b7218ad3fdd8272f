"""Checks shared by the measurements of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.tasks.task import Batch


def check_states(
    states: Tensor, *, at_least: int = 2, name: str = "states", allow_nonfinite: bool = False
) -> None:
    """Raise unless ``states`` is ``[loop+1, ..., d_model]``, long enough and finite."""
    if states.ndim < 2 or len(states) < at_least or not states.is_floating_point():
        raise InputError(
            name,
            expected=f"a floating-point tensor [loop, ..., feature] with at least {at_least} loops",
            given=f"shape {tuple(states.shape)}, {states.dtype}",
            fix="Pass what the model returns with return_type='states' (or run_loops).",
        )
    if not allow_nonfinite:
        check_finite(states, name)


def check_finite(values: Tensor, name: str) -> None:
    """Raise if a value along the leading loop axis is NaN or infinite, naming the first loop."""
    bad = ~values.isfinite()
    if bad.any():
        first = int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0])
        raise InputError(
            name,
            expected="finite values",
            given=f"NaN or infinity, first at index {first} of the loop axis",
            fix="Cut the run before that loop, or pass allow_nonfinite=True where it is offered.",
        )


def check_positive(name: str, value: float) -> None:
    """Raise unless ``value`` is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise InputError(
            name, expected="a number above 0", given=repr(value), fix=f"Pass a positive {name}."
        )


def check_count(name: str, value: int, *, least: int = 1, most: int | None = None) -> None:
    """Raise unless ``least <= value <= most``."""
    if value < least or (most is not None and value > most):
        span = f">= {least}" if most is None else f"in {least}..{most}"
        raise InputError(
            name,
            expected=f"an integer {span}",
            given=repr(value),
            fix=f"Pass {name}={least if value < least else most}.",
        )


def check_scored(batch: Batch) -> None:
    """Raise unless every example of the batch has a position with a target."""
    from loopinterp.tasks.task import IGNORE

    asked = (batch.targets != IGNORE).any(dim=1)
    if len(batch) == 0 or not asked.all():
        missing = (~asked).nonzero().flatten().tolist()
        raise InputError(
            "batch",
            expected="examples that each have a position with a target",
            given="no examples" if len(batch) == 0 else f"none in examples {missing[:8]}",
            fix="Sample the batch from a task.",
        )


def asked_positions(batch: Batch, positions: str) -> Tensor:
    """Positions that a study counts, ``[batch, pos]``: those with a target, or all of them."""
    import torch

    from loopinterp.errors import unknown_name
    from loopinterp.tasks.task import IGNORE

    if positions not in ("asked", "all"):
        raise unknown_name("positions", positions, ("asked", "all"))
    check_scored(batch)
    return batch.targets != IGNORE if positions == "asked" else torch.ones_like(batch.targets) == 1
