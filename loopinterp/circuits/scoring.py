"""How far each rival program says what swaps do to one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.alignment import Alignment, Prediction, agreement, predict
from loopinterp.circuits.alignment_choice import halves, rate_alignments
from loopinterp.circuits.behaviour import behaviour_scores
from loopinterp.circuits.pairs import PLACES, RUN_ON, SwapPairs, swap_pairs
from loopinterp.circuits.runs import SwapRun, prepare_swaps
from loopinterp.circuits.subspaces import CONTROL_ENERGY, energy_rank, random_subspaces
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.rasp.program import LoopProgram

BEHAVIOUR_EXAMPLES = 64
"""Examples on which behaviour without a swap is compared."""


@dataclass(frozen=True)
class ModelScores:
    """One model's pairs, with what each rival says and how far it agrees.

    Attributes:
        pairs: The pairs.
        agree: Whether each program says the model's whole output [pair, program, delay].
        control: The same where random directions are swapped.
        flips: Which bits of the output flip [pair, delay, bit].
        claims: Which bits each program says flip [pair, program, delay, bit]; NaN where it does
            not say.
        behaviour: Agreement without a swap [example, program].
        alignments: How each program lies over the model, in words.
        rank: Dimensions of the random control.
    """

    pairs: SwapPairs
    agree: np.ndarray
    control: np.ndarray
    flips: np.ndarray
    claims: np.ndarray
    behaviour: np.ndarray
    alignments: list[str]
    rank: int

    def by_carry(self, values: np.ndarray) -> np.ndarray:
        """Means over pairs [place, carry, ...] of each place and base carry; NaN where none."""
        table = np.full((len(PLACES), 2, *values.shape[1:]), np.nan)
        for place, carry in np.ndindex(table.shape[:2]):
            here = values[self._at(place, carry)]
            said = ~np.isnan(here)
            count = said.sum(0)
            total = np.where(said, here, 0.0).sum(0)
            table[place, carry] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return table

    def counts(self) -> np.ndarray:
        """Pairs of each place and base carry [place, carry]."""
        return np.array([[self._at(p, c).sum() for c in (0, 1)] for p in range(len(PLACES))])

    def _at(self, place: int, carry: int) -> np.ndarray:
        return ((self.pairs.place == place) & (self.pairs.carry == carry)).cpu().numpy()


def score_model(
    model: LoopedModel | Any,
    rivals: list[LoopProgram],
    *,
    n: int,
    per_place: int,
    max_chain: int,
    seed: int,
) -> ModelScores:
    """Swap states of one model and score every rival; see :func:`compare_programs`."""
    pairs = swap_pairs(model, n=n, per_place=per_place, seed=seed, max_chain=max_chain)
    run = prepare_swaps(model, pairs)
    swapped = run.swap()
    rank = energy_rank(run.difference, CONTROL_ENERGY)
    generator = torch.Generator().manual_seed(seed)
    directions = random_subspaces(len(pairs), rank, run.state.shape[-1], generator)
    control = run.swap(directions)
    laid = [lay_over(program, run, swapped) for program in rivals]
    predictions = [prediction for prediction, _ in laid]
    best = [alignment for _, alignment in laid]
    examples = Addition().sample(
        n,
        batch_size=BEHAVIOUR_EXAMPLES,
        generator=torch.Generator().manual_seed(seed),
        distribution="propagate",
    )
    return ModelScores(
        pairs=pairs,
        agree=agreements(predictions, run, swapped),
        control=agreements(predictions, run, control),
        flips=_at_bits(swapped != run.base, pairs),
        claims=np.stack([_claims(p, pairs) for p in predictions], axis=1),
        alignments=[str(alignment) for alignment in best],
        rank=rank,
        behaviour=behaviour_scores(model, rivals, best, examples),
    )


def lay_over(
    program: LoopProgram, run: SwapRun, swapped: Int[Tensor, "delay pair pos"]
) -> tuple[Prediction, Alignment]:
    """What the program says of each pair under the alignment that suits the other half best.

    Args:
        program: The program.
        run: The pairs on the model.
        swapped: The model's outputs after swaps of the whole state.

    Returns:
        The prediction, and the alignment that suits all pairs best.
    """
    options = rate_alignments(program, run, swapped)
    half = halves(run.pairs.place)
    said = [
        predict(program, run.pairs, alignment=options.best(~part), delays=run.delays)
        for part in (half, ~half)
    ]
    first = half[None, :, None]
    prediction = Prediction(
        torch.where(first, said[0].base, said[1].base),
        torch.where(first, said[0].swapped, said[1].swapped),
    )
    return prediction, options.best(torch.ones_like(half))


def agreements(
    predictions: list[Prediction], run: SwapRun, swapped: Int[Tensor, "delay pair pos"]
) -> np.ndarray:
    """Whether each program says the model's whole output [pair, program, delay]."""
    each = [agreement(p, run.base, swapped, run.pairs.scored) for p in predictions]
    return torch.stack(each).permute(2, 0, 1).cpu().numpy()


def _at_bits(values: Tensor, pairs: SwapPairs) -> np.ndarray:
    """[delay, pair, pos] -> [pair, delay, bit] for bits i, i + 1, i + 2."""
    rows = torch.arange(len(pairs), device=values.device)[:, None]
    places = pairs.position[:, None] + torch.arange(RUN_ON, device=values.device)
    return values[:, rows, places].permute(1, 0, 2).cpu().numpy().astype(np.float64)


def _claims(prediction: Prediction, pairs: SwapPairs) -> np.ndarray:
    """1 where the program says that a bit flips, 0 where not, NaN where it does not say."""
    changed = _at_bits(prediction.base != prediction.swapped, pairs)
    open_ = (prediction.base == UNKNOWN) != (prediction.swapped == UNKNOWN)
    changed[_at_bits(open_, pairs) > 0] = np.nan
    return changed
