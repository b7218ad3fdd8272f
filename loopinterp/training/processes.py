"""Several processes that train one model: each runs its share of every batch.

All draw the same batch from the same random streams, so that they hold the same state and one of
them can write it down. Each runs every ``count``-th example; the gradients of all are added up
before the optimiser sees them, which gives the gradient of the whole batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from loopinterp.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.training.config import TrainingConfig


@dataclass(frozen=True)
class Processes:
    """Those that train together, as one of them sees them.

    Attributes:
        rank: Which of them this one is, from 0.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    @property
    def rows(self) -> slice:
        """Its share of a batch."""
        return slice(self.rank, None, self.count)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the sum over all processes, in one exchange."""
        if self.count == 1:
            return
        together = torch.cat([x.reshape(-1) for x in tensors])
        dist.all_reduce(together)
        for x, total in zip(tensors, together.split([x.numel() for x in tensors])):
            x.copy_(total.view_as(x))

    def wait(self) -> None:
        """Go on when all have come as far."""
        if self.count > 1:
            dist.barrier()


ALONE = Processes()


def is_first() -> bool:
    """Whether this process is the only one, or the first that ``torchrun`` started."""
    return n_processes() == 1 or int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined(config: TrainingConfig) -> Iterator[Processes]:
    """The processes that ``torchrun`` started, or this one alone.

    On GPUs each takes the card of its own number on its machine.

    Raises:
        InputError: If the device is one card for all.
        ConfigError: If there are more processes than examples in a batch.
    """
    count = n_processes()
    if count > config.batch_size:
        raise ConfigError(
            "batch_size",
            expected=f"an example at least for each of {count} processes",
            given=str(config.batch_size),
            fix="Start fewer processes, or take larger batches.",
        )
    if count > 1 and ":" in config.device:
        raise InputError(
            f"device {config.device!r}",
            expected=f"cuda, of which each of {count} processes takes its own card",
            given="one card for all",
            fix="Pass --device cuda.",
        )
    if count == 1 or dist.is_initialized():
        yield _present()
        return
    on_cards = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if on_cards:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_cards else "gloo")
    try:
        yield _present()
    finally:
        dist.destroy_process_group()


def n_processes() -> int:
    """How many train together, or will: those that ``torchrun`` started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _present() -> Processes:
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return ALONE
