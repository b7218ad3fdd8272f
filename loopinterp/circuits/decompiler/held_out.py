"""How far a program says what a model does, on inputs and interventions it was not made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.circuits.interchange_pairs import InterchangePairs
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.intervals import wilson_estimate

if TYPE_CHECKING:
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

UNDISTURBED, END, TRAJECTORY = "undisturbed", "at the end", "whole trajectory"
_DELAYS = 2


def exchanges(
    batch: Batch, n_loops: int, number: int, generator: torch.Generator
) -> InterchangePairs:
    """Whole states of one position, from another input with the same token there.

    Fewer than asked for, if too few of the inputs drawn have the same token.
    """
    tries, (size, n_pos) = 8 * number, batch.inputs.shape
    base, source = torch.randint(size, (2, tries), generator=generator)
    position = torch.randint(n_pos, (tries,), generator=generator)
    loop = torch.randint(n_loops + 1, (tries,), generator=generator)
    alike = batch.inputs[base, position] == batch.inputs[source, position]
    kept = (alike & (base != source)).nonzero().squeeze(1)[:number]
    return InterchangePairs.of(
        batch,
        base=base[kept],
        source=source[kept],
        positions=position[kept, None],
        loop=loop[kept],
        n_loops=n_loops,
    )


def agreement(
    model: LoopedModel | Any, program: LoopProgram, pairs: InterchangePairs
) -> pd.DataFrame:
    """Shares of whole answers that are as the program says, with 95% intervals.

    Undisturbed: of (input, loop), all loops. After exchanges that change an answer of the model or
    of the program: one and two loops later, at the end, and at every loop (whole trajectories).

    Args:
        model: The model.
        program: What is asked.
        pairs: The exchanges (:func:`exchanges`).

    Returns:
        Columns ``what``, ``agree``, ``of``, ``value``, ``low``, ``high``.
    """
    run, said = InterchangeRun(model, pairs), Prediction(program, pairs)
    asked = pairs.asked
    undecided = said.runs.trace.outputs < 0
    same = (said.runs.trace.outputs == run.natural.cpu()) | undecided | ~asked
    # At the end an answer must be given, and be the model's.
    same[-1] &= ~(undecided[-1] & asked)
    rows = [(UNDISTURBED, same.all(-1).flatten())]

    natural, after, within = run.base.cpu(), run.interchange().cpu(), run.within.cpu()
    claims = said.claims(natural)
    counted = pairs.scored[:, None] & within[..., None]
    matters = ((after != natural) & counted).any(-1).any(-1) | (claims.changes & within).any(-1)
    agree = claims.agree(after) | ~within
    for delay in range(1, min(_DELAYS + 1, within.shape[1])):
        what = f"{delay} loop{'s' * (delay > 1)} later"
        rows.append((what, agree[matters & within[:, delay], delay]))
    last = agree[torch.arange(len(pairs)), pairs.horizon]
    rows += [(END, last[matters]), (TRAJECTORY, agree[matters].all(-1))]
    found = pd.DataFrame(
        [(what, int(hits.sum()), len(hits)) for what, hits in rows], columns=["what", "agree", "of"]
    )
    found[["value", "low", "high"]] = wilson_estimate(found["agree"], found["of"])
    return found
