"""Swaps on which rival programs of any task say different things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.alignment import Alignment, ProgramRuns
from loopinterp.circuits.interchange.pairs import draw_pairs
from loopinterp.circuits.swaps import Swaps
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

TRIED = 16
"""So many times as many pairs of inputs are tried at each loop as are wanted of it."""

_SAME = -2
"""In place of an answer: the one without the swap."""


@dataclass(frozen=True)
class RivalSwaps:
    """Swaps, and which rivals each of them tells apart.

    Attributes:
        swaps: The swaps; ``place`` counts the loops after which they are made, in order.
        apart: Whether two rivals say different things of a swap [pair, rival, rival].
    """

    swaps: Swaps
    apart: Bool[Tensor, "pair rival rival"]


def rival_swaps(
    programs: Sequence[LoopProgram],
    batch: Batch,
    *,
    loops: Sequence[int],
    per_loop: int,
    watched: tuple[int, ...],
    generator: torch.Generator,
) -> RivalSwaps:
    """Draw swaps on which at least two rivals disagree.

    Base and source are two inputs of the batch, with the same token at the position that is
    swapped, as the state also holds what it was given of the token. At that position some
    variable of some rival has two values, and two rivals say different things of the answer, at
    one of the watched delays. Swaps that take an answer away from a rival are left out, as it does
    not say what comes instead. Of the swaps of one loop, every two rivals are told apart by as
    many as there are, as evenly as that goes.

    Args:
        programs: The rivals.
        batch: Inputs of one length.
        loops: Loops after which to swap.
        per_loop: Most swaps of each.
        watched: Delays at which rivals are compared.
        generator: Draws pairs and positions.
    """
    last = int(batch.n_loops.max())
    base, source = (
        rows.repeat(len(loops)) for rows in draw_pairs(len(batch), TRIED * per_loop, generator)
    )
    after = torch.tensor(loops).repeat_interleave(len(base) // len(loops))
    differs = batch.inputs[base] == batch.inputs[source]
    differs &= _variables_differ(programs, batch.inputs, base, source, after, max(loops))
    differs[:, 0] = False  # a rival's variables may lie one position to the left
    some = differs.any(-1)
    drawn = torch.rand(differs.shape, generator=generator).masked_fill(~differs, -1)
    position = drawn.argmax(-1)[some]
    order = {loop: number for number, loop in enumerate(loops)}
    swaps = Swaps(
        base=batch.inputs[base[some]],
        source=batch.inputs[source[some]],
        position=position,
        loop=after[some],
        place=torch.tensor([order[t] for t in after[some].tolist()], dtype=torch.long),
        scored=batch.targets[base[some]] != IGNORE,
        n_loops=last,
    )
    apart = _apart(programs, swaps, watched)
    chosen = [
        _evenly(apart, (swaps.place == place).nonzero().squeeze(1), per_loop)
        for place in range(len(loops))
    ]
    rows = torch.cat(chosen)
    return RivalSwaps(swaps[rows], apart[rows])


def _variables_differ(
    programs: Sequence[LoopProgram],
    inputs: Tensor,
    base: Tensor,
    source: Tensor,
    loop: Tensor,
    last: int,
) -> Bool[Tensor, "pair pos"]:
    """Where some variable of some rival has two values."""
    differs = torch.zeros(len(base), inputs.shape[1], dtype=torch.bool)
    for program in programs:
        for values in program.trace(inputs, n_loops=last).variables.values():
            differs |= values[loop, base] != values[loop, source]
    return differs


def _apart(
    programs: Sequence[LoopProgram], swaps: Swaps, watched: tuple[int, ...]
) -> Bool[Tensor, "pair rival rival"]:
    """Whether two rivals say different things of the whole answer, at one of the delays.

    None are told apart by swaps that take an answer away from a rival.
    """
    if not len(swaps):
        return torch.zeros(0, len(programs), len(programs), dtype=torch.bool)
    said, clear = [], torch.ones(len(swaps), dtype=torch.bool)
    last = int(swaps.loop.max()) + max(watched)
    for program in programs:
        runs = ProgramRuns(program, swaps, lag=0, n_loops=last)
        prediction = runs.predict(Alignment(), watched)
        changed = prediction.base != prediction.swapped
        said.append(torch.where(changed & swaps.scored, prediction.swapped, _SAME))
        clear &= (said[-1] != UNKNOWN).all(-1).all(0)
    claims = torch.stack(said, 2)  # [delay, pair, rival, pos]
    return (claims[:, :, :, None] != claims[:, :, None]).any(-1).any(0) & clear[:, None, None]


def _evenly(
    apart: Bool[Tensor, "pair rival rival"], rows: Int[Tensor, " row"], most: int
) -> Int[Tensor, " chosen"]:
    """Some of the rows, so that every two rivals are told apart by as many as there are.

    Going round the pairs of rivals, each takes the next row that tells it apart.
    """
    rivals = torch.triu_indices(apart.shape[1], apart.shape[1], offset=1).T.tolist()
    waiting = {(a, b): rows[apart[rows, a, b]].tolist()[::-1] for a, b in rivals}
    chosen: dict[int, None] = {}
    while len(chosen) < most and any(waiting.values()):
        for queue in waiting.values():
            while queue and queue[-1] in chosen:
                queue.pop()
            if queue and len(chosen) < most:
                chosen[queue.pop()] = None
    return torch.tensor(list(chosen), dtype=torch.long)
