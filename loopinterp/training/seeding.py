"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib

import torch

from loopinterp.errors import check_seed


def stream(seed: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose: streams of different purposes have nothing in common.

    Without this, the test data of seed 0 would be the training data of seed 0.

    Raises:
        InputError: If the seed is out of range.

    Example:
        >>> a, b = stream(0, "data"), stream(0, "evaluation")
        >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
        False
    """
    digest = hashlib.sha256(f"{purpose}:{check_seed(seed)}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
