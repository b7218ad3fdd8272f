"""Choosing how a program lies over a model, on other pairs than it is scored on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.alignment import Alignment, ProgramRuns, agreement, alignments
from loopinterp.circuits.runs import AT_THE_END

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.runs import SwapRun
    from loopinterp.rasp.program import LoopProgram


@dataclass(frozen=True)
class RatedAlignments:
    """How well each alignment of a program suits each pair.

    Attributes:
        options: The alignments, the plain one first.
        suits: Agreement of the program with the model over the first loops after the swap.
        place: Place of each pair.
    """

    options: tuple[Alignment, ...]
    suits: Float[Tensor, "option pair"]
    place: Int[Tensor, " pair"]

    def best(self, pairs: Bool[Tensor, " pair"]) -> Alignment:
        """The alignment that suits some pairs best, each place counting the same.

        Of several that suit alike, the first, which is the plainest.
        """
        places = self.place[pairs].unique().tolist()
        means = [self.suits[:, pairs & (self.place == p)].mean(1) for p in places]
        return self.options[int(torch.stack(means).mean(0).argmax())]


def rate_alignments(
    program: LoopProgram, run: SwapRun, swapped: Int[Tensor, "delay pair pos"]
) -> RatedAlignments:
    """Rate every alignment of a program on swaps of the whole state.

    Args:
        program: The program.
        run: The pairs on the model.
        swapped: The model's outputs after the swaps, at the run's delays.
    """
    delays = tuple(d for d in run.delays if d != AT_THE_END)
    where = [run.delays.index(d) for d in delays]
    pairs = run.pairs
    options = tuple(a for a in alignments() if int(pairs.loop.min()) + a.shift >= 0)
    n_loops = int(pairs.loop.max()) + max(a.shift for a in options) + max(delays)
    runs = {
        lag: ProgramRuns(program, pairs, lag=lag, n_loops=n_loops)
        for lag in {a.lag for a in options}
    }
    suits = [
        agreement(
            runs[a.lag].predict(a, delays), run.base[where], swapped[where], pairs.scored
        ).mean(0)
        for a in options
    ]
    return RatedAlignments(options, torch.stack(suits), run.pairs.place)


def halves(place: Int[Tensor, " pair"]) -> Bool[Tensor, " pair"]:
    """Every other pair of each place."""
    half = torch.zeros_like(place, dtype=torch.bool)
    for p in place.unique().tolist():
        half[(place == p).nonzero().squeeze(1)[::2]] = True
    return half
