"""Fitting the tuned lens and the Jacobian lens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import GREATEST_SEED, InputError, check_choice, check_integer
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.jacobian import position_mask
from loopinterp.dynamics.measures import chunks
from loopinterp.lenses.fitted_lens import (
    EVERYWHERE,
    FittedLens,
    LoopResidual,
    as_wide,
    layer_hooks,
    live_places,
    places,
)
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import describe_model, device_of, need_model
from loopinterp.models.study_examples import fit_to_model, inputs_and_loops
from loopinterp.models.taps import recording_gradients
from loopinterp.tasks.sampling import as_batch
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from loopinterp.lenses.fitted_lens import Layer
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task


_LOGITS_AT_ONCE = 2**24


@checked
def fit_tuned_lens(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    n_loops: Loops | None = None,
    inside: bool = False,
    shared: bool = False,
    steps: PositiveInt = 200,
    learning_rate: PositiveFloat = 3e-3,
    n: int | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> FittedLens:
    """Train an affine map for each place, or one for all, on the run's final readout.

    Maps start as the identity and minimise the mean KL from the final readout at the asked
    positions, by Adam with a learning rate that falls linearly to 0.

    Args:
        data: A task, of which every step draws new examples; or a batch or inputs.
        n_loops: The longest T(n) by default.
        inside: Train for each layer too, by hooks.
        shared: One map for all places.
        batch_size: Examples a step, 32 by default.

    Raises:
        InputError: If the readout cannot be differentiated.

    Source: Belrose et al., arXiv 2303.08112, section 3.

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
    size = batch_size or 32
    batches = _stream(model, data, size, n, seed)
    inputs, counted = next(batches)
    sample = inputs if isinstance(data, torch.Tensor) else data
    n_loops = inputs_and_loops(model, sample, n_loops, n=n, seed=seed)[1]
    check_integer("n_loops", n_loops, least=1)
    with torch.no_grad():
        first = _to_train(places(model, inputs[:1], n_loops, inside=inside))[:-1]
    fitted_at: list[tuple[int, Layer]] = [(place.loop, place.layer) for place in first]
    width, wide = first[0].ended.shape[-1], _wide(first[0].ended)
    maps: list[tuple[int, Layer]] = [EVERYWHERE] if shared else fitted_at
    eye = torch.eye(width, dtype=wide, device=inputs.device)
    matrix = eye.repeat(len(maps), 1, 1).requires_grad_()  # [place, to, from]
    offset = eye.new_zeros(len(maps), width).requires_grad_()
    optimiser = torch.optim.Adam([matrix, offset], lr=learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 1 / steps, steps)
    for step in track(range(steps), "tuned lens"):
        if step:
            inputs, counted = next(batches)
        matrix.grad, offset.grad = _gradients(
            model, inputs, counted, n_loops, inside, matrix, offset
        )
        optimiser.step()
        decay.step()
    options = {"steps": steps, "learning_rate": learning_rate, "shared": shared, "inside": inside}
    # Of a batch each example is counted once.
    known = data if isinstance(data, torch.Tensor) else getattr(data, "inputs", None)
    n_drawn = steps * size
    return FittedLens(
        kind="tuned",
        matrix=matrix.detach().cpu(),
        offset=offset.detach().cpu(),
        places=maps,
        n_loops=n_loops,
        n_layers=len(layer_hooks(model, 0, n_loops)) if inside else 0,
        n_before=len(layer_hooks(model, None, 1, section="prelude")) if inside else 0,
        n_examples=n_drawn if known is None else min(n_drawn, len(known)),
        made={"model": describe_model(model), **options, "batch_size": size, "seed": seed},
    )


