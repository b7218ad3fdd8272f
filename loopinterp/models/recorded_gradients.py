"""Gradients where they are needed, whatever was switched off before."""

from __future__ import annotations

import torch

from loopinterp.errors import InputError


def recording_gradients() -> torch.enable_grad:
    """The context in which what needs gradients runs, also under ``torch.no_grad()``.

    Raises:
        InputError: Under ``torch.inference_mode()``, whose tensors can never have gradients.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with torch.no_grad(), recording_gradients():
        ...     (2 * x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    if torch.is_inference_mode_enabled():
        raise InputError(
            "gradients",
            expected="a place where PyTorch records them",
            given="a call under torch.inference_mode(), whose tensors never have any",
            fix="Call it outside; torch.no_grad() does no harm.",
        )
    return torch.enable_grad()
