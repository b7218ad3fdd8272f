"""The carry study: how far a carry has come after each loop, read off by linear probes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.errors import check_integer, check_number, check_seed
from loopinterp.models.iteration import check_increasing, states_at
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model, device_of, reach
from loopinterp.models.repeatability import need_repeatable
from loopinterp.models.run_length import own_depth
from loopinterp.probing.carry_chains import VARIABLES, ChainSample, sample_chains
from loopinterp.probing.linear_probes import LinearProbe, RidgeProbe
from loopinterp.probing.prequential_code import online_code_length
from loopinterp.probing.probe_controls import (
    context_types,
    control_labels,
    majority_accuracy,
    with_random_weights,
)
from loopinterp.results import Result, study
from loopinterp.study_examples import need_loops, need_model_of
from loopinterp.tasks.study_data import as_batch, need_task

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.addition import Addition

_GRID = "loop chain_length"
_CODED_PAIRS = 1024
_CARRY = VARIABLES.index("carry in")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CarryStudyResult(Result, kind="carry"):
    """Accuracy of probes for the carry into a position, after each number of loops.

    The chain length of a carry is the number of positions it travels, from the bit that decides
    it to the position it enters: one more than the propagating positions it passes. ``loop`` is
    the number of loops run (0: the initial state). A carry that travels one position a loop is
    decodable exactly where chain length <= loops. Chains that run back to bit 0 are left out.

    Half of that picture may be no finding. Where attention has a hard window, the states form a
    light cone: a position cannot depend on what lies further to its left than ``reach`` positions
    a loop, and no probe whatever could read a carry ahead of it. Those cells cannot fail; they are
    the ones where ``in_reach`` is false.

    Arrays:
        accuracy: Probes that each have one loop and one chain length. Where they fail, no linear
            probe trained on more does better.
        in_reach: Whether the deciding bit is within the position's reach by then.
        shared_probe: One probe for each loop, trained on all chain lengths together: whether
            there is one code for all. It has to compromise with carries that have not arrived.
        last_loop_probe: The shared probe of the last loop, applied to all: whether the carry is
            written in the same direction as soon as it arrives.
        short_to_long: Shared probes trained on ``n_short`` bits, scored on ``n``.
        control_task: The same probe on random labels fixed by the last four inputs (control).
        random_model: The same probe on the model with random weights (control).
        embedding: The same probe on the embedding alone (control).
        majority: Always saying the more frequent carry (control).
        variable_accuracy: Balanced accuracy for each variable of the addition.
        variable_random_model: The same on the model with random weights (control).
        variable_embedding: The same on the embedding alone (control).
        code_length: Online code length of the carries of all chain lengths, in bits per carry.
        code_length_control: The same for the random labels (control).
        code_length_random_model: The same for the model with random weights (control).

    Attributes:
        n: Bits of the additions.
        n_short: Bits of the additions of the short-to-long control.
        n_train_pairs: Matched pairs for each chain length that the probes were trained on.
        n_test_pairs: Other pairs for each chain length that they were scored on.
        threshold: Accuracy from which a chain length counts as decodable.
        reach: Positions to its left that one loop can bring something in from; None if there is
            no bound.
        reach_before: Positions that the injected input has reached before the first loop.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("accuracy", "in_reach", "shared_probe", "last_loop_probe"), _GRID),
        **dict.fromkeys(("short_to_long", "control_task", "random_model"), _GRID),
        **dict.fromkeys(("embedding", "majority"), "chain_length"),
        **dict.fromkeys(("variable_accuracy", "variable_random_model"), f"variable {_GRID}"),
        "variable_embedding": "variable chain_length",
        **dict.fromkeys(("code_length", "code_length_control"), "loop"),
        "code_length_random_model": "loop",
    }

    n: int
    n_short: int
    n_train_pairs: int
    n_test_pairs: int
    threshold: float
    reach: int | None
    reach_before: int = 0

    @property
    def speed_limit(self) -> int:
        """Positions a loop of the front that the cells are compared with; 1 without a bound."""
        return self.reach or 1

    @property
    def ahead(self) -> xr.DataArray:
        """Positions that each chain is longer than the front has come, [loop, chain_length]."""
        front = self.speed_limit * self.data["loop"] + self.reach_before
        return (self.data["chain_length"] - front).transpose("loop", "chain_length")

    @property
    def selectivity(self) -> xr.DataArray:
        """Accuracy above that of the same probe on random labels, [loop, chain_length]."""
        return self.data["accuracy"] - self.data["control_task"]

    @property
    def first_loop(self) -> xr.DataArray:
        """First number of loops after which each chain length is decodable; NaN if never."""
        return first_decodable(self.data["accuracy"], self.threshold)

    @property
    def resolved(self) -> float:
        """Least accuracy over all cells that the front has come to."""
        return float(self.data["accuracy"].where(self.ahead <= 0, 1.0).min())

    @property
    def unresolved(self) -> float:
        """Greatest accuracy over all cells with three positions or more still to go."""
        return float(self.data["accuracy"].where(self.ahead > 2, 0.0).max())

    @property
    def speed(self) -> float:
        """Positions the front travels in a loop, by least squares.

        The slope of the first decodable loop on the chain length, inverted; infinite if all
        chain lengths become decodable at once. NaN, and no wavefront, if less than half of the
        chain lengths (or fewer than three) ever are: any model passes on a position or two.
        """
        first = self.first_loop.dropna("chain_length")
        if first.size < max(3, self.data.sizes["chain_length"] / 2):
            return float("nan")
        slope = float(np.polyfit(first["chain_length"].astype(float), first, 1)[0])
        return 1.0 / slope if slope > 1e-9 else float("inf")


def first_decodable(accuracy: xr.DataArray, threshold: float) -> xr.DataArray:
    """First loops at which accuracy [loop, ...] reaches a threshold; NaN where it never does."""
    loops = accuracy["loop"].astype(float)
    return loops.where(accuracy >= threshold).min("loop")


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
        loops: Numbers of loops after which to probe; 0 to ``max_chain + 4`` if None, or to a depth
            that the model has of its own.
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
    need_model_of(task, model)
    check_integer("n", n, least=3)
    need_repeatable(model, as_batch(task, n=3, batch_size=1, device=device_of(model)).inputs)
    max_chain = n // 2 if max_chain is None else check_integer("max_chain", max_chain, least=1)
    if loops is None:
        need_loops(model)
        depth = own_depth(model)
        loops = range(max_chain + 5 if depth is None else min(max_chain + 4, depth) + 1)
    steps = check_increasing(loops)
    check_integer("n_short", n_short, least=4)
    check_number("threshold", threshold, above=0, most=1)
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
        per_loop, before = reach(model), getattr(model, "reach_before", 0)
        if before is None:
            per_loop, before = None, 0
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
