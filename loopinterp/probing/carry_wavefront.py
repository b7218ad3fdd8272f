"""The carry study: how far a carry has come after each loop, read off by linear probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loopinterp.errors import check_integer
from loopinterp.models.iteration import check_increasing, states_at
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

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.addition import Addition

_CONTROL_DRAWS = 8
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
    deciding bit scores 0.5 too but for chance.

    Controls: the same probes on random labels, on a model with random weights and on the
    embedding alone, and the majority class. Beside them one probe per loop that is shared by all
    chain lengths (is there one code for all? It has to compromise with carries that have not
    arrived), the last of these applied to all loops (is the carry written in the same direction
    early and late?), shared probes trained on short additions, online code lengths, and the
    other variables of the addition.

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
    max_chain = n // 2 if max_chain is None else max_chain
    steps = check_increasing(range(max_chain + 5) if loops is None else loops)
    check_integer("n_short", n_short, least=4)
    probe = RidgeProbe() if probe is None else probe
    options = {"n": n, "max_chain": max_chain, "loops": steps, "n_short": n_short}
    options |= {"n_train": n_train, "n_test": n_test, "probe": repr(probe), "threshold": threshold}
    with study(seed, study="carry", model=describe_model(model), **options) as watch:
        generator, device = torch.Generator().manual_seed(seed), device_of(model)

        def draw(bits: int, chains: int, pairs: int) -> ChainSample:
            drawn = sample_chains(task, bits, max_chain=chains, n_pairs=pairs, generator=generator)
            return drawn.to(device)

        train, test = draw(n, max_chain, n_train), draw(n, max_chain, n_test)
        short = draw(n_short, min(n_short - 2, max_chain), n_train)
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)  # type: ignore[type-var]
        trained, embedding = _read(model, train, test, steps)
        random, _ = _read(random_model, train, test, steps)
        short_states = states_at(model, short.inputs, short.row, short.pos, loops=steps)[0]
        labels = _labels(train, test, generator)
        per_loop, before = reach(model), _reach_before(model)
        chains = torch.tensor(train.chain_lengths)
        in_reach = torch.ones(len(steps), len(chains), dtype=torch.bool)
        if per_loop is not None:
            in_reach = chains <= per_loop * torch.tensor(steps)[:, None] + before
        return CarryStudyResult.of(
            watch,
            coords={"loop": steps, "chain_length": chains.tolist(), "variable": VARIABLES},
            in_reach=in_reach,
            majority=majority_accuracy(train.carry, test.carry),
            **_own_scores(probe, trained, random, embedding, labels),
            **_shared_scores(probe, trained, train.carry, test.carry, short_states, short.carry),
            **_code_lengths(trained, random, labels, generator),
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


class _Halves(NamedTuple):
    """What there is of the additions to train on, and of those to score on."""

    train: Tensor
    test: Tensor


def _read(
    model: LoopedModel, train: ChainSample, test: ChainSample, loops: list[int]
) -> tuple[_Halves, _Halves]:
    """States [loop, chain, sample, d_model], and embeddings in the place of those of one loop."""
    (train_h, train_e), (test_h, test_e) = (
        states_at(model, half.inputs, half.row, half.pos, loops=loops) for half in (train, test)
    )
    return _Halves(train_h, test_h), _Halves(train_e[None], test_e[None])


def _labels(train: ChainSample, test: ChainSample, generator: torch.Generator) -> _Halves:
    """Classes [label, chain, sample] of the variables, then of the control task.

    Its random labels are fixed by the local input, and the same in both halves.
    """
    types = context_types(torch.cat([train.inputs, test.inputs]))
    places = [types[train.row, train.pos], types[len(train.inputs) + test.row, test.pos]]
    control = control_labels(
        train.carry.flatten(), torch.cat(places, dim=1), n_draws=_CONTROL_DRAWS, generator=generator
    )
    n_train = train.carry.shape[1]
    return _Halves(
        torch.cat([train.variables, control[..., :n_train]]),
        torch.cat([test.variables, control[..., n_train:]]),
    )


def _own_probes(probe: LinearProbe, states: _Halves, labels: _Halves) -> tuple[Tensor, Tensor]:
    """Accuracy [label, loop, chain] and balanced accuracy [variable, loop, chain].

    One solve for all loops, chain lengths and labels; the labels of a cell share its factor.
    """
    fitted = probe.fresh().fit(states.train, labels.train[:, None])
    truth = labels.test[:, None]
    right = (fitted.predict(states.test) == truth).double()
    recalls = [(right * (truth == cls)).sum(-1) / (truth == cls).sum(-1) for cls in (0, 1)]
    return right.mean(-1), torch.stack(recalls).mean(0)[: len(VARIABLES)]


def _own_scores(
    probe: LinearProbe, trained: _Halves, random: _Halves, embedding: _Halves, labels: _Halves
) -> dict[str, Tensor]:
    """Probes that each have one loop and one chain length, and the same on the controls."""
    variables = _Halves(*(half[: len(VARIABLES)] for half in labels))
    accuracy, balanced = _own_probes(probe, trained, labels)
    random_accuracy, random_balanced = _own_probes(probe, random, variables)
    embedding_accuracy, embedding_balanced = _own_probes(probe, embedding, variables)
    return {
        "accuracy": accuracy[_CARRY],
        "control_task": accuracy[len(VARIABLES) :].mean(0),
        "random_model": random_accuracy[_CARRY],
        "embedding": embedding_accuracy[_CARRY, 0],
        "variable_accuracy": balanced,
        "variable_random_model": random_balanced,
        "variable_embedding": embedding_balanced[:, 0],
    }


def _shared_scores(
    probe: LinearProbe,
    states: _Halves,
    carry: Tensor,
    test_carry: Tensor,
    short_states: Float[Tensor, "loop short_chain short_sample d_model"],
    short_carry: Tensor,
) -> dict[str, Tensor]:
    """Probes that are shared by all chain lengths, scored on each."""

    def shared(x: Tensor, y: Tensor) -> Tensor:
        fitted = probe.fresh().fit(x.flatten(-3, -2), y.flatten())
        predicted = fitted.predict(states.test.flatten(-3, -2))
        return (predicted.unflatten(-1, test_carry.shape) == test_carry).double().mean(-1)

    return {
        "shared_probe": shared(states.train, carry),
        "last_loop_probe": shared(states.train[-1], carry),
        "short_to_long": shared(short_states, short_carry),
    }


def _code_lengths(
    trained: _Halves, random: _Halves, labels: _Halves, generator: torch.Generator
) -> dict[str, Tensor]:
    """Online code lengths of the carries on a shuffled part of the training pairs."""
    carry = labels.train[_CARRY].flatten()
    control = labels.train[len(VARIABLES)].flatten()
    pairs = torch.randperm(len(carry) // 2, generator=generator)[:_CODED_PAIRS]
    order = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten().to(carry.device)

    def bits(states: _Halves, y: Tensor) -> Tensor:
        return online_code_length(states.train.flatten(-3, -2)[:, order], y[order])

    return {
        "code_length": bits(trained, carry),
        "code_length_control": bits(trained, control),
        "code_length_random_model": bits(random, carry),
    }
