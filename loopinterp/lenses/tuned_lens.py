r"""The tuned lens by loop: affine translators, trained to say at each loop what the last one says.

.. math:: \min_{A_t, b_t} \mathbb{E}\,\mathrm{KL}\big(p_T \,\|\, \mathrm{softmax}\,
    \mathrm{readout}(A_t h_t + b_t)\big)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer, check_number, check_seed
from loopinterp.lenses.fitted_lens import EVERYWHERE, FittedLens
from loopinterp.lenses.lens_places import Place, layer_hooks, layers_around, places
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.progress import track
from loopinterp.study_examples import fit_to_model, inputs_and_loops
from loopinterp.tasks.study_data import as_batch
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.lenses.lens_places import Layer
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task

_LOGITS_AT_ONCE = 2**24


def fit_tuned_lens(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    n_loops: int | None = None,
    inside: bool = False,
    shared: bool = False,
    steps: int = 200,
    learning_rate: float = 3e-3,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> FittedLens:
    """Train a translator for each place, or one for all, on what the run says at its end.

    A translator starts as the identity, so that at step 0 the lens is the model's own readout. It
    is trained by Adam, whose rate falls linearly to 0. At a layer it starts from what the loop
    would leave if that layer were its last, with the loop norm. The model's weights are left as
    they are, and no run is differentiated. Positions where the data asks nothing do not count.

    Args:
        model: Any looped model.
        data: A task, of which every step draws new examples; or a batch or inputs, of which every
            step takes some, in a new order each time round.
        n_loops: Loops of the run; the longest T(n) by default.
        inside: Whether to train for each layer too, which takes a model with hooks.
        shared: Whether one translator serves all places.
        steps: Steps of the optimiser.
        learning_rate: Of Adam, at the start.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples of a step; 32 by default.
        seed: Seed of what is drawn.

    Raises:
        InputError: If a number is out of range, or the readout cannot be differentiated.

    Source: Belrose et al., arXiv 2303.08112, section 3; there for layers, with SGD.

    Example:
        >>> from types import SimpleNamespace
        >>> double = SimpleNamespace(
        ...     embed=lambda x: x, initial_state=torch.clone, step=lambda h, e: 2 * h,
        ...     readout=lambda h: torch.cat([h, 0 * h], -1))
        >>> x = torch.linspace(-1, 1, 8)[:, None, None]
        >>> lens = fit_tuned_lens(double, x, n_loops=1, steps=300, learning_rate=0.03)
        >>> round(lens.matrix.item(), 2)
        2.0
    """
    need_model(model)
    check_integer("steps", steps, least=1)
    check_number("learning_rate", learning_rate, above=0)
    size = 32 if batch_size is None else check_integer("batch_size", batch_size, least=1)
    batches = _stream(model, data, size, n, check_seed(seed))
    inputs, asked = next(batches)
    n_loops = inputs_and_loops(model, _sample(data, inputs), n_loops, n=n, seed=seed)[1]
    check_integer("n_loops", n_loops, least=1)
    with torch.no_grad():
        first = _to_train(places(model, inputs[:1], n_loops, inside=inside))[:-1]
    found: list[tuple[int, Layer]] = [(place.loop, place.layer) for place in first]
    width, kind = first[0].ended.shape[-1], first[0].ended.dtype
    wide = torch.promote_types(kind, torch.float32)
    maps: list[tuple[int, Layer]] = [EVERYWHERE] if shared else found
    eye = torch.eye(width, dtype=wide, device=inputs.device)
    matrix = eye.repeat(len(maps), 1, 1).requires_grad_()
    offset = eye.new_zeros(len(maps), width).requires_grad_()
    optimiser = torch.optim.Adam([matrix, offset], lr=learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 1 / steps, steps)
    for step in track(range(steps), "tuned lens"):
        if step:
            inputs, asked = next(batches)
        matrix.grad, offset.grad = _gradients(model, inputs, asked, n_loops, inside, matrix, offset)
        optimiser.step()
        decay.step()
    options = {"steps": steps, "learning_rate": learning_rate, "shared": shared, "inside": inside}
    return FittedLens(
        kind="tuned",
        matrix=matrix.detach().cpu(),
        offset=offset.detach().cpu(),
        places=maps,
        n_loops=n_loops,
        n_layers=len(layer_hooks(model, 0, n_loops)) if inside else 0,
        n_before=len(layers_around(model, "prelude")) if inside else 0,
        n_examples=_n_seen(data, steps * size),
        made={"model": describe_model(model), **options, "batch_size": size, "seed": seed},
    )


def _gradients(
    model: Any,
    inputs: Tensor,
    asked: Tensor,
    n_loops: int,
    inside: bool,
    matrix: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the mean divergence over the asked positions, summed over places."""
    with torch.no_grad():
        readout = bind(model, inputs).readout
        run = _to_train(places(model, inputs, n_loops, inside=inside))
        *read, last = (place.ended for place in run)
        log_p = readout(last).to(matrix.dtype).log_softmax(-1)
    each = max(1, _LOGITS_AT_ONCE // log_p.numel())
    grad_matrix, grad_offset = torch.zeros_like(matrix), torch.zeros_like(offset)
    for start in range(0, len(read), each):
        part = slice(start, start + each)
        h = torch.stack(read[part]).to(matrix.dtype)  # [place, batch, pos, d_model]
        own = slice(None) if len(matrix) == 1 else part
        with recording_gradients():
            moved = torch.einsum("sbpi,soi->sbpo", h, matrix[own].expand(len(h), -1, -1))
            moved = moved + offset[own].expand(len(h), -1)[:, None, None]
            log_q = readout(moved.flatten(0, 1).to(last.dtype)).to(matrix.dtype).log_softmax(-1)
            gap = (log_p.exp() * (log_p - log_q.unflatten(0, h.shape[:2]))).sum(-1)
            loss = (gap * asked).sum() / asked.sum().clamp(min=1)
            if not loss.requires_grad:
                raise InputError(
                    "model",
                    expected="a readout that can be differentiated",
                    given="one that cuts the graph",
                    fix="Write readout in PyTorch's own operations, without detach and no_grad.",
                )
            made = torch.autograd.grad(loss, [matrix, offset])
        grad_matrix += made[0]
        grad_offset += made[1]
    return grad_matrix, grad_offset


def _to_train(run: Iterable[Place]) -> list[Place]:
    """The places of a run, its end last, but for the last layer, which leaves the last state."""
    *before, end = run
    return [*(before[:-1] if before[-1].loop == end.loop else before), end]


def _n_seen(data: Any, drawn: int) -> int:
    """Examples that are seen, where so many are drawn: of a batch each is counted once."""
    given = data if isinstance(data, torch.Tensor) else getattr(data, "inputs", None)
    return drawn if given is None else min(drawn, len(given))


def _sample(data: Any, inputs: Tensor) -> Any:
    return inputs if isinstance(data, torch.Tensor) else data


def _stream(
    model: Any, data: Batch | Task | Tensor, size: int, n: int | None, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and what is asked of them, step by step, without end."""
    device = device_of(model)
    if not isinstance(data, (torch.Tensor, Batch)):
        while True:
            batch = fit_to_model(
                model, as_batch(data, n=n, batch_size=size, seed=seed, device=device)
            )
            yield batch.inputs, batch.targets != IGNORE
            seed += 1
    if isinstance(data, torch.Tensor):
        inputs, _ = inputs_and_loops(model, data, 1)
        asked = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    else:
        batch = fit_to_model(model, as_batch(data, n=n, device=device))
        inputs, asked = batch.inputs, batch.targets != IGNORE
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(inputs), generator=generator).split(size):
            yield inputs[rows], asked[rows]
