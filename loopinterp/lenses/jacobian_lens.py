r"""The Jacobian lens by loop: what a state contributes, on average, to the state at the end.

.. math:: J_t = \mathbb{E}\Big[\sum_{p'} \frac{\partial h_{T, p'}}{\partial h_{t, p}}\Big],

the mean over examples and source positions p, the sum over target positions p'. TransformerLens'
lens does the same per layer, of the last of several loops only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from loopinterp.dynamics.jacobian import position_mask
from loopinterp.dynamics.state_trajectories import chunks
from loopinterp.errors import InputError, check_choice, check_integer, check_seed
from loopinterp.lenses.fitted_lens import FittedLens
from loopinterp.lenses.lens_places import as_wide, layer_hooks, layers_around, live_places
from loopinterp.models.model_description import describe_model
from loopinterp.progress import track
from loopinterp.study_examples import inputs_and_loops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from loopinterp.lenses.lens_places import Layer
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch, Task

Targets = Literal["all", "own"]


def fit_jacobian_lens(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    n_loops: int | None = None,
    inside: bool = False,
    targets: Targets = "all",
    positions: Sequence[int] | None = None,
    centred: bool = False,
    draws: int = 4,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> FittedLens:
    r"""Average the transport :math:`\partial h_T / \partial h_t` from every place to the end.

    One row of all matrices takes one product of a vector with the run's Jacobian, backwards
    through all loops; the Jacobian itself, of all positions by all positions, is never made. The
    lens then reads ``readout(J_t h_t)``. The model's weights are left as they are.

    Args:
        model: Any looped model that can be differentiated.
        data: Examples to average over; none of those that will be read, if it can be helped.
        n_loops: Loops T of the run; the longest T(n) by default.
        inside: Whether to fit after each layer too, which takes a model with hooks.
        targets: ``all``: effects on all positions are added up, as published. ``own``: the effect
            on the source's own position alone, by vectors with random signs for each position,
            whose cross terms vanish on average.
        positions: Source and target positions that count; all by default.
        centred: Whether to read :math:`\bar h_T + J_t (h_t - \bar h_t)`, the first two terms of a
            Taylor series, instead of :math:`J_t h_t`, with means over the same places.
        draws: Draws of signs, for ``own``.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If a loop cannot be differentiated, or a number or position is out of range.

    Source: Gurnee et al. (2026), Verbalizable representations form a global workspace in language
        models, transformer-circuits.pub; the estimator is that of TransformerLens 4.3.

    Example:
        >>> from types import SimpleNamespace
        >>> third = SimpleNamespace(embed=lambda x: x, initial_state=torch.clone,
        ...     step=lambda h, e: h / 3 + e, readout=torch.clone)
        >>> lens = fit_jacobian_lens(third, torch.ones(1, 2, 2), n_loops=2)
        >>> lens.matrix[0].tolist() == (torch.eye(2) / 9).tolist(), lens.places
        (True, [(0, None), (1, None)])
    """
    check_choice("targets", targets, get_args(Targets))
    check_integer("draws", draws, least=1)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, n_loops = inputs_and_loops(model, data, n_loops, **drawn)
    check_integer("n_loops", n_loops, least=1)
    described = describe_model(model)
    generator = torch.Generator().manual_seed(check_seed(seed))
    sums: dict[tuple[int, Layer], Tensor] = {}
    means: dict[tuple[int, Layer], Tensor] = {}
    weight = 0.0
    for rows in track(list(_parts(model, inputs, n_loops)), "Jacobian lens"):
        end, live = live_places(model, inputs[rows], n_loops, inside=inside)
        mask = position_mask(end, positions)
        kept = torch.ones_like(end) if mask is None else mask.to(end)
        for place, J in _transports(end, live, kept, targets, draws, generator).items():
            sums[place] = sums.get(place, 0) + J
        for place, h in {**live, (n_loops, None): end}.items():
            total = (as_wide(h.detach(), end.shape[-1]) * kept).sum((0, 1)).to(_wide(h))
            means[place] = means.get(place, 0) + total
        weight += float(kept[..., 0].sum())
    found = list(sums)
    matrix = torch.stack([sums[place] for place in found]) / weight
    offset = matrix.new_zeros(matrix.shape[:2])
    if centred:
        last = means[n_loops, None] / weight
        here = torch.stack([means[place] for place in found]) / weight
        offset = last - (matrix @ here[..., None])[..., 0]
    options = {"targets": targets, "centred": centred, "inside": inside}
    options |= {"positions": None if positions is None else list(positions), "seed": seed}
    return FittedLens(
        kind="jacobian",
        matrix=matrix.cpu(),
        offset=offset.cpu(),
        places=found,
        n_loops=n_loops,
        n_layers=len(layer_hooks(model, 0, n_loops)) if inside else 0,
        n_before=len(layers_around(model, "prelude")) if inside else 0,
        n_examples=len(inputs),
        made={"model": described, **options},
    )


def _parts(model: LoopedModel | Any, inputs: Tensor, n_loops: int) -> list[slice]:
    """Examples whose graphs of derivatives are held at a time: some 30 states for each loop."""
    end, _ = live_places(model, inputs[:1], 1)
    size = 30 * n_loops * end.numel() * end.element_size()
    return list(chunks(len(inputs), size))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _transports(
    end: Tensor,
    live: dict[tuple[int, Layer], Tensor],
    kept: Tensor,
    targets: str,
    draws: int,
    generator: torch.Generator,
) -> dict[tuple[int, Layer], Tensor]:
    """Sums over examples and source positions of the transport from each place, [to, from]."""
    width = end.shape[-1]
    sums = {place: h.new_zeros(width, width, dtype=_wide(h)) for place, h in live.items()}
    n_draws = 1 if targets == "all" else draws
    for _ in range(n_draws):
        signs = torch.ones(end.shape[:2])
        if targets == "own":
            signs = torch.randint(2, end.shape[:2], generator=generator) * 2.0 - 1
        weights = kept * signs.to(end)[..., None]
        for i in range(width):
            cotangent = torch.zeros_like(end)
            cotangent[..., i] = weights[..., i]
            try:
                gradients = torch.autograd.grad(
                    end, list(live.values()), cotangent, retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                raise InputError(
                    "model",
                    expected="loops that can be differentiated",
                    given=f"one of which PyTorch says: {error}",
                    fix="Write step in PyTorch's own operations, without detach and no_grad, or "
                    "use lens='tuned', which needs no derivative of a loop.",
                ) from error
            for row, gradient in zip(sums.values(), gradients):
                if gradient is not None:  # else nothing of this place reaches the end
                    counted = as_wide(gradient, width) * weights
                    row[i] += counted.to(row.dtype).sum((0, 1)) / n_draws
    return sums
