r"""Bounds on what directions that are not orthogonal do to the program's reads.

A read w of the old stream x becomes a read w' of the new one, W x. At a place where feature f is
at one of the points :math:`p_f`, or between them, its error is

.. math:: w' W x - w x = \sum_f (w' W - w) \, p_f
    \;\in\; \Big[\sum_f \min_{p_f} \epsilon p_f,\; \sum_f \max_{p_f} \epsilon p_f\Big],
    \qquad \epsilon = w' W - w.

The bias takes the middle of the interval, and half its width is the bound. It holds for every
combination of values, reached or not.

Errors of queries and keys, at most a and b, change a score by at most
:math:`\sigma = \max \sum_i (|q_i| b_i + a_i |k_i| + a_i b_i) / \sqrt{d_\mathrm{head}}`. So, of n
keys, those that a head should not look at get at most :math:`n e^{2 \sigma - s}` of its attention,
with s the score by which others are ahead, and among those it should, at most
:math:`\tanh(\sigma / 2)` is moved. What it writes is off by the bound of its values plus that share
of their range, and this is added to the bound of all that reads it.

A unit clips its read to 0 … 1 and is flat for 1/2 on either side of what it is built for. If all
bounds of units are below that, every unit writes what it wrote before, and by induction over
layers and loops the model runs the program exactly, apart from rounding; the answer is exact if
the bound of logits is below half of what tells them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.compiler.assemble import LOGIT, SHARPNESS
from loopinterp.rasp.disguises.places import Held, sum_of
from loopinterp.rasp.disguises.superposition.frame import Frame
from loopinterp.rasp.disguises.superposition.program_reads import (
    HeadReads,
    NeuronReads,
    ProgramReads,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

UNIT_MARGIN = 0.5
"""How far the input of a unit is inside its flat part, whatever the features are."""

LOGIT_MARGIN = LOGIT / 2
"""Logits that are off by less than this have their maximum where it was."""

READ_MARGIN = 0.5
"""Reads of 0 and 1 that are off by less than this are told apart."""

STRAY = 1e-6
"""Attention that may stray from a head's selection."""


@dataclass(frozen=True, eq=False)
class NewReads:
    """Reads of the old stream as reads of the new one.

    Attributes:
        rows: What is read.
        shift: What the bias changes by.
        error: Bound of what is left.
    """

    rows: Float[Tensor, "row new_d_model"]
    shift: Float[Tensor, " row"]
    error: Float[Tensor, " row"]


def new_reads(
    rows: Float[Tensor, "row d_model"], held: Held, frame: Frame, *, smooth: bool = False
) -> NewReads:
    """Reads of the new stream in place of reads of the old one."""
    new = rows @ frame.read(held, smooth=smooth)
    low, high = held.extremes(new @ frame.write - rows)
    return NewReads(new, -(low + high) / 2, (high - low) / 2)


@dataclass(frozen=True, eq=False)
class Errors:
    """Bounds of the errors of all that the program reads.

    Attributes:
        units: Of the inputs of neurons, layer by layer; those of wipes count twice, as they are
            read twice as large if they are not exact.
        scores: Of attention scores, head by head.
        score_margin: What a score can bear.
        logits: Of logits.
        variables: Of what reads the variables' values.
    """

    units: list[Float[Tensor, " neuron"]]
    scores: list[Float[Tensor, ""]]
    score_margin: float
    logits: Float[Tensor, " d_vocab_out"]
    variables: Float[Tensor, " value"]

    @property
    def shares(self) -> Float[Tensor, " read"]:
        """Each bound as a share of what that read can bear."""
        return torch.cat(
            [
                torch.cat(self.units) / UNIT_MARGIN,
                *(score[None] / self.score_margin for score in self.scores),
                self.logits / LOGIT_MARGIN,
                self.variables / READ_MARGIN,
            ]
        )


def errors(reads: ProgramReads, frame: Frame, max_length: int, *, smooth: bool = False) -> Errors:
    """Bounds of the errors of all that the program reads."""
    written: dict[str, Tensor] = {}
    scores: dict[str, Tensor] = {}
    for layer in reads.neurons:
        for head in layer.heads:
            if head.id not in written:
                scores[head.id], written[head.id] = _of_head(head, frame, max_length, smooth)
    units = [_of_neurons(layer, frame, written, smooth) for layer in reads.neurons]
    logits = new_reads(reads.logits, reads.answer, frame, smooth=smooth).error
    # Nothing can be added to these, so the middle of the interval counts.
    values = new_reads(reads.variables, reads.state, frame, smooth=smooth)
    margin = (SHARPNESS - math.log(max_length / STRAY)) / 2
    return Errors(units, list(scores.values()), margin, logits, values.error + values.shift.abs())


def _of_neurons(
    layer: NeuronReads, frame: Frame, written: dict[str, Tensor], smooth: bool
) -> Float[Tensor, " neuron"]:
    error = new_reads(layer.rows, layer.held, frame, smooth=smooth).error
    error = torch.where(layer.wipes, 2 * error, error)
    # What heads write is wiped exactly, with its errors.
    noise = [(layer.rows @ head.out).abs() @ written[head.id] for head in layer.heads]
    return sum_of([error, *(torch.where(layer.wipes, 0, n) for n in noise)])


def _of_head(
    head: HeadReads, frame: Frame, max_length: int, smooth: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, " d_head"]]:
    """Bounds of a head's scores, and of what it writes."""
    d_head = head.rows.shape[1]
    flat = head.rows.flatten(0, 1)
    q_error, k_error, v_error = (
        new_reads(flat, head.held, frame, smooth=smooth).error.view(3, d_head).unbind()
    )
    q_size = _largest(head.rows[0], head.bias[0], k_error, head.held)
    k_size = _largest(head.rows[1], head.bias[1], q_error, head.held)
    score = (q_size + k_size + q_error @ k_error) / d_head**0.5
    # In a search it is the score itself that has to become small enough.
    astray = max_length * torch.exp((2 * score - SHARPNESS).clamp(max=0))
    moved = torch.zeros_like(score) if smooth else astray
    if head.counts:
        moved = moved + torch.tanh(score / 2)
    low, high = head.held.extremes(head.rows[2])
    return score, v_error + moved * (high - low)


def _largest(
    rows: Float[Tensor, "d_head d_model"],
    bias: Float[Tensor, " d_head"],
    weights: Float[Tensor, " d_head"],
    held: Held,
) -> Float[Tensor, ""]:
    """A bound of the weighted sum of the sizes of reads."""
    parts = [((rows @ p.mT).abs().mT @ weights).max() for p in held.points]
    return sum_of([bias.abs() @ weights, *parts])
