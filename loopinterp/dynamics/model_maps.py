"""The map and the state that a function of one map is asked about: given, or those of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.models.looped_model import LoopedModel, bind, need_one_map
from loopinterp.models.model_description import device_of
from loopinterp.models.repeatability import need_repeatable

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_LOOPS = 200
"""Loops in which a model's own limit is sought."""


def map_and_state(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any, h: Any, *, at_limit: bool = True
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A map from states to states, and a state.

    Args:
        model: A map, which is returned with ``h``; or any looped model, whose map is one loop over
            its inputs.
        h: A state; of a looped model its inputs, or a batch of them.
        at_limit: Of a looped model, whether the state is where its own loops have come after
            :data:`LIMIT_LOOPS` at most, the limit if they reach one; else the initial state.

    Raises:
        InputError: If a model's step takes the loop's index, or it does not repeat itself.
    """
    if not (isinstance(model, LoopedModel) or hasattr(model, "bind")):
        return model, h
    from loopinterp.dynamics.limits import find_limits  # which solves by a function of this file

    inputs = getattr(h, "inputs", h).to(device_of(model))
    need_one_map(model)
    need_repeatable(model, inputs)
    iteration = bind(model, inputs)
    if not at_limit:
        return iteration.step, iteration.h0
    with torch.no_grad():
        return iteration.step, find_limits(iteration, iteration.h0, max_loops=LIMIT_LOOPS).state
