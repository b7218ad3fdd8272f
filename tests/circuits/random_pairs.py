"""Exchanges drawn without any strategy, to try the engine and the programs on."""

from __future__ import annotations

import torch

from loopinterp.circuits.interchange_pairs import InterchangePairs


def random_pairs(
    inputs: torch.Tensor, *, n_loops: int, count: int, sites: int = 1, seed: int = 0
) -> InterchangePairs:
    """Any base, source, positions and loops; the donor's loop need not be the base's."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, (count, *shape), generator=generator)

    return InterchangePairs(
        inputs=inputs,
        asked=torch.ones_like(inputs, dtype=torch.bool),
        n_loops=n_loops,
        base=drawn(len(inputs)),
        source=drawn(len(inputs)),
        positions=drawn(inputs.shape[1], sites),
        loop=drawn(n_loops + 1),
        source_loop=drawn(n_loops + 1),
    )
