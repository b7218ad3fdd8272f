"""Whether two programs are the same one, as abstractions of the state of whole positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from loopinterp.errors import InputError, check_integer, check_seed
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_alignment import Alignment, alignments, delayed
from loopinterp.rasp.program_registry import get_program
from loopinterp.tasks.task import IGNORE, Batch
from loopinterp.tasks.task_registry import get_task

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Task

LENGTHS = (2, 4, 6)
"""Lengths of the inputs."""

EXAMPLES = 64
"""Inputs of each length and distribution."""

INTERVENTIONS = 4096
"""Interventions of each length, at most."""

SCREENED = 512
"""The same, for a first look at every way of laying one program over the other."""

_MOST_INPUTS = 2**14
_AT_A_TIME = 2**15


@dataclass(frozen=True, eq=False)
class Equivalence:
    """How far two programs are told apart by interchange interventions.

    Attributes:
        program: Name of the program that is laid over the other.
        other: Name of the other.
        laid: How it lies best.
        exhaustive: Whether every intervention was made that there is at these lengths.
        natural_share: Share of (input, loop) at which undisturbed answers differ.
        interventions: One entry an intervention: length, base and source (rows of the inputs of
            that length), position, loop and the source's, whether it ``changes`` an answer of
            either program, and whether the two answers ``differ``, at some loop after it.
    """

    program: str
    other: str
    laid: Alignment
    exhaustive: bool
    natural_share: float
    interventions: dict[str, np.ndarray] = field(repr=False)

    @property
    def equivalent(self) -> bool:
        """Whether nothing tells them apart.

        Of N interventions none differs: at 95%, less than 3 / N of all do, unless these are all.
        """
        return self.natural_share == 0 and not self.interventions["differ"].any()

    @property
    def share(self) -> float:
        """Share of interventions that differ among those that change anything."""
        differ, changes = self.interventions["differ"], self.interventions["changes"]
        return float(differ.sum() / max((differ | changes).sum(), 1))


def equivalence(
    program: LoopProgram | str,
    other: LoopProgram | str,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    interventions: int | None = INTERVENTIONS,
    seed: int = 0,
) -> Equivalence:
    """Look for an interchange intervention that tells two programs apart.

    At some position and loop of a base input, all variables of that position are taken from the
    run of a source input, drawn among those with the same token there; both programs go on,
    each with its own variables, until the other's T(n). They are equivalent if their answers,
    where asked for and decided by both, are equal at every loop from then on, and without any
    intervention (at T(n), both must be decided). The program may lie over the other a loop earlier
    or later, a position to the left, or with its answers a loop late: the best of these counts.

    Args:
        program: The program, or its name.
        other: Another of the same task, in the place of a model.
        lengths: Lengths of the inputs.
        interventions: How many are made at inputs of each length, at most. None for each there is:
            at every position and loop of every input, every state that the same token has there
            in any input after any loop. For tasks of few inputs: a second at 1,000 of them.
        seed: Seed of inputs and interventions.

    Raises:
        InputError: programs of different tasks, no length, no interventions, or so long inputs that
            there are too many of them for each.

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
    if interventions is not None:
        check_integer("interventions", interventions, least=1)
    if not lengths:
        raise InputError("lengths", expected="at least one", given="none", fix="Pass e.g. (2, 4).")
    first, second = get_program(program), get_program(other)
    if (first.task, first.task_settings) != (second.task, second.task_settings):
        raise InputError(
            "other",
            expected=f"a program of {first.task}, with the settings {dict(first.task_settings)}",
            given=f"{second.name}, of {second.task} with {dict(second.task_settings)}",
            fix="Compare programs that read the same inputs and answer the same question.",
        )

    def laid_over(laid: Alignment, most: int | None) -> Equivalence:
        return told_apart(first, second, laid, lengths=lengths, interventions=most, seed=seed)

    def apart(found: Equivalence) -> float:
        return found.share + found.natural_share

    # The program must have begun when the other is done.
    longest = max(map(second.n_loops, lengths))
    fitting = [laid for laid in alignments() if longest + laid.shift >= 0]
    few = min(interventions or SCREENED, SCREENED)
    screened = [laid_over(laid, few) for laid in fitting]
    candidates = [found for found in screened if found.equivalent] or [min(screened, key=apart)]
    return min((laid_over(found.laid, interventions) for found in candidates), key=apart)


