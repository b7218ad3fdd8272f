"""Additions in matched pairs, sampled so that every chain length has equally many carries.

The chain length of a carry is the number of positions it travels: from the bit that decides it
(which generates or kills) to the position it enters. That is one more than the propagating
positions it passes (:meth:`Addition.chain_length_in`). Information that moves one position a
loop brings a carry of chain length d after d loops, no sooner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.addition import PROPAGATE_PROBABILITIES, Addition

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_READ = {
    "carry in": Addition.carry_in,
    "carry out": Addition.carries,
    "generate": Addition.generate,
    "propagate": Addition.propagate,
    "sum": Addition.targets,
}
VARIABLES = tuple(_READ)
"""Variables of an addition at each position, in the order of :attr:`ChainSample.variables`."""

_LONG_SHARE = 0.6


@dataclass(frozen=True, repr=False)
class ChainSample(ShortRepr):
    """Carries of every chain length, from additions in matched pairs.

    A pair differs only in that every generating position of one kills in the other. So all
    chains keep their length and all their carries flip: each chain length has exactly as many
    carries of 0 as of 1, and a model that cannot see the deciding bit sees no difference.

    Attributes:
        inputs: Model inputs; rows 2k and 2k + 1 are a pair.
        row: Row of each carry in ``inputs``, by chain length, from 1 on; samples 2k and 2k + 1 are
            a pair.
        pos: Position it enters.
        variables: Class of every variable of :data:`VARIABLES` there.
    """

    inputs: Tensor
    row: Int[Tensor, "chain sample"]
    pos: Int[Tensor, "chain sample"]
    variables: Int[Tensor, "variable chain sample"]

    @property
    def carry(self) -> Int[Tensor, "chain sample"]:
        """The carry into each position."""
        return self.variables[VARIABLES.index("carry in")]

    def joined(self, other: ChainSample) -> ChainSample:
        """Both, the samples of the other after those of this one."""
        return ChainSample(
            inputs=torch.cat([self.inputs, other.inputs]),
            row=torch.cat([self.row, other.row + len(self.inputs)], dim=-1),
            pos=torch.cat([self.pos, other.pos], dim=-1),
            variables=torch.cat([self.variables, other.variables], dim=-1),
        )

    def to(self, device: torch.device | str) -> ChainSample:
        names = ("inputs", "row", "pos", "variables")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def sample_chains(
    task: Addition, n: int, *, max_chain: int, n_pairs: int, generator: torch.Generator
) -> ChainSample:
    """Draw additions until each chain length from 1 to ``max_chain`` has ``n_pairs`` pairs.

    Each addition has one chain at a random place, most of length ``max_chain``, the others
    of any length. Its other bits are the propagate-enriched mix of training, or runs of all
    lengths alike. No pair gives more than one carry to a chain length, and up to half of the
    carries of each are read where the chain ends. Carries whose chain runs back to bit 0 are left
    out: nothing decides them, they are 0 always, and they inflate accuracy.

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
    drawn = [_draw_pairs(task, n, max_chain, n_pairs, generator)]
    while True:  # ends: in each round every chain length has a fair chance to occur
        drawn.append(_draw_pairs(task, n, max_chain, n_pairs, generator))
        inputs = torch.cat(drawn)
        length = task.chain_length_in(inputs[::2]) + 1
        length = length.masked_fill(task.chain_in_reaches_start(inputs[::2]), 0)
        found = [int((length == chain).any(1).sum()) for chain in range(1, max_chain + 1)]
        if min(found) >= n_pairs:
            break
    ends = ~task.propagate(inputs[::2])
    score = torch.rand(length.shape, generator=generator, dtype=torch.float32)
    places = [_pick(length == d, ends, score, n_pairs) for d in range(1, max_chain + 1)]
    base, pos = (torch.stack(part) for part in zip(*places))
    row = torch.stack([2 * base, 2 * base + 1], dim=2).flatten(1)
    pos = pos.repeat_interleave(2, dim=1)
    used, row = torch.unique(row, return_inverse=True)
    inputs = inputs[used]
    variables = torch.stack([read(task, inputs).long()[row, pos] for read in _READ.values()])
    return ChainSample(inputs, row, pos, variables)


def _pick(
    here: Bool[Tensor, "pair pos"],
    ends: Bool[Tensor, "pair pos"],
    score: Float[Tensor, "pair pos"],
    n_pairs: int,
) -> tuple[Int[Tensor, " chosen"], Int[Tensor, " chosen"]]:
    """One random place in each of ``n_pairs`` pairs, half of them where the chain ends if it can.

    Long chains seldom end just there: without a preference nearly all places would propagate.
    """
    best = (score + (here & ends)).masked_fill(~here, -1.0)
    value, pos = best.max(dim=1)
    rows = here.any(1).nonzero()[:, 0]
    rows = rows[score[rows, 0].argsort()]
    at_end = value[rows] >= 1
    first, others = rows[at_end], rows[~at_end]
    n_first = min(len(first), max(n_pairs // 2, n_pairs - len(others)))
    chosen = torch.cat([first[:n_first], others[: n_pairs - n_first]])
    return chosen, pos[chosen]


def _draw_pairs(
    task: Addition, n: int, max_chain: int, n_pairs: int, generator: torch.Generator
) -> Tensor:
    """Inputs in matched pairs, [2 * n_pairs, pos, ...]: each base, then its partner."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float32)

    index = torch.arange(n)
    which = (uniform(n_pairs, 1) * len(PROPAGATE_PROBABILITIES)).long()
    enriched = uniform(n_pairs, n) < torch.tensor(PROPAGATE_PROBABILITIES)[which]
    step = 1 + (uniform(n_pairs, n) * (max_chain + 1)).long()
    deciders = (step.cumsum(1) - 1 - (uniform(n_pairs, 1) * step[:, :1]).long()).clamp_max(n)
    even = torch.ones(n_pairs, n + 1, dtype=torch.bool).scatter(1, deciders, False)[:, :n]
    propagates = torch.where(uniform(n_pairs, 1) < 0.5, enriched, even)

    is_long = uniform(n_pairs, 1) < _LONG_SHARE
    stops = ~is_long | (uniform(n_pairs, 1) < 0.5)
    shorter = (uniform(n_pairs, 1) * max_chain).long()
    length = torch.where(is_long, max_chain - stops.long(), shorter)
    start = (uniform(n_pairs, 1) * (n - 1 - length)).long()
    inside = (index > start) & (index <= start + length)
    decides = (index == start) | (stops & (index == start + length + 1))
    propagates = (propagates | inside) & ~decides

    a = (uniform(n_pairs, n) < 0.5).long()
    b = torch.where(propagates, 1 - a, a)
    a, b = (torch.stack([x, x ^ ~propagates], dim=1).flatten(0, 1) for x in (a, b))
    return task.from_bits(a, b, torch.full((2 * n_pairs,), n)).inputs


def _check(task: Addition, n: int, max_chain: int, n_pairs: int) -> None:
    if not isinstance(task, Addition):
        raise InputError(
            "task of the carry study",
            expected="the addition task",
            given=getattr(task, "name", type(task).__name__),
            fix="Only additions have carries; use probe_study for other tasks.",
        )
    fix = f"It must fit in n = {n} bits: pass a shorter max_chain or a larger n."
    check_integer("max_chain", max_chain, least=1, most=n - 2, fix=fix)
    check_integer("n_pairs", n_pairs, least=1)
