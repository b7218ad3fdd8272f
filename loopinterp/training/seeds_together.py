"""Several seeds of one configuration, with their loops in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from loopinterp.core.errors import InputError
from loopinterp.models.placement import need_unchanged
from loopinterp.models.positions import AttentionContext
from loopinterp.training.device import send

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.training.trainer import Drawn, Trainer


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, with all loops in one batch.

    The loops use all weights, stacked ``[seed, ...]``. Everything else (data, noise, readout,
    gradient, optimiser, average) is each trainer's own. Configurations may differ only in the seed;
    :func:`read` returns metrics.
    """
    if len(trainers) == 1:
        return trainers[0].advance()
    for trainer in trainers:
        need_unchanged(trainer.model, "seeds that are trained together")
        trainer.zero_grad()
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
    """:meth:`Trainer.read`, with the seed in errors."""
    try:
        return trainer.read()
    except InputError as error:
        raise error.renamed(f"seed {trainer.config.seed}: {error.what}") from error


def _answers(
    trainers: Sequence[Trainer], drawn: Sequence[Drawn]
) -> list[Float[Tensor, "ask batch pos d_model"]]:
    """By seed, each example's state after the loops of its readings."""
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
    models = [trainer.model for trainer in trainers]
    weights = [dict(model.named_parameters()) for model in models]
    stacked = {
        f"model.{name}": torch.stack([w[name] for w in weights])
        for name in weights[0]
        if name.startswith(("block.", "ln_loop.", "gate", "recall."))
    }
    stacked = {name: x if x.dim() > 1 else x[:, None, None] for name, x in stacked.items()}
    contexts = [model.length_context(h.shape[2], all_pairs=True) for model in models]
    inputs = h, e, offset, [_stacked(each) for each in noise], contexts, running.amax(0).tolist()
    states = functional_call(_Loops(models[0]), stacked, inputs)
    first = torch.tensor([0, *(x.shape[1] for x in states[:-1])]).cumsum(0)  # row of each loop
    answers = []
    for seed, (one, it) in enumerate(zip(drawn, bound)):
        # [loop and example, pos, d_model], and the rows that are read, [ask, batch]
        flat = torch.cat([x[seed, :, : it.e.shape[1]] for x in states])
        at = first[one.questions.loops] + order[seed].argsort()
        answers.append(flat[send(at, flat.device)])
    return answers


def _stacked(batches: Sequence[Tensor]) -> Float[Tensor, "seed example *head pos feature"]:
    n, width = (max(x.shape[dim] for x in batches) for dim in (0, -2))
    return torch.stack(
        [
            F.pad(x, (0, 0, 0, width - x.shape[-2], *(0, 0) * (x.dim() - 3), 0, n - len(x)))
            for x in batches
        ]
    )


class _Loops(nn.Module):
    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        h: Float[Tensor, "seed example pos d_model"],
        e: Float[Tensor, "seed example pos d_model"],
        offset: Float[Tensor, "seed example head pos d_head"] | None,
        noise: Sequence[Float[Tensor, "seed _ pos d_model"]],
        contexts: Sequence[AttentionContext],
        n_running: Sequence[int],
    ) -> list[Float[Tensor, "seed _ pos d_model"]]:
        states, mask = [h], contexts[0].mask
        if self.model.relative_bias is not None:  # [seed, head, query, key]: each has its own
            mask = torch.cat([context.mask for context in contexts if context.mask is not None])
        for loop, n in enumerate(n_running):
            h = h[:, :n] + noise[loop] if noise else h[:, :n]
            # Each seed's examples in a row [seed, example and pos, d_model]
            rotation = contexts[0].rotation
            context = AttentionContext(
                rotation=rotation and (rotation[0].repeat(n, 1), rotation[1].repeat(n, 1)),
                qk_offset=None if offset is None else offset[:, :n].transpose(1, 2).flatten(2, 3),
                attend=partial(_attend, mask=mask, n=n),
            )
            h = self.model.run_loop(h.flatten(1, 2), e[:, :n].flatten(1, 2), context)
            h = h.unflatten(1, (n, -1))
            states.append(h)
        return states


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, n: int) -> Tensor:
    """Attention within each of ``n`` examples, ``[seed, head, place, d_head]``."""
    # [seed and example, head, pos, d_head]
    q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if mask is not None and len(mask) > 1:
        mask = mask.repeat_interleave(n, 0)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return z.unflatten(0, (-1, n)).transpose(1, 2).flatten(2, 3)
