"""Sharp values by experiment: states that behave alike are one value, and pairs are tried.

A context is an input, a position with the state's token, and a loop. A state's *behaviour* is the
list of answers after it is put in, in every context.

Source: distinguishing experiments of automaton learning (Angluin, Information and Computation 75,
1987), by interchange interventions (arXiv 2106.02997).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loopinterp.decompiler.transition_table import EDGE, Cell, TransitionTable
from loopinterp.interventions.engine import InterchangeRun
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.models import bind

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.decompiler.interchange_runs import Runs

_REMEMBERED = 2**25
"""Answers that are remembered for each token, at most: 64 MB."""


@dataclass(eq=False)
class TokenValues:
    """The known values of one token.

    Attributes:
        contexts: Interchanges at positions with the token; their sources mean nothing.
        tolerance: States are one value if they behave differently in at most this share of
            contexts.
        behaviours: Behaviour of the first state of each value.
        states: Some states of each value.
        tried: Behaviours of states by their bytes. A table of few values meets the same states
            again and again; readings in the same contexts may share them.
    """

    runs: Runs
    contexts: InterchangePairs
    tolerance: float = 0.0
    behaviours: list[Int[Tensor, "context answer"]] = field(default_factory=list)
    states: list[list[Float[Tensor, " d_model"]]] = field(default_factory=list)
    tried: dict[bytes, Int[Tensor, "context answer"]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, runs: Runs, token: int, n: int, generator: torch.Generator, tolerance: float = 0.0
    ) -> TokenValues:
        """Contexts drawn in the first half of the runs, to leave many loops after."""
        places = (runs.batch.inputs == token).nonzero()
        drawn = places[torch.randint(len(places), (n,), generator=generator)]
        loop = torch.randint(runs.n_loops // 2 + 1, (n,), generator=generator)
        base, position = drawn.unbind(1)
        contexts = InterchangePairs.of(
            runs.batch,
            base=base,
            source=base,
            positions=position[:, None],
            loop=loop,
            n_loops=runs.n_loops,
        )
        return cls(runs, contexts, tolerance)

    @torch.no_grad()
    def behaviour(
        self, states: Float[Tensor, "state d_model"]
    ) -> Int[Tensor, "state context answer"]:
        """All scored answers in every context, after every loop to the end."""
        keys = [row.tobytes() for row in states.cpu().contiguous().view(torch.uint8).numpy()]
        here = {key: self.tried[key] for key in keys if key in self.tried}
        new = {key: row for row, key in enumerate(keys) if key not in here}
        if new:
            here.update(zip(new, self._behaviour(states[list(new.values())])))
            if len(self.tried) * here[keys[0]].numel() > _REMEMBERED:
                self.tried.clear()
            self.tried.update(here)
        return torch.stack([here[key] for key in keys])

    def _behaviour(
        self, states: Float[Tensor, "state d_model"]
    ) -> Int[Tensor, "state context answer"]:
        n_contexts = len(self.contexts)
        rows = torch.arange(n_contexts).repeat(len(states))  # [state * context]
        pairs = self.contexts[rows]
        run = InterchangeRun(self.runs.model, pairs, clean=self._clean)
        put_in = states.repeat_interleave(n_contexts, 0)[:, None]  # [state * context, 1, d_model]
        answers = run.after(put_in).cpu()
        counted = pairs.scored[:, None] & run.within.cpu()[..., None]
        answers = answers.masked_fill(~counted, -3).flatten(1)  # no answer is -3
        in_context = answers.unflatten(0, (len(states), n_contexts))
        read = self.read(states).to(in_context)[:, None, None]
        # The answer read from the state itself counts in every context.
        return torch.cat([in_context, read.expand(-1, n_contexts, 1)], dim=-1)

    @cached_property
    def _clean(self) -> InterchangeRun:
        return InterchangeRun(self.runs.model, self.contexts)

    @torch.no_grad()
    def read(self, states: Float[Tensor, "state d_model"]) -> Int[Tensor, " state"]:
        """The answer of each state in the first context; ``UNKNOWN`` where undecided.

        A readout may read other positions too, so that a state by itself gives no answer.
        """
        base, loop = self.contexts.base[0], self.contexts.loop[0]
        position = self.contexts.positions[0, 0]
        h = self.runs.states[loop, base].expand(len(states), -1, -1).clone()
        h[:, position] = states
        inputs = self.runs.inputs[base].expand(len(states), -1)
        return self.runs.answers(inputs, h[None])[0, :, position].cpu()

    def __len__(self) -> int:
        return len(self.states)

    def classify(
        self, states: Float[Tensor, "state d_model"], *, most: int | None = None
    ) -> Int[Tensor, " state"]:
        """The value of each state; one that behaves like no known value becomes a new value.

        With ``most`` values, it gets the closest of these.
        """
        values = []
        for state, behaviour in zip(states, self.behaviour(states)):
            value, distance = -1, 2.0
            if self.behaviours:
                # Share of contexts in which each value's behaviour differs, [value].
                differ = (torch.stack(self.behaviours) != behaviour).any(-1).double().mean(-1)
                value = int(differ.argmin())
                distance = float(differ[value])
            if distance > self.tolerance and (most is None or len(self) < most):
                value = len(self)
                self.behaviours.append(behaviour)
                self.states.append([])
            if len(self.states[value]) < 4:  # a step is tried with several of them
                self.states[value].append(state)
            values.append(value)
        return torch.tensor(values, dtype=torch.long)

    def state(self, value: int, turn: int) -> Float[Tensor, " d_model"]:
        return self.states[value][turn % len(self.states[value])]


def spread_out(states: Float[Tensor, "state d_model"], most: int) -> Float[Tensor, "few d_model"]:
    """Some of the states, each as far as possible from earlier ones (farthest-point sampling).

    Example:
        >>> spread_out(torch.tensor([[0.0], [0.1], [5.0], [5.0]]), 2).tolist()
        [[0.0], [5.0]]
    """
    chosen, distance = [0], (states - states[0]).norm(dim=-1)
    while len(chosen) < most and float(distance.max()) > 1e-4 * float(states.abs().max()):
        chosen.append(int(distance.argmax()))
        # To the nearest of those chosen so far.
        distance = torch.minimum(distance, (states - states[chosen[-1]]).norm(dim=-1))
    return states[chosen]


@dataclass(eq=False)
class Experiments:
    """States of all values, put in at positions with their tokens.

    Attributes:
        tries: Experiments of each kind.
        most: Most values of a token; a further one becomes the closest of these.
    """

    runs: Runs
    values: Mapping[int, TokenValues]
    tries: int
    most: int
    generator: torch.Generator

    @cached_property
    def places(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Input and position of each pair of neighbouring tokens; -1 is left of the first."""
        places = defaultdict(list)
        for row, tokens in enumerate(self.runs.batch.inputs.tolist()):
            for position, pair in enumerate(zip([EDGE[0], *tokens], tokens)):
                places[pair].append((row, position))
        return dict(sorted(places.items()))

    def starts(self) -> dict[tuple[int, int], Counter[int]]:
        """How often each value occurs before the first loop, by left token and token."""
        starts = {}
        for (left, token), known in self.places.items():
            drawn = torch.randint(len(known), (self.tries,), generator=self.generator)
            rows, columns = torch.tensor([known[k] for k in drawn]).unbind(1)
            first = self.values[token].classify(self.runs.states[0, rows, columns], most=self.most)
            starts[left, token] = Counter(first.tolist())
        return starts

    def tabulate(self, starts: Mapping[tuple[int, int], Counter[int]]) -> TransitionTable | None:
        """Try every pair of cells that can be neighbours, and the cells that they become.

        Returns the majority table of the experiments; None if there are too many pairs.
        """
        values, steps = self.values, {}
        while True:
            cells = {token: [(token, v) for v in range(len(values[token]))] for token in values}
            untried = [
                (left, cell)
                for before, token in self.places
                for left in ([EDGE] if before == EDGE[0] else cells[before])
                for cell in cells[token]
                if (left, cell) not in steps
            ]
            if not untried:
                break
            if len(steps) + len(untried) > 2500:
                return None
            after = self._stepped(untried)
            for token in values:
                rows = [k for k, (_, cell) in enumerate(untried) if cell[0] == token]
                if rows:
                    after_values = values[token].classify(after[rows].flatten(0, 1), most=self.most)
                    each = after_values.unflatten(0, (len(rows), self.tries)).tolist()
                    steps |= {untried[k]: Counter(row) for k, row in zip(rows, each)}
        answers = {
            (token, v): Counter(each.read(torch.stack(states)).tolist())
            for token, each in values.items()
            for v, states in enumerate(each.states)
        }
        counts = [*steps.values(), *starts.values(), *answers.values()]
        most_common = sum(max(count.values()) for count in counts)
        by_majority: list[dict] = [
            {key: count.most_common(1)[0][0] for key, count in each.items()}
            for each in (starts, steps, answers)
        ]
        start, step, answer = by_majority
        return TransitionTable.from_entries(
            {token: len(each) for token, each in values.items()},
            start=start,
            step=step,
            answers=answer,
            consistency=most_common / sum(count.total() for count in counts),
        )

    @torch.no_grad()
    def _stepped(self, pairs: Sequence[tuple[Cell, Cell]]) -> Float[Tensor, "pair try d_model"]:
        """A position's state after one loop from two states put in, all else as in a clean run."""
        runs, after, at_a_time = self.runs, [], 1024
        each = [(pair, turn) for pair in pairs for turn in range(self.tries)]
        for start in range(0, len(each), at_a_time):
            some = each[start : start + at_a_time]
            drawn = []
            for (left, cell), _ in some:
                known = self.places[left[0], cell[0]]
                drawn.append(known[int(torch.randint(len(known), (), generator=self.generator))])
            rows, columns = torch.tensor(drawn).unbind(1)
            loops = torch.randint(max(runs.n_loops, 1), (len(some),), generator=self.generator)
            h = runs.states[loops, rows].clone()
            for k, ((left, cell), turn) in enumerate(some):
                position = int(columns[k])
                h[k, position] = self.values[cell[0]].state(cell[1], turn)
                if left != EDGE:
                    # Another rhythm, so that different states of the two meet.
                    h[k, position - 1] = self.values[left[0]].state(left[1], turn // 2)
            stepped = bind(runs.model, runs.inputs[rows]).step(h)
            after.append(stepped[torch.arange(len(some)), columns])  # [experiment, d_model]
        return torch.cat(after).unflatten(0, (len(pairs), self.tries))
