"""Reading the states of any looped model at chosen places, without keeping the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.protocol import bind

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel


def states_at(
    model: LoopedModel,
    inputs: Tensor,
    row: Int[Tensor, "*place"],
    pos: Int[Tensor, "*place"],
    *,
    loops: Sequence[int],
    batch_size: int = 256,
) -> tuple[Float[Tensor, "loop *place d_model"], Float[Tensor, "*place d_model"]]:
    """States after given numbers of loops, and the embedding, at given places only.

    Args:
        model: Any looped model; no gradients are kept.
        inputs: Its inputs, on its device.
        row: Row of ``inputs`` of each place.
        pos: Position of each place.
        loops: Numbers of loops, increasing; 0 is the initial state.
        batch_size: Inputs that are run at a time.

    Returns:
        States [loop, *place, d_model] and embeddings ``e`` [*place, d_model].
    """
    steps = check_loops(loops)
    states: Tensor | None = None
    embedding: Tensor | None = None
    with torch.no_grad():
        for start in range(0, len(inputs), batch_size):
            here = (row >= start) & (row < start + batch_size)
            r, p = row[here] - start, pos[here]
            iteration = bind(model, inputs[start : start + batch_size])
            e, h = iteration.e, iteration.h0
            if states is None or embedding is None:
                states = h.new_empty(len(steps), *row.shape, h.shape[-1])
                embedding = e.new_empty(*row.shape, e.shape[-1])
            embedding[here] = e[r, p]
            for loop in range(steps[-1] + 1):
                if loop:
                    h = iteration.step(h)
                if loop in steps:
                    states[steps.index(loop), here] = h[r, p]
    if states is None or embedding is None:
        raise InputError("inputs", expected="at least one", given="none", fix="Draw more inputs.")
    return states, embedding


def check_loops(loops: Sequence[int]) -> list[int]:
    """Numbers of loops as a list.

    Raises:
        InputError: If they are not increasing integers from 0 on.
    """
    steps = list(loops)
    if not steps or steps[0] < 0 or any(b <= a for a, b in pairwise(steps)):
        raise InputError(
            "loops",
            expected="numbers of loops, increasing, 0 or more",
            given=repr(steps[:12]),
            fix="Pass e.g. loops=range(0, 37).",
        )
    return steps


def device_of(model: Any) -> torch.device:
    """Where a model's weights lie; the CPU if it has none."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if parameters is not None else None
    return first.device if first is not None else torch.device("cpu")


def describe_model(model: Any) -> dict[str, Any] | str:
    """A model's configuration for a result's provenance, or the name of its class."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return to_dict() if to_dict is not None else type(model).__name__
