"""A model's clean runs, and runs after an interchange of the state of one position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.text import ShortRepr
from loopinterp.interventions.engine import answer, decided
from loopinterp.interventions.pairs import drawn_pairs
from loopinterp.models import bind, device_of, iterate
from loopinterp.programs.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch


@dataclass(frozen=True, eq=False)
class Runs:
    """A model's clean runs on inputs of one length, kept on the CPU."""

    model: LoopedModel | Any
    batch: Batch
    n_loops: int

    @cached_property
    @torch.no_grad()
    def states(self) -> Float[Tensor, "loops input pos d_model"]:
        return torch.stack([h for _, h in iterate(self.model, self.inputs, self.n_loops)])

    @property
    def inputs(self) -> Int[Tensor, "input pos"]:
        return self.batch.inputs.to(device_of(self.model))

    @cached_property
    def tokens(self) -> list[int]:
        return self.batch.inputs.unique().tolist()

    def trajectories(self) -> Trajectories:
        answers = self.answers(self.inputs, self.states).cpu()
        always = torch.ones(answers.shape[:2], dtype=torch.bool)
        return Trajectories(self.batch.inputs, _to_cut(self.states), answers, always)

    @torch.no_grad()
    def answers(
        self, inputs: Int[Tensor, "run pos"], states: Float[Tensor, "time run pos d_model"]
    ) -> Int[Tensor, "time run pos"]:
        bound = bind(self.model, inputs)
        return torch.stack([read_answers(bound.readout(h)) for h in states])


def read_answers(logits: Float[Tensor, "batch pos d_vocab_out"]) -> Int[Tensor, "batch pos"]:
    return torch.where(decided(logits), answer(logits).long(), UNKNOWN)


@torch.no_grad()
def depends_elsewhere(
    runs: Runs, classify: Callable[[int, Tensor], Tensor], generator: torch.Generator
) -> float:
    """Share of positions whose next value depends on more than they and their left neighbour."""
    n_places, (size, n_pos) = 256, runs.batch.inputs.shape
    rows, others = torch.randint(size, (2, n_places), generator=generator)
    at = torch.randint(n_pos, (n_places,), generator=generator)
    loops = torch.randint(max(runs.n_loops, 1), (n_places,), generator=generator)
    positions = torch.arange(n_pos)
    near = (positions == at[:, None]) | (positions == at[:, None] - 1)  # [place, pos]
    tokens = runs.inputs[rows].where(near.to(runs.inputs.device), runs.inputs[others])
    h = runs.states[loops, rows].clone()  # [place, pos, d_model]
    mixed = h.where(near[..., None].to(h.device), runs.states[loops, others])
    each = torch.arange(n_places)
    before = bind(runs.model, runs.inputs[rows]).step(h)[each, at]
    after = bind(runs.model, tokens).step(mixed)[each, at]
    changed, token_of = 0, runs.batch.inputs[rows, at]
    for token in runs.tokens:
        chosen = token_of == token
        if chosen.any():
            # Classified in one call, so that both see the same values.
            first, second = classify(token, torch.cat([before[chosen], after[chosen]])).chunk(2)
            changed += int((first != second).sum())
    return changed / n_places


def _to_cut(states: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
    """States on the CPU, at least in single precision, for cutting regions."""
    return states.to("cpu", torch.promote_types(states.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Trajectories(ShortRepr):
    """Runs; time counts the loops of each, and ``within`` marks those not yet over."""

    tokens: Int[Tensor, "run pos"]
    states: Float[Tensor, "time run pos d_model"] = field(repr=False)
    answers: Int[Tensor, "time run pos"] = field(repr=False)
    within: Bool[Tensor, "time run"] = field(repr=False)

    def __getitem__(self, rows: Tensor) -> Trajectories:
        return Trajectories(
            self.tokens[rows], self.states[:, rows], self.answers[:, rows], self.within[:, rows]
        )


@dataclass(frozen=True, eq=False)
class InterchangeTrajectories(ShortRepr):
    """Clean runs of all inputs, and ``changed`` ones from an interchange on."""

    clean: Trajectories
    changed: Trajectories
    pairs: InterchangePairs = field(repr=False)

    @classmethod
    @torch.no_grad()
    def drawn(
        cls, runs: Runs, number: int, generator: torch.Generator, *, across_loops: bool = False
    ) -> InterchangeTrajectories:
        """Draw as many ineffective interchanges as effective ones."""
        pairs = drawn_pairs(runs.batch, runs.n_loops, number, generator, across_loops=across_loops)
        every = cls.after(runs, pairs)
        effective = (every.differ & every.counted).any(-1).any(0)
        others = (~effective).nonzero().squeeze(1)[: max(int(effective.sum()), 1)]
        return every[torch.cat([effective.nonzero().squeeze(1), others])]

    @classmethod
    @torch.no_grad()
    def after(cls, runs: Runs, pairs: InterchangePairs) -> InterchangeTrajectories:
        rows, position = torch.arange(len(pairs)), pairs.positions[:, 0]
        # States of the bases at their loops [pair, pos, d_model], with the source's put in.
        changed = runs.states[pairs.loop, pairs.base].clone()
        changed[rows, position] = runs.states[pairs.source_loop, pairs.source, position]
        inputs = runs.inputs[pairs.base]
        run = iterate(runs.model, inputs, int(pairs.longest), state=changed)
        states = torch.stack([h for _, h in run])
        within = pairs.loop + torch.arange(len(states))[:, None] <= runs.n_loops  # [time, pair]
        answers = runs.answers(inputs, states).cpu()
        after = Trajectories(runs.batch.inputs[pairs.base], _to_cut(states), answers, within)
        return cls(runs.trajectories(), after, pairs)

    def __getitem__(self, rows: Tensor) -> InterchangeTrajectories:
        return replace(self, changed=self.changed[rows], pairs=self.pairs[rows])

    @property
    def both(self) -> tuple[Trajectories, Trajectories]:
        return self.clean, self.changed

    @cached_property
    def natural(self) -> Int[Tensor, "time pair pos"]:
        """Answers of each base's clean run at the same loops; past the end its last ones."""
        return self.at_base(self.clean.answers)

    @cached_property
    def counted(self) -> Bool[Tensor, "time pair pos"]:
        """Where an answer is scored, before a run is over."""
        return self.changed.within[..., None] & self.pairs.scored

    @cached_property
    def differ(self) -> Bool[Tensor, "time pair pos"]:
        return self.changed.answers != self.natural

    def at_base(self, of_runs: Int[Tensor, "loops input pos"]) -> Int[Tensor, "time pair pos"]:
        """Entries of clean runs at the loops of the changed runs."""
        times = torch.arange(len(self.changed.within))[:, None]
        loops = (self.pairs.loop + times).clamp(max=len(of_runs) - 1)
        # Rows of [loop * input]: index_select is much faster than two indices.
        rows = loops * of_runs.shape[1] + self.pairs.base
        return of_runs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
