"""Training dynamics: when accuracy, fixed points, wavefront and automaton appear in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveInt

from loopinterp.comparison import SpreadPairs, compare_programs
from loopinterp.comparison.pair_strategies import check_program_list
from loopinterp.core.boundary import checked
from loopinterp.core.errors import describe_tensor, need
from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.decompiler.exact_reading import (
    Surroundings,
    is_finite,
    read_code,
    same_algorithm,
)
from loopinterp.decompiler.program_writing import programs_of
from loopinterp.dynamics import convergence_study
from loopinterp.dynamics.regimes import LEAST_LOOPS
from loopinterp.models.iteration import states_at
from loopinterp.models.protocol import describe_model
from loopinterp.models.study_examples import fit_to_model, need_loops
from loopinterp.probing.carry_wavefront import front_speed, sample_chains
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.probing.probe_grid import majority_accuracy, with_random_weights
from loopinterp.tasks import IGNORE, Addition
from loopinterp.training import evaluate

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks import Task
    from loopinterp.training import Run

_CONVERGED, _COMPARED, _PAIRS = 64, 64, 512
"""Examples whose convergence is followed; inputs and interchanges of the comparison."""


class Milestone(Enum):
    """What a model can have from some step of training on."""

    RIGHT = "right"
    """Exact match after T(n) loops, up to the training cutoff."""
    GENERALISES = "generalises"
    """The same at the greatest length that was measured."""
    CONVERGES = "converges"
    """The share of tokens with a fixed point."""
    CONVERGES_RIGHT = "converges right"
    """The share of tokens with a fixed point and the right answer there."""
    READABLE = "readable"
    """The probe's accuracy at every distance, after some number of loops."""
    PROGRAM = "program"
    """The share of interchanges that one program, the closest at the end, predicts."""
    AUTOMATON = "automaton"
    """The transition table is that of the last snapshot, up to the first guess."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TrainingDynamics(Result, kind="training-dynamics"):
    """The result of :func:`training_dynamics_study`, by step of training and by loop.

    Arrays:
        exact_match: Share right after T(n) loops.
        loop_exact_match: The same after each loop.
        residual: Mean relative residual of tokens at the training cutoff.
        converged: Share of them that have reached a fixed point by that loop.
        converged_right: Share that also have the right answer then.
        probe: Held-out accuracy of a linear probe for ``variable``.
        probe_random: Control: ``probe`` on shuffled weights.
        majority: Control: always the most frequent class.
        whole_run: Share of effective interchanges that a program predicts at every delay.
        cells: Cells of the smallest transition table.
        final_table: Whether it is that of the last snapshot, up to the first guess.

    Attributes:
        cutoff: Greatest length in training.
        variable: ``carry``, ``answer``, or the name of the function given.
        distance: ``chain length`` of a carry, or ``position``.
        threshold: Share that counts as reached.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "exact_match": f"step length {ESTIMATE}",
        "loop_exact_match": "step loop length",
        **dict.fromkeys(("residual", "converged", "converged_right"), "step loop"),
        **dict.fromkeys(("probe", "probe_random"), "step loop distance"),
        "majority": "distance",
        "whole_run": f"step program {ESTIMATE}",
        **dict.fromkeys(("cells", "final_table"), "step"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"whole_run", "cells", "final_table"})

    task: str
    cutoff: int
    variable: str
    distance: str
    threshold: float
    n_samples: int

    @property
    def readable(self) -> xr.DataArray:
        """Share of distances at which the variable is readable, [step, loop]."""
        return (self.data["probe"] >= self.threshold).mean("distance")

    @property
    def front(self) -> xr.DataArray:
        """First loop after which the variable is readable, [step, distance]; NaN if never."""
        loops = self.data["loop"].astype(float)
        return loops.where(self.data["probe"] >= self.threshold).min("loop")

    @property
    def speed(self) -> xr.DataArray:
        """Distance per loop of the front, [step]: the inverse slope of loops on distance.

        NaN if fewer than half of the distances (or fewer than three) are ever readable; infinite if
        far ones are readable no later than near ones.
        """
        first = self.front
        return first.isel(distance=0, drop=True).copy(data=[front_speed(x) for x in first])

    @property
    def closest_program(self) -> str | None:
        """The program that predicts most interchanges of the last snapshot."""
        if "whole_run" not in self.data:
            return None
        shares = self.data["whole_run"].sel({ESTIMATE: "value"}).isel(step=-1)
        return str(shares.fillna(-1).idxmax("program").item())

    def reached(self, milestone: Milestone) -> xr.DataArray | None:
        """Whether each snapshot has it, [step]; None if it was not measured."""
        data, last = self.data, {"loop": -1}
        exact = data["exact_match"].sel({ESTIMATE: "value"}, drop=True)
        match milestone:
            case Milestone.RIGHT if int(data["length"].min()) <= self.cutoff:
                share = exact.sel(length=data["length"] <= self.cutoff).min("length")
            case Milestone.GENERALISES:
                share = exact.isel(length=-1)
            case Milestone.CONVERGES:
                share = data["converged"].isel(last)
            case Milestone.CONVERGES_RIGHT:
                share = data["converged_right"].isel(last)
            case Milestone.READABLE:
                return self.front.notnull().all("distance")
            case Milestone.PROGRAM if self.closest_program is not None:
                shares = data["whole_run"].sel({ESTIMATE: "value"}, drop=True)
                share = shares.sel(program=self.closest_program)
            case Milestone.AUTOMATON if "final_table" in data:
                return data["final_table"].astype(bool)
            case _:
                return None
        return share >= self.threshold

    def step_of(self, milestone: Milestone) -> int | None:
        """The first snapshot from which all have it; None if the last has it not."""
        reached = self.reached(milestone)
        if reached is None or not bool(reached.isel(step=-1)):
            return None
        missing = np.flatnonzero(~reached.values)
        first = missing[-1] + 1 if missing.size else 0
        return int(reached["step"][first])


