"""The model that training begins with: random weights, or those of another run with fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.core.errors import CheckpointError, ConfigError
from loopinterp.core.storage import digest_tensors
from loopinterp.models import LoopedTransformer
from loopinterp.training.device import stream
from loopinterp.training.objectives import answers_at, ask, cross_entropy
from loopinterp.training.run import Run

if TYPE_CHECKING:
    from loopinterp.tasks.task import Batch
    from loopinterp.training.config import TrainingConfig

_EXAMPLES = 256
"""Examples that decide which bit is dropped."""


def starting_model(config: TrainingConfig) -> LoopedTransformer:
    """The model of a run before its first step.

    Raises:
        CheckpointError: If the model of ``start_from`` is not the one that the run began with.
        ConfigError: If it is of another architecture, or has fewer bits.
    """
    if config.start_from is None:
        return LoopedTransformer(config.model, seed=config.seed)
    model = Run.load(config.start_from).model()
    if config.start_sha256 not in (None, digest_of_model(model)):
        raise CheckpointError(
            f"model of {config.start_from}",
            expected="the one that the run began with",
            given="another one",
            fix="Restore it, or train into a new folder.",
        )
    wanted, given = config.model, model.config
    bits = (given.state_code or 0, wanted.state_code or 0)
    if given.replace(
        state_code=wanted.state_code, initial_state=wanted.initial_state
    ) != wanted or (bits[0] < bits[1] or (bits[0] > 0) != (bits[1] > 0)):
        raise ConfigError(
            "start_from",
            expected="a run of the same architecture, with as many bits in its state code or more",
            given=f"one with {bits[0]} bits" if bits[0] < bits[1] else "another architecture",
            fix="Leave model as that run has it, but for fewer bits in model.state_code.",
        )
    batch = _batch(config)
    for _ in range(bits[0] - bits[1]):
        model = min(_with_a_bit_less(model), key=lambda one: _loss(one, config, batch))
    return model


def with_start(config: TrainingConfig) -> TrainingConfig:
    """The same with the digest of the weights that training begins with.

    Raises:
        CheckpointError: If ``start_from`` holds no run with a model.
    """
    if config.start_from is None:
        return config
    return config.replace(start_sha256=digest_of_model(Run.load(config.start_from).model()))


def digest_of_model(model: LoopedTransformer) -> str:
    """SHA-256 of a model's weights."""
    return digest_tensors(model.state_dict())


def _with_a_bit_less(model: LoopedTransformer) -> list[LoopedTransformer]:
    """The model without each of its bits in turn, which is -1 from then on."""
    assert model.code is not None
    n_bits = model.code.n_bits
    found = []
    for bit in range(n_bits):
        kept = [k for k in range(n_bits) if k != bit]
        smaller = LoopedTransformer(model.config.replace(state_code=n_bits - 1))
        weights = model.state_dict()
        write = weights["code.write.weight"]
        weights |= {
            "code.read.weight": weights["code.read.weight"][kept],
            "code.read.bias": weights["code.read.bias"][kept],
            "code.write.weight": write[:, kept],
            "code.write.bias": weights["code.write.bias"] - write[:, bit],
        }
        smaller.load_state_dict(weights)
        found.append(smaller)
    return found


def _batch(config: TrainingConfig) -> Batch:
    generator = stream(config.seed, "dropped bits")
    longest = config.curriculum.max_n
    lengths = torch.randint(config.curriculum.min_n, longest + 1, (_EXAMPLES,), generator=generator)
    return config.make_task().sample(lengths, generator=generator, distribution=config.distribution)


@torch.no_grad()
def _loss(model: LoopedTransformer, config: TrainingConfig, batch: Batch) -> float:
    """Cross-entropy of the answers where the objective first asks for them."""
    asked = ask(config.objective, batch, stream(config.seed, "dropped bits"))
    logits = answers_at(model.bind(batch.inputs), asked.loops[:1])
    return float(cross_entropy(logits[0], asked.targets[0]))
