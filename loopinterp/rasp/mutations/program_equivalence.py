"""Whether two programs are the same one, as abstractions of the state of whole positions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from loopinterp.errors import InputError, unknown_name
from loopinterp.rasp.language import UNKNOWN, full, var
from loopinterp.rasp.mutations.rewriting import changed, fresh
from loopinterp.rasp.mutations.task_inputs import inputs_of
from loopinterp.rasp.registry import get_program
from loopinterp.tasks.registry import get_task
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

LENGTHS = (2, 4, 6)
"""Lengths of the inputs."""

EXAMPLES = 64
"""Inputs of each length and distribution."""

SCREENED = 16
"""The same, for a first look at every alignment."""

STRATA = ("length", "position", "loop", "token", "left_token")


@dataclass(frozen=True)
class Laid:
    """How one program lies over another.

    Attributes:
        shift: The other after t loops stands for the program after t + shift.
        offset: The other's position p stands for the program's p - offset.
        lag: The other answers by what the program knew so many loops before.
    """

    shift: int = 0
    offset: int = 0
    lag: int = 0


LAID = tuple(
    Laid(shift, offset, lag) for lag, offset, shift in itertools.product((0, 1), (0, 1), (0, -1, 1))
)
"""The ways that are tried, loop by loop and position by position first."""


@dataclass(frozen=True, eq=False)
class Equivalence:
    """How far two programs are told apart by interchange interventions.

    Attributes:
        program: Name of the program that is laid over the other.
        other: Name of the other.
        laid: How it lies best.
        natural_share: Share of (input, loop) at which undisturbed answers differ.
        interventions: One entry an intervention: the strata it is in, whether it ``changes`` an
            answer of either program, and whether the two ``differ`` at some loop after it.
    """

    program: str
    other: str
    laid: Laid
    natural_share: float
    interventions: dict[str, np.ndarray] = field(repr=False)

    @property
    def equivalent(self) -> bool:
        """Whether nothing tells them apart.

        Of N interventions none differs: at 95%, less than 3 / N of all do.
        """
        return self.natural_share == 0 and not self.interventions["differs"].any()

    @property
    def n_interventions(self) -> int:
        """How many interventions were made."""
        return len(self.interventions["differs"])

    @property
    def share(self) -> float:
        """Share of interventions that differ among those that change anything."""
        differs, changes = self.interventions["differs"], self.interventions["changes"]
        return float(differs.sum() / max((differs | changes).sum(), 1))

    def share_by(self, *strata: str) -> pd.DataFrame:
        """:attr:`share` in each stratum, with the interventions it is of, the largest first.

        Raises:
            InputError: an unknown stratum.
        """
        import pandas as pd

        for stratum in strata:
            if stratum not in STRATA:
                raise unknown_name("stratum", stratum, STRATA)
        table = pd.DataFrame(self.interventions)
        table = table[table["changes"] | table["differs"]]
        shares = table.groupby(list(strata))["differs"].agg(share="mean", n="size")
        return shares.sort_values("share", ascending=False, kind="stable")


def equivalence(
    program: LoopProgram | str,
    other: LoopProgram | str,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> Equivalence:
    """Look for an interchange intervention that tells two programs apart.

    At every position and loop of every base input, all variables of that position are taken from
    the run of a source input, drawn among those with the same token there; both programs go on,
    each with its own variables, until the other's T(n). They are equivalent if their answers,
    where asked for and decided by both, are equal at every loop from then on, and without any
    intervention (at T(n), both must be decided). The program may lie over the other a loop earlier or later, a position to the
    left, or with its answers a loop late (:data:`LAID`): the best of these counts.

    Args:
        program: The program, or its name.
        other: Another of the same task, in the place of a model.
        lengths: Lengths of the inputs.
        examples: Inputs of each length and distribution of the task.
        seed: Seed of inputs and sources.

    Raises:
        InputError: programs of different tasks.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997.

    Example:
        >>> from loopinterp.rasp.mutations import near_misses_by_kind
        >>> [negated] = near_misses_by_kind("ripple")["negated"]
        >>> equivalence("ripple", negated).equivalent
        True
        >>> found = equivalence("ripple", "ripple_held_2")
        >>> found.equivalent, found.natural_share, found.share > 0.1
        (False, 0.0, True)
    """
    first, second = (get_program(p) if isinstance(p, str) else p for p in (program, other))
    if (first.task, first.task_settings) != (second.task, second.task_settings):
        raise InputError(
            "other",
            expected=f"a program of {first.task}, with the settings {dict(first.task_settings)}",
            given=f"{second.name}, of {second.task} with {dict(second.task_settings)}",
            fix="Compare programs that read the same inputs and answer the same question.",
        )
    screened = {
        laid: told_apart(
            first, second, laid, lengths=lengths, examples=min(examples, SCREENED), seed=seed
        )
        for laid in LAID
    }
    best = min(LAID, key=lambda laid: screened[laid].share + screened[laid].natural_share)
    candidates = [laid for laid in LAID if screened[laid].equivalent] or [best]
    found = [
        told_apart(first, second, laid, lengths=lengths, examples=examples, seed=seed)
        for laid in candidates
    ]
    return min(found, key=lambda result: result.share + result.natural_share)


def answering_late(program: LoopProgram, loops: int) -> LoopProgram:
    """The program, answering by what it knew so many loops before.

    The pending answers are variables, so that an intervention on a position takes them along.

    Example:
        >>> answering_late(get_program("ripple"), 1).variables
        ('carry', 'answer')
    """
    for _ in range(loops):
        name = fresh(program, "answer")
        program = changed(
            program,
            "answering late",
            doc=program.doc,
            prepare={name: full(UNKNOWN)},
            step={name: program.finish},
            finish=var(name),
        )
    return program


def told_apart(
    program: LoopProgram,
    other: LoopProgram,
    laid: Laid,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> Equivalence:
    """:func:`equivalence` with the program laid over the other in one given way."""
    task = get_task(program.task, **program.task_settings)
    late = answering_late(program, laid.lag)
    natural: list[Tensor] = []
    columns: dict[str, list[Tensor]] = {}
    for n in lengths:
        batch, n_loops = inputs_of(task, (n,), examples, seed=seed), other.n_loops(n)
        first = max(-laid.shift, 0)
        if first > n_loops:
            continue  # the program has not begun when the other is done
        runs = _Run(late, batch.inputs, n_loops + 1), _Run(other, batch.inputs, n_loops + 1)
        asked = batch.targets != IGNORE
        answers = runs[1].outputs[first : n_loops + 1]
        expected = runs[0].outputs[first + laid.shift :][: len(answers)]
        differ = _differ(expected, answers)
        differ[-1:] = expected[-1:] != answers[-1:]  # at T(n), undecided is no answer
        natural.append((differ & asked).any(-1).flatten())
        generator = torch.Generator().manual_seed(seed)
        for position in range(max(laid.offset, 1), batch.inputs.shape[1]):
            pairs = _pairs(batch, position, torch.arange(first, n_loops + 1), generator)
            for name, column in _intervened(runs, laid, batch, pairs, n_loops).items():
                columns.setdefault(name, []).append(column)
            columns.setdefault("length", []).append(torch.full_like(pairs.base, n))
    return Equivalence(
        program=program.name,
        other=other.name,
        laid=laid,
        natural_share=float(torch.cat(natural).double().mean()),
        interventions={name: torch.cat(parts).numpy() for name, parts in columns.items()},
    )


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Interventions at one position: which input's run, which other's, after which loop."""

    position: int
    base: Int[Tensor, " pair"]
    source: Int[Tensor, " pair"]
    loop: Int[Tensor, " pair"]


