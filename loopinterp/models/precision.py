"""The precision of a run: its dtype, and the same weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.models.iteration import bind

if TYPE_CHECKING:
    from torch import Tensor


def rounding_of(dtype: torch.dtype) -> float:
    """Largest relative change of a state in a loop from the rounding of the state alone."""
    # At fixed points states move by .5 to .7 rounding errors in half precision, to 2.1 in float32.
    return 2 * torch.finfo(dtype).eps


def is_coarse(dtype: torch.dtype) -> bool:
    """Whether rounding in this dtype hides what studies of dynamics measure."""
    return rounding_of(dtype) > 1e-4  # float16, bfloat16 and narrower


def computing_dtype(state: Tensor) -> torch.dtype:
    """The coarser one of a state's dtype and, if it is on, autocast's."""
    kind = state.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return state.dtype
    both = (state.dtype, torch.get_autocast_dtype(kind))
    return max(both, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes of weights and states."""
    if not torch.amp.is_autocast_available(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@torch.no_grad()
def in_float32(model: Any, inputs: Tensor) -> Any | None:
    """The model with its weights in float32: itself if they are, else a copy.

    None if its step still computes in a coarse dtype.
    """
    with no_autocast(inputs.device):
        if _computes_fine(model, inputs):
            return model
        copy = deepcopy(model).float() if isinstance(model, nn.Module) else None
        return copy if copy is not None and _computes_fine(copy, inputs) else None


def _computes_fine(model: Any, inputs: Tensor) -> bool:
    try:
        only = bind(model, inputs[:1]).at(0)
        states = only.h0, only.step(only.h0)
    except RuntimeError:  # weights of two dtypes do not multiply
        return False
    return not any(is_coarse(state.dtype) for state in states)
