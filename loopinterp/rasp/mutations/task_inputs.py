"""Inputs of a task on which programs are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from loopinterp.tasks.task import Task


def inputs_of(task: Task, lengths: tuple[int, ...], examples: int, *, seed: int) -> Batch:
    """So many inputs of each length and of each of the task's distributions, padded alike."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.tensor(lengths).repeat_interleave(examples)
    parts = [task.sample(n, generator=generator, distribution=d) for d in task.distributions]
    fields = ("inputs", "targets", "n", "n_loops")
    return Batch(*(torch.cat([getattr(part, field) for part in parts]) for field in fields))