def told_apart(
    program: LoopProgram,
    other: LoopProgram,
    laid: Alignment,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    interventions: int | None = INTERVENTIONS,
    seed: int = 0,
) -> Equivalence:
    """:func:`equivalence` with the program laid over the other in one given way."""
    task = get_task(program.task, **program.task_settings)
    late = delayed(program, laid.lag)
    natural: list[Tensor] = []
    columns: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(check_seed(seed))
    for n in lengths:
        if interventions is None:
            batch = every_input(task, n, seed=seed)
        else:
            batch = inputs_of(task, (n,), EXAMPLES, seed=seed)
        n_loops = other.n_loops(n)
        first = max(-laid.shift, 0)
        if first > n_loops:
            continue  # the program has not begun when the other is done
        runs = _Run(late, batch.inputs, n_loops + 1), _Run(other, batch.inputs, n_loops + 1)
        answers = runs[1].outputs[first : n_loops + 1]
        expected = runs[0].outputs[first + laid.shift :][: len(answers)]
        differ = _differ(expected, answers)
        differ[-1:] = expected[-1:] != answers[-1:]  # at T(n), undecided is no answer
        natural.append((differ & (batch.targets != IGNORE)).any(-1).flatten())
        positions = range(max(laid.offset, 1), batch.inputs.shape[1])
        loops = range(first, n_loops + 1)
        if interventions is None:
            made = _every(runs, laid, batch, positions, loops)
        else:
            made = _drawn(batch, positions, loops, interventions, generator)
        for some in made.split(_AT_A_TIME):
            for name, column in _intervened(runs, laid, batch, some, n_loops).items():
                columns.setdefault(name, []).append(column)
        columns.setdefault("length", []).append(torch.full_like(made.base, n))
    return Equivalence(
        program=program.name,
        other=other.name,
        laid=laid,
        exhaustive=interventions is None,
        natural_share=float(torch.cat(natural).double().mean()),
        interventions={name: torch.cat(parts).numpy() for name, parts in columns.items()},
    )


@dataclass(frozen=True, eq=False)
class _Interventions:
    """Whose run is changed, whose values it is given, where, and after how many loops of each."""

    base: Int[Tensor, " row"]
    source: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    loop: Int[Tensor, " row"]
    source_loop: Int[Tensor, " row"]

    def split(self, at_a_time: int) -> Iterator[_Interventions]:
        """Parts that fit memory."""
        parts = zip(*(column.split(at_a_time) for column in vars(self).values()))
        return (_Interventions(*part) for part in parts)


def _every(
    runs: tuple[_Run, _Run], laid: Alignment, batch: Batch, positions: range, loops: range
) -> _Interventions:
    """All that change a state: of runs that come to one state of both programs, one is given."""
    made = []
    for position in positions:
        program, other = (run.trace.variables.values() for run in runs)
        shifted = slice(loops.start + laid.shift, loops.stop + laid.shift)
        state = torch.stack([
            batch.inputs[:, position].expand(len(loops), -1),
            *(x[shifted, :, position - laid.offset] for x in program),
            *(x[loops.start : loops.stop, :, position] for x in other),
        ])  # fmt: skip
        kinds, kind = state.flatten(1).unique(dim=1, return_inverse=True)
        one = torch.empty(kinds.shape[1], dtype=torch.long)
        one[kind] = torch.arange(len(kind))
        at = torch.arange(len(kinds[0]))
        base, source = ((kinds[0] == kinds[0, kind, None]) & (kind[:, None] != at)).nonzero().T
        (loop, base), (source_loop, source) = (
            torch.unravel_index(x, (len(loops), len(batch))) for x in (base, one[source])
        )
        position = torch.full_like(base, position)
        made.append((base, source, position, loop + loops.start, source_loop + loops.start))
    return _Interventions(*map(torch.cat, zip(*made)))


def _drawn(
    batch: Batch, positions: range, loops: range, most: int, generator: torch.Generator
) -> _Interventions:
    """Inputs, positions and loops, all different, each with another input of the same token."""
    source = torch.stack([_other_of_token(column, generator) for column in batch.inputs.T], dim=1)
    sizes = (len(batch), len(positions), len(loops))
    chosen = torch.randperm(math.prod(sizes), generator=generator)[:most]
    base, place, time = torch.unravel_index(chosen, sizes)
    position, loop = place + positions.start, time + loops.start
    return _Interventions(base, source[base, position], position, loop, loop)


