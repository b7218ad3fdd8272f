"""Several seeds of one configuration, run through the loops together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from loopinterp.core.errors import InputError
from loopinterp.models.weights import need_unchanged
from loopinterp.training.device import send

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.training.trainer import Drawn, Trainer


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, as each would make it alone, their loops in one batch.

    The loops run under :func:`torch.func.vmap` over the stacked weights. Everything else (data,
    noise, readout, gradient, optimiser, average) is each trainer's own.

    Args:
        trainers: Of configurations that differ in the seed alone. Each returns its own metrics
            (:func:`read`).
    """
    if len(trainers) == 1:
        return trainers[0].advance()
    for trainer in trainers:
        need_unchanged(trainer.model, "seeds that are trained together")
        trainer.optimiser.zero_grad(set_to_none=True)
    drawn = [trainer.draw() for trainer in trainers]
    with trainers[0].autocast():
        supervised = []
        for trainer, one, states in zip(trainers, drawn, _answers(trainers, drawn)):
            logits = trainer.model.readout(states.flatten(0, 1))
            supervised.append(one.questions.score(logits.unflatten(0, states.shape[:2])))
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
        raise InputError(what, **again) from error


def _answers(
    trainers: Sequence[Trainer], drawn: Sequence[Drawn]
) -> list[Float[Tensor, "ask batch pos d_model"]]:
    """By seed, the state of each example after the loops that it is asked at."""
    bound = [trainer.bind(one) for trainer, one in zip(trainers, drawn)]
    ends = torch.stack([one.questions.loops.amax(0) for one in drawn])  # [seed, example]
    order = ends.argsort(dim=1, descending=True, stable=True)  # those that run longest first
    rows = [it.select(send(at, it.e.device)) for it, at in zip(bound, order)]
    # [seed, loop]: how many examples go on into each loop
    running = (ends[:, None] > torch.arange(int(ends.max()))[:, None]).sum(2)
    noise = zip(*[t.noise(it.h0, n) for t, it, n in zip(trainers, rows, running.tolist())])
    offset = None
    if rows[0].context.qk_offset is not None:
        offset = _stacked([it.context.qk_offset for it in rows])
    h, e = _stacked([it.h0 for it in rows]), _stacked([it.e for it in rows])
    weights = [dict(trainer.model.named_parameters()) for trainer in trainers]
    stacked = {
        f"model.{name}": torch.stack([w[name] for w in weights])
        for name in weights[0]
        if name.startswith(("block.", "ln_loop.", "gate", "recall.", "relative_bias."))
    }
    loops = _Loops(trainers[0].model, running.amax(0).tolist())
    run = vmap(partial(functional_call, loops), (0, (0, 0, None if offset is None else 0, 0)))
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule on a CPU
        states = run(stacked, (h, e, offset, [_stacked(each) for each in noise]))
    first = torch.tensor([0, *(x.shape[1] for x in states[:-1])]).cumsum(0)  # row of each loop
    answers = []
    for seed, (one, it) in enumerate(zip(drawn, bound)):
        # [loop and example, pos, d_model], and the rows that are asked for, [ask, batch]
        flat = torch.cat([x[seed, :, : it.e.shape[1]] for x in states])
        at = first[one.questions.loops] + order[seed].argsort()
        answers.append(flat[send(at, flat.device)])
    return answers


def _stacked(batches: Sequence[Tensor]) -> Float[Tensor, "seed example *head pos feature"]:
    """Batches with zeros after their examples and positions, up to the largest of them."""
    n, width = (max(x.shape[dim] for x in batches) for dim in (0, -2))
    return torch.stack(
        [
            pad(x, (0, 0, 0, width - x.shape[-2], *(0, 0) * (x.dim() - 3), 0, n - len(x)))
            for x in batches
        ]
    )


class _Loops(nn.Module):
    """All loops of one model as a ``forward``, which ``functional_call`` gives other weights.

    The first ``n_running`` examples go on into each loop.
    """

    def __init__(self, model: LoopedTransformer, n_running: Sequence[int]) -> None:
        super().__init__()
        self.model, self.n_running = model, n_running

    def forward(
        self, h: Tensor, e: Tensor, offset: Tensor | None, noise: Sequence[Tensor]
    ) -> list[Tensor]:
        context = replace(self.model.length_context(h.shape[1]), qk_offset=offset)
        states = [h]
        for loop, n in enumerate(self.n_running):
            h = h[:n] + noise[loop] if noise else h[:n]
            h = self.model.run_loop(h, e[:n], context.select(slice(n)))
            states.append(h)
        return states
