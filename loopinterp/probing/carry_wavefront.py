"""The carry study: how far a carry has come after each loop, read off by linear probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import check_integer, check_seed
from loopinterp.models.iteration import check_increasing, states_at
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model, device_of, reach
from loopinterp.probing.carry_chains import VARIABLES, ChainSample, sample_chains
from loopinterp.probing.carry_wavefront_result import CarryStudyResult
from loopinterp.probing.linear_probes import LinearProbe, RidgeProbe
from loopinterp.probing.prequential_code import online_code_length
from loopinterp.probing.probe_controls import (
    context_types,
    control_labels,
    majority_accuracy,
    with_random_weights,
)
from loopinterp.results import study
from loopinterp.tasks.study_data import need_task

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.addition import Addition

_CODED_PAIRS = 1024
_CARRY = VARIABLES.index("carry in")


def carry_study(
    model: LoopedModel,
    task: Addition,
    *,
    n: int = 48,
    max_chain: int | None = None,
    loops: Sequence[int] | None = None,
    n_short: int = 12,
    n_train: int = 192,
    n_test: int = 96,
    probe: LinearProbe | None = None,
    random_model: Any = None,
    threshold: float = 0.95,
    seed: int = 0,
) -> CarryStudyResult:
    """Probe for the carry INTO each position, by loops run and by chain length, with controls.

    Each number of loops and each chain length has a probe of its own, on carries into all
    positions, scored on other additions. Additions come in matched pairs (:class:`ChainSample`),
    so that the majority class scores 0.5 in every cell, and a state that has not seen the
    deciding bit scores 0.5 too but for chance. The controls, and what is read besides, are the
    arrays of :class:`CarryStudyResult`.

    Args:
        model: Any looped model of the task.
        task: The addition task in the model's format.
        n: Bits of the additions.
        max_chain: Longest chain studied (positions the carry travels); half of ``n`` if None.
        loops: Numbers of loops after which to probe; 0 to ``max_chain + 4`` if None.
        n_short: Bits of the additions of the short-to-long control.
        n_train: Pairs for each chain length to train on.
        n_test: Other pairs for each chain length to score on.
        probe: An unfitted probe; ``RidgeProbe()`` if None.
        random_model: The random-weights control; the model with shuffled weights if None.
        threshold: Accuracy from which a chain length counts as decodable.
        seed: Seed of everything random.

    Raises:
        InputError: If the task is no addition, or chains or loops do not fit.
    """
    need_model(model)
    need_task(task)
    max_chain = n // 2 if max_chain is None else max_chain
    steps = check_increasing(range(max_chain + 5) if loops is None else loops)
    check_integer("n_short", n_short, least=4)
    probe = RidgeProbe() if probe is None else probe
    options = {"n": n, "max_chain": max_chain, "loops": steps, "n_short": n_short}
    options |= {"n_train": n_train, "n_test": n_test, "probe": repr(probe), "threshold": threshold}
    with study(seed, study="carry", model=describe_model(model), **options) as watch:
        generator, device = torch.Generator().manual_seed(check_seed(seed)), device_of(model)

        def draw(bits: int, chains: int, pairs: int) -> ChainSample:
            drawn = sample_chains(task, bits, max_chain=chains, n_pairs=pairs, generator=generator)
            return drawn.to(device)

        sample = draw(n, max_chain, n_train).joined(draw(n, max_chain, n_test))
        short = draw(n_short, min(n_short - 2, max_chain), n_train)
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)  # type: ignore[type-var]
        trained, e = states_at(model, sample.inputs, sample.row, sample.pos, loops=steps)
        random, _ = states_at(random_model, sample.inputs, sample.row, sample.pos, loops=steps)
        short_states, _ = states_at(model, short.inputs, short.row, short.pos, loops=steps)
        split = 2 * n_train  # samples before it are trained on, the others scored
        # Random labels are fixed by the local input, and the same in training and test.
        types = context_types(sample.inputs)[sample.row, sample.pos]
        control = control_labels(sample.carry[:, :split].flatten(), types, generator=generator)
        labels = torch.cat([sample.variables, control])
        chains = range(1, max_chain + 1)
        per_loop, before = reach(model), _reach_before(model)
        edges = [math.inf if per_loop is None else per_loop * loop + before for loop in steps]
        return CarryStudyResult.of(
            watch,
            coords={"loop": steps, "chain_length": chains, "variable": VARIABLES},
            in_reach=[[chain <= edge for chain in chains] for edge in edges],
            majority=majority_accuracy(sample.carry[:, :split], sample.carry[:, split:]),
            **_own_scores(probe, trained, random, e[None], labels, split),
            **_shared_scores(probe, trained, sample.carry, split, short_states, short.carry),
            **_code_lengths(trained, random, labels, split, generator),
            n=n,
            n_short=n_short,
            n_train_pairs=n_train,
            n_test_pairs=n_test,
            threshold=threshold,
            reach=per_loop,
            reach_before=before,
        )


def _reach_before(model: Any) -> int:
    """Positions to its left that a position's injected input has come from, in a windowed model."""
    config = getattr(model, "config", None)
    return getattr(config, "n_prelude", 0) * (getattr(config, "attention_window", None) or 0)


