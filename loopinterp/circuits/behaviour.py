"""Whose answers the model gives short of T(n) loops, where rival programs differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.alignment import Alignment, delayed
from loopinterp.circuits.runs import device_of, outputs
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch


def behaviour_scores(
    model: LoopedModel | Any,
    programs: list[LoopProgram],
    aligned: list[Alignment],
    batch: Batch,
) -> np.ndarray:
    """How often each program gives the model's answer, [example, program].

    Only loops 1 .. T(n) - 1 count, and of those only positions where two programs differ; where a
    program is undecided it gets one half. Examples without such a place are left out.

    Args:
        model: The model.
        programs: The rivals.
        aligned: How each lies over the model.
        batch: Examples of one length.
    """
    batch = batch.to(device_of(model))
    last = int(batch.n_loops.max()) - 1
    answers = outputs(model, batch.inputs, last)[1:]
    said = torch.stack([_said(p, a, batch.inputs, last) for p, a in zip(programs, aligned)])
    open_ = (said != said[:1]).any(0) & (batch.targets != IGNORE)
    right = torch.where(said == UNKNOWN, 0.5, (said == answers).double())
    count = open_.sum((0, 2))
    score = (right * open_).sum((1, 3)) / count.clamp(min=1)
    return score[:, count > 0].T.cpu().numpy()


def _said(
    program: LoopProgram, alignment: Alignment, inputs: torch.Tensor, last: int
) -> torch.Tensor:
    """The program's answers at the model's loops 1 .. last."""
    trace = delayed(program, alignment.lag).trace(inputs, n_loops=last + max(alignment.shift, 0))
    loops = torch.arange(1, last + 1) + alignment.shift
    said = trace.outputs[loops.clamp(min=0)]
    return said.masked_fill((loops < 0)[:, None, None].to(said.device), UNKNOWN)
