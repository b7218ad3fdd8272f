"""Device, threads, random streams and processes of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from loopinterp.core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer
    from loopinterp.training.config import TrainingConfig


@contextmanager
def cpu_threads(n_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device, without waiting."""
    return x.to(device, non_blocking=True)


def with_noise(iteration: Iteration, noise: Iterator[Tensor]) -> Iteration:
    """The iteration ``h -> step(h + noise)``; a loop uses its noise's first rows."""

    def advance(h: Tensor, e: Tensor, context: Any) -> Tensor:
        return iteration.advance(h + next(noise)[: len(h)], e, context)

    return replace(iteration, advance=advance)


def make_bind(model: LoopedTransformer, *, compiled: bool) -> Callable[..., Iteration]:
    """``bind(inputs, position_offset=0, checked=False)`` of a model, compiled if asked."""
    if not compiled:
        return model.bind
    # Batches shrink as examples finish, and grow with the curriculum: sizes are not compiled in.
    step = torch.compile(model.step, dynamic=True)

    def bind(inputs: Tensor, **options: Any) -> Iteration:
        return replace(model.bind(inputs, **options), advance=lambda h, e, _: step(h, e))

    return bind


def stream(seed: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose, independent of others with the same seed."""
    # 56 bits, which fit into a generator's seed
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass(frozen=True)
class Processes:
    """The processes that train together.

    All draw the same batch and hold the same state. Each runs every ``count``-th example; gradients
    are summed.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all processes, in place."""
        if self.count > 1:
            # One reduction of all numbers is faster than one for each tensor.
            flat = torch.cat([x.reshape(-1) for x in tensors])
            dist.all_reduce(flat)
            for x, total in zip(tensors, flat.split([x.numel() for x in tensors])):
                x.copy_(total.view_as(x))

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


ONE_PROCESS = Processes()


def is_first() -> bool:
    return n_processes() == 1 or int(os.environ.get("RANK", "0")) == 0


def n_processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(config: TrainingConfig) -> Iterator[Processes]:
    """The processes that ``torchrun`` started, or this one alone; each takes its own GPU."""
    count = n_processes()
    if count > config.batch_size:
        expected, got = f"an example at least for each of {count} processes", config.batch_size
        fix = "Start fewer processes, or take larger batches."
        raise ConfigError("batch_size", expected=expected, given=str(got), fix=fix)
    if count > 1 and ":" in config.device:
        expected = f"cuda, of which each of {count} processes takes its own card"
        fix, what = "Pass --device cuda.", f"device {config.device!r}"
        raise InputError(what, expected=expected, given="one card for all", fix=fix)
    started = dist.is_available() and dist.is_initialized()
    if count > 1 and not started:
        on_cards = config.device == "cuda" or (
            config.device == "auto" and torch.cuda.is_available()
        )
        if on_cards:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if on_cards else "gloo")
    try:
        yield Processes(dist.get_rank(), count) if count > 1 or started else ONE_PROCESS
    finally:
        if count > 1 and not started:
            dist.destroy_process_group()
