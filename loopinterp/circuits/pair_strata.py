"""What the pairs of an exchange are sorted by: token, place and loop, and a task's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.interchange_pairs import Stratum
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.rasp.program import LoopProgram

TOKEN, LEFT, WHEN, WHERE = "token", "left token", "loop", "position"
BOTH = "token and left token"
SOURCE_LOOP = "loop of the source"
SOURCE_LOOPS = ("the same", "an earlier one", "a later one")
SECOND = "second interchange"
SECONDS = ("none", "at the same position", "at another position")
THIRDS = ("first third", "second third", "last third")
CHAINS = ("0", "1", "2 or 3", "4 to 7", "8 or more")
_FIRST = torch.tensor([1, 2, 4, 8])


def strata_of(pairs: InterchangePairs, program: LoopProgram) -> dict[str, Stratum]:
    """Strata of pairs of a program's inputs: those that every task has, and the task's own.

    Every task has the token, the left token, both, when and where, whether the source is of the
    same loop, and whether there is a second interchange; additions also the chains. Pairs of
    several positions count by the first.
    """
    tokens, position = program.inputs, pairs.positions[:, 0]
    own, left = pairs.tokens
    both = own * len(tokens) + left
    kinds = both.unique()
    alone = position == 0  # nothing stands to the left of the first
    before, into = ((x - 1).clamp(min=0) for x in (pairs.loop, position))
    names = [f"{tokens[k // len(tokens)]} after {tokens[k % len(tokens)]}" for k in kinds.tolist()]
    return {
        TOKEN: Stratum(tuple(tokens), own),
        LEFT: Stratum(tuple(tokens), left.masked_fill(alone, -1)),
        BOTH: Stratum(tuple(names), torch.searchsorted(kinds, both).masked_fill(alone, -1)),
        WHEN: Stratum(THIRDS, 3 * before // max(pairs.n_loops - 1, 1)),
        WHERE: Stratum(THIRDS, 3 * into // max(pairs.inputs.shape[1] - 1, 1)),
        **_history(pairs),
        **(_chains(pairs) if program.task == "addition" else {}),
    }


def _history(pairs: InterchangePairs) -> dict[str, Stratum]:
    """The loop of the source, and the second interchange, where they are not all alike."""
    strata = {}
    later = pairs.source_loop - pairs.loop
    if bool(later.any()):
        codes = torch.where(later < 0, 1, torch.where(later > 0, 2, 0))
        strata[SOURCE_LOOP] = Stratum(SOURCE_LOOPS, codes)
    if pairs.second is not None and bool(pairs.second.made.any()):
        elsewhere = pairs.second.position != pairs.positions[:, 0]
        strata[SECOND] = Stratum(SECONDS, torch.where(pairs.second.made, 1 + elsewhere.long(), 0))
    return strata


def _chains(pairs: InterchangePairs) -> dict[str, Stratum]:
    """Length of the chain of propagating bits that feeds the carry, and of that it feeds."""
    task, position = Addition(), pairs.positions[:, 0]
    before = task.chain_length_in(pairs.inputs)[pairs.base, position]
    ends = ~task.propagate(pairs.inputs)
    place = torch.arange(ends.shape[1])
    first_end = torch.where(
        ends[pairs.base] & (place >= position[:, None]), place, ends.shape[1]
    ).amin(1)
    return {
        "chain before": Stratum(CHAINS, torch.bucketize(before, _FIRST, right=True)),
        "chain behind": Stratum(CHAINS, torch.bucketize(first_end - position, _FIRST, right=True)),
    }
