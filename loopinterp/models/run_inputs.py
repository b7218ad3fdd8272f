"""What a run is given, checked where it enters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.models.positions import check_length

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig

TOKEN_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of token tensors: widening one of them loses nothing."""


def check_inputs(
    inputs: Tensor, config: LoopedTransformerConfig, device: torch.device, position_offset: int
) -> None:
    """Raise unless a model of this configuration can read the inputs."""
    _check_shape(inputs, config)
    need_examples(inputs)
    if inputs.device != device:
        raise InputError(
            "inputs",
            expected=f"a tensor on {device}, where the model is",
            given=str(inputs.device),
            fix=f"Move it: inputs.to({str(device)!r}).",
        )
    if config.d_vocab is not None:
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
        expected = "tokens [batch, pos], integers (uint8 or int8 to int64)"
        fits = is_tensor and inputs.dtype in TOKEN_TYPES and inputs.dim() == 2
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


def need_examples(inputs: Any) -> None:
    """Raise on a batch without examples: a run has one at least, and so has every study."""
    if isinstance(inputs, torch.Tensor) and inputs.dim() and not len(inputs):
        raise InputError(
            "inputs",
            expected="at least one example",
            given="an empty batch",
            fix="Leave empty batches out.",
        )


def check_ends(n_loops: Tensor, inputs: Any) -> Tensor:
    """Numbers of loops, one for each example, 0 or more.

    Raises:
        InputError: If shape, type, device or range is wrong.
    """
    batch, device = len(inputs), inputs.device
    if (
        n_loops.dtype not in TOKEN_TYPES
        or tuple(n_loops.shape) != (batch,)
        or n_loops.device != device
    ):
        raise InputError(
            "n_loops",
            expected=f"an integer tensor [{batch}] on {device}",
            given=f"{n_loops.dtype} {list(n_loops.shape)} on {n_loops.device}",
            fix="Pass n_loops=batch.n_loops.",
        )
    check_integer("n_loops", int(n_loops.min()), least=0, fix="Check T(n).")
    return n_loops


def check_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point type, or its name; None stays None.

    Raises:
        InputError: If it is none.

    Example:
        >>> check_dtype("bfloat16"), check_dtype(torch.float32)
        (torch.bfloat16, torch.float32)
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise InputError(
        "dtype",
        expected="a floating-point type of PyTorch, or its name",
        given=repr(dtype),
        fix="Pass e.g. dtype=torch.float32, or dtype='float32'.",
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
