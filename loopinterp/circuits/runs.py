"""Running any looped model: outputs at every loop, and swaps of states without recomputed loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.subspaces import project
from loopinterp.models.model_description import device_of as device_of
from loopinterp.models.protocol import bind

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.circuits.swaps import Swaps
    from loopinterp.models.protocol import LoopedModel

AT_THE_END = -1
"""Among delays: read the output after T(n) loops, however many that are after the swap."""

DELAYS = (0, 1, 2, AT_THE_END)
"""Loops between a swap and the reading of the output."""

TIE = 1e-4
"""Logits that differ by no more are equal."""

VERDICT_DELAY = 1
"""The verdict goes by the output one loop after the swap."""

DELAY_NAMES = {0: "at once", 1: "1 loop later", AT_THE_END: "at the end"}


def delay_name(delay: int) -> str:
    """A delay in words.

    Example:
        >>> [delay_name(d) for d in DELAYS]
        ['at once', '1 loop later', '2 loops later', 'at the end']
    """
    return DELAY_NAMES.get(delay, f"{delay} loops later")


def steps_to(
    delays: tuple[int, ...], loop: Int[Tensor, " pair"], n_loops: int
) -> Int[Tensor, "delay pair"]:
    """Loops from a swap after ``loop`` loops to each reading of the output.

    Example:
        >>> steps_to((1, AT_THE_END), torch.tensor([2, 7]), n_loops=8).tolist()
        [[1, 1], [6, 1]]
    """
    left = n_loops - loop
    return torch.stack([left if d == AT_THE_END else torch.full_like(left, d) for d in delays])


def answer(logits: Float[Tensor, "*shape d_vocab_out"]) -> Int[Tensor, "*shape"]:
    """The class with the largest logit; of those that are equal to rounding, the first.

    A model that has not decided yet may have all logits alike; which of them is largest by a
    rounding error says nothing, but would change from one basis of the state to another.

    Example:
        >>> answer(torch.tensor([[0.2, 1.3], [1e-7, 2e-7]])).tolist()
        [1, 0]
    """
    return (logits >= logits.amax(-1, keepdim=True) - TIE).int().argmax(-1)


@torch.no_grad()
def outputs(
    model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> Int[Tensor, "loops batch pos"]:
    """The answer that would be read after 0, 1, … ``n_loops`` loops."""
    iteration = bind(model, inputs)
    h = iteration.h0
    read = [answer(iteration.readout(h))]
    for _ in range(n_loops):
        h = iteration.step(h)
        read.append(answer(iteration.readout(h)))
    return torch.stack(read)


@torch.no_grad()
def states(
    model: LoopedModel | Any, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> Float[Tensor, "loops batch pos d_model"]:
    """h_0 .. h_T."""
    iteration = bind(model, inputs)
    passed = [iteration.h0]
    for _ in range(n_loops):
        passed.append(iteration.step(passed[-1]))
    return torch.stack(passed)


@dataclass(frozen=True)
class SwapRun:
    """Pairs run on a model up to their loops, ready for any number of swaps.

    Attributes:
        model: The model.
        pairs: The pairs.
        state: State of the base when the swap is made.
        donor: State of the source at the position that is swapped, at that loop.
        base: Outputs of the base without a swap, at each delay.
        delays: Loops between the swap and the reading of the output; see :data:`DELAYS`.
    """

    model: LoopedModel | Any
    pairs: Swaps
    state: Float[Tensor, "pair pos d_model"]
    donor: Float[Tensor, "pair d_model"]
    base: Int[Tensor, "delay pair pos"]
    delays: tuple[int, ...]

    @property
    def difference(self) -> Float[Tensor, "pair d_model"]:
        """What a swap of the whole state adds."""
        rows = torch.arange(len(self.pairs), device=self.state.device)
        return self.donor - self.state[rows, self.pairs.position]

    def swap(
        self,
        subspace: Float[Tensor, "... rank d_model"] | None = None,
        *,
        delays: tuple[int, ...] | None = None,
    ) -> Int[Tensor, "delay pair pos"]:
        """Outputs after the swap, at each delay.

        Args:
            subspace: Orthonormal rows; only the part of the difference that lies in their span
                is put in. One for all pairs [rank, d_model] or one each [pair, rank, d_model].
                The whole state if omitted.
            delays: Other delays than the run's own.

        Raises:
            InputError: rows that are not orthonormal.
        """
        change = self.difference
        if subspace is not None:
            change = project(change, subspace)
        h = self.state.clone()
        h[torch.arange(len(h), device=h.device), self.pairs.position] += change
        return _read(self.model, self.pairs, h, self.delays if delays is None else delays)


def prepare_swaps(
    model: LoopedModel | Any, pairs: Swaps, *, delays: tuple[int, ...] = DELAYS
) -> SwapRun:
    """Run base and source once, each up to its loop; swaps go on from there."""
    rows = torch.arange(len(pairs), device=pairs.base.device)
    state = _states_at(model, pairs.base, pairs.loop)
    donor = states_after(model, pairs.source, rows, pairs.position, pairs.loop)
    return SwapRun(model, pairs, state, donor, _read(model, pairs, state, delays), delays)


@torch.no_grad()
def states_after(
    model: LoopedModel | Any,
    inputs: Int[Tensor, "batch pos"],
    row: Int[Tensor, " place"],
    pos: Int[Tensor, " place"],
    loop: Int[Tensor, " place"],
) -> Float[Tensor, "place d_model"]:
    """The state at each place (a position of an input) after the place's own number of loops."""
    iteration = bind(model, inputs)
    h = iteration.h0
    found = h[row, pos]
    last = int(loop.max()) if len(loop) else 0
    for t in range(1, last + 1):
        h = iteration.step(h)
        now = loop == t
        found[now] = h[row[now], pos[now]]
    return found


@torch.no_grad()
def read_on(
    model: LoopedModel | Any,
    inputs: Int[Tensor, "pair pos"],
    h: Float[Tensor, "pair pos d_model"],
    steps: Int[Tensor, "read pair"],
) -> Int[Tensor, "read pair pos"]:
    """Outputs of runs that go on from the state ``h``, each read after so many more loops."""
    iteration = bind(model, inputs)
    read = torch.zeros(*steps.shape, inputs.shape[1], dtype=torch.long, device=h.device)
    for passed in range(int(steps.max()) + 1):
        if passed:
            h = iteration.step(h)
        now = steps == passed
        if bool(now.any()):
            read = torch.where(now[..., None], answer(iteration.readout(h)), read)
    return read


@torch.no_grad()
def _states_at(model: LoopedModel | Any, inputs: Tensor, loop: Tensor) -> Tensor:
    """Each example's state after its own number of loops."""
    iteration = bind(model, inputs)
    h = iteration.h0
    found = h.clone()
    for t in range(1, int(loop.max()) + 1):
        h = iteration.step(h)
        found[loop == t] = h[loop == t]
    return found


def _read(
    model: LoopedModel | Any, pairs: Swaps, h: Tensor, delays: tuple[int, ...]
) -> Int[Tensor, "delay pair pos"]:
    return read_on(model, pairs.base, h, steps_to(delays, pairs.loop, pairs.n_loops))
