"""Whether a cache fits where it will be kept, asked before the run that fills it.

A process that asks for more memory than there is may be ended by the system without a word; so a
cache says its size first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from loopinterp.models.sites import Address

ALWAYS_FITS = 64 * 1024**2
"""Bytes of a cache that nobody is asked about: asking takes as long as a short run."""


def need_room(
    wanted: Sequence[Address],
    batch: int,
    n_pos: int,
    n_kept: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    gradients: bool = False,
) -> None:
    """Raise where a cache of some activations is larger than what is free on its device.

    What the run itself needs is not counted, nor a graph for gradients; where nobody can say what
    is free, nothing is refused.

    Args:
        wanted: What it keeps.
        batch: Examples.
        n_pos: Positions of the input.
        n_kept: Positions that a position slice keeps.
        dtype: Type of the cache.
        device: Where it is kept.
        gradients: Whether it keeps the gradient of each activation too.

    Raises:
        InputError: If it does not fit, with its size, what is free, and what to do.
    """
    copies = dtype.itemsize * (2 if gradients else 1)
    axes = {address.axes: address for address in wanted}  # few, where a run has thousands of sites
    largest = max(_numbers(address, batch, n_pos, n_kept) for address in axes.values())
    if len(wanted) * largest * copies <= ALWAYS_FITS:
        return
    size = sum(_numbers(address, batch, n_pos, n_kept) for address in wanted) * copies
    free = free_bytes(device) if size > ALWAYS_FITS else None
    if free is not None and size > free:
        smaller = " or dtype=torch.float16" if dtype.itemsize > 2 else ""
        elsewhere = "" if device.type == "cpu" else " or device='cpu'"
        raise InputError(
            "cache",
            expected=f"at most the {spell_bytes(free)} that are free on {device}",
            given=f"{spell_bytes(size)}: {len(wanted)} activations of {batch} x {n_pos} positions "
            f"in {str(dtype).removeprefix('torch.')}",
            fix=f"Pass names_filter=, loops=, pos_slice={smaller}{elsewhere}; or cache some loops "
            "at a time, and write each to shards: cache.save(folder).",
        )


def _numbers(address: Address, batch: int, n_pos: int, n_kept: int) -> int:
    return math.prod(address.shape(batch, n_pos, n_kept))


def spell_bytes(number: int) -> str:
    """A number of bytes in words.

    Example:
        >>> spell_bytes(1_234_567), spell_bytes(3_456_000_000_000)
        ('1.2 MB', '3456.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where nobody can say.

    On a GPU that is what its driver has left, with what PyTorch holds for reuse. On a CPU it is
    what the system can give without swapping, or what a limit of this process's group (that of a
    container or a job on a cluster) leaves of it.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    if device.type != "cpu":
        return None
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups(
    member: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What each group that this process is in leaves of its limit, in both versions of Linux'."""
    try:
        lines = member.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        first = mounted / controllers
        inside = first / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(first):
                left = _left_in(folder)
                if left is not None:
                    yield left


def _left_in(folder: Path) -> int | None:
    """What one group leaves; files that were read and could be read again do not count."""
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, usage in files:
        try:
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
        again = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(0, most - used + again)
    return None
