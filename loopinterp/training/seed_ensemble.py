"""Several seeds of one configuration, run through the loops together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopinterp.errors import ConfigError, InputError
from loopinterp.training.device import send
from loopinterp.training.objectives import collect, sort_by_end

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer
    from loopinterp.training.config import TrainingConfig
    from loopinterp.training.objectives import Asked, Supervised
    from loopinterp.training.trainer import Trainer


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, as each would make it alone, their loops in one batch.

    Everything but the loops is each trainer's own: data, noise, curriculum, gradient, clipping,
    optimiser, average. In the loops the weights of all are stacked ``[seed, ...]``, with as many
    examples ``[seed, running, pos, d_model]`` as the seed has that goes on with most. A padded
    position, and an example that has been answered, is run and never read.

    Args:
        trainers: Of configurations that differ in the seed alone (:func:`check_together`). Each
            says by itself how the step went (:func:`read`).
    """
    if len(trainers) == 1:
        return trainers[0].advance()
    drawn = [trainer.begin() for trainer in trainers]
    with trainers[0].autocast():
        bound = [trainer.bind(one) for trainer, one in zip(trainers, drawn)]
        supervised = _supervise(trainers, bound, [one.asked for one in drawn])
    torch.stack([one.loss for one in supervised]).sum().backward()
    for trainer, one, answered in zip(trainers, drawn, supervised):
        trainer.finish(one, answered)
    return None


def read(trainer: Trainer) -> list[dict[str, float | int]]:
    """:meth:`Trainer.read`, whose errors name the seed."""
    try:
        return trainer.read()
    except InputError as error:
        what = f"seed {trainer.config.seed}: {error.what}"
        again = {"expected": error.expected, "given": error.given, "fix": error.fix}
        raise type(error)(what, **again) from error


def check_together(config: TrainingConfig) -> None:
    """Raise unless models of a configuration can be run together.

    Shorter examples are padded to the longest of all seeds, which only a causal model ignores.
    """
    fix = "Train the seeds one by one."
    if not config.model.causal:
        what, wanted = "model.causal", "true where seeds are trained together, as they are padded"
        raise ConfigError(what, expected=wanted, given="false", fix=fix)
    if config.compile:
        raise ConfigError(
            "compile", expected="false where seeds are trained together", given="true", fix=fix
        )


def _supervise(
    trainers: Sequence[Trainer], bound: Sequence[Iteration], asked: Sequence[Asked]
) -> list[Supervised]:
    """What the objective makes of each model's answers."""
    sorts = [sort_by_end(one.loops) for one in asked]
    ends = torch.stack([loops.amax(0) for _, loops in sorts])  # [seed, batch], falling
    running = [(ends >= loop).sum(1).tolist() for loop in range(1, int(ends.max()) + 1)]
    rows = [it.select(send(order, it.e.device)) for it, (order, _) in zip(bound, sorts)]
    states = _run(trainers, rows, running)
    found = []
    for seed, (trainer, iteration, one) in enumerate(zip(trainers, rows, asked)):
        own = ((loop, h[seed, :, : iteration.e.shape[1]]) for loop, h in enumerate(states))
        order, loops = sorts[seed]
        read = collect(own, loops, order, lambda h: h)
        found.append(one.score(trainer.model.readout(read.flatten(0, 1)).unflatten(0, loops.shape)))
    return found


def _run(
    trainers: Sequence[Trainer], rows: Sequence[Iteration], running: Sequence[Sequence[int]]
) -> Sequence[Tensor]:
    """States ``[seed, running, pos, d_model]`` after 0, 1, … loops; ``running`` by loop, seed."""
    widest = max(iteration.e.shape[1] for iteration in rows)

    def stacked(parts: Sequence[Tensor], n_rows: int | None = None) -> Tensor:
        """``[seed, row, ..., pos, feature]`` of ``[row, ..., pos, feature]``, padded with 0."""
        return torch.stack(
            [
                F.pad(x, (0, 0, 0, widest - x.shape[-2]) + (0, 0) * (x.ndim - 3) + more)
                for x in parts
                for more in [() if n_rows is None else (0, n_rows - len(x))]
            ]
        )

    start = {"h": stacked([it.h0 for it in rows]), "e": stacked([it.e for it in rows])}
    if rows[0].context.qk_offset is not None:
        start["qk_offset"] = stacked([it.context.qk_offset for it in rows])
    # [seed][loop], each drawn as its trainer would alone
    draws = [t.noise(its.h0, n) for t, its, n in zip(trainers, rows, zip(*running))]
    noise = [stacked(at_loop, len(max(at_loop, key=len))) for at_loop in zip(*draws)]
    weights = [dict(trainer.model.named_parameters()) for trainer in trainers]
    together = {f"model.{name}": torch.stack([w[name] for w in weights]) for name in weights[0]}
    loops = _Loops(trainers[0].model, [max(n) for n in running])

    def run(own: dict[str, Tensor], given: tuple[dict[str, Tensor], list[Tensor]]) -> Any:
        return functional_call(loops, own, given)

    with sdpa_kernel(SDPBackend.MATH):  # the fused operation has no batched form
        return vmap(run)(together, (start, noise))


class _Loops(nn.Module):
    """All loops of one model as a ``forward``, which ``functional_call`` gives other weights.

    Args:
        model: The model.
        running: Examples in each loop, never more than in the one before.
    """

    def __init__(self, model: LoopedTransformer, running: Sequence[int]) -> None:
        super().__init__()
        self.model, self.running = model, running

    def forward(self, start: dict[str, Tensor], noise: Sequence[Tensor]) -> tuple[Tensor, ...]:
        h, e = start["h"], start["e"]
        context = self.model._length_context(h.shape[1])
        if "qk_offset" in start:
            context = replace(context, qk_offset=start["qk_offset"])
        states = [h]
        for loop, n in enumerate(self.running):
            h = h[:n] + noise[loop] if noise else h[:n]
            h = self.model._loop(h, e[:n], context.select(slice(n)))
            states.append(h)
        return tuple(states)
