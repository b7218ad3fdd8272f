"""HRM of the package, tiny and random, and its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopinterp.adapters.plain.hrm import ACTWrapper, HierarchicalReasoningModel_ACTV1


def tiny(seed: int = 0, **settings: Any) -> HierarchicalReasoningModel_ACTV1:
    """A random one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HierarchicalReasoningModel_ACTV1(settings).eval()


def segments(
    model: ACTWrapper, tokens: Tensor, n_loops: int, *, puzzles: Tensor | None = None
) -> dict[str, Tensor]:
    """What the model's own forward says after so many slow cycles, in segments of ``H_cycles``.

    A number of loops that is no multiple of ``H_cycles`` is run as one segment of so many cycles.
    """
    if puzzles is None:
        puzzles = torch.zeros(len(tokens), dtype=torch.int32)
    batch = {"inputs": tokens, "puzzle_identifiers": puzzles}
    config, carry, outputs = model.inner.config, model.initial_carry(batch), {}
    cycles, most = config.H_cycles, config.halt_max_steps
    config.H_cycles = cycles if n_loops % cycles == 0 else n_loops
    config.halt_max_steps = n_loops  # or the run would begin anew
    try:
        for _ in range(n_loops // config.H_cycles):
            carry, outputs = model(carry, batch)
    finally:
        config.H_cycles, config.halt_max_steps = cycles, most
    return outputs


def native(
    model: ACTWrapper, tokens: Tensor, n_loops: int, *, puzzles: Tensor | None = None
) -> Tensor:
    """Logits of the model's own forward after so many slow cycles; the puzzle's prefix has none."""
    return segments(model, tokens, n_loops, puzzles=puzzles)["logits"]
