"""Exchanges drawn without any strategy, to try the engine and the programs on."""

from __future__ import annotations

import torch

from loopinterp.interventions.pairs import NO_LOOP, InterchangePairs, SecondInterchange


def random_pairs(
    inputs: torch.Tensor,
    *,
    n_loops: int,
    count: int,
    sites: int = 1,
    seed: int = 0,
    twice: bool = False,
) -> InterchangePairs:
    """Any base, source, positions and loops; the donor's loop need not be the base's.

    With ``twice``, half of the pairs have a second interchange: anywhere, not before the first.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, (count, *shape), generator=generator)

    loop = drawn(n_loops + 1)
    second = None
    if twice:
        later = loop + (torch.rand(count, generator=generator) * (n_loops - loop + 1)).long()
        has_second = torch.rand(count, generator=generator) < 0.5
        second = SecondInterchange(
            source=drawn(len(inputs)),
            position=drawn(inputs.shape[1]),
            loop=later.where(has_second, torch.tensor(NO_LOOP)),
            source_loop=drawn(n_loops + 1),
        )
    return InterchangePairs(
        inputs=inputs,
        asked=torch.ones_like(inputs, dtype=torch.bool),
        n_loops=n_loops,
        base=drawn(len(inputs)),
        source=drawn(len(inputs)),
        positions=drawn(inputs.shape[1], sites),
        loop=loop,
        source_loop=drawn(n_loops + 1),
        second=second,
    )
