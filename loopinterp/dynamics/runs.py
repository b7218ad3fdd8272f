"""Runs of a batch through the loops, in parts that fit in memory, and in half precision."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import check_integer
from loopinterp.core.results import study
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import above_rounding, share_of_size
from loopinterp.models.iteration import bind, computing_dtype, in_float32, is_coarse, no_autocast
from loopinterp.models.protocol import describe_model
from loopinterp.models.study_examples import examples_for
from loopinterp.tasks.sampling import need_asked
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.core.results import Result, Stopwatch
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


CHUNK_BYTES = 64 * 2**20
"""Largest tensor of states in memory."""

Counted = Literal["asked", "all"]
"""Positions that a study counts: those with a target, or all."""


class AfterLoops:
    """A result whose axis ``loop`` counts the loops made, from 0 on."""

    data: xr.Dataset

    @property
    def n_loops(self) -> int:
        return self.data.sizes["loop"] - 1


@checked
def run_loops(iteration: Iteration, n_loops: Loops) -> Float[Tensor, "loop batch pos d_model"]:
    """States ``h_0 .. h_T`` of the plain iteration, without gradients."""
    with torch.no_grad():
        states = iteration.h0.new_empty(n_loops + 1, *iteration.h0.shape)
        for loop, h in iteration.run(n_loops, may_diverge=True):
            states[loop] = h
    return states


@dataclass(frozen=True, repr=False)
class LoopMeasures(ShortRepr):
    r"""Measures of one loop, with :math:`D_t = h_t - h_{t-1}`; NaN where undefined.

    Norm :math:`\|h_t\|`; residual :math:`\|D_t\| / \|h_t\|` of a token, and of a sequence in the
    maximum norm; contraction :math:`\|D_t\| / \|D_{t-1}\|` and cosine of :math:`D_t, D_{t-1}` (NaN
    also at rounding error).
    """

    norm: Float[Tensor, "batch pos"]
    residual: Float[Tensor, "batch pos"]
    residual_max: Float[Tensor, " batch"]
    contraction: Float[Tensor, "batch pos"]
    cosine: Float[Tensor, "batch pos"]


def stream_measures(
    iteration: Iteration, n_loops: int
) -> Iterator[tuple[int, Float[Tensor, "batch pos d_model"], LoopMeasures]]:
    """Run a model and measure every loop, with two updates in memory.

    States need not be finite.

    Yields:
        Loops made, from 0 to ``n_loops``; the state after them; measures of the last one.
    """
    norms: deque[Tensor] = deque(maxlen=3)
    before, update, size = None, None, None
    with torch.no_grad():
        for loop, h in iteration.run(n_loops, may_diverge=True):
            norms.append(norm := torch.linalg.vector_norm(h, dim=-1))
            residual = contraction = cosine = torch.full_like(norm, float("nan"))
            residual_max = residual[:, 0]
            if before is not None:
                last, last_size = update, size
                update = h - before
                size = torch.linalg.vector_norm(update, dim=-1)
                residual = share_of_size(size, norm)
                # Maximum norms, [batch]
                most = update.abs().amax(dim=(1, 2)), h.abs().amax(dim=(1, 2))
                residual_max = share_of_size(*most)
                if last is not None and last_size is not None:
                    unknown = ~above_rounding(size, norms[-1], norms[-2])
                    unknown |= ~above_rounding(last_size, norms[-2], norms[-3])
                    contraction = (size / last_size).masked_fill(unknown, float("nan"))
                    cosine = torch.linalg.vecdot(update, last) / (size * last_size)
                    cosine = cosine.clamp(-1, 1).masked_fill(unknown, float("nan"))
            before = h
            yield loop, h, LoopMeasures(norm, residual, residual_max, contraction, cosine)


def chunks(n_examples: int, bytes_per_example: int) -> Iterator[slice]:
    """Slices over the batch whose examples take at most :data:`CHUNK_BYTES`."""
    size = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    for first in range(0, n_examples, size):
        yield slice(first, min(first + size, n_examples))


def state_chunks(model: LoopedModel, batch: Batch, n_states: int) -> list[slice]:
    """Slices over a batch, for ``n_states`` states in memory."""
    h0 = bind(model, batch.inputs[:1]).h0
    return list(chunks(len(batch), n_states * h0.numel() * h0.element_size()))


def gather(kind: type[Result], parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Arrays of a kind of result, joined along the batch; others of the parts are left out."""
    every = list(parts)
    declared = (name for name in every[0] if name in kind.VARIABLES)
    axis = {name: kind.VARIABLES[name].split().index("batch") for name in declared}
    return {name: torch.cat([part[name].cpu() for part in every], at) for name, at in axis.items()}


def counted_examples(
    model: LoopedModel,
    data: Batch | Task,
    positions: Counted = "asked",
    *,
    at_least: int = 1,
    **options: Any,
) -> tuple[Batch, Bool[Tensor, "batch pos"]]:
    """The examples of a study and the positions it counts."""
    batch = examples_for(model, data, **options)
    need_asked(batch)
    fix = "One's limit is compared with another's: pass batch_size=16, or a larger batch."
    check_integer("len(data)", len(batch), least=at_least, fix=fix)
    has_target = batch.targets != IGNORE
    return batch, has_target if positions == "asked" else torch.ones_like(has_target)


def usual_loops(batch: Batch, *, times: float, least: int) -> int:
    return max(least, math.ceil(times * int(batch.n_loops.max())))


def beside_float32(model: LoopedModel, inputs: Tensor) -> tuple[dict[str, Any], Any | None]:
    """The model for the provenance and, if it computes in a coarse dtype, its copy in float32.

    The copy is None in float32, and of a model that cannot be copied.
    """
    about: dict[str, Any] = {"model": describe_model(model)}
    dtype = computing_dtype(bind(model, inputs[:1]).h0)
    if not is_coarse(dtype):
        return about, None
    return about | {"state_dtype": str(dtype).removeprefix("torch.")}, in_float32(model, inputs)


@contextmanager
def limit_study(
    model: LoopedModel, inputs: Tensor, seed: int, **config: Any
) -> Iterator[tuple[Any, Stopwatch]]:
    """A study of limits: the model to run, and the stopwatch of the study.

    In half precision the same weights in float32, without autocast, replace it (``computed_in``). A
    model that cannot be copied stays.
    """
    about, precise = beside_float32(model, inputs)
    if precise is not None:
        model, about = precise, about | {"computed_in": "float32"}
    with (
        nullcontext() if precise is None else no_autocast(inputs.device),
        study(seed, **about, **config) as watch,
    ):
        yield model, watch
