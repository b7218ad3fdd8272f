"""The model before training: random, or another run's with fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from loopinterp.core.errors import ConfigError
from loopinterp.core.storage import digest_tensors
from loopinterp.models import LoopedTransformer
from loopinterp.training.device import stream
from loopinterp.training.objectives import answers_at, ask, cross_entropy
from loopinterp.training.run import Run, RunError, RunFault

if TYPE_CHECKING:
    from loopinterp.training.config import TrainingConfig


def starting_model(config: TrainingConfig) -> LoopedTransformer:
    """The model of a run before its first step; raise if that of ``start_from`` has changed."""
    if config.start_from is None:
        return LoopedTransformer(config.model, seed=config.seed)
    model = Run.load(config.start_from).model()
    if config.start_sha256 not in (None, digest_tensors(model.state_dict())):
        raise RunError(RunFault.OTHER_START, f"model of {config.start_from}")
    target, source = config.model, model.config
    n_bits, n_target = source.state_code or 0, target.state_code or 0
    changes = {"state_code": target.state_code, "initial_state": target.initial_state}
    if source.replace(**changes) != target or n_bits < n_target or (n_bits > 0) != (n_target > 0):
        expected = "a run of the same architecture, with as many bits in its state code or more"
        got = f"one with {n_bits} bits" if n_bits < n_target else "another architecture"
        fix = "Keep the model settings of that run; only model.state_code may be smaller."
        raise ConfigError("start_from", expected=expected, given=got, fix=fix)
    if n_bits == n_target:
        return model
    generator = stream(config.seed, "dropped bits")
    ends = config.curriculum.min_n, config.curriculum.max_n + 1
    lengths = torch.randint(*ends, (256,), generator=generator)
    task, distribution = config.make_task(), config.distribution
    batch = task.sample(lengths, generator=generator, distribution=distribution)
    question = ask(config.objective, batch, stream(config.seed, "dropped bits"))

    @torch.no_grad()
    def loss(model: LoopedTransformer) -> float:
        logits = answers_at(model.bind(batch.inputs), question.loops[:1])
        return float(cross_entropy(logits[0], question.targets[0]))

    # One bit at a time: the one without which the loss is lowest.
    for _ in range(n_bits - n_target):
        model = min(_without_each_bit(model), key=loss)
    return model


def with_start(config: TrainingConfig) -> TrainingConfig:
    if config.start_from is None:
        return config
    model = Run.load(config.start_from).model()
    return config.replace(start_sha256=digest_tensors(model.state_dict()))


def _without_each_bit(model: LoopedTransformer) -> Iterator[LoopedTransformer]:
    """The model without each of its bits in turn (fixed at -1)."""
    assert model.code is not None
    n_bits = model.code.n_bits
    for bit in range(n_bits):
        # Without a bit its column of the write matrix is a constant, -1 times the column.
        left = [k for k in range(n_bits) if k != bit]
        smaller = LoopedTransformer(model.config.replace(state_code=n_bits - 1))
        weights = model.state_dict()
        write = weights["code.write.weight"]
        weights |= {
            "code.read.weight": weights["code.read.weight"][left],
            "code.read.bias": weights["code.read.bias"][left],
            "code.write.weight": write[:, left],
            "code.write.bias": weights["code.write.bias"] - write[:, bit],
        }
        smaller.load_state_dict(weights)
        yield smaller
