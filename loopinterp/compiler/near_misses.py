"""Near misses: mutations of a program with the same answers at T(n) and another mechanism."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest

import torch
from jaxtyping import Int
from pydantic import NonNegativeInt
from torch import Tensor

from loopinterp.compiler.compiled import compile_program
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.settings import Seed
from loopinterp.programs import mutations
from loopinterp.programs.equivalence import SCREENED, equivalence_at, inputs_of
from loopinterp.programs.expressions import Seq
from loopinterp.programs.mutations import ALWAYS, Condition, reads_of_other_positions
from loopinterp.programs.program import LoopProgram, ProgramOffset
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import IGNORE, Batch
from loopinterp.tasks.task_registry import get_task

# Lengths of the inputs on which a near miss must answer as the original does
LENGTHS = (*range(1, 8), 16)
# Kinds that no intervention on whole positions separates from the original
_STORED_OTHERWISE = ("negated", "doubled")


def near_misses(
    program: LoopProgram | str, *, most: int | None = None, seed: int = 0
) -> list[LoopProgram]:
    """Mutations of a program that give its answers at T(n), and compile.

    A mutation acts everywhere or at some tokens. It starts at the first loop from which the answers
    stay right, or else once clean runs are constant. Mutations that no interchange reveals are left
    out. Some may be equivalent to the original: see :func:`~loopinterp.programs.equivalence`.

    Args:
        most: Return at most this many, of as many kinds as possible; all by default.
        seed: Seed of the tokens at which some mutations act, of the inputs, and of the choice.

    Example:
        >>> [miss.name for miss in near_misses("prefix_xor", most=1)]
        ['prefix_xor, prefix held 3 loops once settled']
    """
    kinds = near_misses_by_kind(program, most=most, seed=seed)
    return [miss for misses in kinds.values() for miss in misses]


@checked
def near_misses_by_kind(
    program: LoopProgram | str, *, most: NonNegativeInt | None = None, seed: Seed = 0
) -> dict[str, list[LoopProgram]]:
    """:func:`near_misses` by kind of mutation; kinds without any are left out."""
    original = get_program(program)
    task = get_task(original.task, **original.task_settings)
    batch = inputs_of(task, LENGTHS, 48, seed=seed)
    needed = torch.tensor([original.n_loops(n) for n in batch.n.tolist()])
    answers = _answers(original, batch, needed)
    how = {"interventions": SCREENED, "seed": seed, "drawn": {}}

    def is_near_miss(kind: str, miss: LoopProgram) -> bool:
        try:
            if not torch.equal(_answers(miss, batch, needed), answers):
                return False
            result = equivalence_at(original, miss, ProgramOffset(), **how)
            if result.equivalent and kind not in _STORED_OTHERWISE:
                return False
            compile_program(miss, max_length=task.n_positions(2))
        except InputError:  # it divides by 0, or takes too many values
            return False
        return True

    # Mutations act everywhere and at some tokens: when, the broadest first.
    converged = mutations.once_converged(
        original, mutations.lateness(original, batch.inputs, n_loops=int(needed.max()) + 1)
    )
    seen = batch.inputs[batch.n == max(LENGTHS), 1:].unique().tolist()
    chosen = sorted(random.Random(seed).sample(seen, max(len(seen) // 2, 1)))
    at_tokens = mutations.at_tokens(original, chosen)
    conditions = [(ALWAYS, converged), (at_tokens, converged & at_tokens)]
    by_kind: dict[str, list[tuple[Callable[[], LoopProgram], ...]]] = {}
    for kind, broadest_first in _mutations(original, conditions):
        by_kind.setdefault(kind, []).append(broadest_first)
    for same_kind in by_kind.values():
        random.Random(seed).shuffle(same_kind)
    misses: dict[str, list[LoopProgram]] = {}
    # One attempt of each kind, then another of each, and so on.
    for one_each in zip_longest(*by_kind.values(), fillvalue=()):
        for kind, broadest_first in zip(by_kind, one_each):
            if sum(map(len, misses.values())) == most:
                return misses
            mutated = (mutate() for mutate in broadest_first)
            miss = next((miss for miss in mutated if is_near_miss(kind, miss)), None)
            if miss is not None:
                misses.setdefault(kind, []).append(miss)
    return misses


def _answers(
    program: LoopProgram, batch: Batch, needed: Int[Tensor, " batch"]
) -> Int[Tensor, "batch pos"]:
    outputs = program.trace(batch.inputs, int(needed.max())).outputs  # [loop, batch, pos]
    at_end = outputs[needed, torch.arange(len(batch))]
    return torch.where(batch.targets == IGNORE, IGNORE, at_end)


def _mutations(
    program: LoopProgram, conditions: list[tuple[Condition, Condition]]
) -> Iterator[tuple[str, tuple[Callable[[], LoopProgram], ...]]]:
    reads = reads_of_other_positions(program)
    for kind, mutated in _conditional(program, reads):
        for broadest_first in conditions:
            yield kind, tuple(partial(mutated, when) for when in broadest_first)
    for name in program.prepare:
        yield "negated", (partial(mutations.negated, program, name),)
    for name in program.step:
        yield "doubled", (partial(mutations.doubled, program, name),)
        if name in program.finish.variables:
            larger = partial(mutations.answers_by_the_larger, program, name)
            yield "answers by the larger", (larger,)
    for read in reads:
        for trust in ("copy", "larger", "smaller"):
            copied = partial(mutations.read_from_a_copy, program, read, trust=trust)
            yield "read from a copy", (copied,)
    yield "faster", (partial(mutations.several_steps, program, 3, ALWAYS),)
    yield "answers ahead", (partial(mutations.answers_ahead, program),)


def _conditional(
    program: LoopProgram, reads: list[Seq]
) -> Iterator[tuple[str, Callable[[Condition], LoopProgram]]]:
    read_by_others = {name for read in reads for name in read.variables}
    for name in program.step:
        altered = partial(mutations.altered, program, name)
        for loops in (2, 3):
            yield "held", partial(mutations.held, program, name, loops=loops)
        yield "held for ever", partial(altered, how="held for ever")
        yield "one-sided", partial(altered, how="only grows")
        yield "one-sided", partial(altered, how="only falls")
        yield "delayed", partial(mutations.delayed, program, name)
        yield "forgetting", partial(altered, how="forgotten")
        if name in read_by_others:
            yield "old value read", partial(mutations.reading_old, program, name)
            yield "out of phase", partial(mutations.held_out_of_phase, program, name)
            yield "second change", partial(mutations.forgotten_the_second_time, program, name)
        if mutations.keep_choice(program, name) is not None:
            for loops in (1, 2):
                shorter = partial(mutations.kept_shorter, program, name, loops=loops)
                yield "kept shorter", shorter
    for name in program.prepare:
        if name not in program.step:
            yield "recomputed", partial(mutations.recomputed, program, name)
    for read in reads:
        before = partial(mutations.worked_out_from_before, program, read)
        yield "worked out from before", before
    yield "faster", partial(mutations.several_steps, program, 2)
    yield "slower", partial(mutations.every_other_loop, program)
