"""The map and the state that a function of one map is asked about: given, or those of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loopinterp.models.looped_model import Iteration, LoopedModel, bind, need_one_map
from loopinterp.models.model_description import device_of
from loopinterp.models.repeatability import need_repeatable

if TYPE_CHECKING:
    from torch import Tensor


def iteration_of(model: LoopedModel | Callable[[Tensor], Tensor] | Any, h: Any) -> Iteration | None:
    """A looped model's iteration over its inputs; None if what is given is a map itself.

    Args:
        model: A map from states to states, or any looped model.
        h: A state; of a looped model its inputs, or a batch of them.

    Raises:
        InputError: If a model's step takes the loop's index, or it does not repeat itself.
    """
    if not (isinstance(model, LoopedModel) or hasattr(model, "bind")):
        return None
    inputs = getattr(h, "inputs", h).to(device_of(model))
    need_one_map(model)
    need_repeatable(model, inputs)
    return bind(model, inputs)


def map_and_start(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any, h: Any
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A map and its state as given; or one loop of a model over its inputs, and its initial state.

    Raises:
        InputError: as :func:`iteration_of`.
    """
    iteration = iteration_of(model, h)
    if iteration is None:
        map_of_states: Any = model
        return map_of_states, h
    return iteration.step, iteration.h0
