"""Several seeds of one configuration, run through the loops together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call

from loopinterp.errors import ConfigError, InputError
from loopinterp.models.plain_layers import need_unchanged
from loopinterp.training.packed_attention import PackedAttention, goes_by_key
from loopinterp.training.packed_examples import Packing

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer
    from loopinterp.training.config import TrainingConfig
    from loopinterp.training.objectives import Asked, Supervised
    from loopinterp.training.trainer import Trainer

_OF_A_LOOP = ("block.", "ln_loop.", "gate", "recall.")
"""How the names of the weights begin that a loop meets."""


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, as each would make it alone, their loops in one batch.

    Everything but the loops is each trainer's own: data, noise, curriculum, gradient, clipping,
    optimiser, average. In the loops the weights of all are stacked ``[seed, ...]``, and the
    examples of each seed stand in a row ``[seed, place, d_model]``, without their padding.

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
    if config.model.state_code is not None:
        what, wanted = "model.state_code", "none where seeds are trained together"
        raise ConfigError(what, expected=wanted, given=str(config.model.state_code), fix=fix)
    if config.compile:
        raise ConfigError(
            "compile", expected="false where seeds are trained together", given="true", fix=fix
        )


def _supervise(
    trainers: Sequence[Trainer], bound: Sequence[Iteration], asked: Sequence[Asked]
) -> list[Supervised]:
    """What the objective makes of each model's answers."""
    models = [trainer.model for trainer in trainers]
    packing = Packing.of(asked, square=not goes_by_key(models[0].config))
    answers = packing.answers(_run(trainers, bound, packing))
    found = []
    for model, one, h, width in zip(models, asked, answers, packing.widths):
        logits = model.readout(h[: len(one.loops), :, :width].flatten(0, 1))
        found.append(one.score(logits.unflatten(0, one.loops.shape)))
    return found


def _run(
    trainers: Sequence[Trainer], bound: Sequence[Iteration], packing: Packing
) -> Sequence[Tensor]:
    """States ``[seed, running, d_model]`` after 0, 1, … loops."""
    attention = PackedAttention([trainer.model for trainer in trainers], bound, packing)
    h, e = (packing.pack(parts) for parts in zip(*[(it.h0, it.e) for it in bound]))
    # [loop][seed], each drawn as its trainer would alone
    examples = zip(*[n for n, _ in packing.running])
    noise = list(zip(*[t.noise(it.h0, n) for t, it, n in zip(trainers, bound, examples)]))
    loops = _Loops(trainers[0].model)
    return functional_call(loops, _stacked(trainers), (h, e, noise, packing, attention))


def _stacked(trainers: Sequence[Trainer]) -> dict[str, Tensor]:
    """The weights of a loop, those of each model ``[seed, ...]``, by their plain names."""
    for trainer in trainers:
        need_unchanged(trainer.model, "seeds that are trained together")
    weights = [dict(trainer.model.named_parameters()) for trainer in trainers]
    found = {}
    for name, one in weights[0].items():
        if name.startswith(_OF_A_LOOP):
            stacked = torch.stack([w[name] for w in weights])
            found[f"model.{name}"] = stacked if one.dim() else stacked[:, None, None]
    return found


class _Loops(nn.Module):
    """All loops of one model as a ``forward``, which ``functional_call`` gives other weights."""

    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        h: Tensor,
        e: Tensor,
        noise: Sequence[Sequence[Tensor]],
        packing: Packing,
        attention: PackedAttention,
    ) -> list[Tensor]:
        states = [h]
        for loop, (_, places) in enumerate(packing.running):
            n = max(places)
            h, e = h[:, :n], e[:, :n]
            if noise:
                h = h + packing.pack_noise(noise[loop], loop)
            h = self.model._loop(h, e, attention.of_loop(loop))
            states.append(h)
        return states
