"""What sorts exchanges in the words of a task, beyond what sorts those of every task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.interchange_pairs import Stratum
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from loopinterp.circuits.interchange_pairs import InterchangePairs

CHAINS = ("0", "1", "2 or 3", "4 to 7", "8 or more")
_FIRST = torch.tensor([1, 2, 4, 8])


def strata_of(task: str) -> Callable[[InterchangePairs], Mapping[str, Stratum]]:
    """The function that sorts pairs of a task; it finds nothing for most of them.

    Example:
        >>> strata_of("copy")(None)
        {}
    """
    return {"addition": _addition}.get(task, lambda pairs: {})


def _addition(pairs: InterchangePairs) -> Mapping[str, Stratum]:
    """Length of the chain of propagating bits that feeds the carry, and of that it feeds."""
    task, position = Addition(), pairs.positions[:, 0]
    row = torch.arange(len(pairs))
    before = task.chain_length_in(pairs.inputs)[pairs.base][row, position]
    ends = ~task.propagate(pairs.inputs)
    after = torch.arange(ends.shape[1]) >= position[:, None]
    first_end = torch.where(ends[pairs.base] & after, torch.arange(ends.shape[1]), ends.shape[1])
    ahead = first_end.amin(1) - position
    return {
        "chain before": Stratum(CHAINS, torch.bucketize(before, _FIRST, right=True)),
        "chain behind": Stratum(CHAINS, torch.bucketize(ahead, _FIRST, right=True)),
    }