def _pairs(batch: Batch, position: int, loops: Tensor, generator: torch.Generator) -> _Pairs:
    """Every input with another one of the same token there, at every loop."""
    token = batch.inputs[:, position]
    shuffled = torch.randperm(len(batch), generator=generator)
    by_token = shuffled[token[shuffled].argsort(stable=True)]
    # The next one of the same token, in a circle.
    source = torch.empty_like(by_token)
    for same in by_token.split(token.unique(return_counts=True)[1].tolist()):
        source[same] = same.roll(1)
    base, loop = torch.meshgrid(torch.arange(len(batch)), loops, indexing="ij")
    return _Pairs(position, base.flatten(), source[base.flatten()], loop.flatten())


class _Run:
    """A program's natural run on all inputs, and runs that go on from a changed state."""

    def __init__(self, program: LoopProgram, inputs: Tensor, n_loops: int) -> None:
        self.program, self.inputs = program, inputs
        self.trace = program.trace(inputs, n_loops)
        self.outputs = self.trace.outputs

    def intervened(
        self, pairs: _Pairs, *, position: int, loop: Tensor, n_loops: int
    ) -> tuple[Int[Tensor, "delay pair pos"], Int[Tensor, "delay pair pos"]]:
        """What is answered after the position's variables come from the source; and without."""
        state = {name: x[loop, pairs.base] for name, x in self.trace.variables.items()}
        for name, x in self.trace.variables.items():
            state[name][:, position] = x[loop, pairs.source, position]
        # A step knows no loop number, so interventions at different loops go on together.
        run = self.program.run(self.inputs[pairs.base], n_loops=n_loops, variables=state)
        delays = torch.arange(n_loops + 1)[:, None]
        reads = (loop + delays).clamp(max=len(self.outputs) - 1)
        return run.outputs, self.outputs[reads, pairs.base]


def _intervened(
    runs: tuple[_Run, _Run], laid: Laid, batch: Batch, pairs: _Pairs, n_loops: int
) -> dict[str, Tensor]:
    program, other = runs
    expected, undisturbed = program.intervened(
        pairs,
        position=pairs.position - laid.offset,
        loop=pairs.loop + laid.shift,
        n_loops=n_loops,
    )
    answers, left_alone = other.intervened(
        pairs, position=pairs.position, loop=pairs.loop, n_loops=n_loops
    )
    counts = (batch.targets != IGNORE)[pairs.base] & (
        pairs.loop + torch.arange(n_loops + 1)[:, None] <= n_loops
    )[..., None]

    def anywhere(x: Tensor) -> Tensor:
        return (x & counts).any(-1).any(0)

    return {
        "position": torch.full_like(pairs.base, pairs.position),
        "loop": pairs.loop,
        "token": batch.inputs[pairs.base, pairs.position],
        "left_token": batch.inputs[pairs.base, pairs.position - 1],
        "changes": anywhere(_differ(expected, undisturbed))
        | anywhere(_differ(answers, left_alone)),
        "differs": anywhere(_differ(expected, answers)),
    }


def _differ(x: Tensor, y: Tensor) -> Bool[Tensor, ...]:
    """Where two answers differ; one that is undecided says nothing."""
    return (x != y) & (x != UNKNOWN) & (y != UNKNOWN)
