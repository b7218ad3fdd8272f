"""Stepping a looped model: the one loop that every study shares."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import bind
from loopinterp.models.run_inputs import need_examples
from loopinterp.progress import track

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel


def iterate(
    model: LoopedModel | Any,
    inputs: Tensor,
    n_loops: int,
    *,
    state: Float[Tensor, "batch pos d_model"] | None = None,
    start_at_loop: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"]]]:
    """The states of a run, one at a time: ``(0, h_0)``, ``(1, h_1)``, … ``(n_loops, h_T)``.

    A loop is run when its state is asked for, with gradients where the caller has them on.
    :meth:`Iteration.run` is the same for a model that is bound to its input already.

    Args:
        model: Any looped model.
        inputs: Its inputs, on its device.
        n_loops: Loops to run.
        state: State to go on from, instead of the initial one; loops are counted from it.
        start_at_loop: Index of the first loop that is made; of use where the model's step takes
            the index, and needed there beside a state.

    Raises:
        InputError: If the model is none, the number of loops is no integer from 0 on, or a state
            is not finite; it names the loop and the example.

    Example:
        >>> from types import SimpleNamespace
        >>> double = SimpleNamespace(
        ...     embed=lambda x: x, initial_state=torch.clone, readout=torch.clone,
        ...     step=lambda h, e: h + e)
        >>> [(loop, h.item()) for loop, h in iterate(double, torch.ones(1, 1, 1), 2)]
        [(0, 1.0), (1, 2.0), (2, 3.0)]
    """
    return bind(model, inputs).run(n_loops, state=state, start_at_loop=start_at_loop)


@torch.no_grad()
def states_at(
    model: LoopedModel | Any,
    inputs: Tensor,
    row: Int[Tensor, "*place"],
    pos: Int[Tensor, "*place"],
    *,
    loops: Sequence[int],
    batch_size: int = 256,
) -> tuple[Float[Tensor, "loop *place d_model"], Float[Tensor, "*place d_model"]]:
    """States after given numbers of loops, and the embedding, at given places only.

    Args:
        model: Any looped model; no gradients are kept.
        inputs: Its inputs, on its device.
        row: Row of ``inputs`` of each place.
        pos: Position of each place.
        loops: Numbers of loops, increasing; 0 is the initial state.
        batch_size: Inputs that are run at a time.

    Returns:
        States [loop, *place, d_model] and embeddings ``e`` [*place, d_model].

    Raises:
        InputError: If the loops do not increase, there are no inputs, or no such row.
    """
    wanted = {loop: at for at, loop in enumerate(check_increasing(loops))}
    need_examples(inputs)
    if row.numel():
        for end in (int(row.min()), int(row.max())):
            check_integer("row", end, least=0, most=len(inputs) - 1)
    states: Tensor | None = None
    embedding: Tensor | None = None
    for start in track(range(0, len(inputs), batch_size), "run"):
        here = (row >= start) & (row < start + batch_size)
        r, p = row[here] - start, pos[here]
        bound = bind(model, inputs[start : start + batch_size])
        if states is None or embedding is None:
            states = bound.h0.new_empty(len(wanted), *row.shape, bound.h0.shape[-1])
            embedding = bound.e.new_empty(*row.shape, bound.e.shape[-1])
        embedding[here] = bound.e[r, p]
        for loop, h in bound.run(max(wanted)):
            if loop in wanted:
                states[wanted[loop], here] = h[r, p]
    assert states is not None and embedding is not None
    return states, embedding


def check_increasing(loops: Sequence[int], *, most: int | None = None) -> list[int]:
    """Numbers of loops as a list; raise unless they increase from 0 on, up to ``most``."""
    fix = f"Pass e.g. loops=range(0, {37 if most is None else most + 1})."
    steps = [check_integer("loops", loop, least=0, most=most, fix=fix) for loop in loops]
    if not steps or any(b <= a for a, b in pairwise(steps)):
        raise InputError(
            "loops",
            expected="numbers of loops, increasing, 0 or more",
            given=reprlib.repr(steps),
            fix=fix,
        )
    return steps
