"""TRM of the package, tiny and random; its own forward is called as HRM's."""

from __future__ import annotations

from typing import Any

import torch

from loopinterp.adapters.plain.hrm import TinyRecursiveReasoningModel_ACTV1
from tests.adapters.published.hrm import native, segments

__all__ = ["native", "segments", "tiny"]


def tiny(seed: int = 0, **settings: Any) -> TinyRecursiveReasoningModel_ACTV1:
    """A random one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyRecursiveReasoningModel_ACTV1({"L_cycles": 2} | settings).eval()
