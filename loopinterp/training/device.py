"""Where and how a run computes; decided once, never changed silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer


def resolve_device(name: str) -> torch.device:
    """The device that a name asks for; ``auto`` is the GPU where there is one.

    Raises:
        InputError: If the name is unknown, or the device is not there.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    found = re.fullmatch("cuda(?::([0-9]{1,4}))?", name)
    if found is None:
        raise unknown_name("device", name, ("auto", "cpu", "cuda"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(found[1] or 0) >= count:
        raise InputError(
            f"device {name!r}",
            expected="a GPU that PyTorch can use",
            given="none on this machine" if not count else f"only {count} of them",
            fix="Use --device cpu." if not count else f"Use a number below {count}.",
        )
    return torch.device(name)


@contextmanager
def cpu_threads(n_threads: int | None) -> Iterator[None]:
    """Use so many CPU threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what the device has to do before.

    What comes back from a device is not sent with this: it would be read before it is there.
    """
    return x.to(device, non_blocking=True)


def with_state_noise(iteration: Iteration, std: float, generator: torch.Generator) -> Iteration:
    """The iteration ``h -> step(h + std * noise)``; the generator is on the model's device."""

    def advance(h: Tensor, e: Tensor, context: Any) -> Tensor:
        noise = torch.randn(h.shape, generator=generator, device=h.device, dtype=h.dtype)
        return iteration.advance(h + std * noise, e, context)

    return replace(iteration, advance=advance)


def with_given_noise(iteration: Iteration, noise: Sequence[Tensor]) -> Iteration:
    """The same with noise that is there already: of each loop in turn, the first rows first."""
    left = iter(noise)

    def advance(h: Tensor, e: Tensor, context: Any) -> Tensor:
        return iteration.advance(h + next(left)[: len(h)], e, context)

    return replace(iteration, advance=advance)


def make_bind(model: LoopedTransformer, *, compiled: bool) -> Callable[..., Iteration]:
    """``bind(inputs, position_offset=0, look=True)`` of a model, its step compiled if asked.

    The compiled step takes any number of examples and positions: batches shrink as examples
    finish, and grow with the curriculum.
    """
    if not compiled:
        return model.bind
    step = torch.compile(model.step, dynamic=True)

    def bind(inputs: Tensor, **options: Any) -> Iteration:
        return replace(model.bind(inputs, **options), advance=lambda h, e, _: step(h, e))

    return bind
