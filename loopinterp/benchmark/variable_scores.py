"""Where a tool says that variables are kept, put to the test of exchanging what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import torch

from loopinterp.benchmark.interchange_scores import exchanged, probed_subspaces
from loopinterp.benchmark.known_models import KnownModel
from loopinterp.circuits.variable_directions import labelled_states, mean_directions
from loopinterp.circuits.variable_interchange import RANDOM
from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import orthonormal

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.benchmark.benchmark_folder import Exercise, KnownCircuit
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

VariableMethod = Callable[["Exercise", "LoopProgram"], "Mapping[str, Tensor]"]

_EXAMPLES = 256


def score_variables(method: VariableMethod, known: KnownCircuit, *, seed: int = 0) -> pd.DataFrame:
    """The IIA of subspaces in which a tool says that a program's variables are kept.

    Args:
        method: From an exercise and the program that the model runs to a subspace of each variable,
            as rows ``[row, d_model]`` that span it; a variable without one is not found.
        known: The model.
        seed: Of the exchanges.

    Returns:
        One row: ``iia``, the share of whole runs after an exchange that are as the program says,
        over all variables and loops, its interval, the same after a change of equal norm in a
        random direction, and the share of variables that were found. NaN where no exchange of the
        program changes an answer.

    Raises:
        InputError: Subspaces of variables that there are not, or of another width.
    """
    exercise, program = known.exercise, known.compiled.program
    subspaces = dict(method(exercise, program))
    width = exercise.model.config.d_model
    for name, rows in subspaces.items():
        if name not in program.variables or rows.ndim != 2 or rows.shape[1] != width:
            raise InputError(
                f"subspace of {name!r}",
                expected=f"rows of d_model = {width}, of one of {', '.join(program.variables)}",
                given=f"shape {list(rows.shape)}",
                fix="Return one tensor [rank, d_model] for each variable.",
            )
    found = {
        name: orthonormal(rows.double()).to(rows) for name, rows in subspaces.items() if len(rows)
    }
    share = len(found) / len(program.variables)
    row = {"iia": float("nan"), "low": float("nan"), "high": float("nan"), "random": float("nan")}
    if found:
        model = KnownModel(known.compiled, _batch(exercise), exercise.n_loops)
        runs = exchanged(model, found, seed)
        iia, low, high, n_runs = runs.pooled()
        if n_runs:
            row = {"iia": iia, "low": low, "high": high, "random": runs.pooled(RANDOM)[0]}
    return pd.DataFrame([{**row, "found": share}])


def by_probing(exercise: Exercise, program: LoopProgram) -> Mapping[str, Tensor]:
    """Where a ridge probe reads each variable."""
    return probed_subspaces(exercise.model, program, _batch(exercise, extra_loop=1))


def by_means(exercise: Exercise, program: LoopProgram) -> Mapping[str, Tensor]:
    """The directions between the mean states of a variable's values."""
    batch = _batch(exercise, extra_loop=1)
    return {
        name: labelled_states(exercise.model, program, [name], batch).subspace(mean_directions)
        for name in program.variables
    }


def _batch(exercise: Exercise, *, extra_loop: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(extra_loop)
    batch = exercise.task.sample(torch.full((_EXAMPLES,), exercise.n), generator=generator)
    # Probes see the loops of the run: of states that have settled there are many alike.
    return replace(batch, n_loops=torch.full_like(batch.n_loops, exercise.n_loops + extra_loop))