def _other_of_token(
    tokens: Int[Tensor, " input"], generator: torch.Generator
) -> Int[Tensor, " input"]:
    """For each input another one with the same token: the next of a circle in random order."""
    shuffled = torch.randperm(len(tokens), generator=generator)
    by_token = shuffled[tokens[shuffled].argsort(stable=True)]
    other = torch.empty_like(by_token)
    for same in by_token.split(tokens.unique(return_counts=True)[1].tolist()):
        other[same] = same.roll(1)
    return other


class _Run:
    """A program's natural run on all inputs, and runs that go on from a changed state."""

    def __init__(self, program: LoopProgram, inputs: Tensor, n_loops: int) -> None:
        self.program, self.inputs = program, inputs
        self.trace = program.trace(inputs, n_loops)
        self.outputs = self.trace.outputs

    def intervened(
        self, drawn: _Interventions, laid: Alignment, n_loops: int
    ) -> tuple[Int[Tensor, "delay row pos"], Int[Tensor, "delay row pos"]]:
        """What is answered with the source's variables at the position; and without."""
        loop, position = drawn.loop + laid.shift, drawn.position - laid.offset
        rows = torch.arange(len(loop))
        state = {name: x[loop, drawn.base] for name, x in self.trace.variables.items()}
        for name, x in self.trace.variables.items():
            state[name][rows, position] = x[drawn.source_loop + laid.shift, drawn.source, position]
        # A step knows no loop number, so interventions at different loops go on together.
        run = self.program.run(self.inputs[drawn.base], n_loops=n_loops, variables=state)
        delays = torch.arange(n_loops + 1)[:, None]
        reads = (loop + delays).clamp(max=len(self.outputs) - 1)
        return run.outputs, self.outputs[reads, drawn.base]


def _intervened(
    runs: tuple[_Run, _Run], laid: Alignment, batch: Batch, drawn: _Interventions, n_loops: int
) -> dict[str, Tensor]:
    if not len(drawn.base):
        none = torch.zeros(0, dtype=torch.bool)
        return {**vars(drawn), "changes": none, "differ": none}
    program, other = runs
    expected, undisturbed = program.intervened(drawn, laid, n_loops)
    answers, left_alone = other.intervened(drawn, Alignment(), n_loops)
    within = drawn.loop + torch.arange(n_loops + 1)[:, None] <= n_loops
    counts = (batch.targets != IGNORE)[drawn.base] & within[..., None]

    def anywhere(x: Tensor) -> Tensor:
        return (x & counts).any(-1).any(0)

    changes = _differ(expected, undisturbed) | _differ(answers, left_alone)
    return {
        **vars(drawn),
        "changes": anywhere(changes),
        "differ": anywhere(_differ(expected, answers)),
    }


def _differ(x: Tensor, y: Tensor) -> Bool[Tensor, ...]:
    """Where two answers differ; one that is undecided says nothing."""
    return (x != y) & (x != UNKNOWN) & (y != UNKNOWN)


def inputs_of(task: Task, lengths: tuple[int, ...], examples: int, *, seed: int) -> Batch:
    """So many inputs of each length and of each of the task's distributions, padded alike."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    n = torch.tensor(lengths).repeat_interleave(examples)
    parts = [task.sample(n, generator=generator, distribution=d) for d in task.distributions]
    fields = ("inputs", "targets", "n", "n_loops")
    joined = (torch.cat([getattr(part, field) for part in parts]) for field in fields)
    return Batch(*joined, task=task)


def every_input(task: Task, n: int, *, seed: int = 0) -> Batch:
    """All inputs of a length, and more where not every symbol may follow every other.

    Raises:
        InputError: There are more than 16,384.
    """
    drawn = inputs_of(task, (n,), 8 * EXAMPLES, seed=seed).inputs
    symbols = [column.unique() for column in drawn.T]
    number = math.prod(map(len, symbols))
    if number > _MOST_INPUTS:
        raise InputError(
            "lengths",
            expected=f"lengths of which {task.name} has at most {_MOST_INPUTS:,} inputs",
            given=f"{n}, of which it has {number:,}",
            fix="Pass shorter ones, or a number of interventions.",
        )
    inputs = torch.cartesian_prod(*symbols).view(number, len(symbols))
    each = torch.full((number,), n), torch.full((number,), task.n_loops(n))
    return Batch(inputs, task.targets(inputs), *each, task=task)
