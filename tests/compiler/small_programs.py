"""Programs of no task, and all their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from loopinterp.programs import Linear, LoopProgram, Seq, full


def program(
    prepare: Mapping[str, Seq | int],
    step: Mapping[str, Seq | int],
    finish: Seq | int = 0,
    *,
    n_tokens: int = 3,
    name: str = "small",
) -> LoopProgram:
    """A program of no task."""

    def seq(x: Seq | int) -> Seq:
        return full(x) if isinstance(x, int) else x

    return LoopProgram(
        name=name,
        task="none",
        inputs=tuple(map(str, range(n_tokens))),
        prepare={name: seq(x) for name, x in prepare.items()},
        step={name: seq(x) for name, x in step.items()},
        finish=seq(finish),
        n_loops=Linear(),
    )


def every_input(program: LoopProgram, n: int) -> Tensor:
    """All sequences of tokens of that length."""
    return torch.tensor(list(itertools.product(range(len(program.inputs)), repeat=n)))
