"""The studies that ``loopinterp analyze`` runs: what each asks, of which task, on what data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.results import Result
    from loopinterp.tasks import Addition, Batch, Task
    from loopinterp.training import Run

RESULTS = "results"
"""The folder of saved results inside a run."""

KNOWN_BITS = 5
"""Bits of the additions on which the tools themselves are tried: enough to see every loop."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trained model with its task, as a study takes it."""

    run: Run
    model: LoopedTransformer
    task: Task
    seed: int

    @property
    def cutoff(self) -> int:
        """Greatest problem length that was trained on."""
        return self.run.config.curriculum.max_n

    def generator(self) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(self.seed)

    def sample(self, n: int, batch_size: int) -> Batch:
        """Examples of one length, of the distribution that the model was trained on."""
        batch = self.task.sample(
            n,
            batch_size=batch_size,
            generator=self.generator(),
            distribution=self.run.config.distribution,
        )
        return batch.to(self.model.device)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that ``analyze`` can run.

    Attributes:
        name: Its name on the command line and of its files.
        about: What it asks.
        run: From the subject to the result.
        tasks: Tasks that it applies to; any if empty.
        needs: The study whose saved result it starts from, if any.
    """

    name: str
    about: str
    run: Callable[[Subject], Result]
    tasks: tuple[str, ...] = ()
    needs: str | None = None

    def fits(self, task: Task) -> bool:
        return not self.tasks or task.name in self.tasks


def open_run(folder: str | Path, *, seed: int = 0, device: str = "auto") -> Subject:
    """A run's model and task, on a device, ready for studies.

    Raises:
        CheckpointError: If the folder holds no run, or its files are damaged.
        InputError: If the device is not there.
    """
    from loopinterp.training import Run
    from loopinterp.training.device import resolve_device

    run = Run.load(folder)
    model = run.model(resolve_device(device))
    return Subject(run=run, model=model, task=run.task(), seed=seed)


def _convergence(subject: Subject) -> Result:
    from loopinterp.dynamics import convergence_study

    batch = subject.sample(4 * subject.cutoff, 32)
    return convergence_study(subject.model, batch, seed=subject.seed)


def _extrapolation(subject: Subject) -> Result:
    from loopinterp.dynamics import extrapolation_study

    trained = subject.task.n_loops(subject.cutoff)
    batch = subject.sample(2 * subject.cutoff, 64)
    return extrapolation_study(subject.model, batch, n_loops=10 * trained, trained_loops=trained)


def _stabilisation(subject: Subject) -> Result:
    from loopinterp.dynamics import attention_stabilisation_study

    return attention_stabilisation_study(subject.model, subject.sample(2 * subject.cutoff, 32))


def _wavefront(subject: Subject) -> Result:
    from loopinterp.probing import carry_study

    task = cast("Addition", subject.task)
    return carry_study(subject.model, task, n=max(24, 4 * subject.cutoff), seed=subject.seed)


def _attention(subject: Subject) -> Result:
    from loopinterp.lenses import attention_study

    batch = subject.sample(2 * subject.cutoff, 64)
    n_loops = subject.task.n_loops(2 * subject.cutoff)
    return attention_study(
        subject.model,
        batch.inputs,
        n_loops=n_loops,
        labels=_labels(subject.task, batch.inputs[0]),
        seed=subject.seed,
    )


def _programs(subject: Subject) -> Result:
    from loopinterp.circuits import compare_programs

    return compare_programs(
        subject.model,
        names=[subject.run.folder.resolve().name],
        n=_swap_bits(subject),
        seed=subject.seed,
    )


def _swap_bits(subject: Subject) -> int:
    """Bits of additions whose states are swapped: chains need room on both sides of the front."""
    return max(24, 2 * subject.cutoff)


def _subspaces(subject: Subject) -> Result:
    from loopinterp.circuits import CircuitComparison, subspace_study

    comparison = CircuitComparison.load(subject.run.folder / RESULTS / "programs.json")
    return subspace_study(
        subject.model, comparison.verdict.nearest, n=_swap_bits(subject), seed=subject.seed
    )


def _decodability(subject: Subject) -> Result:
    from loopinterp.circuits import decodability

    return decodability(subject.model, subject.sample(2 * subject.cutoff, 64), seed=subject.seed)


def _heads(subject: Subject) -> Result:
    from loopinterp.circuits import head_study

    return head_study(subject.model, subject.sample(2 * subject.cutoff, 64), seed=subject.seed)


def _ground_truth(subject: Subject) -> Result:
    """The tools on the programs that the model is compared with, compiled and disguised."""
    from functools import partial

    from loopinterp.ground_truth import ground_truth_study, known_models
    from loopinterp.rasp import distract, list_programs, permute, rotate

    seed = subject.seed
    hide = [partial(disguise, seed=seed) for disguise in (distract, permute, rotate)]
    programs = list_programs(subject.task.name)
    models = known_models(
        programs, n=KNOWN_BITS, examples=128, disguises=hide, label="disguised", seed=seed
    )
    return ground_truth_study(models, seed=seed)


def _labels(task: Task, tokens: Tensor) -> list[str] | None:
    """What stands at each position, where a word for it exists."""
    if task.name != "addition" or task.d_vocab is None:
        return None
    words = ("0+0", "1+0", "0+1", "1+1", "BOS", "PAD")
    return [words[int(token)] for token in tokens]


# In the order in which they are run.
STUDIES = (
    Study(name="convergence", about="does the state settle, and is it right?", run=_convergence),
    Study(name="extrapolation", about="what if the loops run on?", run=_extrapolation),
    Study(name="stabilisation", about="do the heads freeze?", run=_stabilisation),
    Study(
        name="wavefront",
        about="how far has the carry come after each loop?",
        run=_wavefront,
        tasks=("addition",),
    ),
    Study(
        name="programs",
        about="which program does the circuit run?",
        run=_programs,
        tasks=("addition",),
    ),
    Study(
        name="subspaces",
        about="in which directions does it keep the program's variables? (after programs)",
        run=_subspaces,
        tasks=("addition",),
        needs="programs",
    ),
    Study(
        name="decodability",
        about="which variables of the programs can be read?",
        run=_decodability,
        tasks=("addition",),
    ),
    Study(
        name="heads",
        about="do the heads look where the programs look?",
        run=_heads,
        tasks=("addition",),
    ),
    Study(name="attention", about="where does each head look at each loop?", run=_attention),
    Study(
        name="ground-truth",
        about="do the tools find what is known to be there, in compiled models?",
        run=_ground_truth,
        tasks=("addition",),
    ),
)
