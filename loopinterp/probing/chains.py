"""Additions in matched pairs, sampled so that every chain length has equally many carries.

The chain length of a carry is the number of positions it travels: from the bit that decides it
(which generates or kills) to the position it enters. That is one more than the propagating
positions it passes (:meth:`Addition.chain_length_in`). Information that moves one position a
loop brings a carry of chain length d after d loops, no sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.tasks.addition import PROPAGATE_PROBABILITIES, Addition

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

VARIABLES = ("carry in", "carry out", "generate", "propagate", "sum")
"""Variables of an addition at each position, in the order of :attr:`ChainSample.variables`."""

_LONG_SHARE = 0.75
_MAX_ROUNDS = 50


@dataclass(frozen=True)
class ChainSample:
    """Carries of every chain length, from additions in matched pairs.

    A pair differs only in that every generating position of one kills in the other. So all
    chains keep their length and all their carries flip: each chain length has exactly as many
    carries of 0 as of 1, and a model that cannot see the deciding bit sees no difference.

    Attributes:
        inputs: Model inputs; rows 2k and 2k + 1 are a pair.
        row: Row of each carry in ``inputs``; samples 2k and 2k + 1 are a pair.
        pos: Position it enters.
        chain_lengths: Chain length of each row of ``row`` and ``pos``.
        variables: Class of every variable of :data:`VARIABLES` there.
    """

    inputs: Tensor
    row: Int[Tensor, "chain sample"]
    pos: Int[Tensor, "chain sample"]
    chain_lengths: tuple[int, ...]
    variables: Int[Tensor, "variable chain sample"]

    @property
    def carry(self) -> Int[Tensor, "chain sample"]:
        """The carry into each position."""
        return self.variables[VARIABLES.index("carry in")]

    def to(self, device: torch.device | str) -> ChainSample:
        moved = (v.to(device) for v in (self.inputs, self.row, self.pos))
        return ChainSample(*moved, self.chain_lengths, self.variables.to(device))


def sample_chains(
    task: Addition, n: int, *, max_chain: int, n_pairs: int, generator: torch.Generator
) -> ChainSample:
    """Draw additions until each chain length from 1 to ``max_chain`` has ``n_pairs`` pairs.

    Each addition has one long run of propagating positions at a random place (three in four
    reach ``max_chain``), and otherwise the propagate-enriched mix of training. No pair gives more
    than one carry to a chain length. Carries whose chain runs back to bit 0 are left out:
    nothing decides them, they are 0 always, and they inflate accuracy.

    Args:
        task: The addition task, in either format.
        n: Bits of each operand.
        max_chain: Longest chain, at most ``n - 2``.
        n_pairs: Pairs for each chain length.
        generator: Source of randomness.

    Raises:
        InputError: If a chain of that length does not fit, or the task is no addition.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> sample = sample_chains(Addition(), 12, max_chain=6, n_pairs=10, generator=g)
        >>> sample.carry.float().mean(1).tolist()
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    """
    _check(task, n, max_chain, n_pairs)
    inputs, rows, positions = [], [], []
    missing = torch.full((max_chain,), n_pairs)
    for _ in range(_MAX_ROUNDS):
        drawn = _draw_pairs(task, n, max_chain, n_pairs, generator)
        found = _pick(task, drawn[::2], max_chain, generator)
        offset = sum(len(x) for x in inputs)
        for chain, (row, pos) in enumerate(found):
            keep = slice(0, int(missing[chain]))
            rows.append(torch.stack([torch.full_like(row, chain), offset + 2 * row], 1)[keep])
            positions.append(pos[keep])
            missing[chain] -= len(row[keep])
        inputs.append(drawn)
        if not missing.any():
            break
    else:
        raise InputError(
            "max_chain",
            expected="chains that occur often enough to be sampled",
            given=f"too few of lengths {(torch.nonzero(missing)[:, 0] + 1).tolist()}",
            fix="Use a shorter max_chain or a larger n.",
        )
    where, pos = torch.cat(rows), torch.cat(positions)
    order = where[:, 0].argsort(stable=True)
    base = where[order, 1].reshape(max_chain, n_pairs)
    pos = pos[order].reshape(max_chain, n_pairs).repeat_interleave(2, dim=1)
    row = torch.stack([base, base + 1], dim=2).flatten(1)
    return _describe(task, torch.cat(inputs), row, pos)


def _describe(task: Addition, inputs: Tensor, row: Tensor, pos: Tensor) -> ChainSample:
    """Keep the additions in use, and read every variable off them."""
    used, row = torch.unique(row, return_inverse=True)
    inputs = inputs[used]
    values = {
        "carry in": task.carry_in(inputs),
        "carry out": task.carries(inputs),
        "generate": task.generate(inputs).long(),
        "propagate": task.propagate(inputs).long(),
        "sum": task.targets(inputs),
    }
    variables = torch.stack([values[name][row, pos] for name in VARIABLES])
    return ChainSample(inputs, row, pos, tuple(range(1, len(row) + 1)), variables)


def _draw_pairs(
    task: Addition, n: int, max_chain: int, n_pairs: int, generator: torch.Generator
) -> Tensor:
    """Inputs in matched pairs, [2 * n_pairs, pos, ...]: each base, then its partner."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    probability = torch.tensor(PROPAGATE_PROBABILITIES)[
        (uniform(n_pairs, 1) * len(PROPAGATE_PROBABILITIES)).long()
    ]
    propagates = uniform(n_pairs, n) < probability
    is_long = uniform(n_pairs) < _LONG_SHARE
    short = (uniform(n_pairs) * max_chain).long()
    length = torch.where(is_long, max_chain - 1 + (uniform(n_pairs) < 0.5), short)
    start = (uniform(n_pairs) * (n - 1 - length)).long()
    index = torch.arange(n)
    propagates |= (index > start[:, None]) & (index <= (start + length)[:, None])
    propagates[torch.arange(n_pairs), start] = False
    a = (uniform(n_pairs, n) < 0.5).long()
    b = torch.where(propagates, 1 - a, a)
    pairs_a = torch.stack([a, torch.where(propagates, a, 1 - a)], dim=1).flatten(0, 1)
    pairs_b = torch.stack([b, torch.where(propagates, b, 1 - b)], dim=1).flatten(0, 1)
    return task.from_bits(pairs_a, pairs_b, torch.full((2 * n_pairs,), n)).inputs


