"""Measures of a run, and runs of a batch in parts that fit in memory and in half precision.

States ``h_0 .. h_T`` are ``[loop+1, ..., d_model]``; with :math:`D_t = h_t - h_{t-1}`, entry
``t - 1`` of a result with ``T`` entries belongs to :math:`D_t`. Logits are
``[loop+1, ..., d_vocab_out]``. Values that are not finite are refused, with their loop, unless
``allow_nonfinite``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.results import study
from loopinterp.core.text import ShortRepr
from loopinterp.models.iteration import bind, computing_dtype, in_float32, is_coarse, no_autocast
from loopinterp.models.protocol import describe_model
from loopinterp.models.study_examples import examples_for
from loopinterp.tasks.sampling import need_asked
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.core.results import Result, Stopwatch
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


SETTLED = 0.03
"""Relative residual below which a token counts as converged (arXiv 2502.05171)."""

NOISE = 16
"""Updates of fewer rounding errors of the state have no rate and no angle."""

_ONE_NUMBER = -2
"""The answer of a readout of one number."""


@checked
def relative_residual(
    states: Float[Tensor, "states *lead d_model"],
    *,
    norm: Literal["2", "max"] = "2",
    allow_nonfinite: bool = False,
) -> Float[Tensor, "loop ..."]:
    r"""Relative residual :math:`\|D_t\| / \|h_t\|` along the last axis; 0 for constant zeros.

    Source: arXiv 2502.05171.

    Example:
        >>> relative_residual(torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]))
        tensor([0.5000, 0.0000])
    """
    check_states(states, allow_nonfinite=allow_nonfinite)
    order = 2 if norm == "2" else float("inf")
    update = torch.linalg.vector_norm(states[1:] - states[:-1], ord=order, dim=-1)
    return share_of_size(update, torch.linalg.vector_norm(states[1:], ord=order, dim=-1))


def distance_to_limit(
    states: Float[Tensor, "states *lead d_model"],
    limit: Float[Tensor, "*limit_lead d_model"],
    *,
    relative: bool = False,
    allow_nonfinite: bool = False,
) -> Float[Tensor, "states ..."]:
    r"""Distance :math:`\|h_t - h^*\|` of each state to the limit, or over :math:`\|h^*\|`."""
    check_states(states, at_least=1, allow_nonfinite=allow_nonfinite)
    fix = "Pass the fixed point of the same batch."
    check_shape("limit", limit.shape, states.shape[1:], fix=fix)
    distance = (states - limit).norm(dim=-1)
    return share_of_size(distance, limit.norm(dim=-1)) if relative else distance


def update_cosine(
    states: Float[Tensor, "states *lead d_model"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "loop ..."]:
    r"""Cosine of successive updates, :math:`\cos(D_t, D_{t-1})`, for loops 2 to T.

    Near 1: a straight approach. About 0.5 to 0.65: a spiral. Negative: overshoot, period 2. NaN if
    an update is no larger than rounding error.
    """
    check_states(states, at_least=3, allow_nonfinite=allow_nonfinite)
    update, size, real = _updates(states)
    cosine = (update[1:] * update[:-1]).sum(dim=-1) / (size[1:] * size[:-1])
    return cosine.clamp(-1, 1).masked_fill(~(real[1:] & real[:-1]), float("nan"))


@dataclass(frozen=True, repr=False)
class ContractionRates(ShortRepr):
    r"""Ratios :math:`\|D_{t+1}\| / \|D_t\|`; NaN where an update is at rounding error.

    ``mean`` and ``spread`` (standard deviation) are over loops; ``asymptotic``, the geometric mean
    over the last loops, approaches the spectral radius at the fixed point.
    """

    per_loop: Float[Tensor, "loop ..."]
    mean: Float[Tensor, "*lead"]
    spread: Float[Tensor, "*lead"]
    asymptotic: Float[Tensor, "*lead"]


@checked
def contraction_rates(
    states: Float[Tensor, "states *lead d_model"],
    *,
    last: PositiveInt = 8,
    allow_nonfinite: bool = False,
) -> ContractionRates:
    r"""Contraction rate :math:`\|D_{t+1}\| / \|D_t\|`: per loop, mean, spread, asymptotic.

    The asymptotic rate uses the ``last`` loops above rounding error (arXiv 2605.21488).

    Example:
        >>> halving = 2 - torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None]
        >>> contraction_rates(halving).asymptotic
        tensor(0.5000)
    """
    check_states(states, at_least=3, allow_nonfinite=allow_nonfinite)
    _, size, real = _updates(states)
    valid = real[1:] & real[:-1]  # [loop, ...]
    ratio = (size[1:] / size[:-1]).masked_fill(~valid, float("nan"))
    count = valid.sum(dim=0)
    mean = ratio.nansum(dim=0) / count
    spread = ((ratio - mean) ** 2).nansum(dim=0).div(count).sqrt()
    # Valid loops counted from the end: the last ones are numbered 1 .. last.
    from_end = valid.flip(0).cumsum(dim=0).flip(0)
    late = valid & (from_end <= last)
    log_ratio = torch.where(late, ratio, 1).log()
    asymptotic = (log_ratio.sum(dim=0) / late.sum(dim=0)).exp()
    return ContractionRates(ratio, mean, spread, asymptotic)


@checked
def settling_time(
    residual: Float[Tensor, "loop ..."], *, threshold: PositiveFloat = SETTLED
) -> Int[Tensor, "*lead"]:
    """First loop (from 1) from which the residual stays below the threshold; -1 for never.

    Not yet convergence: in steady growth the residual falls as 1/t (:func:`classify_regimes`). NaN
    counts as above the threshold.

    Source: arXiv 2502.05171.

    Example:
        >>> settling_time(torch.tensor([0.5, 0.01, 0.2, 0.02, 0.01]))
        tensor(4)
    """
    n_loops = len(residual) if residual.ndim else 0
    check_integer("loops of residual", n_loops, least=1, fix="Pass that of relative_residual.")
    last_moving = _last_loop(~(residual < threshold))
    return torch.where(last_moving == n_loops, -1, last_moving + 1)


def readout_kl(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "loop ..."]:
    r"""Change of the readout in loops 1 to T, :math:`\mathrm{KL}(p_t \| p_{t-1})`, in nats."""
    check_states(logits, name="logits", allow_nonfinite=allow_nonfinite)
    log_p = logits.log_softmax(dim=-1)
    return (log_p[1:].exp() * (log_p[1:] - log_p[:-1])).sum(dim=-1).clamp_min(0)


def readout_entropy(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "readouts ..."]:
    """Entropy of each readout in nats."""
    check_states(logits, at_least=1, name="logits", allow_nonfinite=allow_nonfinite)
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def readout_margin(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "readouts ..."]:
    """Largest logit minus the second largest; NaN for a readout of one number."""
    check_states(logits, at_least=1, name="logits", allow_nonfinite=allow_nonfinite)
    if logits.shape[-1] == 1:
        return torch.full_like(logits[..., 0], float("nan"))
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def likeliest(logits: Float[Tensor, "*lead d_vocab_out"]) -> Int[Tensor, " *lead"]:
    """The class of the largest logit; -1 where a logit is NaN, -2 for a readout of one number.

    Example:
        >>> likeliest(torch.tensor([[0.0, 1.0], [2.0, torch.inf], [0.0, torch.nan]]))
        tensor([ 1,  1, -1])
    """
    if logits.shape[-1] == 1:
        return torch.full_like(logits[..., 0], _ONE_NUMBER, dtype=torch.int64)
    return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), -1)


def stable_from(answers: Int[Tensor, "readouts ..."]) -> Int[Tensor, "*lead"]:
    """First loop, from 0, whose answer is kept to the last one.

    ``answers`` are those after 0..T loops; one that changes in the last loop gives ``T``.

    Example:
        >>> stable_from(torch.tensor([0, 1, 1, 1, 0])), stable_from(torch.tensor([0, 1, 1, 1]))
        (tensor(4), tensor(1))
    """
    check_integer("loops of the answers", len(answers) - 1, least=1)
    return _last_loop(answers[1:] != answers[:-1])


def correctness(
    answers: Int[Tensor, "*loop batch pos"], targets: Int[Tensor, "batch pos"]
) -> Int[Tensor, "*loop batch pos"]:
    """1 where the answer is right, 0 where wrong, -1 where the target is ``IGNORE`` (int8)."""
    fix = "Pass the likeliest classes of the readout of the same batch."
    check_shape("answers", answers.shape[-2:], targets.shape, fix=fix)
    right = (answers == targets).to(torch.int8)
    return right.masked_fill((targets == IGNORE) | (answers == _ONE_NUMBER), -1)


def exact_match(right: Int[Tensor, "*loop batch pos"]) -> Float[Tensor, "*loop batch"]:
    """1.0 for an example with every asked position right by :func:`correctness`, else 0.0."""
    return (right != 0).all(dim=-1).float()


def check_states(
    states: Tensor, *, at_least: int = 2, name: str = "states", allow_nonfinite: bool = False
) -> None:
    """Raise unless ``states`` is ``[loop+1, ..., d_model]``, long enough and finite."""
    if states.ndim < 2 or len(states) < at_least or not states.is_floating_point():
        raise InputError(
            name,
            expected=f"a floating-point tensor [loop, ..., feature] with at least {at_least} loops",
            given=f"shape {tuple(states.shape)}, {states.dtype}",
            fix="Pass what the model returns with return_type='states' (or run_loops).",
        )
    if not allow_nonfinite:
        check_finite(states, name)


def check_finite(values: Tensor, name: str, *, start: int = 0) -> None:
    bad = ~values.isfinite()
    if bad.any():
        first = start + int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0])
        raise InputError(
            name,
            expected="finite values",
            given=f"NaN or infinity, first at index {first} of the loop axis",
            fix="Cut the run before that loop, or pass allow_nonfinite=True where it is offered.",
        )


def check_finite_state(state: Tensor, name: str, *, fix: str) -> None:
    numbers = state.numel() > 0 and state.is_floating_point()
    if not numbers or not state.isfinite().all():
        got = "NaN or infinity" if numbers else f"{state.dtype} of shape {tuple(state.shape)}"
        raise InputError(name, expected="finite floating-point values", given=got, fix=fix)


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int], *, fix: str) -> None:
    if tuple(shape) != tuple(expected):
        sizes = {"expected": f"shape {tuple(expected)}", "given": f"shape {tuple(shape)}"}
        raise InputError(name, **sizes, fix=fix)


def share_of_size(part: Float[Tensor, "*part"], size: Float[Tensor, "*#part"]) -> Tensor:
    """``part / size``: 0 if both are 0, infinity if only the size is."""
    return torch.where(part == 0, part, part / size)


def _last_loop(holds: Bool[Tensor, "loop ..."]) -> Int[Tensor, "*lead"]:
    loops = torch.arange(1, len(holds) + 1, device=holds.device)
    return (holds * loops.reshape(-1, *[1] * (holds.ndim - 1))).amax(dim=0)


def _updates(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    update = states[1:] - states[:-1]  # D_t [loop, ..., d_model]
    size, norm = update.norm(dim=-1), states.norm(dim=-1)
    return update, size, above_rounding(size, norm[1:], norm[:-1])


def above_rounding(size: Tensor, norm: Tensor, norm_before: Tensor) -> Tensor:
    """Whether an update exceeds the rounding error of its two states."""
    return size > NOISE * torch.finfo(size.dtype).eps * torch.maximum(norm, norm_before)


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
