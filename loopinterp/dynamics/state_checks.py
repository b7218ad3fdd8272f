"""Checks of states and examples that the measurements of this package share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_choice
from loopinterp.tasks.study_data import need_asked
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool
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


def check_finite(values: Tensor, name: str, *, start: int = 0) -> None:
    """Raise if a value is NaN or infinite, naming the first loop on the leading axis.

    That axis begins at loop ``start``.
    """
    bad = ~values.isfinite()
    if bad.any():
        first = start + int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0])
        raise InputError(
            name,
            expected="finite values",
            given=f"NaN or infinity, first at index {first} of the loop axis",
            fix="Cut the run before that loop, or pass allow_nonfinite=True where it is offered.",
        )


def check_finite_state(state: Tensor, name: str, *, fix: str) -> None:
    """Raise unless a state is there and finite."""
    empty = state.numel() == 0
    if empty or not state.isfinite().all():
        given = f"an empty tensor {tuple(state.shape)}" if empty else "NaN or infinity"
        raise InputError(name, expected="finite values", given=given, fix=fix)


def check_shape(values: Tensor, like: Tensor, name: str, *, fix: str) -> None:
    """Raise unless a tensor has the shape of another one."""
    wanted, given = tuple(like.shape), tuple(values.shape)
    if given != wanted:
        raise InputError(name, expected=f"shape {wanted}", given=f"shape {given}", fix=fix)


def of_each(flags: Bool[Tensor, " batch"], values: Tensor) -> Bool[Tensor, "batch ..."]:
    """One flag of each example, in a shape to be held against its values."""
    return flags.reshape(-1, *[1] * (values.ndim - 1))


def asked_positions(batch: Batch, positions: str = "asked") -> Bool[Tensor, "batch pos"]:
    """Positions that a study counts: those with a target (``asked``), or ``all`` of them.

    Raises:
        InputError: If an example has no position with a target, or ``positions`` is another word.
    """
    check_choice("positions", positions, ("asked", "all"))
    need_asked(batch)
    asked = batch.targets != IGNORE
    return asked if positions == "asked" else torch.ones_like(asked)
