"""What a run is given, checked where it enters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.models.positions import check_length

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig


def check_inputs(
    inputs: Tensor, config: LoopedTransformerConfig, device: torch.device, position_offset: int
) -> None:
    """Raise unless a model of this configuration can read the inputs."""
    _check_shape(inputs, config)
    if inputs.device != device:
        raise InputError(
            "inputs",
            expected=f"a tensor on {device}, where the model is",
            given=str(inputs.device),
            fix=f"Move it: inputs.to({str(device)!r}).",
        )
    if config.d_vocab is not None and inputs.numel():
        low, high = int(inputs.min()), int(inputs.max())
        if low < 0 or high >= config.d_vocab:
            raise InputError(
                "inputs",
                expected=f"tokens from 0 to {config.d_vocab - 1}",
                given=f"tokens from {low} to {high}",
                fix="Use the task that the model was trained on, or a larger d_vocab.",
            )
    if config.positions == "absolute" and config.n_ctx is not None:
        check_length(inputs.shape[1], config.n_ctx, "sequence length")
    if position_offset and config.positions != "abacus":
        raise InputError(
            "position_offset",
            expected=f"0 with positions={config.positions!r}, which it does not move",
            given=str(position_offset),
            fix="Leave it out.",
        )


def _check_shape(inputs: Any, config: LoopedTransformerConfig) -> None:
    is_tensor = isinstance(inputs, torch.Tensor)
    if config.token_input:
        expected = "tokens [batch, pos], integers"
        whole = is_tensor and not inputs.is_floating_point() and inputs.dtype != torch.bool
        fits = whole and inputs.dim() == 2
    else:
        expected = f"features [batch, pos, {config.d_features}], floats"
        vectors = is_tensor and inputs.dim() == 3 and inputs.shape[-1] == config.d_features
        fits = vectors and inputs.is_floating_point()
    if not fits or inputs.shape[1] == 0:
        given = (
            f"{tuple(inputs.shape)} of {inputs.dtype}"
            if is_tensor
            else f"a {type(inputs).__name__}"
        )
        raise InputError(
            "inputs",
            expected=expected,
            given=given,
            fix="Give what the task's sampler gives: task.sample(...).inputs.",
        )


def check_state(state: Tensor, e: Tensor) -> Tensor:
    """The state, unless its shape or type is not that of the embedded input."""
    if state.shape != e.shape or state.dtype != e.dtype:
        raise InputError(
            "state",
            expected=f"shape {tuple(e.shape)} of {e.dtype}",
            given=f"{tuple(state.shape)} of {state.dtype}",
            fix="A state has the shape [batch, pos, d_model] of its input.",
        )
    return state


def loop_span(start: int, stop: int | None, n_loops: int, state: Tensor | None) -> range:
    """The loops to run, out of ``n_loops``; beginning with a later one takes a state.

    Example:
        >>> loop_span(2, None, 5, torch.zeros(1, 1, 8))
        range(2, 5)
    """
    stop = n_loops if stop is None else check_integer("stop_at_loop", stop)
    check_integer("start_at_loop", start)
    if not 0 <= start <= stop <= n_loops:
        raise InputError(
            "start_at_loop, stop_at_loop",
            expected=f"0 <= start <= stop <= n_loops = {n_loops}",
            given=f"{start}, {stop}",
            fix="Pass a larger n_loops, or loops inside the run.",
        )
    if start > 0 and state is None:
        raise InputError(
            "state",
            expected=f"the state before loop {start}",
            given="None",
            fix="Pass state=, from model(inputs, stop_at_loop=..., return_type='state').",
        )
    return range(start, stop)