def _pick(
    task: Addition, base: Tensor, max_chain: int, generator: torch.Generator
) -> list[tuple[Int[Tensor, " found"], Int[Tensor, " found"]]]:
    """For each chain length the additions that have one, and a random position of it in each."""
    length = task.chain_length_in(base) + 1
    length = length.masked_fill(task.chain_in_reaches_start(base), 0)
    score = torch.rand(length.shape, generator=generator)
    found = []
    for chain in range(1, max_chain + 1):
        here: Bool[Tensor, "batch pos"] = length == chain
        rows = here.any(1).nonzero()[:, 0]
        found.append((rows, score.masked_fill(~here, -1.0).argmax(1)[rows]))
    return found


def _check(task: Addition, n: int, max_chain: int, n_pairs: int) -> None:
    if not isinstance(task, Addition):
        raise InputError(
            "task of the carry study",
            expected="the addition task",
            given=getattr(task, "name", type(task).__name__),
            fix="Only additions have carries; use probe_study for other tasks.",
        )
    if not 1 <= max_chain <= n - 2:
        raise InputError(
            "max_chain",
            expected=f"1..{n - 2}, to fit in n = {n} bits",
            given=str(max_chain),
            fix="Pass a shorter max_chain or a larger n.",
        )
    if n_pairs < 1:
        raise InputError("n_pairs", expected=">= 1", given=str(n_pairs), fix="Pass n_pairs=64.")
