"""What an interchange study is given, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.runs import AT_THE_END
from loopinterp.circuits.subspaces import check_orthonormal
from loopinterp.errors import InputError, unknown_name
from loopinterp.probing.states import check_loops
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram


@dataclass(frozen=True)
class Plan:
    """What is tried: on which inputs, after which loops, read when, with how many pairs.

    Attributes:
        inputs: Tokens.
        asked: Positions at which an answer is asked for.
        n_loops: Loops of a full run.
        loops: Numbers of loops after which to swap.
        delays: Loops between a swap and the reading of the output.
        per_cell: Most pairs of a variable, loop and delay.
    """

    inputs: Int[Tensor, "input pos"]
    asked: Bool[Tensor, "input pos"]
    n_loops: int
    loops: tuple[int, ...]
    delays: tuple[int, ...]
    per_cell: int

    @property
    def furthest(self) -> int:
        """Loops of the longest run."""
        return self.n_loops + max(0, *self.delays)


def make_plan(
    program: LoopProgram,
    batch: Batch | Int[Tensor, "input pos"],
    *,
    n_loops: int | None,
    loops: Sequence[int] | None,
    delays: tuple[int, ...],
    per_cell: int,
    device: torch.device,
) -> Plan:
    """Check what the study is given, and move the inputs to the model's device.

    Raises:
        InputError: inputs that are not tokens of the program, or fewer than two; loops or delays
            out of range; no pairs.
    """
    tokens = batch.inputs if isinstance(batch, Batch) else batch
    tokens = check_tokens(tokens, len(program.inputs), f"inputs for program {program.name}")
    if len(tokens) < 2:
        raise InputError(
            "batch",
            expected="at least 2 inputs, to swap between them",
            given=str(len(tokens)),
            fix="Draw more.",
        )
    if isinstance(batch, Batch):
        asked = batch.targets != IGNORE
        last = int(batch.n_loops.max()) if n_loops is None else n_loops
    else:
        asked, last = torch.ones_like(tokens, dtype=torch.bool), n_loops
    if isinstance(last, bool) or not isinstance(last, int) or last < 0:
        raise InputError(
            "n_loops",
            expected="an integer >= 0; it may be left out where the inputs are a task's batch",
            given=repr(n_loops),
            fix="Pass T(n) of the inputs, e.g. n_loops=program.n_loops(n).",
        )
    if isinstance(per_cell, bool) or not isinstance(per_cell, int) or per_cell < 1:
        raise InputError(
            "pairs_per_cell",
            expected="an integer >= 1",
            given=repr(per_cell),
            fix="Pass e.g. pairs_per_cell=64.",
        )
    return Plan(
        inputs=tokens.to(device),
        asked=asked.to(device),
        n_loops=last,
        loops=_loops(loops, last),
        delays=_delays(delays),
        per_cell=per_cell,
    )


def check_subspaces(
    subspaces: Mapping[str, Float[Tensor, "rank d_model"]], program: LoopProgram, d_model: int
) -> None:
    """Check the subspaces of variables.

    Raises:
        InputError: an unknown variable, a subspace of another width, or rows that are not
            orthonormal.
    """
    for name, rows in subspaces.items():
        if name not in program.prepare:
            raise unknown_name(
                f"subspaces: variable of program {program.name}", name, program.prepare
            )
        what = f"subspace of variable {name!r}"
        shape = list(rows.shape) if isinstance(rows, torch.Tensor) else None
        if shape is None or len(shape) != 2 or not 1 <= shape[0] <= d_model or shape[1] != d_model:
            raise InputError(
                what,
                expected=f"rows [rank, d_model] of the model's width {d_model}, rank 1..{d_model}",
                given=type(rows).__name__ if shape is None else f"shape {shape}",
                fix="Give one row for each direction of the variable.",
            )
        check_orthonormal(rows, what)


def _loops(loops: Sequence[int] | None, last: int) -> tuple[int, ...]:
    steps = check_loops(range(last + 1) if loops is None else loops)
    if steps[-1] > last:
        raise InputError(
            "loops",
            expected=f"numbers from 0 to n_loops = {last}",
            given=str(steps[-1]),
            fix="Pass a larger n_loops, or leave out the later loops.",
        )
    return tuple(steps)


def _delays(delays: tuple[int, ...]) -> tuple[int, ...]:
    whole = all(isinstance(d, int) and not isinstance(d, bool) and d >= AT_THE_END for d in delays)
    if not delays or not whole or len(set(delays)) < len(delays):
        raise InputError(
            "delays",
            expected=f"different numbers of loops from 0 on, or AT_THE_END ({AT_THE_END})",
            given=repr(delays),
            fix="Pass e.g. delays=(1, AT_THE_END).",
        )
    return tuple(delays)
