"""Which variables of a program can be read from the model, loop against loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.circuits.comparison_inputs import check_programs
from loopinterp.errors import InputError, check_integer
from loopinterp.models.iteration import states_at
from loopinterp.models.model_description import describe_model
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.probing.probe_controls import with_random_weights
from loopinterp.progress import track
from loopinterp.results import Result, study
from loopinterp.study_examples import examples_for
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

_FEWEST = 8
"""A class with fewer test places than this does not count towards balanced accuracy."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Decodability(Result, kind="decodability"):
    """What :func:`decodability` returns.

    Balanced accuracy is the mean over classes of the fraction of that class that is read right;
    a probe that knows nothing gets 1 / classes. NaN where a variable has one value only. Loops of
    the model count loops made, 0 the initial state; those of a program too, 0 after ``prepare``.

    Arrays:
        accuracy: Balanced accuracy of a linear probe on the model's state, of ``program.variable``.
        random_weights: Control: the same on the model with shuffled weights.
        shuffled: Control: the same probe on the labels of other examples.
        embedding: Control: a probe on the injected input alone.
        chance: 1 / classes.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("accuracy", "random_weights", "shuffled"), "variable loop program_loop"),
        **dict.fromkeys(("embedding", "chance"), "variable program_loop"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"random_weights"})

    def loop_for_loop(self, name: str) -> xr.DataArray:
        """An array where the model has made as many loops as the program, [variable, loop]."""
        loops = self.data["loop"]
        axes = {"loop", "program_loop"} & set(self.data[name].dims)
        return self.data[name].sel(dict.fromkeys(axes, loops)).drop_vars("program_loop")


def decodability(
    model: LoopedModel | Any,
    data: Batch | Task,
    programs: Sequence[str | LoopProgram],
    *,
    n_loops: int | None = None,
    random_model: LoopedModel | Any = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Decodability:
    """Read every variable of every program, at each of its loops, from each loop of the model.

    A model that runs the program loop for loop shows it on the diagonal; one that is faster,
    slower or a loop late, beside it. A variable that is not held fades above the diagonal.
    Probes are fitted on every other example and scored on the rest, over all positions that have
    an answer.

    Args:
        model: The model.
        data: Examples in the programs' token format, on the model's device, or their task.
        programs: The programs, such as ``list_programs(task.name)``.
        n_loops: Loops of model and programs; by default the largest T(n) of the batch.
        random_model: The random-weights control; by default the model with shuffled weights, and
            none for a model that has no weights to shuffle.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of the controls, and of what is drawn.

    Raises:
        InputError: fewer than four examples, no program, none with a variable that depends on the
            input, or tokens that a program does not know.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = examples_for(model, data, needs_loops=n_loops is None, **drawn)
    if len(batch) < 4:
        raise InputError(
            "batch", expected="at least 4 examples", given=str(len(batch)), fix="Draw more."
        )
    chosen = check_programs(programs)
    for program in chosen:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    last = check_integer(
        "n_loops", int(batch.n_loops.max()) if n_loops is None else n_loops, least=1
    )
    with study(
        seed,
        study="decodability",
        model=describe_model(model),
        programs=[p.name for p in chosen],
        n_loops=last,
        examples=len(batch),
    ) as watch:
        row, pos = (batch.targets != IGNORE).nonzero(as_tuple=True)
        train = row % 2 == 0
        values = _labels(chosen, batch.inputs, row, pos, train, last)
        labels = torch.stack(list(values.values()))

        def states_of(some_model: Any) -> tuple[Tensor, Tensor]:
            return states_at(some_model, batch.inputs, row, pos, loops=range(last + 1))

        states, e = states_of(model)
        if random_model is None and isinstance(model, torch.nn.Module):
            random_model = with_random_weights(model, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        other = _other_examples(row, pos, len(batch), generator)
        return Decodability.of(
            watch,
            coords={
                "variable": list(values),
                "loop": range(last + 1),
                "program_loop": range(last + 1),
            },
            accuracy=_scores(states, labels, train),
            random_weights=None
            if random_model is None
            else _scores(states_of(random_model)[0], labels, train),
            shuffled=_scores(states, labels[..., other], train),
            embedding=_scores(e[None], labels, train)[:, 0],
            chance=torch.stack([_chance(x[:, ~train]) for x in labels]),
        )


def _labels(
    programs: list[LoopProgram],
    inputs: Tensor,
    row: Tensor,
    pos: Tensor,
    train: Bool[Tensor, " place"],
    last: int,
) -> dict[str, Int[Tensor, "program_loop place"]]:
    """Values of every variable that depends on the input, at places to fit a probe on as well."""
    labels = {}
    for program in programs:
        for name, values in program.trace(inputs, n_loops=last).variables.items():
            here = values[:, row, pos]
            if bool((values != values[:, :1]).any()) and len(here[:, train].unique()) > 1:
                labels[f"{program.name}.{name}"] = here
    if not labels:
        raise InputError(
            "programs",
            expected="programs with a variable that depends on the input",
            given=", ".join(p.name for p in programs),
            fix="Pass others, or more loops.",
        )
    return labels


def _other_examples(
    row: Tensor, pos: Tensor, n_examples: int, generator: torch.Generator
) -> Tensor:
    """For each place, the place at the same position of another example of the same half."""
    lookup = torch.full((n_examples, int(pos.max()) + 1), -1, device=row.device)
    lookup[row, pos] = torch.arange(len(row), device=row.device)
    half = 2 * torch.randperm(n_examples // 2, generator=generator).to(row.device)
    partner = torch.arange(n_examples, device=row.device)
    for parity in (0, 1):
        partner[half + parity] = half.roll(1) + parity  # none is its own
    found = lookup[partner[row], pos]
    return torch.where(found >= 0, found, torch.arange(len(row), device=row.device))


def _scores(
    states: Float[Tensor, "loop place d_model"],
    labels: Int[Tensor, "variable program_loop place"],
    train: Bool[Tensor, " place"],
) -> Float[Tensor, "variable loop program_loop"]:
    """Balanced accuracy of probes of all labels, from whatever states they are given."""
    tables = []
    for values in track(labels, "probes"):
        probe = RidgeProbe().fit(states[:, None, train], values[None, :, train])
        tables.append(_balanced(probe.predict(states[:, None, ~train]), values[:, ~train]))
    return torch.stack(tables)


def _chance(labels: Int[Tensor, "program_loop place"]) -> Float[Tensor, " program_loop"]:
    """1 / classes, which always the same answer gets; NaN where there is one class."""
    return _balanced(labels.mode(-1, keepdim=True).values, labels)


def _balanced(predicted: Tensor, labels: Int[Tensor, "program_loop place"]) -> Tensor:
    """Mean recall over classes [loop, program_loop]; NaN where there is only one class."""
    recalls = []
    for value in labels.unique():
        here = labels == value
        count = here.sum(-1)
        recall = ((predicted == value) & here).sum(-1) / count.clamp(min=1)
        recalls.append(torch.where(count >= _FEWEST, recall.double(), torch.nan))
    table = torch.stack(recalls)
    enough = (~table.isnan()).sum(0) > 1
    return torch.where(enough, table.nanmean(0), torch.nan)
