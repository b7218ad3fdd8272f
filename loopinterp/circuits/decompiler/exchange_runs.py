"""Runs that went on after a state was exchanged, beside runs that were left alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.interchange_pairs import InterchangePairs, SecondInterchange
from loopinterp.models import iterate
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.behaviour import Runs
    from loopinterp.tasks.task import Batch

_TRIES = 8
"""As many exchanges are drawn for each one that is planted."""


def exchanges(
    batch: Batch,
    n_loops: int,
    number: int,
    generator: torch.Generator,
    *,
    across_loops: bool = False,
) -> InterchangePairs:
    """Whole states of one position, from another input with the same token there.

    Fewer than asked for, if too few of the inputs drawn have the same token.

    Args:
        batch: Of one length.
        n_loops: Of the runs.
        number: Of exchanges.
        generator: Of all that is drawn.
        across_loops: Whether the state is one of any loop, in half of them; else of the same loop.
    """
    pairs = _drawn(batch, n_loops, number, generator)
    if not across_loops:
        return pairs
    elsewhere = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    same = torch.rand(pairs.loop.shape, generator=generator, dtype=torch.float32) < 0.5
    return replace(pairs, source_loop=pairs.loop.where(same, elsewhere))


def planted(
    batch: Batch,
    values: Int[Tensor, "loops input pos"],
    number: int,
    generator: torch.Generator,
) -> InterchangePairs:
    """Whole states of one position, of any loop, rare kinds as often as common ones.

    A *kind* is the value that is put in, the one that it replaces, and the one to the left of it,
    each with its token. Of exchanges as they come, most put in what most runs have.

    Args:
        batch: Of one length.
        values: Some value of every state of its undisturbed runs, h_0 to h_T.
        number: Of exchanges; fewer if not so many are drawn.
        generator: Of all that is drawn.
    """
    n_loops = len(values) - 1
    pairs = _drawn(batch, n_loops, _TRIES * number, generator)
    elsewhere = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    pairs = replace(pairs, source_loop=elsewhere)
    position = pairs.positions[:, 0]
    left, (token, left_token) = (position - 1).clamp(min=0), pairs.tokens
    kinds = torch.stack([
        position == 0, left_token, values[pairs.loop, pairs.base, left], token,
        values[pairs.loop, pairs.base, position],
        values[pairs.source_loop, pairs.source, position],
    ])  # fmt: skip
    if not len(pairs):
        return pairs
    _, kind, counts = kinds.unique(dim=1, return_inverse=True, return_counts=True)
    rare = 1 / counts[kind].double()
    return pairs[rare.multinomial(min(number, len(pairs)), generator=generator)]


def repeated(
    batch: Batch, n_loops: int, number: int, generator: torch.Generator
) -> InterchangePairs:
    """Two interchanges in one run, of whole states of any loop.

    The second is made at that loop or later, at the same position in half of them.

    Args:
        batch: Of one length.
        n_loops: Of the runs.
        number: Of pairs; fewer if not so many are drawn.
        generator: Of all that is drawn.
    """
    pairs = _drawn(batch, n_loops, _TRIES * number, generator)
    count, (size, n_pos) = len(pairs), batch.inputs.shape
    source = torch.randint(size, (count,), generator=generator)
    anywhere = torch.randint(n_pos, (count,), generator=generator)
    same = torch.rand(count, generator=generator, dtype=torch.float32) < 0.5
    position = pairs.positions[:, 0].where(same, anywhere)
    later = torch.rand(count, generator=generator, dtype=torch.float32) * (pairs.horizon + 1)
    own, second = torch.randint(n_loops + 1, (2, count), generator=generator)
    twice = SecondInterchange(source, position, pairs.loop + later.long(), second)
    alike = batch.inputs[pairs.base, position] == batch.inputs[source, position]
    kept = (alike & (source != pairs.base)).nonzero().squeeze(1)[:number]
    return replace(pairs, source_loop=own, second=twice)[kept]


def _drawn(batch: Batch, n_loops: int, number: int, generator: torch.Generator) -> InterchangePairs:
    tries, (size, n_pos) = 8 * number, batch.inputs.shape
    base, source = torch.randint(size, (2, tries), generator=generator)
    position = torch.randint(n_pos, (tries,), generator=generator)
    loop = torch.randint(n_loops + 1, (tries,), generator=generator)
    alike = batch.inputs[base, position] == batch.inputs[source, position]
    kept = (alike & (base != source)).nonzero().squeeze(1)[:number]
    return InterchangePairs.of(
        batch,
        base=base[kept],
        source=source[kept],
        positions=position[kept, None],
        loop=loop[kept],
        n_loops=n_loops,
    )


def to_cut(states: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
    """States as regions are cut from them: on the CPU, and in single precision at least."""
    return states.to("cpu", torch.promote_types(states.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Trajectories(ShortRepr):
    """States and answers of some runs; time counts the loops from where each begins.

    Attributes:
        tokens: What stands where.
        states: The states.
        answers: What would be answered there.
        within: Whether a run is not over yet.
    """

    tokens: Int[Tensor, "run pos"]
    states: Float[Tensor, "time run pos d_model"] = field(repr=False)
    answers: Int[Tensor, "time run pos"] = field(repr=False)
    within: Bool[Tensor, "time run"] = field(repr=False)

    def __getitem__(self, rows: Tensor) -> Trajectories:
        return Trajectories(
            self.tokens[rows], self.states[:, rows], self.answers[:, rows], self.within[:, rows]
        )


@dataclass(frozen=True, eq=False)
class ExchangeRuns(ShortRepr):
    """What a table of steps can be learnt from, and what it should say.

    Attributes:
        undisturbed: The runs of all inputs.
        exchanged: Those that went on from an exchanged state, from there on.
        pairs: Base, source, position and loop of each.
        asked: Where an answer is asked for.
    """

    undisturbed: Trajectories
    exchanged: Trajectories
    pairs: InterchangePairs = field(repr=False)
    asked: Bool[Tensor, "input pos"] = field(repr=False)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        runs: Runs,
        number: int,
        generator: torch.Generator,
        *,
        across_loops: bool = False,
    ) -> ExchangeRuns:
        """Draw exchanges; of those that change no answer of the model, as many as of the others.

        Args:
            runs: Undisturbed runs.
            number: How many are tried.
            generator: Of the exchanges.
            across_loops: As :func:`exchanges` has it.
        """
        pairs = exchanges(runs.batch, runs.n_loops, number, generator, across_loops=across_loops)
        made = cls.after(runs, pairs)
        felt = (made.felt & made.counted).any(-1).any(0)
        unfelt = (~felt).nonzero().squeeze(1)[: max(int(felt.sum()), 1)]
        return made[torch.cat([felt.nonzero().squeeze(1), unfelt])]

    @classmethod
    @torch.no_grad()
    def after(cls, runs: Runs, pairs: InterchangePairs) -> ExchangeRuns:
        """Run on after given exchanges.

        Args:
            runs: Undisturbed runs.
            pairs: Exchanges between them.
        """
        loops = torch.arange(runs.n_loops + 1)
        everything = torch.ones(len(loops), len(runs.batch.inputs), dtype=torch.bool)
        alone = runs.answers(runs.inputs, runs.states).cpu()
        undisturbed = Trajectories(runs.batch.inputs, to_cut(runs.states), alone, everything)
        each, position = torch.arange(len(pairs)), pairs.positions[:, 0]
        changed = runs.states[pairs.loop, pairs.base].clone()
        changed[each, position] = runs.states[pairs.source_loop, pairs.source, position]
        inputs = runs.inputs[pairs.base]
        run = iterate(runs.model, inputs, int(pairs.longest), state=changed)
        states = torch.stack([h for _, h in run])
        within = pairs.loop + loops[: len(states), None] <= runs.n_loops
        answers = runs.answers(inputs, states).cpu()
        exchanged = Trajectories(runs.batch.inputs[pairs.base], to_cut(states), answers, within)
        return cls(undisturbed, exchanged, pairs, pairs.asked)

    def __getitem__(self, rows: Tensor) -> ExchangeRuns:
        """All undisturbed runs, and some of the exchanged ones."""
        return replace(self, exchanged=self.exchanged[rows], pairs=self.pairs[rows])

    @property
    def both(self) -> tuple[Trajectories, Trajectories]:
        """The undisturbed runs and the exchanged ones."""
        return self.undisturbed, self.exchanged

    @cached_property
    def natural(self) -> Int[Tensor, "time pair pos"]:
        """Answers of each base at the same loops, undisturbed; past the end those of the end."""
        return self.at_base(self.undisturbed.answers)

    @cached_property
    def counted(self) -> Bool[Tensor, "time pair pos"]:
        """Where an answer is asked for, before a run is over."""
        return self.exchanged.within[..., None] & self.asked[self.pairs.base]

    @cached_property
    def felt(self) -> Bool[Tensor, "time pair pos"]:
        """Where an exchange changes what the model answers."""
        return self.exchanged.answers != self.natural

    def at_base(self, of_runs: Int[Tensor, "loops input pos"]) -> Int[Tensor, "time pair pos"]:
        """What undisturbed runs have at the loops at which the exchanged ones are."""
        times = torch.arange(len(self.exchanged.within))[:, None]
        loops = (self.pairs.loop + times).clamp(max=len(of_runs) - 1)
        rows = loops * of_runs.shape[1] + self.pairs.base
        return of_runs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
