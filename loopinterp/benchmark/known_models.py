"""Models whose circuit is known, with inputs to study them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from loopinterp.circuits.comparison_inputs import check_program_list
from loopinterp.errors import check_integer, check_seed
from loopinterp.models.looped_model import LoopedModel
from loopinterp.rasp.compiler.circuit import orthonormal
from loopinterp.rasp.compiler.compiled import Compiled, compile_program
from loopinterp.rasp.program import LoopProgram
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task import Batch
from loopinterp.tasks.task_registry import get_task

Disguise = Callable[[Compiled], Compiled]


@dataclass(frozen=True, eq=False, repr=False)
class KnownModel(ShortRepr):
    """A compiled model to try a tool on: its circuit is known.

    Attributes:
        compiled: The model, its circuit, its program.
        batch: Inputs of one length.
        n_loops: T(n), the loops of a full run.
        label: What was done to the model, in a word or two; "" for nothing.
    """

    compiled: Compiled
    batch: Batch
    n_loops: int
    label: str = ""

    @property
    def name(self) -> str:
        """The program, and what was done to the model."""
        program = self.compiled.program.name
        return f"{program}, {self.label}" if self.label else program

    def of_distractors(self, states: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """The part of states along directions of which the circuit says nothing."""
        directions = [d.write for d in self.compiled.circuit.directions.values()]
        held = orthonormal(torch.cat(directions).double()).to(states)
        rest = states - (states @ held.mT) @ held
        return torch.zeros_like(rest) if len(held) == states.shape[-1] else rest

    @property
    def without_distractors(self) -> LoopedModel:
        """The model, with distractors wiped from each state: nothing reads what they write.

        They hold functions of whatever they read: there a probe finds a variable before the
        program has it, and the state settles a loop after the program.
        """
        return _WithoutDistractors(self)


class _WithoutDistractors:
    def __init__(self, known: KnownModel) -> None:
        self._known, self._model = known, known.compiled.model
        self.embed, self.readout = self._model.embed, self._model.readout

    def initial_state(self, e: Tensor) -> Tensor:
        return self._wiped(self._model.initial_state(e))

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return self._wiped(self._model.step(h, e))

    def _wiped(self, h: Tensor) -> Tensor:
        return h - self._known.of_distractors(h)


def known_models(
    programs: Sequence[str | LoopProgram],
    *,
    n: int = 6,
    examples: int = 256,
    disguises: Sequence[Disguise] = (),
    label: str | None = None,
    seed: int = 0,
) -> list[KnownModel]:
    """Compile programs, and put each through the same disguises, one after the other.

    Args:
        programs: Loop programs whose task is registered.
        n: Problem length of the inputs; the models are compiled for it.
        examples: Inputs for each model.
        disguises: What is done to each model, e.g. ``partial(rotate, seed=0)``.
        label: What tables call the disguises; by default a word for each.
        seed: Seed of the inputs.

    Raises:
        InputError: no list of programs, fewer than 8 examples, or a program that cannot be
            compiled.

    Example:
        >>> [known.name for known in known_models(["ripple", "copy"], n=3, examples=8)]
        ['ripple', 'copy']
    """
    check_integer("examples", examples, least=8)
    check_integer("n", n, least=1)
    made = []
    for program in check_program_list(programs):
        bare, (batch,) = compiled_with_inputs(program, [n], examples=examples, seed=seed)
        compiled = disguised(bare, disguises)
        done = " ".join(words.split()[0] for words in compiled.circuit.disguises)
        called = done if label is None else label
        made.append(KnownModel(compiled, batch, program.n_loops(n), called))
    return made


def compiled_with_inputs(
    program: LoopProgram, lengths: Sequence[int], *, examples: int, seed: int
) -> tuple[Compiled, list[Batch]]:
    """A program compiled for the last of some problem lengths, and a batch of each length."""
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(check_seed(seed))
    batches = [task.sample(torch.full((examples,), n), generator=generator) for n in lengths]
    return compile_program(program, max_length=batches[-1].inputs.shape[1]), batches


def disguised(compiled: Compiled, disguises: Sequence[Disguise]) -> Compiled:
    """A model put through disguises, one after the other."""
    for disguise in disguises:
        compiled = disguise(compiled)
    return compiled