def _own_probes(
    probe: LinearProbe, states: Tensor, labels: Tensor, split: int
) -> tuple[Tensor, Tensor]:
    """Accuracy and balanced accuracy [label, loop, chain] of a probe for each of these cells."""
    fitted = probe.fresh().fit(states[..., :split, :], labels[:, None, :, :split])
    truth = labels[:, None, :, split:]
    right = (fitted.predict(states[..., split:, :]) == truth).double()
    recalls = [(right * (truth == cls)).sum(-1) / (truth == cls).sum(-1) for cls in (0, 1)]
    return right.mean(-1), torch.stack(recalls).mean(0)


def _own_scores(
    probe: LinearProbe,
    trained: Tensor,
    random: Tensor,
    embedding: Tensor,
    labels: Tensor,
    split: int,
) -> dict[str, Tensor]:
    """Probes that each have one loop and one chain length, and the same on the controls."""
    n_variables = len(VARIABLES)
    accuracy, balanced = _own_probes(probe, trained, labels, split)
    random_accuracy, random_balanced = _own_probes(probe, random, labels[:n_variables], split)
    own_input, own_input_balanced = _own_probes(probe, embedding, labels[:n_variables], split)
    return {
        "accuracy": accuracy[_CARRY],
        "control_task": accuracy[n_variables:].mean(0),
        "random_model": random_accuracy[_CARRY],
        "embedding": own_input[_CARRY, 0],
        "variable_accuracy": balanced[:n_variables],
        "variable_random_model": random_balanced,
        "variable_embedding": own_input_balanced[:, 0],
    }


def _shared_scores(
    probe: LinearProbe,
    states: Float[Tensor, "loop chain sample d_model"],
    carry: Int[Tensor, "chain sample"],
    split: int,
    short_states: Float[Tensor, "loop short_chain short_sample d_model"],
    short_carry: Tensor,
) -> dict[str, Tensor]:
    """Probes that are shared by all chain lengths, scored on each."""
    unseen, truth = states[..., split:, :], carry[:, split:]
    states, carry = states[..., :split, :], carry[:, :split]

    def shared(x: Tensor, y: Tensor) -> Tensor:
        fitted = probe.fresh().fit(x.flatten(-3, -2), y.flatten())
        predicted = fitted.predict(unseen.flatten(-3, -2))
        return (predicted.unflatten(-1, truth.shape) == truth).double().mean(-1)

    return {
        "shared_probe": shared(states, carry),
        "last_loop_probe": shared(states[-1], carry),
        "short_to_long": shared(short_states, short_carry),
    }


def _code_lengths(
    trained: Tensor, random: Tensor, labels: Tensor, split: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Online code lengths of the carries on a shuffled part of the pairs trained on."""
    carry, control = (labels[which, :, :split].flatten() for which in (_CARRY, len(VARIABLES)))
    pairs = torch.randperm(len(carry) // 2, generator=generator)[:_CODED_PAIRS]
    order = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten().to(carry.device)

    def bits(states: Tensor, y: Tensor) -> Tensor:
        return online_code_length(states[..., :split, :].flatten(-3, -2)[:, order], y[order])

    return {
        "code_length": bits(trained, carry),
        "code_length_control": bits(trained, control),
        "code_length_random_model": bits(random, carry),
    }
