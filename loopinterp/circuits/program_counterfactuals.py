"""What a program says to an interchange intervention: the one place that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_alignment import Alignment, delayed
from loopinterp.rasp.trace import Intervention
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.trace import Trace

_AT_A_TIME = 2**16
"""Positions of all pairs that go on together."""


class ProgramRuns(ShortRepr):
    """A program run once on some inputs, ready for any number of exchanges between them.

    Args:
        program: The program; it must read these tokens.
        inputs: The inputs.
        n_loops: Loops to run; exchanges are made after at most so many.
        lag: Loops by which its answers come late.
    """

    def __init__(
        self,
        program: LoopProgram,
        inputs: Int[Tensor, "input pos"],
        *,
        n_loops: int,
        lag: int = 0,
    ) -> None:
        self.program = delayed(program, lag)
        self.trace = self.program.trace(inputs, n_loops=n_loops)


class Prediction(ShortRepr):
    """What a program says of pairs, with and without the exchange; -1 where it is undecided.

    Args:
        program: The program; it must read the pairs' tokens.
        pairs: What is exchanged.
        alignment: How the program lies over the model.
        names: The variables that are exchanged; all by default, as one exchanges a whole state.
        runs: The program's runs, where they are at hand.
        steps: Delays to predict; those of the pairs' longest horizon by default.

    Raises:
        InputError: every loop of the pairs falls before the program's first under that alignment.
            Where some do, the program is at its first there.
    """

    def __init__(
        self,
        program: LoopProgram,
        pairs: InterchangePairs,
        alignment: Alignment | None = None,
        *,
        names: Sequence[str] | None = None,
        runs: ProgramRuns | None = None,
        steps: int | None = None,
    ) -> None:
        self.pairs, self.alignment = pairs, alignment or Alignment()
        self.steps = pairs.longest if steps is None else min(steps, pairs.longest)
        shift = self.alignment.shift
        self.runs = runs or ProgramRuns(
            program, pairs.inputs, n_loops=pairs.n_loops + max(shift, 0), lag=self.alignment.lag
        )
        self._names = tuple(self.runs.program.variables if names is None else names)
        loops = pairs.sites.loop, pairs.sites.source_loop
        latest = min(int(x.max()) for x in loops) if len(pairs) else 0
        if latest + shift < 0:
            raise InputError(
                "shift",
                expected=f"at least {-latest}, for the last loop of the pairs",
                given=str(shift),
                fix="Pass a larger shift, or pairs of later loops.",
            )

    @cached_property
    def base(self) -> Int[Tensor, "pair delay pos"]:
        """Without the exchange."""
        pairs = self.pairs
        delays = torch.arange(self.steps + 1, device=pairs.loop.device)
        loops = self._own_loop((pairs.loop[:, None] + delays).clamp(max=pairs.n_loops))
        return self.runs.trace.outputs[loops, pairs.base[:, None]].to(torch.int16)

    def _own_loop(self, loop: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The program's loop at a loop of the model; its first before that."""
        return (loop + self.alignment.shift).clamp(min=0)

    @cached_property
    def exchanged(self) -> Int[Tensor, "pair delay pos"]:
        """With it."""
        pairs = self.pairs
        n_pos = pairs.inputs.shape[1]
        found = self.base.new_empty(len(pairs), self.steps + 1, n_pos)
        at_a_time = max(_AT_A_TIME // n_pos, 1)
        for start in range(0, len(pairs), at_a_time):
            rows = slice(start, start + at_a_time)
            found[rows] = self.after(rows).outputs.transpose(0, 1)
        return found

    def after(self, rows: Any) -> Trace:
        """The program's runs from the exchange on, in some pairs: entry k is k loops after."""
        inputs = self.pairs.inputs[self.pairs.base[rows]]
        # A step knows no loop number, so pairs of different loops go on together.
        return self.runs.program.run(
            inputs,
            n_loops=self.steps,
            variables=self.state(rows),
            interventions=self._second(rows),
        )

    def second_state(self, rows: Any) -> dict[str, Int[Tensor, "pair pos"]]:
        """The variables right after the second interchange, of pairs that have one."""
        pairs = self.pairs[rows]
        assert pairs.second is not None
        delay, each = pairs.second.loop - pairs.loop, torch.arange(len(pairs))
        return {name: x[delay, each] for name, x in self.after(rows).variables.items()}

    def _second(self, rows: Any) -> list[Intervention]:
        """The second interchanges of some of the pairs, those of each delay together."""
        pairs = self.pairs[rows]
        second, found = pairs.second, []
        if second is None:
            return found
        delay = second.loop - pairs.loop
        position = (second.position - self.alignment.offset).clamp(min=0)[:, None]
        n_pos = pairs.inputs.shape[1]
        here = position == torch.arange(n_pos, device=position.device)
        for after in delay[second.made & (delay <= self.steps)].unique().tolist():
            mask = (second.made & (delay == after))[:, None] & here
            for name in self._names:
                taken = self.runs.trace.variables[name][
                    self._own_loop(second.source_loop[:, None]),
                    second.source[:, None],
                    position,
                ]
                found.append(Intervention(name, after, taken.expand(-1, n_pos).contiguous(), mask))
        return found

    def state(self, rows: Any) -> dict[str, Int[Tensor, "pair pos"]]:
        """The program's variables right after the exchange, in some of the pairs."""
        pairs = self.pairs[rows]
        at = (pairs.positions - self.alignment.offset).clamp(min=0)
        loop, source_loop = map(self._own_loop, (pairs.loop, pairs.source_loop[:, None]))
        variables = self.runs.trace.variables
        state = {name: values[loop, pairs.base] for name, values in variables.items()}
        for name in self._names:
            taken = variables[name][source_loop, pairs.source[:, None], at]
            state[name] = state[name].scatter(1, at, taken)
        return state

    def claims(self, natural: Int[Tensor, "pair delay pos"]) -> Claims:
        """What it says of a model that answers so without the exchange."""
        natural = natural[:, : self.steps + 1]
        changed = self.base != self.exchanged
        silent = changed & (self.exchanged == UNKNOWN)
        expected = torch.where(changed, self.exchanged.to(natural), natural)
        asked = self.pairs.scored[:, None]
        return Claims(
            expected=expected.masked_fill(silent | ~asked, SILENT),
            changes=(changed & ~silent & asked).any(-1),
        )


SILENT = -2
"""In place of an answer: the program says nothing of it."""


@dataclass(frozen=True, eq=False, repr=False)
class Claims(ShortRepr):
    """What a program says of a model's answers after an exchange.

    Given what the model answers without it, the program says, position by position:

    - where its answer with the exchange is decided, and the exchange changed or decided it: that
      answer;
    - where the exchange changes nothing for it (undecided counts as a value): what the model
      answers without;
    - where the exchange takes away an answer it had: nothing.

    Attributes:
        expected: The answers; :data:`SILENT` where it says nothing, or nothing is asked.
        changes: Whether it says that some answer changes.
    """

    expected: Int[Tensor, "pair delay pos"]
    changes: Bool[Tensor, "pair delay"]

    def __getitem__(self, rows: Any) -> Claims:
        """Those of some of the pairs, by index or mask."""
        return Claims(self.expected[rows], self.changes[rows])

    def agree(self, answers: Int[Tensor, "pair delay pos"]) -> Bool[Tensor, "pair delay"]:
        """Whether the whole answer is the one it says, at each delay."""
        return ((answers == self.expected) | (self.expected == SILENT)).all(-1)

    def apart(self, other: Claims) -> Bool[Tensor, "pair delay"]:
        """Whether two programs say different things of the whole answer."""
        both = (self.expected != SILENT) & (other.expected != SILENT)
        return (both & (self.expected != other.expected)).any(-1)


def each_apart(claims: Sequence[Claims]) -> Bool[Tensor, "program rival pair delay"]:
    """Whether every two of several programs say different things of the whole answer."""
    shape = (len(claims), len(claims), *claims[0].changes.shape)
    found = claims[0].changes.new_zeros(shape)
    for (a, own), (b, other) in combinations(enumerate(claims), 2):
        found[a, b] = found[b, a] = own.apart(other)
    return found
