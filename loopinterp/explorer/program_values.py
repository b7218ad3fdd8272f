"""What a program's variables are at each loop, and what a model's answers say they would be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.explorer.exploration import NOT_SAID
from loopinterp.rasp.expr import Aggregate, SelWidth, ShiftRight
from loopinterp.rasp.node import postorder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.trace import Trace

_MOST_VALUES = 16
"""A variable of more values than this is shown without what answers imply."""


def program_values(
    program: LoopProgram,
    inputs: Int[Tensor, "batch pos"],
    answers: Int[Tensor, "loop batch pos"],
    asked: Bool[Tensor, "batch pos"],
    run: Trace | None = None,
) -> Iterator[tuple[str, Int[Tensor, "loop batch pos"], Int[Tensor, "loop batch pos"]]]:
    """Each variable of a program and its answer: name, value, and what the model's answer implies.

    A value is implied where it is the only one, of those that the variable takes in this run, with
    which the program, all its other variables left as they are, would answer as the model does; the
    answer is its own implication. Where the program's answer at a position depends on variables
    elsewhere, none is.

    Args:
        program: The program.
        inputs: Its inputs.
        answers: The model's, after 0, 1, … loops.
        asked: Where one is asked for.
        run: The program's run, where it is another than the undisturbed one.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> tokens, answers = torch.tensor([[4, 3, 1]]), torch.zeros(2, 1, 3, dtype=torch.int64)
        >>> found = program_values(get_program("ripple"), tokens, answers, tokens < 4)
        >>> name, value, implied = next(found)      # 1 + 1, then 1 + 0: 0 if a carry comes in
        >>> name, value[:, 0].tolist(), implied[0, 0, 1:].tolist()
        ('ripple.carry', [[0, 0, 0], [0, 0, 1]], [0, 1])
    """
    n_loops = len(answers) - 1
    trace = run or program.trace(inputs, n_loops=n_loops)
    # Every loop of every example as an example of its own: one run for each value.
    tokens = inputs.repeat(n_loops + 1, 1)
    held = {name: values.flatten(0, 1) for name, values in trace.variables.items()}
    local = _answers_here(program)
    for name, values in trace.variables.items():
        implied, known = torch.full_like(values, NOT_SAID), values.unique()
        if local and len(known) <= _MOST_VALUES:
            agreeing = torch.zeros_like(values)
            for value in known.tolist():
                tried = {**held, name: torch.full_like(tokens, value)}
                answered = program.run(tokens, n_loops=0, variables=tried).outputs[0]
                agrees = (answered.view_as(values) == answers) & asked
                implied[agrees] = value
                agreeing += agrees
            implied[agreeing != 1] = NOT_SAID
        yield f"{program.name}.{name}", values, implied
    yield f"{program.name}'s answer", trace.outputs, answers.where(asked, NOT_SAID)


def _answers_here(program: LoopProgram) -> bool:
    """Whether the answer at a position reads variables at that position alone."""
    elsewhere = (Aggregate, SelWidth, ShiftRight)
    return not any(
        isinstance(node, elsewhere) and node.variables for node in postorder([program.finish])
    )
