"""Examples of several seeds without their padding: which positions run, and what they attend to.

A causal model is asked at certain positions: what lies behind the last of them in an example
changes nothing, and is not run. What is left stands in one row for each seed, example by example,
those that run longest first, so that what goes on is always the beginning of a row. The rows of
other seeds may go on a little longer; what then stands at the end of a row is run, and never read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.task import IGNORE
from loopinterp.training.device import send

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.training.objectives import Asked

_NEARLY_SQUARE = 0.9
"""Share of the positions of a square from which on the rest of it is run as well."""


@dataclass(frozen=True)
class Packing:
    """Where each position of each seed's examples stands in the seed's row; on the CPU.

    Attributes:
        asked: The loops that each example is asked at, in the order of the row; -1: not once more.
        order: Which example of its batch each one of a row is.
        lengths: Positions of it that are run.
        widths: Positions of each seed's batch, with its padding.
    """

    asked: Int[Tensor, "seed ask example"]
    order: Int[Tensor, "seed example"]
    lengths: Int[Tensor, "seed example"]
    widths: Sequence[int]

    @classmethod
    def of(cls, asked: Sequence[Asked], *, square: bool = False) -> Packing:
        """Pack what is asked of each seed's examples.

        Args:
            asked: By seed.
            square: Leave padding that is less than a tenth where it is: attention over all pairs of
                positions has nothing to rearrange then.
        """
        n_asks = max(len(one.loops) for one in asked)
        loops = torch.full((len(asked), n_asks, asked[0].loops.shape[1]), -1)
        for seed, one in enumerate(asked):
            loops[seed, : len(one.loops)] = one.loops
        order = loops.amax(1).argsort(dim=1, descending=True, stable=True)
        lengths = torch.stack([_read_until(one.targets) for one in asked]).gather(1, order)
        if square and lengths.sum() > _NEARLY_SQUARE * lengths.numel() * lengths.max():
            lengths = torch.full_like(lengths, int(lengths.max()))
        loops = loops.gather(2, order[:, None].expand_as(loops))
        return cls(loops, order, lengths, [one.targets.shape[-1] for one in asked])

    @cached_property
    def n_pos(self) -> int:
        """Positions of the longest example."""
        return int(self.lengths.max())

    @cached_property
    def is_square(self) -> bool:
        """Whether all examples are as long."""
        return bool((self.lengths == self.n_pos).all())

    @cached_property
    def starts(self) -> Int[Tensor, "seed example"]:
        """Where each example begins in its row."""
        return self.lengths.cumsum(1) - self.lengths

    @cached_property
    def running(self) -> list[tuple[list[int], list[int]]]:
        """Examples and positions of each seed that run in each loop: those of a row's beginning."""
        ends, until = self.asked.amax(1), self.lengths.cumsum(1)
        found = []
        for loop in range(1, int(ends.max()) + 1):
            goes_on = ends >= loop
            found.append((goes_on.sum(1).tolist(), (until * goes_on).amax(1).tolist()))
        return found

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Example and position of each place ``[seed, place]``; 0 behind the end of a row."""
        inside = torch.arange(self.n_pos) < self.lengths[:, :, None]
        seed, example, pos = inside.nonzero(as_tuple=True)
        found = torch.zeros(2, len(self.lengths), int(self.lengths.sum(1).max()), dtype=torch.long)
        found[:, seed, self.starts[seed, example] + pos] = torch.stack([example, pos])
        return found[0], found[1]

    @property
    def example(self) -> Int[Tensor, "seed place"]:
        """Which example of its row each place belongs to."""
        return self._places[0]

    @property
    def pos(self) -> Int[Tensor, "seed place"]:
        """Which position of its example each place is."""
        return self._places[1]

    def pack(self, batches: Sequence[Tensor]) -> Float[Tensor, "seed place *feature"]:
        """The rows of each seed's batch."""
        rows = []
        for seed, (x, width) in enumerate(zip(batches, self.widths)):
            # In a square an example may be longer than its own batch.
            pos = self.pos[seed].clamp(max=width - 1)
            at = self.order[seed, self.example[seed]] * width + pos
            rows.append(x.flatten(0, 1)[send(at, x.device)])
        return torch.stack(rows)

    def pack_noise(self, noise: Sequence[Tensor], loop: int) -> Float[Tensor, "seed place d_model"]:
        """What is added in a loop: each seed's own, whose examples stand in the row's order."""
        places = self.running[loop][1]
        packed = noise[0].new_zeros(len(noise), max(places), noise[0].shape[-1])
        for seed, (x, width, n) in enumerate(zip(noise, self.widths, places)):
            pos = self.pos[seed, :n].clamp(max=width - 1)
            at = send(self.example[seed, :n] * width + pos, x.device)
            torch.index_select(x.flatten(0, 1), 0, at, out=packed[seed, :n])
        return packed

    def answers(self, states: Iterable[Tensor]) -> Float[Tensor, "seed ask batch pos d_model"]:
        """What stands at each example at the loops it is asked at; 0 where it has no position.

        Args:
            states: After 0, 1, … loops; at least the places that run so long.
        """
        n_pos = max(self.widths)
        inside = torch.arange(n_pos) < self.lengths[:, None, :, None]
        asked = self.asked[..., None]
        found, places = [], []
        for loop, state in enumerate(states):
            seed, ask, example, pos = (inside & (asked == loop)).nonzero(as_tuple=True)
            if len(seed):
                at = seed * state.shape[1] + self.starts[seed, example] + pos
                found.append(state.flatten(0, 1)[send(at, state.device)])
                places.append((seed, ask, self.order[seed, example], pos))
        seed, ask, example, pos = (torch.cat(parts) for parts in zip(*places))
        values = torch.cat(found)
        shape = (*self.asked.shape, n_pos)
        at = ((seed * shape[1] + ask) * shape[2] + example) * shape[3] + pos
        whole = values.new_zeros(math.prod(shape), values.shape[-1])
        return whole.index_copy(0, send(at, whole.device), values).unflatten(0, shape)


def _read_until(targets: Int[Tensor, "ask batch pos"]) -> Int[Tensor, " batch"]:
    """Positions of each example until the last that is asked for, one at least."""
    place = torch.arange(1, targets.shape[-1] + 1)
    return ((targets != IGNORE).any(0) * place).amax(1).clamp(min=1)
