"""What a program says to an interchange intervention: the one place that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.interpreter import Interpreter
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_alignment import Alignment, delayed

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.rasp.program import LoopProgram

_AT_A_TIME = 2**18
"""Positions of all pairs that go on together."""


class ProgramRuns:
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
        self.program, self.inputs, self.n_loops = delayed(program, lag), inputs, n_loops
        self.trace = self.program.trace(inputs, n_loops=n_loops)

    def after(
        self,
        names: Sequence[str],
        *,
        base: Int[Tensor, " pair"],
        source: Int[Tensor, " pair"],
        positions: Int[Tensor, "pair site"],
        loop: Int[Tensor, " pair"],
        source_loop: Int[Tensor, " pair"],
        steps: int,
    ) -> Int[Tensor, "pair delay pos"]:
        """Answers after 0 .. ``steps`` more loops, if some variables come from another run.

        Args:
            names: The variables that are taken.
            base: Which input the run is of.
            source: Which input's run they are taken from.
            positions: At which positions.
            loop: After how many loops they are put in.
            source_loop: After how many loops of the source's run they are taken.
            steps: Loops to go on.
        """
        found = torch.empty(
            len(base), steps + 1, self.inputs.shape[1], dtype=torch.int16, device=base.device
        )
        rows = torch.arange(len(base), device=base.device)
        for part in rows.split(max(_AT_A_TIME // self.inputs.shape[1], 1)):
            row, at = rows[: len(part), None], positions[part]
            state = {n: x[loop[part], base[part]] for n, x in self.trace.variables.items()}
            for name in names:
                donor = self.trace.variables[name]
                taken = donor[source_loop[part, None], source[part, None], at]
                state[name][row, at] = taken
            # A step knows no loop number, so pairs of different loops go on together.
            for step, read in enumerate(self._answers(self.inputs[base[part]], state, steps)):
                found[part, step] = read.to(torch.int16)
        return found

    def _answers(self, tokens: Tensor, state: dict[str, Tensor], steps: int) -> list[Tensor]:
        interpreter, orders = Interpreter(tokens), self.program.orders
        step, finish = self.program.step, self.program.finish
        read = []
        for done in range(steps + 1):
            if done:
                values = interpreter.run(orders["step"], state, step.values())
                state = {**state, **{name: values[x] for name, x in step.items()}}
            read.append(interpreter.run(orders["finish"], state, [finish])[finish])
        return read


class Prediction:
    """What a program says of pairs, with and without the exchange; -1 where it is undecided.

    Args:
        program: The program; it must read the pairs' tokens.
        pairs: What is exchanged.
        alignment: How the program lies over the model.
        names: The variables that are exchanged; all by default, as one exchanges a whole state.
        runs: The program's runs, where they are at hand.
        steps: Delays to predict; those of the pairs' longest horizon by default.

    Raises:
        InputError: a loop of the pairs falls before the program's first under that alignment.
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
        first = min(int(pairs.loop.min()), int(pairs.source_loop.min())) if len(pairs) else 0
        if first + shift < 0:
            raise InputError(
                "shift",
                expected=f"at least {-first}, for the first loop of the pairs",
                given=str(shift),
                fix="Pass a larger shift, or pairs of later loops.",
            )

    @cached_property
    def base(self) -> Int[Tensor, "pair delay pos"]:
        """Without the exchange."""
        pairs = self.pairs
        delays = torch.arange(self.steps + 1, device=pairs.loop.device)
        loops = (pairs.loop[:, None] + delays).clamp(max=pairs.n_loops) + self.alignment.shift
        return self.runs.trace.outputs[loops, pairs.base[:, None]].to(torch.int16)

    @cached_property
    def exchanged(self) -> Int[Tensor, "pair delay pos"]:
        """With it."""
        pairs, shift = self.pairs, self.alignment.shift
        return self.runs.after(
            self._names,
            base=pairs.base,
            source=pairs.source,
            positions=(pairs.positions - self.alignment.offset).clamp(min=0),
            loop=pairs.loop + shift,
            source_loop=pairs.source_loop + shift,
            steps=self.steps,
        )

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


class Claims:
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

    def __init__(
        self, expected: Int[Tensor, "pair delay pos"], changes: Bool[Tensor, "pair delay"]
    ) -> None:
        self.expected, self.changes = expected, changes

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
