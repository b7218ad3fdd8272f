"""What a program says a swap does, under every way of laying the program over the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.program_swaps import ProgramSwaps
from loopinterp.circuits.runs import AT_THE_END, steps_to
from loopinterp.errors import InputError
from loopinterp.rasp.language import UNKNOWN, full, var
from loopinterp.rasp.program import LoopProgram

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.circuits.swaps import Swaps

ANSWER = "answer"


@dataclass(frozen=True)
class Alignment:
    """Which part of a program stands for the state of the model at one position and loop.

    Attributes:
        shift: The state after t loops of the model stands for the program after t + shift.
        offset: The state at position p stands for the program's variables at p - offset (1 for
            a program whose variables are the carries OUT of each position).
        lag: The model answers by what the program knew so many loops before.
    """

    shift: int = 0
    offset: int = 0
    lag: int = 0

    def __str__(self) -> str:
        parts = []
        if self.shift:
            side = "ahead of" if self.shift > 0 else "behind"
            parts.append(f"program {_loops(abs(self.shift))} {side} the model")
        if self.offset:
            parts.append(f"variables {self.offset} position to the left")
        if self.lag:
            parts.append(f"answers {_loops(self.lag)} late")
        return ", ".join(parts) or "loop by loop, position by position"


def _loops(n: int) -> str:
    return "1 loop" if n == 1 else f"{n} loops"


def alignments(
    shifts: tuple[int, ...] = (0, -1, 1), offsets: tuple[int, ...] = (0, 1), lags: int = 1
) -> Iterator[Alignment]:
    """All alignments in a range, the plain one first.

    Example:
        >>> len(list(alignments())), str(next(alignments()))
        (12, 'loop by loop, position by position')
    """
    for lag in range(lags + 1):
        for offset in offsets:
            for shift in shifts:
                yield Alignment(shift, offset, lag)


def delayed(program: LoopProgram, lag: int) -> LoopProgram:
    """The same program, answering by what it knew ``lag`` loops before.

    The pending answers become variables, so that a swapped state takes them along.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> delayed(get_program("ripple"), 1).variables
        ('carry', 'answer')
    """
    for _ in range(lag):
        name = ANSWER
        while name in program.prepare:
            name += "_"
        program = LoopProgram(
            name=program.name,
            task=program.task,
            inputs=program.inputs,
            prepare={**program.prepare, name: full(UNKNOWN)},
            step={**program.step, name: program.finish},
            finish=var(name),
            n_loops=program.n_loops,
            doc=program.doc,
        )
    return program


@dataclass(frozen=True)
class Prediction:
    """What a program answers, with and without the swap; -1 where it is undecided.

    Attributes:
        base: Without the swap.
        swapped: With it.
    """

    base: Int[Tensor, "delay pair pos"]
    swapped: Int[Tensor, "delay pair pos"]


class ProgramRuns:
    """A program run on base and source of every pair, ready to be swapped at any alignment.

    Args:
        program: The program; it must read the pairs' tokens.
        pairs: The pairs.
        lag: Loops that its answers are late.
        n_loops: Loops to run, at least as many as any prediction looks at.
    """

    def __init__(self, program: LoopProgram, pairs: Swaps, *, lag: int, n_loops: int) -> None:
        self.pairs, self.lag = pairs, lag
        both = torch.cat([pairs.base, pairs.source])
        self._swaps = ProgramSwaps(delayed(program, lag), both, n_loops=n_loops)
        self._rows = torch.arange(len(pairs), device=pairs.loop.device)

    def predict(
        self,
        alignment: Alignment,
        delays: tuple[int, ...],
        variables: tuple[str, ...] | None = None,
    ) -> Prediction:
        """See :func:`predict`; the alignment's lag must be the runs' own."""
        loop = self.pairs.loop + alignment.shift
        if int(loop.min()) < 0:
            raise InputError(
                "shift",
                expected=f"at least {-int(self.pairs.loop.min())}, for the first loop of the pairs",
                given=str(alignment.shift),
                fix="Pass a larger shift, or pairs of later loops.",
            )
        rows = self._rows
        steps = steps_to(delays, self.pairs.loop, self.pairs.n_loops)
        names = self._swaps.program.variables if variables is None else variables
        return Prediction(
            base=self._swaps.trace.outputs[loop + steps, rows],
            swapped=self._swaps.outputs(
                names,
                base=rows,
                source=rows + len(rows),
                position=self.pairs.position - alignment.offset,
                loop=loop,
                steps=steps,
            ),
        )


def predict(
    program: LoopProgram,
    pairs: Swaps,
    *,
    alignment: Alignment | None = None,
    delays: tuple[int, ...],
    variables: tuple[str, ...] | None = None,
) -> Prediction:
    """Run the program on the pairs, with its variables swapped as the model's state is.

    Args:
        program: The program; it must read the pairs' tokens.
        pairs: The pairs.
        alignment: How the program lies over the model.
        delays: Loops between the swap and the reading of the output.
        variables: The variables to swap: all by default, as a swap of the whole state does.

    Raises:
        InputError: a loop of the pairs falls before the program's first under that shift.
    """
    alignment = alignment or Alignment()
    longest = int(pairs.loop.max()) + max(delays)
    n_loops = max(longest, pairs.n_loops if AT_THE_END in delays else 0) + max(alignment.shift, 0)
    runs = ProgramRuns(program, pairs, lag=alignment.lag, n_loops=n_loops)
    return runs.predict(alignment, delays, variables)


def agreement(
    prediction: Prediction,
    base: Int[Tensor, "delay pair pos"],
    swapped: Int[Tensor, "delay pair pos"],
    scored: Tensor,
) -> Float[Tensor, "delay pair"]:
    r"""Is the whole output of the model after the swap the one the program says?

    The program says, position by position, given what the model answers without the swap:

    - where its answer with the swap is decided, and the swap changed or decided it: that answer;
    - where the swap changes nothing for it (undecided counts as a value): what the model answers
      without the swap;
    - where the swap takes away an answer it had: nothing. A position of which it says nothing
      counts one half, what a guess would get.

    The product over positions is 1 or 0 but for such halves.

    Args:
        prediction: What the program answers.
        base: What the model answers without the swap.
        swapped: What it answers with it.
        scored: Positions that count [pair, pos].
    """
    lost = (prediction.base != UNKNOWN) & (prediction.swapped == UNKNOWN)
    changed = prediction.base != prediction.swapped
    expected = torch.where(changed, prediction.swapped, base)
    right = torch.where(lost, 0.5, (expected == swapped).double())
    return torch.where(scored, right, 1.0).prod(-1)
