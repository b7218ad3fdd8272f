"""How long a decompiled program takes to follow its left neighbour: a carry held, in loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from loopinterp.circuits.decompiler.automaton_program import Messages

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.circuits.decompiler.cell_automaton import Cell, CellAutomaton

_MOST_LOOPS = 40
_COLUMNS = ["token", "before", "after", "least", "most", "ways"]


def response_times(
    automaton: CellAutomaton, tokens: Int[Tensor, "batch pos"], *, n_loops: int
) -> pd.DataFrame:
    """Loops until a position's answer follows what comes from the left.

    Runs are left alone until they rest. What cells at rest send are the messages of rest. A
    position that rests under one of them, and then gets another one for good, changes its answer
    after some loops, if at all: 1 in a program that holds nothing, k more in one that holds a carry
    for k loops after its reason is gone.

    Args:
        automaton: The table of steps.
        tokens: Inputs whose runs show which messages there are at rest.
        n_loops: Loops after which they rest.

    Returns:
        A row for each token and change of its answer: ``before`` and ``after``, the ``least`` and
        ``most`` loops it takes over all pairs of messages that make it, and how many ``ways`` there
        are.

    Example:
        >>> import torch
        >>> from loopinterp.circuits import decompile
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import get_task
        >>> task = get_task("addition")
        >>> model = compile_program("ripple_held_2", max_length=7).model
        >>> found = decompile(model, task).automaton
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs = task.sample(6, batch_size=64, generator=generator).inputs
        >>> response_times(found, inputs, n_loops=12).query("token == 1")["most"].tolist()
        [2, 1]
    """
    messages = Messages.of(automaton)
    resting = {cell for run in _ends(automaton, tokens, n_loops) for cell in run}
    there = sorted({messages.sends[cell] for cell in resting if cell in messages.sends})
    ways: dict[tuple[int, int, int], list[int]] = {}
    for token in automaton.sizes:
        cells = [cell for cell in sorted(resting) if cell[0] == token]
        for rested in cells:
            for held in there:
                if messages.becomes.get((rested, held)) != rested[1]:
                    continue  # it does not rest under that one
                for new in there:
                    found = _followed(automaton, messages, rested, new)
                    if found is not None:
                        before = automaton.answers[rested]
                        ways.setdefault((token, before, found[0]), []).append(found[1])
    rows = [(*key, min(of), max(of), len(of)) for key, of in sorted(ways.items())]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _ends(
    automaton: CellAutomaton, tokens: Int[Tensor, "batch pos"], n_loops: int
) -> Iterator[list[Cell]]:
    """The cells of every input after some loops; without those of which the table says nothing."""
    for row in tokens:
        try:
            *_, values = automaton.run(row[None], n_loops)
        except KeyError:
            continue
        yield list(zip(row.tolist(), values[0].tolist()))


def _followed(
    automaton: CellAutomaton, messages: Messages, rested: Cell, message: int
) -> tuple[int, int] | None:
    """The answer at rest under a message, and after how many loops it is given for good."""
    cell, answers = rested, [automaton.answers[rested]]
    for _ in range(_MOST_LOOPS):
        value = messages.becomes.get((cell, message))
        if value is None:
            return None
        cell = (cell[0], value)
        answers.append(automaton.answers[cell])
    if messages.becomes.get((cell, message)) != cell[1] or answers[-1] == answers[0]:
        return None
    return answers[-1], max(k for k, y in enumerate(answers) if y != answers[-1]) + 1
