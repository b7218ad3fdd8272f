"""Whether the parts of a batch fit each other, and its task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import MOST_LOOPS, InputError

if TYPE_CHECKING:
    from torch import Tensor

_FIX = "Draw the batch with task.sample or task.encode, or give its parts these shapes and values."


def is_task(data: object) -> bool:
    """Whether it has a sampler, an oracle and T(n); a user's own need not have words."""
    parts = ("sample", "targets", "n_loops", "n_positions")
    return not isinstance(data, type) and all(callable(getattr(data, p, None)) for p in parts)


def check_shapes(batch: Any) -> None:
    """Raise unless the parts are tensors of one batch, on one device.

    Raises:
        InputError: inputs that are neither tokens ``[batch, pos]`` nor features ``[batch, pos,
            d_features]``, targets that are no integers ``[batch, pos]``, ``n`` or ``n_loops`` that
            are no integers ``[batch]``, parts on several devices, or a task that is none.
    """
    if batch.task is not None and not is_task(batch.task):
        raise _refused("task", "a task, or None", batch.task)
    inputs = batch.inputs
    tokens = _is_integer(inputs) and inputs.ndim == 2
    if not (tokens or (isinstance(inputs, torch.Tensor) and _is_features(inputs))):
        expected = "integers [batch, pos], or floats [batch, pos, d_features]"
        raise _refused("inputs", expected, inputs)
    n_examples, n_pos = inputs.shape[:2]
    shapes = {"targets": (n_examples, n_pos), "n": (n_examples,), "n_loops": (n_examples,)}
    for name, shape in shapes.items():
        part = getattr(batch, name)
        if not _is_integer(part) or part.shape != shape:
            raise _refused(name, f"integers of shape {list(shape)}, as the inputs have it", part)
        if part.device != inputs.device:
            raise InputError(
                f"{name} of a batch",
                expected=f"a tensor on {inputs.device}, where the inputs are",
                given=f"one on {part.device}",
                fix="Move the whole batch: batch.to(device).",
            )


def check_values(batch: Any, *, ignore: int) -> None:
    """Raise unless tokens, targets, lengths and loops are in their ranges.

    Raises:
        InputError: features that are not finite, a token or target below 0 (but ``ignore``) or
            beyond those of the batch's task, a length below 1, or loops that no run makes.
    """
    if not len(batch):
        return
    task, inputs, targets = batch.task, batch.inputs, batch.targets
    d_vocab, d_vocab_out = (getattr(task, name, None) for name in ("d_vocab", "d_vocab_out"))
    if inputs.is_floating_point():
        if not bool(inputs.isfinite().all()):
            raise _refused("inputs", "finite numbers", inputs)
    elif not _inside(inputs, 0, d_vocab):
        raise _refused("inputs", f"tokens{_range(d_vocab)}", inputs)
    if not _inside(targets[targets != ignore], 0, d_vocab_out):
        expected = f"classes{_range(d_vocab_out)}, or IGNORE ({ignore}) where nothing is asked"
        raise _refused("targets", expected, targets)
    if not _inside(batch.n, 1, None):
        raise _refused("n", "lengths of at least 1", batch.n)
    if not _inside(batch.n_loops, 0, MOST_LOOPS + 1):
        raise _refused("n_loops", f"numbers of loops in 0..{MOST_LOOPS}", batch.n_loops)


def _is_integer(part: object) -> bool:
    return isinstance(part, torch.Tensor) and not (
        part.is_floating_point() or part.is_complex() or part.dtype == torch.bool
    )


def _is_features(inputs: Tensor) -> bool:
    return inputs.ndim == 3 and inputs.is_floating_point()


def _inside(values: Tensor, least: int, end: int | None) -> bool:
    """Whether all are in ``least .. end - 1``."""
    if values.numel() == 0:
        return True
    low, high = (int(x) for x in values.aminmax())
    return least <= low and (end is None or high < end)


def _range(end: int | None) -> str:
    return " of 0 or more" if end is None else f" in 0..{end - 1}"


def _refused(name: str, expected: str, part: object) -> InputError:
    given = describe_tensor(part)
    return InputError(f"{name} of a batch", expected=expected, given=given, fix=_FIX)


def describe_tensor(values: object) -> str:
    """Dtype, shape and range of a tensor, in words; the type of anything else."""
    if not isinstance(values, torch.Tensor):
        return type(values).__name__
    ends = f" from {values.min().item()} to {values.max().item()}" if values.numel() else ""
    return f"{values.dtype} of shape {list(values.shape)}{ends}"
