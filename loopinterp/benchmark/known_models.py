"""Known-circuit models: compiled programs with inputs, and the models of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from loopinterp.benchmark.circuit_training import TRAINED
from loopinterp.comparison.inputs import check_program_list
from loopinterp.compiler import add_noise, distract, permute, rotate
from loopinterp.compiler.circuit import orthonormal
from loopinterp.compiler.compiled import Compiled, compile_program
from loopinterp.core.boundary import checked
from loopinterp.core.errors import unknown_name
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.models.protocol import LoopedModel
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.task import Batch, Task
from loopinterp.tasks.task_registry import get_task

Disguise = Callable[[Compiled], Compiled]
VERSION = 1  # of the benchmark's list of models. Scores of different versions are not comparable
DISGUISES: dict[str, Disguise] = {
    "bare": lambda compiled: compiled,
    "rotated, permuted": lambda c: rotate(permute(c, seed=0), seed=0),
    "distracted, rotated": lambda c: rotate(distract(c, seed=0), seed=0),
    "noisy": partial(add_noise, relative=0.01, seed=0),
}

_BROKEN_BY_NOISE = {
    *("abacus_ripple", "binary_sum", "copy", "multiplication", "one_shot"),
    *("token_addition", "unique_set"),
}
"""Programs without a noisy model: noise adds up over their hundreds of directions."""

_LEFT_OUT = {"regular_language"}  # tasks that are newer than this version of the list
TRAINED_MODELS = Path(__file__).parent / "trained_models"
"""Models of :func:`~loopinterp.benchmark.train_to_circuit`, by program."""

# Longest problems of the tasks with wide programs; 6 for all others
LENGTHS = {"multiplication": 3, "unique_set": 4, "token_addition": 4, "abacus_addition": 4}


@dataclass(frozen=True, eq=False, repr=False)
class KnownModel(ShortRepr):
    """A compiled model to test a tool on, with inputs of one length."""

    compiled: Compiled
    batch: Batch
    n_loops: int  # T(n), the loops of a full run
    label: str = ""  # the disguise, in a word or two

    @property
    def name(self) -> str:
        """The program, and the disguise."""
        program = self.compiled.program.name
        return f"{program}, {self.label}" if self.label else program

    def of_distractors(self, states: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """The part of states outside the circuit's directions."""
        written = torch.cat([d.write for d in self.compiled.circuit.directions.values()])
        basis = orthonormal(written).to(states)  # [rank, d_model], of the circuit
        rest = states - (states @ basis.mT) @ basis
        return torch.zeros_like(rest) if len(basis) == states.shape[-1] else rest

    @property
    def without_distractors(self) -> LoopedModel:
        """The model with distractors removed from each state; they converge one loop after the
        program.
        """
        model = self.compiled.model

        def without(h: Tensor) -> Tensor:
            return h - self.of_distractors(h)

        without_them: Any = SimpleNamespace(
            embed=model.embed,
            initial_state=lambda e: without(model.initial_state(e)),
            step=lambda h, e: without(model.step(h, e)),
            readout=model.readout,
        )
        return without_them


@dataclass(frozen=True)
class Score:
    """A tool's score on one model, and its control; NaN where a check does not apply."""

    value: float
    control: float = float("nan")


@checked
def known_models(
    programs: Sequence[str | LoopProgram],
    *,
    n: PositiveInt = 6,
    examples: Annotated[int, Field(ge=8)] = 256,
    disguises: Sequence[Disguise] = (),
    label: str | None = None,
    seed: Seed = 0,
) -> list[KnownModel]:
    """Compile programs, and apply the same disguises to each model, in order.

    Args:
        programs: Loop programs whose task is registered.
        n: Problem length of the inputs; the models are compiled for it.
        disguises: Changes of a model, e.g. ``partial(rotate, seed=0)``.
        label: Name of the disguises in tables; by default a word for each.

    Example:
        >>> [known.name for known in known_models(["ripple", "copy"], n=3, examples=8)]
        ['ripple', 'copy']
    """
    models = []
    for program in check_program_list(programs):
        compiled, (batch,) = compiled_with_inputs(program, [n], examples=examples, seed=seed)
        for disguise in disguises:
            compiled = disguise(compiled)
        names = " ".join(words.split()[0] for words in compiled.circuit.disguises)
        name = names if label is None else label
        models.append(KnownModel(compiled, batch, program.n_loops(n), name))
    return models


def compiled_with_inputs(
    program: LoopProgram, lengths: Sequence[int], *, examples: int, seed: int
) -> tuple[Compiled, list[Batch]]:
    """A program compiled for the last of several problem lengths, and a batch of each length."""
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(seed)
    batches = [task.sample(torch.full((examples,), n), generator=generator) for n in lengths]
    return compile_program(program, max_length=batches[-1].inputs.shape[1]), batches


@dataclass(frozen=True, repr=False)
class BenchmarkModel(ShortRepr):
    """One model of the benchmark."""

    program_name: str
    disguise: str  # one of DISGUISES, or TRAINED if its weights were learnt

    @property
    def name(self) -> str:
        """Its name, and that of its folder."""
        return f"{self.program_name}.{self.disguise.replace(', ', '-')}"

    @property
    def program(self) -> LoopProgram:
        """The stock program that it runs."""
        return get_program(self.program_name)

    @property
    def task(self) -> Task:
        """The task of the program."""
        return get_task(self.program.task, **self.program.task_settings)

    @property
    def n(self) -> int:
        """The longest problem of its inputs."""
        return LENGTHS.get(self.program.task, 6)

    @property
    def n_loops(self) -> int:
        """T(n), and at least two loops, so that some edges cross loops."""
        return max(self.program.n_loops(self.n), 2)

    @cached_property
    def compiled(self) -> Compiled:
        """The model with its circuit: compiled now, or trained before."""
        if self.disguise == TRAINED:
            return Compiled.load(TRAINED_MODELS / self.program_name, program=self.program)
        bare = compile_program(self.program, max_length=self.task.n_positions(self.n))
        return DISGUISES[self.disguise](bare)

    def pairs(self) -> tuple[Int[Tensor, "pair pos"], Int[Tensor, "pair pos"]]:
        """Base and source inputs for edges, of all lengths up to n."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(min(2, self.n), self.n + 1, (2, 48), generator=generator)
        lengths[:, 0] = self.n  # all inputs are padded to the full length
        base, source = (self.task.sample(n, generator=generator).inputs for n in lengths)
        return base, source


def benchmark_models(names: Iterable[str] | None = None) -> list[BenchmarkModel]:
    """The models of the benchmark, or those with these names or programs.

    Example:
        >>> len(benchmark_models()), len({model.task.name for model in benchmark_models()})
        (97, 9)
        >>> benchmark_models(["ripple.noisy"])[0].n_loops
        5
    """
    every = [
        BenchmarkModel(program, disguise)
        for program in list_programs()
        if get_program(program).task not in _LEFT_OUT
        for disguise in DISGUISES
        if disguise != "noisy" or program not in _BROKEN_BY_NOISE
    ]
    every += [BenchmarkModel(folder.name, TRAINED) for folder in sorted(TRAINED_MODELS.iterdir())]
    if names is None:
        return every
    names = [names] if isinstance(names, str) else list(names)
    known = {name for model in every for name in (model.name, model.program_name)}
    for name in names:
        if name not in known:
            raise unknown_name("model of the benchmark", name, known)
    return [model for model in every if {model.name, model.program_name} & {*names}]
