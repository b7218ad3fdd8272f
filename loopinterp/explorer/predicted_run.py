"""What a program says of an exchange that is made in a model, as a run to be stepped beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits import Prediction
from loopinterp.circuits.program_counterfactuals import SILENT
from loopinterp.explorer.exploration import NOT_SAID, Exploration
from loopinterp.explorer.program_values import program_values
from loopinterp.results import study

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits import InterchangeRun
    from loopinterp.explorer.explored_run import ExploredRun
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.trace import Trace


def explore_prediction(
    program: LoopProgram, exchange: InterchangeRun, changed: ExploredRun, symbols: dict[str, str]
) -> Exploration:
    """The program's own run with the exchange that was made in the model.

    Its answers are what it answers itself, -1 where it leaves them open. Its variables stand beside
    what the answers of the changed model imply of them. Last is its claim, as the verdict takes it
    (:class:`~loopinterp.circuits.program_counterfactuals.Claims`), beside what the model answers.

    Args:
        program: The program; it must read these tokens.
        exchange: The exchange, of one pair.
        changed: The model's run with it.
        symbols: Words for classes.
    """
    n_loops, loop = changed.n_loops, int(exchange.pairs.loop[0])
    with study(0, program=program.name, n_loops=n_loops) as watch:
        prediction = Prediction(program, exchange.pairs.to("cpu"))
        run = _joined(prediction, loop)
        answers = torch.from_numpy(changed.answer[..., 0]).transpose(0, 1).long()
        asked = torch.from_numpy(changed.asked)
        inputs = changed.batch.inputs.cpu()
        values = {
            name: pair for name, *pair in program_values(program, inputs, answers, asked, run)
        }
        claim = _claim(prediction, exchange.base.cpu(), n_loops + 1)
        values[f"{program.name}'s claim"] = [claim, answers.where(asked & (claim >= 0), NOT_SAID)]
        variable, implied = (
            torch.stack([pair[which].transpose(0, 1) for pair in values.values()])
            for which in (0, 1)
        )
        return Exploration.of(
            watch,
            coords={"name": list(values)},
            row=[one.row for one in changed.rows],
            n_pos=[changed.n_pos],
            n_loops=[n_loops],
            asked_after=changed.batch.n_loops.tolist(),
            target=changed.target,
            answer=run.outputs.transpose(0, 1)[..., None],
            variable=variable.to(torch.int16),
            implied=implied.to(torch.int16),
            asks="",
            by_hand="",
            reasons=[program.name],
            details=[f"The run of {program.name} with the same exchange; ? is left open by it."],
            said=changed.said(),
            tokens=changed.tokens(),
            n_classes=changed.n_classes,
            symbols=symbols,
            axes=[],
            missing={},
            n_examples=1,
        )


def _joined(prediction: Prediction, loop: int) -> Trace:
    """The program's whole run of the one pair: without the exchange before it, with it after."""
    before, after = prediction.runs.trace, prediction.after(slice(0, 1))
    base = prediction.pairs.base
    variables = {
        name: torch.cat([values[:loop, base], after.variables[name]])
        for name, values in before.variables.items()
    }
    outputs = torch.cat([before.outputs[:loop, base], after.outputs])
    return replace(after, start=0, variables=variables, outputs=outputs, selectors={})


def _claim(
    prediction: Prediction, natural: Int[Tensor, "pair delay pos"], n_loops: int
) -> Int[Tensor, "loop pair pos"]:
    """What it says that the model answers; nothing before the exchange."""
    expected = prediction.claims(natural).expected.transpose(0, 1).long()
    before = expected.new_full((n_loops - len(expected), *expected.shape[1:]), SILENT)
    claim = torch.cat([before, expected])
    return claim.masked_fill(claim == SILENT, NOT_SAID)