@checked
def training_dynamics_study(
    run: Run,
    *,
    steps: Sequence[int] | None = None,
    lengths: Annotated[Sequence[PositiveInt], Field(min_length=1)] | None = None,
    n_loops: Annotated[int, Field(ge=LEAST_LOOPS)] | None = None,
    variable: Callable[[Tensor], Tensor] | None = None,
    programs: Sequence[Any] | None = None,
    n_samples: Annotated[int, Field(ge=8)] = 256,
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95,
    seed: Seed = 0,
) -> TrainingDynamics:
    """Measure accuracy, convergence, probes and program of every snapshot of a run, by loop.

    All snapshots get the same examples. Snapshots are averaged weights
    (:meth:`~loopinterp.training.Run.model_at`): every measure lags by the same steps.

    Args:
        run: Trained with ``snapshots`` (:class:`~loopinterp.training.SnapshotConfig`).
        steps: Snapshots; all by default.
        lengths: Lengths of the accuracy; the training cutoff and twice it by default.
        n_loops: By default a quarter more than T(n) of the greatest length.
        variable: Maps inputs to probed classes ``[batch, pos]``, ``IGNORE`` for none. By default
            the carry of an addition, by distance to the bit that decides it; of other tasks the
            answer.
        programs: Programs to compare with; by default those of the task.
        n_samples: Examples of each accuracy, and to train and to score each probe.
        threshold: Share that counts as reached.

    Raises:
        InputError: If there is no such snapshot, the model makes one loop, or no position has a
            class in all examples.

    Source: arXiv 2304.01373.
    """
    chosen = list(run.snapshots) if steps is None else sorted({*steps})
    fix = "Train a run with snapshots.kind=even (or log) and snapshots.every=…."
    need(chosen, f"snapshots of run {run.folder}", "one or more", "none", fix)
    last, task = run.model_at(chosen[-1]), run.task
    need_loops(last)
    lengths = sorted({*(lengths or (run.cutoff, 2 * run.cutoff))})
    if n_loops is None:
        one = task.sample(lengths[-1], batch_size=1, generator=torch.Generator().manual_seed(seed))
        longest = fit_to_model(last, one)
        n_loops = max(LEAST_LOOPS, -(-5 * int(longest.n_loops.max()) // 4))
    known = programs_of(task) if programs is None else check_program_list(programs)
    cells = _Cells.draw(task, variable, lengths[-1], n_samples, seed)
    sizes: Any = {"lengths": lengths, "n_loops": n_loops, "n_samples": n_samples, "seed": seed}
    models = [describe_model(run.model_at(step)) for step in chosen]
    coords = {"step": chosen, "loop": range(n_loops + 1), "length": lengths}
    coords |= {"distance": cells.distances}
    coords |= {"program": [p.name for p in known]} if known else {}
    with study(seed, task=task.name, n_samples=n_samples, models=models) as watch:
        parts = [_measure(run, step, cells, known, **sizes) for step in track(chosen, "snapshots")]
        return TrainingDynamics.of(
            watch,
            coords=coords,
            **{name: np.stack([part[name] for part in parts]) for name in parts[0]},
            **(_tables(run, task, chosen) if is_finite(last) else {}),
            majority=cells.majority,
            task=task.name,
            cutoff=run.cutoff,
            variable=cells.variable,
            distance=cells.meaning,
            threshold=threshold,
            n_samples=n_samples,
        )


def _tables(run: Run, task: Task, steps: Sequence[int]) -> dict[str, list[float]]:
    """Arrays of the transition tables of a finite-state model."""
    tables = [read_code(run.model_at(step), task)[1] for step in steps]
    cells = Surroundings.of(task, (1, 2, 3)).asked
    return {
        "cells": [float(sum(table.sizes.values())) for table in tables],
        "final_table": [float(same_algorithm(x, tables[-1], cells)) for x in tables],
    }


@dataclass(frozen=True)
class _Cells:
    """Labelled positions; probes are trained on the first half of the samples."""

    inputs: Tensor
    row: Int[Tensor, "distance sample"]
    pos: Int[Tensor, "distance sample"]
    label: Int[Tensor, "distance sample"]
    distances: Sequence[int]
    variable: str
    meaning: str

    @classmethod
    def draw(
        cls, task: Task, variable: Callable[[Tensor], Tensor] | None, n: int, size: int, seed: int
    ) -> _Cells:
        generator = torch.Generator().manual_seed(seed)
        if variable is None and isinstance(task, Addition):
            longest = max(1, min(n // 2, n - 2))
            options: dict[str, Any] = {"max_chain": longest, "n_pairs": size // 2}
            # Pairs of one half share no input with the other half.
            train, test = (sample_chains(task, n, generator=generator, **options) for _ in "ab")
            both = train.joined(test)
            chains = range(1, longest + 1)
            return cls(both.inputs, both.row, both.pos, both.carry, chains, "carry", "chain length")
        batch = task.sample(n, batch_size=2 * size, generator=generator)
        labels = batch.targets if variable is None else variable(batch.inputs)
        fits = isinstance(labels, torch.Tensor) and labels.shape == batch.inputs.shape[:2]
        positions = (labels != IGNORE).all(0).nonzero()[:, 0] if fits else torch.empty(0)
        expected = f"classes {list(batch.inputs.shape[:2])}, known at some position of all examples"
        fix = "Pass a function of the inputs, such as task.targets."
        got = "none there" if fits else describe_tensor(labels)
        need(len(positions), "variable", expected, got, fix)
        row = torch.arange(len(labels)).expand(len(positions), -1)  # [distance, sample]
        pos = positions[:, None].expand_as(row)
        name = "answer" if variable is None else getattr(variable, "__name__", "variable")
        distances = (positions - positions[0] + 1).tolist()
        return cls(batch.inputs, row, pos, labels[row, pos], distances, name, "position")

    @property
    def majority(self) -> Float[Tensor, " distance"]:
        half = self.label.shape[1] // 2
        return majority_accuracy(self.label[:, :half], self.label[:, half:])

    def probe(
        self, model: LoopedModel, n_loops: int, *, may_diverge: bool = False
    ) -> Float[np.ndarray, "loop distance"]:
        """Held-out accuracy of one probe for each loop and distance."""
        half = self.label.shape[1] // 2
        loops = range(n_loops + 1)
        # [loop, distance, sample, d_model]
        places = self.inputs, self.row, self.pos
        states, _ = states_at(model, *places, loops=loops, may_diverge=may_diverge)
        probe = RidgeProbe().fit(states[..., :half, :], self.label[:, :half])
        return probe.score(states[..., half:, :], self.label[:, half:]).cpu().numpy()


def _measure(
    run: Run,
    step: int,
    cells: _Cells,
    programs: Sequence[LoopProgram],
    *,
    lengths: Sequence[int],
    n_loops: int,
    n_samples: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Arrays of one snapshot, without the axis of steps."""
    model, task, n = run.model_at(step), run.task, run.cutoff
    generator = torch.Generator().manual_seed(seed)
    kind = run.config.distribution or task.distributions[0]
    evaluation = evaluate(
        model, task, lengths, distributions=[kind], loops=range(n_loops + 1),
        n_samples=n_samples, seed=seed,
    ).data.isel(distribution=0)  # fmt: skip
    batch = task.sample(n, batch_size=_CONVERGED, generator=generator, distribution=kind)
    convergence = convergence_study(model, batch, n_loops=n_loops, n_spectral=0)
    counted, loops = convergence.data["counted"], convergence.data["loop"]
    converged = (convergence.settling_times() <= loops) & counted
    right = converged & (convergence.data["right"] == 1)
    control = with_random_weights(model, seed=seed)  # type: ignore[type-var]
    arrays = {
        "exact_match": evaluation["exact_match"].isel(extra_loop=0).values,
        "loop_exact_match": evaluation["loop_exact_match"].sel({ESTIMATE: "value"}).values,
        "probe": cells.probe(model, n_loops),
        "probe_random": cells.probe(control, n_loops, may_diverge=True),
        "residual": convergence.mean_residual().where(loops > 0).values,
        "converged": converged.sum(("batch", "pos")).values / float(counted.sum()),
        "converged_right": right.sum(("batch", "pos")).values / float(counted.sum()),
    }
    if programs:
        generator.manual_seed(seed)
        batch = task.sample(n, batch_size=_COMPARED, generator=generator)
        pairs = SpreadPairs(pairs=_PAIRS, same_value=0)
        compared = compare_programs(model, programs, batch, pairs=pairs, seed=seed)
        arrays["whole_run"] = compared.data["whole_run"].isel(model=0).sel(stratum="all").values
    return arrays
