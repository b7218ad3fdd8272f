r"""Pairs of additions for interchange interventions, placed relative to the carry's front.

A pair (base, source) has opposite carries into one bit i. After ``loop`` loops, the state of the
model at bit i is taken from the source and put into the base run. What that should do depends on
where the front of resolved carries is at that loop, so each pair is drawn for one of six places:

==================== ==================================================================
ahead                bit i is not resolved yet, in neither run
at                   bit i is resolved, bit i + 1 is not
one behind           bit i + 1 is resolved, bit i + 2 is not
two or more behind   bit i + 2 is resolved
planted ahead        bit i is not resolved in the base, but it is in the source
erased behind        bits i .. i + 2 are resolved in the base; in the source bit i is not
==================== ==================================================================

(In the first four, base and source are in the same place.) In every pair bits i, i + 1 and i + 2
propagate and bits i and above are the same in base and source, so that whatever the swap changes
above i it changes by the carry.

Where the front is, is measured on the model itself: a bit is *resolved* from the first loop on from
which the model's output there is right, in the input and in its twin (the same input with the
opposite deciding bit, so with the opposite carry), and stays right to the end. The twin matters: a
model that answers "no carry" where it does not know yet is right half of the time. A model that
answers wrongly has no front of its own; for it the front of one position a loop is taken, and
the pairs say so.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.circuits.runs import device_of, outputs
from loopinterp.circuits.swaps import Swaps
from loopinterp.errors import InputError
from loopinterp.tasks.addition import Addition, draw_bits
from loopinterp.tasks.sampling import coins
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel

PLACES = (
    "ahead",
    "at",
    "one behind",
    "two or more behind",
    "planted ahead",
    "erased behind",
)
RUN_ON = 3
"""Bits from i on that propagate in every pair."""

MIN_SOLVED = 0.5
"""Least fraction of candidates a model must solve for its own front to be used."""


@dataclass(frozen=True)
class SwapPairs(Swaps):
    """Pairs (base, source) of additions; the swapped position is that of bit i.

    Attributes:
        carry: The carry into bit i in the base; in the source it is ``1 - carry``.
        measured: Whether the front is the model's own; if not it is one position a loop.
        solved: Fraction of candidates that the model answers right, twin included.
    """

    carry: Int[Tensor, " pair"]
    measured: bool
    solved: float

    ARRAYS: ClassVar[tuple[str, ...]] = (*Swaps.ARRAYS, "carry")


def swap_pairs(
    model: LoopedModel | Any,
    *,
    n: int = 24,
    per_place: int = 96,
    seed: int = 0,
    max_chain: int = 9,
) -> SwapPairs:
    """Draw pairs for every place relative to the front, as many for each as the model allows.

    Args:
        model: The model whose front is measured (pairs format: BOS, then one token a bit).
        n: Bits of each operand.
        per_place: Pairs for each of :data:`PLACES`. A place that the model does not have (one
            that resolves all bits at once has no "ahead") stays empty.
        seed: Seed of the pairs.
        max_chain: Greatest distance between bit i and the bit that decides its carry.

    Raises:
        InputError: too few bits for the chains, or a model for which no place exists at all.
    """
    _check_sizes(n, max_chain)
    generator = torch.Generator().manual_seed(seed)
    device = device_of(model)
    need = [per_place] * len(PLACES)
    kept: list[SwapPairs] = []
    measured, solved = True, 0.0
    for attempt in range(4):
        drawn = _draw(n, need, max_chain, generator)
        resolved, right = _resolved(model, drawn, n, device)
        if attempt == 0:
            solved = float(right.float().mean())
            measured = solved >= MIN_SOLVED
        if not measured:
            resolved, right = drawn.one_position_a_loop(), torch.ones_like(right)
        loop, possible = _choose_loops(drawn.place, resolved, n + 1, generator)
        pairs = drawn.pairs(loop, n, measured, solved)[possible & right]
        pairs = pairs[_first_of_each(pairs.place, need)]
        kept.append(pairs)
        found = [int((pairs.place == p).sum()) for p in range(len(PLACES))]
        # A place of which a whole round has none is one that this model does not have.
        need = [k - f if f else 0 for k, f in zip(need, found)]
        if not any(need):
            break
    joined = _join(kept)
    if not len(joined):
        raise InputError(
            "model",
            expected="an answer that takes some loops to be resolved",
            given="no bit of any pair that is resolved within T(n) loops",
            fix="Pass a trained model, more bits, or shorter chains.",
        )
    return joined.to(device)


@dataclass(frozen=True)
class _Candidates:
    """Pairs before their loops are chosen; bits [candidate, bit] of the operands of each input."""

    base: tuple[Tensor, Tensor]
    source: tuple[Tensor, Tensor]
    bit: Tensor
    place: Tensor
    carry: Tensor
    distance: Tensor
    """Bits from the deciding one to bit i, in the base and in the source [candidate, 2]."""

    def one_position_a_loop(self) -> Tensor:
        """Loops at which bits i, i + 1, i + 2 are resolved by that front [candidate, 2, bit]."""
        return self.distance[:, :, None] + torch.arange(RUN_ON)

    def pairs(self, loop: Tensor, n: int, measured: bool, solved: float) -> SwapPairs:
        task = Addition()
        each = torch.full_like(self.bit, n)
        base = task.from_bits(*self.base, each)
        return SwapPairs(
            base=base.inputs,
            source=task.from_bits(*self.source, each).inputs,
            position=self.bit + task.offset,
            loop=loop,
            place=self.place,
            carry=self.carry,
            scored=base.targets != IGNORE,
            n_loops=task.n_loops(n),
            measured=measured,
            solved=solved,
        )


def _draw(n: int, need: list[int], max_chain: int, generator: torch.Generator) -> _Candidates:
    """A few more candidates than are needed of each place."""
    counts = torch.tensor([k + k // 4 + 4 if k else 0 for k in need])
    place = torch.arange(len(PLACES)).repeat_interleave(counts)
    k = len(place)

    def integers(low: Tensor, high: Tensor) -> Tensor:
        return low + (torch.rand(k, generator=generator) * (high - low + 1)).long()

    least = torch.where(place == PLACES.index("ahead"), 2, 1)
    near = integers(least, torch.full_like(place, max_chain))
    planted, erased = (place == PLACES.index(p) for p in ("planted ahead", "erased behind"))
    # The member that is resolved has the shorter chain; in "erased" by the bits that run on.
    gap = torch.where(erased, RUN_ON, 1)
    crossed = planted | erased
    near = torch.where(crossed, integers(torch.ones_like(near), max_chain - gap), near)
    far = torch.where(crossed, integers(near + gap, torch.full_like(near, max_chain)), near)
    distance = torch.stack([torch.where(planted, far, near), torch.where(planted, near, far)], 1)
    bit = integers(torch.full_like(place, max_chain), torch.full_like(place, n - RUN_ON))
    carry = coins(0.5, (k,), generator).long()

    index = torch.arange(n)
    shared = draw_bits("uniform", k, n, generator)
    _propagate(*shared, (index >= bit[:, None]) & (index < bit[:, None] + RUN_ON))
    members = []
    for member, value in ((0, carry), (1, 1 - carry)):
        below = draw_bits("uniform", k, n, generator)
        a, b = (torch.where(index < bit[:, None], x, y) for x, y in zip(below, shared))
        start = (bit - distance[:, member])[:, None]
        _propagate(a, b, (index > start) & (index < bit[:, None]))
        members.append(tuple(torch.where(index == start, value[:, None], x) for x in (a, b)))
    return _Candidates(members[0], members[1], bit, place, carry, distance)


def _propagate(a: Tensor, b: Tensor, where: Tensor) -> None:
    b[where] = 1 - a[where]


def _resolved(
    model: LoopedModel | Any, drawn: _Candidates, n: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First loop from which bits i .. i + 2 are right in each member and its twin, to the end.

    Returns:
        The loops [candidate, member, bit], and whether all of them are right at the end.
    """
    task = Addition()
    each = torch.full_like(drawn.bit, n)
    rows = torch.arange(len(each))
    watched = (drawn.bit + task.offset)[:, None] + torch.arange(RUN_ON)
    members, solved = [], torch.ones(len(each), dtype=torch.bool)
    for member, (a, b) in enumerate((drawn.base, drawn.source)):
        start = drawn.bit - drawn.distance[:, member]
        last = torch.zeros(len(each), RUN_ON, dtype=torch.long)
        for flip in (0, 1):
            a2, b2 = a.clone(), b.clone()
            a2[rows, start] ^= flip
            b2[rows, start] ^= flip
            batch = task.from_bits(a2, b2, each)
            read = outputs(model, batch.inputs.to(device), task.n_loops(n)).cpu()
            wrong = (read != batch.targets)[:, rows[:, None], watched]
            loops = torch.arange(1, len(wrong) + 1)[:, None, None]
            last = torch.maximum(last, (wrong * loops).amax(0))
            solved &= ~wrong[-1].any(-1)
        members.append(last)
    return torch.stack(members, 1), solved


