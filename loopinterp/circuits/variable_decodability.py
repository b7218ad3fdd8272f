"""Which variables of a program can be read from the model, loop against loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.runs import device_of
from loopinterp.errors import InputError
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.probing.probe_controls import with_random_weights
from loopinterp.probing.states import describe_model, states_at
from loopinterp.rasp.registry import get_program, list_programs
from loopinterp.results import Figure, Finding, Result, study
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_AXES = ("variable", "loop", "program_loop")
_READABLE = 0.95
_FEWEST = 8
"""A class with fewer test places than this does not count towards balanced accuracy."""


@dataclass(frozen=True, kw_only=True)
class Decodability(Result):
    """What :func:`decodability` returns.

    Balanced accuracy is the mean over classes of the fraction of that class that is read right;
    a probe that knows nothing gets 1 / classes. NaN where a variable has one value only.

    Attributes:
        accuracy: Balanced accuracy of a linear probe on the model's state.
        random_weights: Control: the same on the model with shuffled weights.
        shuffled: Control: the same probe on the labels of other examples.
        embedding: Control: a probe on the injected input alone [variable, program_loop].
        chance: 1 / classes [variable, program_loop].
        variables: ``program.variable``.
        loops: Loops of the model, 0 the initial state.
        program_loops: Loops of the program, 0 after ``prepare``.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "accuracy": _AXES,
        "random_weights": _AXES,
        "shuffled": _AXES,
        "embedding": ("variable", "program_loop"),
        "chance": ("variable", "program_loop"),
    }

    accuracy: np.ndarray
    random_weights: np.ndarray | None
    shuffled: np.ndarray
    embedding: np.ndarray
    chance: np.ndarray
    variables: list[str]
    loops: list[int]
    program_loops: list[int]

    def best_loop(self, variable: str) -> list[int]:
        """For each program loop, the model loop at which the variable is read best (-1: none)."""
        table = self.accuracy[self.variables.index(variable)]
        known = ~np.isnan(table).all(0)
        filled = np.where(np.isnan(table), -1.0, table)
        return [int(filled[:, k].argmax()) if known[k] else -1 for k in range(table.shape[1])]

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.figures import decodability_figures

        return decodability_figures(self)

    def summary(self) -> list[Finding]:
        """How many variables can be read loop for loop, after one loop and more.

        Before the first loop there may be nothing to read: an initial state of zeros holds nothing.
        """
        read = []
        for v, name in enumerate(self.variables):
            same = np.diagonal(self.accuracy[v])[1:]
            if not np.isnan(same).all() and float(np.nanmean(same)) >= _READABLE:
                read.append(name)
        some = f" ({', '.join(read)})" if read else ""
        text = (
            f"{len(read)} of {len(self.variables)} program variables{some} can be read from the "
            f"model loop for loop, after one loop and more, with balanced accuracy of at least "
            f"{_READABLE}. That says "
            "where to look, not what is used: rival programs' variables can be read alike."
        )
        return [Finding(kind="program", text=text, value=f"{len(read)} of {len(self.variables)}")]


