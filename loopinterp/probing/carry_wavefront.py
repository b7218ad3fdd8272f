"""The carry study: how far a carry has come after each loop, read off by linear probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.addition import Addition

_CONTROL_DRAWS = 8
_CODED_PAIRS = 1024


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
        generator = torch.Generator().manual_seed(seed)
        sizes = {"n_short": n_short, "n_train": n_train, "n_test": n_test}
        sample = _draw(task, n, max_chain, generator=generator, device=device_of(model), **sizes)
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)  # type: ignore[type-var]
        trained = _read(model, sample, steps)
        random = _read(random_model, sample, steps)
        short = sample.short
        short_states = states_at(model, short.inputs, short.row, short.pos, loops=steps)[0]
        labels = _labels(sample, generator)
        per_loop, before = reach(model), _reach_before(model)
        chains = torch.tensor(sample.train.chain_lengths)
        in_reach = torch.ones(len(steps), len(chains), dtype=torch.bool)
        if per_loop is not None:
            in_reach = chains <= per_loop * torch.tensor(steps)[:, None] + before
        return CarryStudyResult.of(
            watch,
            coords={"loop": steps, "chain_length": chains.tolist(), "variable": VARIABLES},
            in_reach=in_reach,
            majority=majority_accuracy(sample.train.carry, sample.test.carry),
            **_own_scores(probe, trained, random, labels),
            **_shared_scores(probe, trained, sample, short_states),
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


@dataclass(frozen=True)
class _Sample:
    """Additions to train on, others to score on, and short ones to train on."""

    train: ChainSample
    test: ChainSample
    short: ChainSample


def _draw(
    task: Addition,
    n: int,
    max_chain: int,
    *,
    n_short: int,
    n_train: int,
    n_test: int,
    generator: torch.Generator,
    device: torch.device,
) -> _Sample:
    def draw(bits: int, chains: int, pairs: int) -> ChainSample:
        drawn = sample_chains(task, bits, max_chain=chains, n_pairs=pairs, generator=generator)
        return drawn.to(device)

    return _Sample(
        train=draw(n, max_chain, n_train),
        test=draw(n, max_chain, n_test),
        short=draw(n_short, min(n_short - 2, max_chain), n_train),
    )


@dataclass(frozen=True)
class _Readings:
    """States [loop, chain, sample, d_model] and embeddings of the long additions."""

    train: Float[Tensor, "loop chain train_sample d_model"]
    test: Float[Tensor, "loop chain test_sample d_model"]
    train_e: Float[Tensor, "chain train_sample d_model"]
    test_e: Float[Tensor, "chain test_sample d_model"]

    def of_embedding(self) -> _Readings:
        """The embedding in the place of the states of one loop."""
        return _Readings(self.train_e[None], self.test_e[None], self.train_e, self.test_e)


def _read(model: LoopedModel, sample: _Sample, loops: list[int]) -> _Readings:
    (train, train_e), (test, test_e) = (
        states_at(model, half.inputs, half.row, half.pos, loops=loops)
        for half in (sample.train, sample.test)
    )
    return _Readings(train, test, train_e, test_e)


@dataclass(frozen=True)
class _Labels:
    """Classes of every variable of the addition, then the random labels of the control task."""

    train: Int[Tensor, "label chain train_sample"]
    test: Int[Tensor, "label chain test_sample"]

    def of_variables(self) -> _Labels:
        return _Labels(self.train[: len(VARIABLES)], self.test[: len(VARIABLES)])


def _labels(sample: _Sample, generator: torch.Generator) -> _Labels:
    """The random labels are fixed by the local input, and the same in both halves."""
    train, test = sample.train, sample.test
    types = context_types(torch.cat([train.inputs, test.inputs]))
    places = [types[train.row, train.pos], types[len(train.inputs) + test.row, test.pos]]
    control = control_labels(
        train.carry.flatten(),
        torch.cat(places, dim=1),
        n_draws=_CONTROL_DRAWS,
        generator=generator,
    )
    n_train = train.carry.shape[1]
    return _Labels(
        torch.cat([train.variables, control[..., :n_train]]),
        torch.cat([test.variables, control[..., n_train:]]),
    )


@dataclass(frozen=True)
class _Scores:
    """Scores [label, loop, chain] of probes that each have one loop and one chain length."""

    accuracy: Tensor
    balanced: Tensor

    @property
    def carry(self) -> Tensor:
        return self.accuracy[VARIABLES.index("carry in")]

    @property
    def control(self) -> Tensor:
        return self.accuracy[len(VARIABLES) :].mean(0)


def _own_probes(probe: LinearProbe, states: _Readings, labels: _Labels) -> _Scores:
    """One solve for all loops, chain lengths and labels; the labels of a cell share its factor."""
    fitted = probe.fresh().fit(states.train, labels.train[:, None])
    truth = labels.test[:, None]
    right = (fitted.predict(states.test) == truth).double()
    recalls = [(right * (truth == cls)).sum(-1) / (truth == cls).sum(-1) for cls in (0, 1)]
    balanced = torch.stack(recalls).mean(0)[: len(VARIABLES)]
    return _Scores(right.mean(-1), balanced)


def _own_scores(
    probe: LinearProbe, trained: _Readings, random: _Readings, labels: _Labels
) -> dict[str, Tensor]:
    """Probes that each have one loop and one chain length, and the same on the controls."""
    own = _own_probes(probe, trained, labels)
    on_random = _own_probes(probe, random, labels.of_variables())
    on_embedding = _own_probes(probe, trained.of_embedding(), labels.of_variables())
    return {
        "accuracy": own.carry,
        "control_task": own.control,
        "random_model": on_random.carry,
        "embedding": on_embedding.carry[0],
        "variable_accuracy": own.balanced,
        "variable_random_model": on_random.balanced,
        "variable_embedding": on_embedding.balanced[:, 0],
    }


def _shared_scores(
    probe: LinearProbe,
    trained: _Readings,
    sample: _Sample,
    short_states: Float[Tensor, "loop short_chain short_sample d_model"],
) -> dict[str, Tensor]:
    """Probes that are shared by all chain lengths, scored on each."""

    def shared(x: Tensor, y: Tensor) -> Tensor:
        fitted = probe.fresh().fit(x.flatten(-3, -2), y.flatten())
        predicted = fitted.predict(trained.test.flatten(-3, -2))
        right = predicted.unflatten(-1, sample.test.carry.shape) == sample.test.carry
        return right.double().mean(-1)

    return {
        "shared_probe": shared(trained.train, sample.train.carry),
        "last_loop_probe": shared(trained.train[-1], sample.train.carry),
        "short_to_long": shared(short_states, sample.short.carry),
    }


def _code_lengths(
    trained: _Readings, random: _Readings, labels: _Labels, generator: torch.Generator
) -> dict[str, Tensor]:
    """Online code lengths of the carries on a shuffled part of the training pairs."""
    carry = labels.train[VARIABLES.index("carry in")].flatten()
    control = labels.train[len(VARIABLES)].flatten()
    pairs = torch.randperm(len(carry) // 2, generator=generator)[:_CODED_PAIRS]
    order = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten().to(carry.device)

    def bits(states: _Readings, y: Tensor) -> Tensor:
        return online_code_length(states.train.flatten(-3, -2)[:, order], y[order])

    return {
        "code_length": bits(trained, carry),
        "code_length_control": bits(trained, control),
        "code_length_random_model": bits(random, carry),
    }
