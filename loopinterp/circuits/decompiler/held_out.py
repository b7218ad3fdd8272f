"""How far a program says what a model does, on inputs and interventions that are drawn anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from loopinterp.circuits.decompiler.exchange_runs import exchanges, planted, repeated
from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.intervals import wilson_estimate

if TYPE_CHECKING:
    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

UNDISTURBED, END, TRAJECTORY = "undisturbed", "at the end", "whole trajectory"
PLANTED = "whole trajectory, planted"
REPEATED = "whole trajectory, two interchanges"
_DELAYS = 2


def held_out(
    model: LoopedModel | Any,
    program: LoopProgram,
    batch: Batch,
    n_loops: int,
    number: int,
    generator: torch.Generator,
) -> pd.DataFrame:
    """What is held against a program, at one length: :func:`agreement` on three kinds of exchanges.

    Exchanges at one loop, as inputs give them; as many *planted* states, of any loop, of which
    those count as often that are rare to the program
    (:func:`~loopinterp.circuits.decompiler.exchange_runs.planted`); and as many runs with two
    interchanges (:func:`~loopinterp.circuits.decompiler.exchange_runs.repeated`).

    Args:
        model: The model.
        program: What is asked.
        batch: Inputs of one length.
        n_loops: Of the runs.
        number: Exchanges of each kind.
        generator: Of all that is drawn.
    """
    drawn = torch.Generator()
    drawn.set_state(generator.get_state())
    usual = agreement(model, program, exchanges(batch, n_loops, number, generator))
    trace = program.trace(batch.inputs, n_loops=n_loops)
    variables = torch.stack([x.flatten() for x in trace.variables.values()])
    values = variables.unique(dim=1, return_inverse=True)[1].view(n_loops + 1, *batch.inputs.shape)
    others = {
        PLANTED: planted(batch, values, number, drawn),
        REPEATED: repeated(batch, n_loops, number, drawn),
    }
    tables = [agreement(model, program, pairs).assign(kind=kind) for kind, pairs in others.items()]
    whole = [one[one["what"] == TRAJECTORY].assign(what=one["kind"]) for one in tables]
    return pd.concat([usual, *(one[usual.columns] for one in whole)], ignore_index=True)


def agreement(
    model: LoopedModel | Any, program: LoopProgram, pairs: InterchangePairs
) -> pd.DataFrame:
    """Shares of whole answers that are as the program says, with 95% intervals.

    Clean runs: of (input, loop), all loops. After interchanges that change an answer of the model
    or of the program: one and two loops later, at the end, and at every loop (whole trajectories).
    Trials on one input are alike, so that intervals are those of so many independent trials as
    there are inputs (``inputs``), each drawn by itself.

    Args:
        model: The model.
        program: What is asked.
        pairs: The exchanges (:func:`~loopinterp.circuits.decompiler.exchange_runs.exchanges`).

    Returns:
        Columns ``what``, ``agree``, ``of``, ``inputs``, ``value``, ``low``, ``high``.
    """
    run, said = InterchangeRun(model, pairs), Prediction(program, pairs)
    asked = pairs.asked
    undecided = said.runs.trace.outputs < 0
    same = (said.runs.trace.outputs == run.natural.cpu()) | undecided | ~asked
    # At the end an answer must be given, and be the model's.
    same[-1] &= ~(undecided[-1] & asked)
    rows = [(UNDISTURBED, same.all(-1).flatten(), torch.arange(same.shape[1]).repeat(len(same)))]

    natural, after, within = run.base.cpu(), run.interchange().cpu(), run.within.cpu()
    claims = said.claims(natural)
    counted = pairs.scored[:, None] & within[..., None]
    matters = ((after != natural) & counted).any(-1).any(-1) | (claims.changes & within).any(-1)
    agree = claims.agree(after) | ~within
    for delay in range(1, min(_DELAYS + 1, within.shape[1])):
        what = f"{delay} loop{'s' * (delay > 1)} later"
        there = matters & within[:, delay]
        rows.append((what, agree[there, delay], pairs.base[there]))
    last, base = agree[torch.arange(len(pairs)), pairs.horizon], pairs.base[matters]
    rows += [(END, last[matters], base), (TRAJECTORY, agree[matters].all(-1), base)]
    counts = pd.DataFrame(
        [(what, int(hits.sum()), len(hits), len(of.unique())) for what, hits, of in rows],
        columns=["what", "agree", "of", "inputs"],
    )
    return counts.assign(**dict(zip(("value", "low", "high"), estimates(counts).T)))


def estimates(counts: pd.DataFrame) -> np.ndarray:
    """Shares with 95% intervals over inputs, [row, (value, low, high)]."""
    return wilson_estimate(counts["agree"], counts["of"], independent=counts["inputs"])
