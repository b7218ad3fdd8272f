r"""Exchanges in additions by where the front of resolved carries is.

==================== ==================================================================
ahead                bit i is not resolved yet, in neither run
at                   bit i is resolved in both, bit i + 1 is not in the base
one behind           bit i + 1 is resolved too, bit i + 2 is not
two or more behind   bit i + 2 is resolved too
planted ahead        bit i is not resolved in the base, but it is in the source
erased behind        bits i .. i + 2 are resolved in the base; in the source bit i is not
==================== ==================================================================

Where the front is, is measured on the model: a chain of k propagating bits is *resolved* from the
first loop on from which the model's answers behind such chains, if a carry comes through them,
are right and stay so. (Behind chains without a carry a model that answers "no carry" where it
does not know yet is right at once.) Logits that are alike are no right answer. A chain that the
model never gets right counts as resolved after k + 1 loops, the front of one position a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.comparison.pair_strategies import KIND, OTHER_VALUE
from loopinterp.core.errors import InputError, check_integer
from loopinterp.interventions.engine import answer, decided
from loopinterp.interventions.pairs import InterchangePairs, Stratum, draw_pairs, evenly_by_class
from loopinterp.models import bind, device_of
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch

PLACES = ("ahead", "at", "one behind", "two or more behind", "planted ahead", "erased behind")
PLACE = "place relative to the front"

_MOSTLY = 0.95
_TRIED = 16


@dataclass(frozen=True, kw_only=True)
class CarryFrontPairs:
    """Exchanges of a bit's state with an opposite carry into it, evenly over the six places.

    Attributes:
        per_place: Pairs for each place; one that the model does not have stays empty.
    """

    per_place: int = 96

    def __post_init__(self) -> None:
        check_integer("per_place", self.per_place, least=1)

    def __call__(
        self,
        model: LoopedModel | Any,
        programs: Sequence[LoopProgram],
        batch: Batch,
        generator: torch.Generator,
    ) -> InterchangePairs:
        """Choose pairs among additions.

        Raises:
            InputError: programs of another task, or no place that exists.
        """
        wrong = sorted({p.task for p in programs} - {"addition"})
        if wrong:
            raise InputError(
                "pairs",
                expected="programs of addition, whose carries have a front",
                given=f"programs of {', '.join(wrong)}",
                fix="Use SpreadPairs() for other tasks.",
            )
        task, last = Addition(), int(batch.n_loops.max())
        tokens, carry = batch.inputs, task.carry_in(batch.inputs)
        chain = task.chain_length_in(tokens)
        resolved = front(model, batch)[chain]
        most = _TRIED * self.per_place * len(PLACES)
        base, source = draw_pairs(len(batch), most, generator)
        loop = torch.randint(1, max(last, 2), base.shape, generator=generator)
        differs = (tokens[base] == tokens[source]) & (carry[base] != carry[source])
        differs &= batch.targets[base] != IGNORE
        differs[:, -2:] = False  # two more bits are looked at
        pair, position = differs.nonzero(as_tuple=True)
        place = _place(resolved, base[pair], source[pair], position, loop[pair])
        some = (place >= 0).nonzero().squeeze(1)
        if not len(some):
            raise InputError(
                "batch",
                expected="additions that differ in a carry, of at least 4 bits",
                given=f"{len(batch)} of {int(batch.n[0])} bits that do not",
                fix="Draw more, or longer ones, of the distribution 'propagate'.",
            )
        chosen = evenly_by_class(place[some], self.per_place * len(PLACES), generator)
        rows = some[chosen]
        return InterchangePairs.of(
            batch,
            base=base[pair[rows]],
            source=source[pair[rows]],
            positions=position[rows, None],
            loop=loop[pair[rows]],
            strata={
                KIND: Stratum((OTHER_VALUE,), torch.zeros_like(rows)),
                PLACE: Stratum(PLACES, place[rows]),
            },
        )


@torch.no_grad()
def front(model: LoopedModel | Any, batch: Batch) -> Int[Tensor, " chain"]:
    """The loop from which on a model's answers behind a chain of each length are right."""
    task, last = Addition(), int(batch.n_loops.max())
    bound, targets = bind(model, batch.inputs.to(device_of(model))), batch.targets
    logits = (bound.read(h, loop).cpu() for loop, h in bound.run(last))
    # Right answers after every loop, [loop, input, pos].
    right = torch.stack([(answer(x) == targets) & decided(x) for x in logits])
    carry, chain = task.carry_in(batch.inputs), task.chain_length_in(batch.inputs)
    loops = torch.arange(1, chain.shape[1] + 1)  # one position a loop
    for length in range(chain.shape[1]):
        here = (chain == length) & (carry == 1) & (batch.targets != IGNORE)
        if not bool(here.any()):
            continue
        holds = right[:, here].double().mean(1) >= _MOSTLY
        wrong = (~holds).nonzero().squeeze(1)
        if bool(holds[-1]):
            loops[length] = int(wrong[-1]) + 1 if len(wrong) else 0
    return loops


def _place(
    resolved: Int[Tensor, "input pos"], base: Tensor, source: Tensor, position: Tensor, loop: Tensor
) -> Int[Tensor, " pair"]:
    """The number of each pair's place; -1 where it is in none."""
    # Whether the bit and the next two are resolved in the base by then, [pair].
    own, next_, after = (resolved[base, position + k] <= loop for k in range(3))
    other = resolved[source, position] <= loop
    places = torch.stack(
        [
            ~own & ~other,
            own & other & ~next_,
            own & other & next_ & ~after,
            own & other & next_ & after,
            ~own & other,
            own & next_ & after & ~other,
        ]
    )
    return torch.where(places.any(0), places.int().argmax(0), -1)
