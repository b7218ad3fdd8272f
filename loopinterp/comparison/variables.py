"""Decodability: the program variables that a linear probe reads from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import PositiveInt

from loopinterp.comparison.pair_strategies import check_programs
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_integer, need
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.models.iteration import states_at
from loopinterp.models.protocol import describe_model
from loopinterp.models.study_examples import examples_for
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.probing.probe_grid import with_random_weights
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Decodability(Result, kind="decodability"):
    """The result of :func:`decodability`.

    Balanced accuracy is the mean recall over classes; NaN for a variable with one value. Loop 0 is
    the initial state of the model, and the program after ``prepare``.

    Arrays:
        accuracy: Balanced accuracy of a linear probe of ``program.variable`` on the model's state.
        random_weights: Control: on the state of the model with shuffled weights.
        shuffled: Control: with the labels of other examples.
        embedding: Control: on the injected input alone.
        chance: 1 / classes.
    """

    VARIABLES: ClassVar = {
        "accuracy": "variable loop program_loop",
        "random_weights": "variable loop program_loop",
        "shuffled": "variable loop program_loop",
        "embedding": "variable program_loop",
        "chance": "variable program_loop",
    }
    OPTIONAL: ClassVar = frozenset({"random_weights"})

    def loop_for_loop(self, name: str) -> xr.DataArray:
        """An array at equal loops of model and program."""
        loops = self.data["loop"]
        axes = {"loop", "program_loop"} & set(self.data[name].dims)
        return self.data[name].sel(dict.fromkeys(axes, loops)).drop_vars("program_loop")


@checked
def decodability(
    model: LoopedModel | Any,
    data: Batch | Task,
    programs: Sequence[str | LoopProgram],
    *,
    n_loops: PositiveInt | None = None,
    random_model: LoopedModel | Any = None,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> Decodability:
    """Probe every loop of the model for every variable of every program, at each of its loops.

    A model that runs the program loop for loop shows it on the diagonal. Probes are fitted on every
    other example and scored on the rest, at all positions with an answer.

    Args:
        data: Examples in the programs' tokens, on the model's device, or the task (``batch_size``
            of length ``n``).
        programs: Such as ``list_programs(task.name)``.
        n_loops: Loops of model and programs; by default the largest T(n).
        random_model: The random-weights control; by default the model with shuffled weights, if
            any.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = examples_for(model, data, needs_loops=n_loops is None, **drawn)
    check_integer("examples", len(batch), least=4, fix="Draw more.")
    chosen = check_programs(programs)
    for program in chosen:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    last = int(batch.n_loops.max()) if n_loops is None else n_loops
    with study(
        seed,
        study="decodability",
        model=describe_model(model),
        programs=[p.name for p in chosen],
        n_loops=last,
        examples=len(batch),
    ) as watch:
        row, pos = (batch.targets != IGNORE).nonzero(as_tuple=True)  # one cell each
        train = row % 2 == 0
        values = _labels(chosen, batch.inputs, row, pos, train, last)
        labels = torch.stack(list(values.values()))
        generator = torch.Generator().manual_seed(seed)
        other = _cells_of_other_examples(row, pos, len(batch), generator)
        places, loops = (batch.inputs, row, pos), range(last + 1)
        states, e = states_at(model, *places, loops=loops)
        if random_model is None and isinstance(model, torch.nn.Module):
            random_model = with_random_weights(model, seed=seed)
        random_weights = None
        if random_model is not None:
            random_states, _ = states_at(random_model, *places, loops=loops, may_diverge=True)
            random_weights = _accuracy(random_states, labels, train)
        test = labels[:, :, ~train]  # [variable, program_loop, cell]
        return Decodability.of(
            watch,
            coords={"variable": list(values), "loop": loops, "program_loop": loops},
            accuracy=_accuracy(states, labels, train),
            random_weights=random_weights,
            shuffled=_accuracy(states, labels[..., other], train),
            embedding=_accuracy(e[None], labels, train)[:, 0],
            # The most frequent label in place of a prediction.
            chance=torch.stack([_balanced(x.mode(-1, keepdim=True).values, x) for x in test]),
        )


def _labels(
    programs: list[LoopProgram],
    inputs: Tensor,
    row: Tensor,
    pos: Tensor,
    train: Bool[Tensor, " cell"],
    last: int,
) -> dict[str, Int[Tensor, "program_loop cell"]]:
    labels = {}
    for program in programs:
        for name, values in program.trace(inputs, n_loops=last).variables.items():
            here = values[:, row, pos]
            if bool((values != values[:, :1]).any()) and len(here[:, train].unique()) > 1:
                labels[f"{program.name}.{name}"] = here
    expected = "programs with a variable that depends on the input"
    names = ", ".join(p.name for p in programs)
    need(labels, "programs", expected, names, "Pass others, or more loops.")
    return labels


def _cells_of_other_examples(
    row: Tensor, pos: Tensor, n_examples: int, generator: torch.Generator
) -> Int[Tensor, " cell"]:
    """A cell at the same position of another example in the same half."""
    cells = torch.arange(len(row), device=row.device)
    # [example, position] -> cell, -1 where there is no answer.
    lookup = torch.full((n_examples, int(pos.max()) + 1), -1, device=row.device)
    lookup[row, pos] = cells
    half = 2 * torch.randperm(n_examples // 2, generator=generator).to(row.device)
    # Even examples take labels from even ones, odd from odd: probes are fitted on the even ones.
    partner = torch.arange(n_examples, device=row.device)
    for parity in (0, 1):
        partner[half + parity] = half.roll(1) + parity  # a cycle: none is its own partner
    other = lookup[partner[row], pos]
    return torch.where(other >= 0, other, cells)


def _accuracy(
    states: Float[Tensor, "loop cell d_model"],
    labels: Int[Tensor, "variable program_loop cell"],
    train: Bool[Tensor, " cell"],
) -> Float[Tensor, "variable loop program_loop"]:
    tables = []
    for values in track(labels, "probes"):
        # One probe for each pair of loops, [loop, program_loop], on [loop, 1, cell, d_model].
        probe = RidgeProbe().fit(states[:, None, train], values[None, :, train])
        tables.append(_balanced(probe.predict(states[:, None, ~train]), values[:, ~train]))
    return torch.stack(tables)


def _balanced(predicted: Tensor, labels: Int[Tensor, "program_loop cell"]) -> Tensor:
    """Mean recall over classes [loop, program_loop]; NaN with one class."""
    recalls = []
    for value in labels.unique():
        here = labels == value  # [program_loop, cell]
        count = here.sum(-1)
        recall = ((predicted == value) & here).sum(-1) / count.clamp(min=1)
        # A class of too few cells does not count.
        recalls.append(torch.where(count >= 8, recall.double(), torch.nan))
    table = torch.stack(recalls)
    enough = (~table.isnan()).sum(0) > 1
    return torch.where(enough, table.nanmean(0), torch.nan)
