"""What a state does: the answers that follow once it stands at a position.

Two states of one token are the same value of the program, however far apart they lie, if putting
either in is followed by the same answers in every context: an input, a position with that token
and a loop. The contexts are drawn once; the answers in all of them are the state's *behaviour*.

Source: distinguishing experiments of automaton learning (Angluin, Information and Computation 75,
1987), made with interchange interventions (arXiv 2106.02997).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.interchange_engine import InterchangeRun, answer, decided
from loopinterp.circuits.interchange_pairs import InterchangePairs
from loopinterp.errors import InputError
from loopinterp.models import bind, device_of, iterate
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch

_UNASKED = -3
"""In place of an answer that is not asked for, or comes after the end of the run."""


@dataclass(frozen=True, eq=False)
class Runs:
    """A model's undisturbed runs, in which everything is tried.

    Attributes:
        model: Any looped model.
        batch: Inputs of one length, on the CPU.
        n_loops: Loops of each run.
    """

    model: LoopedModel | Any
    batch: Batch
    n_loops: int

    @cached_property
    @torch.no_grad()
    def states(self) -> Float[Tensor, "loops input pos d_model"]:
        """h_0 .. h_T."""
        runs = iterate(self.model, self.inputs, self.n_loops)
        return torch.stack([h for _, h in runs])

    @property
    def inputs(self) -> Int[Tensor, "input pos"]:
        """On the model's device."""
        return self.batch.inputs.to(device_of(self.model))

    @cached_property
    def tokens(self) -> list[int]:
        """Those that occur."""
        return self.batch.inputs.unique().tolist()

    def states_of(self, token: int) -> Float[Tensor, "state d_model"]:
        """Those of all positions with a token, after every loop, in order."""
        return self.states[:, self.inputs == token].flatten(0, 1)

    @torch.no_grad()
    def answers(
        self, inputs: Int[Tensor, "run pos"], states: Float[Tensor, "time run pos d_model"]
    ) -> Int[Tensor, "time run pos"]:
        """What is read at every position of whole runs; ``UNKNOWN`` where undecided."""
        bound = bind(self.model, inputs)
        return torch.stack([read_answers(bound.readout(h)) for h in states])


def read_answers(logits: Float[Tensor, "batch pos d_vocab_out"]) -> Int[Tensor, "batch pos"]:
    """The answers of logits; ``UNKNOWN`` where undecided."""
    return torch.where(decided(logits), answer(logits).long(), UNKNOWN)


@dataclass(frozen=True, eq=False)
class Behaviour:
    """The contexts of one token.

    Attributes:
        runs: The runs that they are part of.
        pairs: Input, position and loop of each; nothing is taken from a source.
    """

    runs: Runs
    pairs: InterchangePairs = field(repr=False)

    @classmethod
    def of(cls, runs: Runs, token: int, n: int, generator: torch.Generator) -> Behaviour:
        """Contexts of a token, drawn in the first half of the runs, so that much comes after."""
        places = (runs.batch.inputs == token).nonzero()
        if not len(places):
            raise InputError(
                f"token {token}",
                expected="a token of the inputs",
                given="one that none of them has",
                fix="Pass more inputs.",
            )
        drawn = places[torch.randint(len(places), (n,), generator=generator)]
        loop = torch.randint(runs.n_loops // 2 + 1, (n,), generator=generator)
        base, position = drawn.unbind(1)
        pairs = InterchangePairs(
            inputs=runs.batch.inputs,
            asked=runs.batch.targets != IGNORE,
            n_loops=runs.n_loops,
            base=base,
            source=base,
            positions=position[:, None],
            loop=loop,
            source_loop=loop,
        )
        return cls(runs, pairs)

    @torch.no_grad()
    def __call__(
        self, states: Float[Tensor, "state d_model"]
    ) -> Int[Tensor, "state context answer"]:
        """All that is asked for and answered in every context, after every loop to the end."""
        n_contexts = len(self.pairs)
        each = torch.arange(n_contexts).repeat(len(states))
        run = InterchangeRun(self.runs.model, self.pairs[each])
        put_in = states.repeat_interleave(n_contexts, 0)[:, None]
        answers = run.after(put_in).cpu()
        counts = self.pairs.scored[each][:, None] & run.within.cpu()[..., None]
        answers = answers.masked_fill(~counts, _UNASKED).flatten(1)
        seen = answers.unflatten(0, (len(states), n_contexts))
        own = self.read(states).to(seen)[:, None, None]
        return torch.cat([seen, own.expand(-1, n_contexts, 1)], dim=-1)

    @torch.no_grad()
    def read(self, states: Float[Tensor, "state d_model"]) -> Int[Tensor, " state"]:
        """The answer that each gives in the first context; ``UNKNOWN`` where undecided.

        A readout may look at other positions too, so a state by itself gives no answer.
        """
        pairs, each = self.pairs, torch.arange(len(states))
        h = self.runs.states[pairs.loop[0], pairs.base[0]].expand(len(states), -1, -1).clone()
        h[:, pairs.positions[0, 0]] = states
        inputs = self.runs.inputs[pairs.base[0]].expand(len(states), -1)
        return self.runs.answers(inputs, h[None])[0, each, pairs.positions[0, 0]].cpu()


def apart(
    one: Int[Tensor, "state context answer"], other: Int[Tensor, "value context answer"]
) -> Float[Tensor, "state value"]:
    """Share of the contexts in which the answers differ, at any position and loop."""
    return torch.stack([(one != of).any(-1).double().mean(-1) for of in other], dim=-1)