def decodability(
    model: LoopedModel | Any,
    batch: Batch,
    programs: Sequence[str | LoopProgram] | None = None,
    *,
    n_loops: int | None = None,
    random_model: LoopedModel | Any = None,
    seed: int = 0,
) -> Decodability:
    """Read every variable of every program, at each of its loops, from each loop of the model.

    A model that runs the program loop for loop shows it on the diagonal; one that is faster,
    slower or a loop late, beside it. A variable that is not held fades above the diagonal.
    Probes are fitted on every other example and scored on the rest, over all positions that have
    an answer.

    Args:
        model: The model.
        batch: Examples in the programs' token format, on the model's device.
        programs: The programs; by default all of addition.
        n_loops: Loops of model and programs; by default the largest T(n) of the batch.
        random_model: The random-weights control; by default the model with shuffled weights, and
            none for a model that has no weights to shuffle.
        seed: Seed of the controls.

    Raises:
        InputError: fewer than four examples.
    """
    if len(batch) < 4:
        raise InputError(
            "batch", expected="at least 4 examples", given=str(len(batch)), fix="Draw more."
        )
    named = list_programs("addition") if programs is None else programs
    chosen = [get_program(p) if isinstance(p, str) else p for p in named]
    last = int(batch.n_loops.max()) if n_loops is None else n_loops
    with study(
        seed,
        study="decodability",
        model=describe_model(model),
        programs=[p.name for p in chosen],
        n_loops=last,
        examples=len(batch),
    ) as watch:
        batch = batch.to(device_of(model))
        row, pos = (batch.targets != IGNORE).nonzero(as_tuple=True)
        labels = _labels(chosen, batch.inputs, row, pos, last)
        train = row % 2 == 0
        score = _Scorer(torch.stack(list(labels.values())), train)
        states, e = states_at(model, batch.inputs, row, pos, loops=range(last + 1))
        if random_model is None and isinstance(model, torch.nn.Module):
            random_model = with_random_weights(model, seed=seed)
        random = None
        if random_model is not None:
            random = score(
                states_at(random_model, batch.inputs, row, pos, loops=range(last + 1))[0]
            )
        generator = torch.Generator().manual_seed(seed)
        other = _other_examples(row, pos, len(batch), generator)
        return Decodability(
            provenance=watch.provenance(),
            accuracy=score(states),
            random_weights=random,
            shuffled=_Scorer(score.labels[..., other], train)(states),
            embedding=score(e[None])[:, 0],
            chance=score.chance(),
            variables=list(labels),
            loops=list(range(last + 1)),
            program_loops=list(range(last + 1)),
        )


def _labels(
    programs: list[LoopProgram], inputs: Tensor, row: Tensor, pos: Tensor, last: int
) -> dict[str, Int[Tensor, "program_loop place"]]:
    """Values of every variable that depends on the input."""
    labels = {}
    for program in programs:
        for name, values in program.trace(inputs, n_loops=last).variables.items():
            if bool((values != values[:, :1]).any()):
                labels[f"{program.name}.{name}"] = values[:, row, pos]
    return labels


def _other_examples(
    row: Tensor, pos: Tensor, n_examples: int, generator: torch.Generator
) -> Tensor:
    """For each place, the place at the same position of another example of the same half."""
    lookup = torch.full((n_examples, int(pos.max()) + 1), -1, device=row.device)
    lookup[row, pos] = torch.arange(len(row), device=row.device)
    half = torch.randperm(n_examples // 2, generator=generator).to(row.device)
    partner = torch.arange(n_examples, device=row.device)
    for parity in (0, 1):
        partner[parity::2][: len(half)] = 2 * half + parity
    found = lookup[partner[row], pos]
    return torch.where(found >= 0, found, torch.arange(len(row), device=row.device))


class _Scorer:
    """Fits and scores probes of all labels at once, from whatever states it is given."""

    def __init__(self, labels: Int[Tensor, "variable program_loop place"], train: Tensor) -> None:
        self.labels, self._train = labels, train
        self._test = labels[..., ~train]

    def __call__(self, states: Float[Tensor, "loop place d_model"]) -> np.ndarray:
        """Balanced accuracy [variable, loop, program_loop]."""
        tables = []
        for labels, test in zip(self.labels, self._test):
            probe = RidgeProbe().fit(states[:, None, self._train], labels[None, :, self._train])
            tables.append(_balanced(probe.predict(states[:, None, ~self._train]), test))
        return torch.stack(tables).cpu().numpy()

    def chance(self) -> np.ndarray:
        """1 / classes [variable, program_loop]; NaN where there is one class."""
        counts = torch.stack([_counts(test).ge(_FEWEST).sum(-1) for test in self._test])
        return torch.where(counts > 1, 1.0 / counts, torch.nan).cpu().numpy()


def _counts(labels: Int[Tensor, "program_loop place"]) -> Tensor:
    return torch.stack([(labels == c).sum(-1) for c in labels.unique()], dim=-1)


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