def _choose_loops(
    place: Tensor, resolved: Tensor, n_loops: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A loop drawn evenly from those at which each candidate is in its place; is there one?"""
    base, source = resolved[:, 0], resolved[:, 1]
    early, late = torch.minimum(base, source), torch.maximum(base, source)
    first, end = torch.ones_like(place), torch.full_like(place, n_loops - 1)
    spans = [
        (first, early[:, 0]),
        (late[:, 0], early[:, 1]),
        (late[:, 1], early[:, 2]),
        (late[:, 2], end),
        (source[:, 0], base[:, 0]),
        (base[:, 2], source[:, 0]),
    ]
    low = torch.stack([span[0] for span in spans], 1).gather(1, place[:, None]).squeeze(1)
    high = torch.stack([span[1] for span in spans], 1).gather(1, place[:, None]).squeeze(1)
    low, high = torch.maximum(low, first), torch.minimum(high, end)
    drawn = torch.rand(len(place), generator=generator)
    loop = low + (drawn * (high - low).clamp(min=1)).long()
    return loop, high > low


def _first_of_each(place: Tensor, need: list[int]) -> Tensor:
    """Indices of the first ``need[p]`` pairs of each place."""
    chosen = [(place == p).nonzero().squeeze(1)[:k] for p, k in enumerate(need)]
    return torch.cat(chosen)


def _join(parts: list[SwapPairs]) -> SwapPairs:
    arrays = {name: torch.cat([getattr(p, name) for p in parts]) for name in SwapPairs.ARRAYS}
    return dataclasses.replace(parts[0], **arrays)


def _check_sizes(n: int, max_chain: int) -> None:
    if not RUN_ON < max_chain <= n - RUN_ON:
        raise InputError(
            "max_chain",
            expected=f"{RUN_ON + 1}..{n - RUN_ON}, for {RUN_ON} more bits to fit into n={n}",
            given=str(max_chain),
            fix="Pass a larger n, or another max_chain.",
        )
