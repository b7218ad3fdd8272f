"""Swaps of a program's variables between any two of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram

_AT_A_TIME = 2**23
"""Values that the traces of one run of pairs may hold: 64 MiB of them."""


class ProgramSwaps:
    """A program run once on all inputs, ready for any number of swaps between them.

    Args:
        program: The program; it must read these tokens.
        inputs: The inputs.
        n_loops: Loops to run; swaps are made after at most so many.
    """

    def __init__(
        self, program: LoopProgram, inputs: Int[Tensor, "input pos"], *, n_loops: int
    ) -> None:
        self.program, self.inputs = program, inputs
        self.trace = program.trace(inputs, n_loops=n_loops)

    def outputs(
        self,
        names: Sequence[str],
        *,
        base: Int[Tensor, " pair"],
        source: Int[Tensor, " pair"],
        position: Int[Tensor, " pair"],
        loop: Int[Tensor, " pair"],
        steps: Int[Tensor, "read pair"],
        source_loop: Int[Tensor, " pair"] | None = None,
    ) -> Int[Tensor, "read pair pos"]:
        """What the program answers if some of its variables are taken from another run.

        Args:
            names: The variables that are taken.
            base: Which input the run is of.
            source: Which input's run they are taken from.
            position: At which position.
            loop: After how many loops.
            steps: How many loops after that the output is read.
            source_loop: After how many loops of the source's run they are taken, if not after
                as many as they are put in.
        """
        donor_loop = loop if source_loop is None else source_loop
        per_pair = (int(steps.max()) + 1) * (len(self.program.variables) + 1)
        rows = torch.arange(len(base), device=base.device)
        read = []
        for part in rows.split(max(_AT_A_TIME // (per_pair * self.inputs.shape[1]), 1)):
            row, at = rows[: len(part)], position[part]
            state = {n: x[loop[part], base[part]] for n, x in self.trace.variables.items()}
            for name in names:
                donor = self.trace.variables[name]
                state[name][row, at] = donor[donor_loop[part], source[part], at]
            # A step knows no loop number, so pairs of different loops go on together.
            run = self.program.run(
                self.inputs[base[part]], n_loops=int(steps[:, part].max()), variables=state
            )
            read.append(run.outputs[steps[:, part], row])
        return torch.cat(read, dim=1)
