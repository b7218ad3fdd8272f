"""What a run is given, checked where it enters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import MOST_LOOPS, InputError, check_integer
from loopinterp.models.grid_positions import grid_width
from loopinterp.models.positions import check_length

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig

TOKEN_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of token tensors: widening one of them loses nothing."""


def need_weights(device: torch.device) -> None:
    """Raise where weights lie on the meta device, which keeps shapes and no numbers."""
    if device == torch.device("meta"):
        raise InputError(
            "model",
            expected="one whose weights hold numbers",
            given="one on the meta device",
            fix="Build it on another, or model.to_empty(device='cpu') and load its weights.",
        )


def check_inputs(
    inputs: Tensor,
    config: LoopedTransformerConfig,
    device: torch.device,
    position_offset: int | Tensor,
    *,
    look: bool = True,
) -> None:
    """Raise unless a model of this configuration can read the inputs.

    Without ``look``, tokens and offsets are taken to be in range: to look at them on a GPU is to
    wait for it.
    """
    need_weights(device)
    if config.d_vocab is not None:
        _check_token_kind(inputs)
    else:
        vectors = isinstance(inputs, torch.Tensor) and inputs.dim() == 3
        fits = vectors and inputs.shape[-1] == config.d_features and inputs.is_floating_point()
        _check_kind(inputs, fits, f"features [batch, pos, {config.d_features}], floats")
    if inputs.device != device:
        raise InputError(
            "inputs",
            expected=f"a tensor on {device}, where the model is",
            given=str(inputs.device),
            fix=f"Move it: inputs.to({str(device)!r}).",
        )
    if config.d_vocab is not None and look:  # which on the meta device nobody can
        fix = "Use the task that the model was trained on, or a larger d_vocab."
        _check_range(inputs, config.d_vocab, fix)
    if config.positions == "absolute" and config.n_ctx is not None:
        check_length(inputs.shape[1], config.n_ctx, "sequence length")
    if config.positions == "grid":
        grid_width(inputs.shape[1])
    _check_offset(position_offset, inputs, config.positions, look)


def _check_offset(offset: int | Tensor, inputs: Tensor, positions: str, look: bool) -> None:
    """Raise unless an offset is one from 0 on, or one for each example, where it has an effect."""
    if isinstance(offset, torch.Tensor):
        check_each("position_offset", offset, inputs, "Pass one integer for all, or one for each.")
    if positions == "abacus" and (look or not isinstance(offset, torch.Tensor)):
        least = int(offset.min()) if isinstance(offset, torch.Tensor) else offset
        check_integer("position_offset", least, least=0)
    elif positions != "abacus" and (isinstance(offset, torch.Tensor) or offset):
        expected = f"0 with positions={positions!r}, which it does not move"
        refuse({"position_offset": offset}, expected, "Leave it out.")


def check_tokens(inputs: Tensor, d_vocab: int, fix: str) -> None:
    """Raise unless the inputs are tokens of a vocabulary."""
    _check_token_kind(inputs)
    _check_range(inputs, d_vocab, fix)


def _check_token_kind(inputs: Tensor) -> None:
    fits = isinstance(inputs, torch.Tensor) and inputs.dtype in TOKEN_TYPES and inputs.dim() == 2
    _check_kind(inputs, fits, "tokens [batch, pos], integers (uint8 or int8 to int64)")


def _check_range(inputs: Tensor, d_vocab: int, fix: str) -> None:
    low, high = int(inputs.min()), int(inputs.max())
    if low < 0 or high >= d_vocab:
        raise InputError(
            "inputs",
            expected=f"tokens from 0 to {d_vocab - 1}",
            given=f"tokens from {low} to {high}",
            fix=fix,
        )


def _check_kind(inputs: Any, fits: bool, expected: str) -> None:
    if not fits or inputs.shape[1] == 0:
        a_tensor = isinstance(inputs, torch.Tensor)
        raise InputError(
            "inputs",
            expected=expected,
            given=spell(inputs) if a_tensor else f"a {type(inputs).__name__}",
            fix="Give what the task's sampler gives: task.sample(...).inputs.",
        )
    need_examples(inputs)


def spell(x: Tensor) -> str:
    """Shape and type of a tensor, for messages."""
    return f"{tuple(x.shape)} of {x.dtype}"


def refuse(given: Mapping[str, Any], expected: str, fix: str) -> None:
    """Raise on the first of some options that is given, not None, where it has no effect."""
    for name, value in given.items():
        if value is not None:
            raise InputError(name, expected=expected, given=repr(value), fix=fix)


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
    """Numbers of loops, one for each example, on its device; raise unless they can be run."""
    if not isinstance(inputs, torch.Tensor):
        return n_loops  # the inputs are refused where they are read
    need_examples(inputs)
    check_each("n_loops", n_loops, inputs, "Pass n_loops=batch.n_loops.")
    for end in n_loops.aminmax():
        check_integer("n_loops", int(end), least=0, far=MOST_LOOPS, fix="Check T(n).")
    return n_loops


def check_each(name: str, values: Tensor, inputs: Tensor, fix: str) -> None:
    """Raise unless there is one integer for each example, on its device."""
    wanted, device = (len(inputs),), inputs.device
    if values.dtype in TOKEN_TYPES and values.shape == wanted and values.device == device:
        return
    raise InputError(
        name,
        expected=f"an integer tensor {list(wanted)} on {device}",
        given=f"{values.dtype} {list(values.shape)} on {values.device}",
        fix=fix,
    )


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


def check_state(state: Tensor, e: Tensor, width: int) -> Tensor:
    """The state, unless its shape or type is not that of an embedded input's, of some width."""
    shape = (*e.shape[:-1], width)
    if state.shape != shape or state.dtype != e.dtype:
        raise InputError(
            "state",
            expected=f"shape {shape} of {e.dtype}",
            given=spell(state),
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


def check_logits(logits: Float[Tensor, batch * rest], after: str) -> None:
    """Raise if a model's answer is NaN: an argmax would take it for the likeliest.

    Args:
        logits: What is answered.
        after: Where, in words.

    Raises:
        InputError: NaN in some example; they are named.
    """
    bad = logits.isnan().flatten(1).any(1)
    if bool(bad.any()):
        raise InputError(
            f"logits {after}",
            expected="numbers",
            given=f"NaN in examples {bad.nonzero().flatten().tolist()[:8]} of {len(logits)}",
            fix="Run fewer loops, or check the model's weights and inputs.",
        )