def _gradients(
    model: Any,
    inputs: Tensor,
    counted: Tensor,
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
        log_p = readout(last).to(matrix.dtype).log_softmax(-1)  # [batch, pos, class]
    each = max(1, _LOGITS_AT_ONCE // log_p.numel())
    grad_matrix, grad_offset = torch.zeros_like(matrix), torch.zeros_like(offset)
    for start in range(0, len(read), each):
        part = slice(start, start + each)
        h = torch.stack(read[part]).to(matrix.dtype)  # [place, batch, pos, d_model]
        maps = slice(None) if len(matrix) == 1 else part
        with recording_gradients(model):
            # [place, batch, pos, d_model]
            moved = torch.einsum("sbpi,soi->sbpo", h, matrix[maps].expand(len(h), -1, -1))
            moved = moved + offset[maps].expand(len(h), -1)[:, None, None]
            log_q = readout(moved.flatten(0, 1).to(last.dtype)).to(matrix.dtype).log_softmax(-1)
            gap = (log_p.exp() * (log_p - log_q.unflatten(0, h.shape[:2]))).sum(-1)  # [s, b, p]
            # Summed over places, mean over positions
            loss = (gap * counted).sum() / counted.sum().clamp(min=1)
            if not loss.requires_grad:
                raise InputError(
                    "model",
                    expected="a readout that can be differentiated",
                    given="one that cuts the graph",
                    fix="Write readout in PyTorch's own operations, without detach and no_grad.",
                )
            gradients = torch.autograd.grad(loss, [matrix, offset])
        grad_matrix += gradients[0]
        grad_offset += gradients[1]
    return grad_matrix, grad_offset


def _to_train(run: Iterable[LoopResidual]) -> list[LoopResidual]:
    """The places of a run, its end last, without the last layer, which ends in that state."""
    *before, end = run
    return [*(before[:-1] if before[-1].loop == end.loop else before), end]


def _stream(
    model: Any, data: Batch | Task | Tensor, size: int, n: int | None, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    device = device_of(model)
    while not isinstance(data, (torch.Tensor, Batch)):
        batch = as_batch(data, n=n, batch_size=size, seed=seed, device=device)
        batch = fit_to_model(model, batch)
        yield batch.inputs, batch.targets != IGNORE
        seed += 1
    if isinstance(data, torch.Tensor):
        inputs, _ = inputs_and_loops(model, data, 1)
        counted = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    else:
        batch = fit_to_model(model, as_batch(data, n=n, device=device))
        inputs, counted = batch.inputs, batch.targets != IGNORE
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(inputs), generator=generator).split(size):
            yield inputs[rows], counted[rows]


@checked
def fit_jacobian_lens(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    n_loops: Loops | None = None,
    inside: bool = False,
    targets: Literal["all", "own"] = "all",
    positions: Sequence[int] | None = None,
    centred: bool = False,
    draws: PositiveInt = 4,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> FittedLens:
    r"""Average the Jacobian :math:`J_t = \partial h_T / \partial h_t` of every place.

    The lens reads ``readout(J_t h_t)``.

    Args:
        data: Examples other than those to be read.
        n_loops: T, the longest T(n) by default.
        inside: Fit after each layer too, by hooks.
        targets: ``all`` sums the effects on all positions, as published; ``own`` estimates that on
            the same position, with random signs.
        positions: Source and target positions; all by default.
        centred: Read :math:`\bar h_T + J_t (h_t - \bar h_t)` instead, with means over the same
            places.
        draws: Draws of signs, for ``own``.

    Raises:
        InputError: If the loop cannot be differentiated.

    Source: Gurnee et al. (2026), Verbalizable representations form a global workspace in language
    models, transformer-circuits.pub; the estimator of TransformerLens 4.3.

    Example:
        >>> from types import SimpleNamespace
        >>> third = SimpleNamespace(embed=lambda x: x, initial_state=torch.clone,
        ...     step=lambda h, e: h / 3 + e, readout=torch.clone)
        >>> lens = fit_jacobian_lens(third, torch.ones(1, 2, 2), n_loops=2)
        >>> lens.matrix[0].tolist() == (torch.eye(2) / 9).tolist(), lens.places
        (True, [(0, None), (1, None)])
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, n_loops = inputs_and_loops(model, data, n_loops, **drawn)
    check_integer("n_loops", n_loops, least=1)
    described = describe_model(model)
    generator = torch.Generator().manual_seed(seed)
    end, _ = live_places(model, inputs[:1], 1)
    # Autograd keeps some 30 states for each loop and example.
    parts = list(chunks(len(inputs), 30 * n_loops * end.numel() * end.element_size()))
    sums: dict[tuple[int, Layer], Tensor] = {}
    means: dict[tuple[int, Layer], Tensor] = {}
    weight = 0.0
    for rows in track(parts, "Jacobian lens"):
        end, live = live_places(model, inputs[rows], n_loops, inside=inside)
        mask = position_mask(end, positions)
        counted = torch.ones_like(end) if mask is None else mask.to(end)
        for place, J in _transports(end, live, counted, targets, draws, generator).items():
            sums[place] = sums.get(place, 0) + J
        for place, h in {**live, (n_loops, None): end}.items():
            total = (as_wide(h.detach(), end.shape[-1]) * counted).sum((0, 1)).to(_wide(h))
            means[place] = means.get(place, 0) + total
        weight += float(counted[..., 0].sum())
    fitted_at = list(sums)
    matrix = torch.stack([sums[place] for place in fitted_at]) / weight  # [place, to, from]
    offset = matrix.new_zeros(matrix.shape[:2])
    if centred:
        last = means[n_loops, None] / weight
        here = torch.stack([means[place] for place in fitted_at]) / weight
        offset = last - (matrix @ here[..., None])[..., 0]  # [place, d_model]
    options = {"targets": targets, "centred": centred, "inside": inside}
    options |= {"positions": None if positions is None else list(positions), "seed": seed}
    return FittedLens(
        kind="jacobian",
        matrix=matrix.cpu(),
        offset=offset.cpu(),
        places=fitted_at,
        n_loops=n_loops,
        n_layers=len(layer_hooks(model, 0, n_loops)) if inside else 0,
        n_before=len(layer_hooks(model, None, 1, section="prelude")) if inside else 0,
        n_examples=len(inputs),
        made={"model": described, **options},
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _transports(
    end: Tensor,
    live: dict[tuple[int, Layer], Tensor],
    counted: Tensor,
    targets: str,
    draws: int,
    generator: torch.Generator,
) -> dict[tuple[int, Layer], Tensor]:
    """Sums over examples and source positions of the Jacobian of each place [to, from]."""
    width = end.shape[-1]
    sums = {place: h.new_zeros(width, width, dtype=_wide(h)) for place, h in live.items()}
    n_draws = 1 if targets == "all" else draws
    for _ in range(n_draws):
        signs = torch.ones(end.shape[:2])
        if targets == "own":
            signs = torch.randint(2, end.shape[:2], generator=generator) * 2.0 - 1
        weights = counted * signs.to(end)[..., None]  # [batch, pos, d_model]
        for i in range(width):
            cotangent = torch.zeros_like(end)
            cotangent[..., i] = weights[..., i]  # row i of every transport
            try:
                gradients = torch.autograd.grad(
                    end, list(live.values()), cotangent, retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                raise InputError(
                    "model",
                    expected="loops that can be differentiated",
                    given=f"PyTorch says: {error}",
                    fix="Write step in PyTorch's own operations, without detach and no_grad, or "
                    "use lens='tuned', which needs no derivative of a loop.",
                ) from error
            for row, gradient in zip(sums.values(), gradients):
                if gradient is not None:  # else nothing of this place reaches the end
                    weighted = as_wide(gradient, width) * weights  # [batch, pos, from]
                    row[i] += weighted.to(row.dtype).sum((0, 1)) / n_draws
    return sums


LensName = Literal["logit", "coda", "tuned", "jacobian"]
FITTED = ("tuned", "jacobian")


def check_lens(lens: LensName | FittedLens | Any) -> str:
    """The name of a lens; an InputError if it is unknown."""
    if isinstance(lens, FittedLens):
        return lens.kind
    return check_choice("lens", lens, get_args(LensName))


def loops_of_lens(lens: LensName | FittedLens, n_loops: int | None) -> int | None:
    """Loops of a run to be read through a lens; for a fitted lens those of its fit."""
    if not isinstance(lens, FittedLens):
        return n_loops
    if n_loops not in (None, lens.n_loops):
        raise InputError(
            "n_loops",
            expected=f"the {lens.n_loops} loops of the lens, whose maps lead to that end",
            given=str(n_loops),
            fix=f"Leave n_loops out, or fit a lens with n_loops={n_loops}.",
        )
    return lens.n_loops


def fitted_lens(
    lens: LensName | FittedLens,
    model: Any,
    data: Any,
    *,
    n_loops: int,
    inside: bool,
    fit_on: Any = None,
    n: int | None = None,
    seed: int = 0,
) -> FittedLens | None:
    """The fitted lens of a name; None for the logit and the coda lens.

    It is fitted on ``fit_on``, by default the data's task with another seed.
    """
    if isinstance(lens, FittedLens):
        return lens
    if lens not in FITTED:
        return None
    fit: Callable[..., FittedLens] = fit_tuned_lens if lens == "tuned" else fit_jacobian_lens
    if fit_on is None:
        fit_on = data.task if isinstance(data, Batch) else data
        if fit_on is None or isinstance(fit_on, torch.Tensor):
            raise InputError(
                "fit_on",
                expected="examples to fit the lens on, other than those it reads",
                given="None, and data of no task that more could be drawn from",
                fix="Pass fit_on=other_inputs, or a lens that is fitted already.",
            )
    other = (seed + 1_000_003) % GREATEST_SEED
    options: dict[str, Any] = {"n_loops": n_loops, "inside": inside, "seed": other}
    if not isinstance(fit_on, (torch.Tensor, Batch)):
        length = int(data.n[0]) if isinstance(data, Batch) and n is None else n
        options |= {"n": length, "batch_size": 32}
    return fit(model, fit_on, **options)


def of_other_weights(lens: FittedLens, described: dict[str, Any] | str) -> bool:
    """Whether a lens was fitted on other weights than the described model's."""
    fitted_on = lens.made.get("model")
    both = [x.get("weights_sha256") for x in (fitted_on, described) if isinstance(x, dict)]
    return len({*both} - {None}) == 2
