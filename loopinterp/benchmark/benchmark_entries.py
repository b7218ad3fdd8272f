"""The models of the benchmark: which they are, and how each is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopinterp.benchmark.circuit_training import TRAINED
from loopinterp.errors import unknown_name
from loopinterp.rasp.compiler.compiled import Compiled, compile_program
from loopinterp.rasp.disguises import add_noise, distract, permute, rotate
from loopinterp.rasp.program_registry import get_program, list_programs
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task_registry import get_task

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Task

VERSION = 1
"""Of the list of models. Scores of different versions are not to be compared."""

NOISY = "noisy"
DISGUISES: dict[str, Callable[[Compiled], Compiled]] = {
    "bare": lambda compiled: compiled,
    "rotated, permuted": lambda c: rotate(permute(c, seed=0), seed=0),
    "distracted, rotated": lambda c: rotate(distract(c, seed=0), seed=0),
    NOISY: partial(add_noise, relative=0.01, seed=0),
}

BROKEN_BY_NOISE = {
    *("abacus_ripple", "binary_sum", "copy", "multiplication", "one_shot"),
    *("token_addition", "unique_set"),
}
"""Programs whose models give other answers with noise on their weights: their circuit is not known.

They are wide: noise of one relative size adds up over hundreds of directions.
"""

LEFT_OUT = {"regular_language"}
"""Tasks whose programs came after this version of the list, and have no models in it."""

TRAINED_MODELS = Path(__file__).parent / "trained_models"
"""What :func:`~loopinterp.benchmark.train_to_circuit` gave, by program; part of the package."""

LENGTHS = {"multiplication": 3, "unique_set": 4, "token_addition": 4, "abacus_addition": 4}
"""Longest problems of the models, where that is not :data:`LENGTH`: their programs are wide."""

LENGTH = 6
PAIRS = 48
"""Pairs of inputs that edges are scored on."""


@dataclass(frozen=True, repr=False)
class BenchmarkModel(ShortRepr):
    """One model of the benchmark.

    Attributes:
        program_name: The stock program that it runs.
        disguise: What was done to it, one of :data:`DISGUISES`; or :data:`TRAINED`, if its weights
            were learnt.
    """

    program_name: str
    disguise: str

    @property
    def name(self) -> str:
        """Its name, and that of its folder."""
        return f"{self.program_name}.{self.disguise.replace(', ', '-')}"

    @property
    def program(self) -> LoopProgram:
        """The program that it runs."""
        return get_program(self.program_name)

    @property
    def task(self) -> Task:
        """The task of the program."""
        return get_task(self.program.task, **self.program.task_settings)

    @property
    def n(self) -> int:
        """The longest problem that it can be asked."""
        return LENGTHS.get(self.program.task, LENGTH)

    @property
    def n_loops(self) -> int:
        """T(n), the loops of a full run; at least two, that there are edges from loop to loop."""
        return max(self.program.n_loops(self.n), 2)

    @cached_property
    def compiled(self) -> Compiled:
        """The model with its circuit, made anew, or as it was trained."""
        if self.disguise == TRAINED:
            return Compiled.load(TRAINED_MODELS / self.program_name, program=self.program)
        bare = compile_program(self.program, max_length=self.task.n_positions(self.n))
        return DISGUISES[self.disguise](bare)

    def pairs(self) -> tuple[Int[Tensor, "pair pos"], Int[Tensor, "pair pos"]]:
        """Inputs, base and source, that edges are scored on: of all lengths up to n."""
        generator = torch.Generator().manual_seed(0)
        # The first pair is of full length, so that all inputs are as long as it.
        lengths = torch.randint(min(2, self.n), self.n + 1, (2, PAIRS), generator=generator)
        lengths[:, 0] = self.n
        base, source = (self.task.sample(n, generator=generator).inputs for n in lengths)
        return base, source


def benchmark_models(names: Iterable[str] | None = None) -> list[BenchmarkModel]:
    """The models of the benchmark, or some of them.

    Args:
        names: Names of models; or of programs, for all models that run them; by default all.

    Raises:
        InputError: a name that there is not.

    Example:
        >>> len(benchmark_models()), len({model.task.name for model in benchmark_models()})
        (93, 9)
        >>> benchmark_models(["ripple.noisy"])[0].n_loops
        5
    """
    every = [
        BenchmarkModel(program, disguise)
        for program in list_programs()
        if get_program(program).task not in LEFT_OUT
        for disguise in DISGUISES
        if disguise != NOISY or program not in BROKEN_BY_NOISE
    ]
    every += [BenchmarkModel(of.name, TRAINED) for of in sorted(TRAINED_MODELS.iterdir())]
    if names is None:
        return every
    known = {model.name: [model] for model in every}
    for model in every:
        known.setdefault(model.program_name, []).append(model)
    wanted: dict[str, BenchmarkModel] = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in known:
            raise unknown_name("model of the benchmark", name, known)
        wanted |= {model.name: model for model in known[name]}
    return [model for model in every if model.name in wanted]
