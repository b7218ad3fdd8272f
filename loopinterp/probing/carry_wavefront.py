"""The carry study: how far a carry has travelled after each loop, by linear probes.

The chain length of a carry is the number of positions it travels, from the bit that decides it to
the position it enters: one more than the propagating positions it passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveInt
from sklearn.exceptions import ConvergenceWarning

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.models import protocol
from loopinterp.models.iteration import check_increasing, need_repeatable, states_at
from loopinterp.models.study_examples import need_loops, need_model_of
from loopinterp.probing.linear_probes import LinearProbe, RidgeProbe, online_code_length
from loopinterp.probing.probe_grid import (
    context_types,
    control_labels,
    majority_accuracy,
    with_random_weights,
)
from loopinterp.tasks.addition import PROPAGATE_PROBABILITIES, Addition
from loopinterp.tasks.sampling import as_batch, need_task

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel


_READ = {
    "carry in": Addition.carry_in,
    "carry out": Addition.carries,
    "generate": Addition.generate,
    "propagate": Addition.propagate,
    "sum": Addition.targets,
}
VARIABLES = tuple(_READ)
"""Variables of an addition, in the order of :attr:`ChainSample.variables`."""

_CARRY = VARIABLES.index("carry in")
_GRID = "loop chain_length"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CarryStudyResult(Result, kind="carry"):
    """Accuracy of probes for the carry into a position, after each number of loops.

    With a hard attention window, no probe can read a carry outside the light cone, ``reach``
    positions a loop.

    Arrays:
        accuracy: One probe for each loop and chain length.
        in_reach: Whether the deciding bit is inside the light cone.
        shared_probe: One probe for each loop: is there one code for all chain lengths?
        last_loop_probe: The last loop's shared probe on all loops: is the direction the same from
            the start?
        short_to_long: Shared probes trained on ``n_short`` bits, scored on ``n``.
        control_task, random_model, embedding, majority: Controls: the probe on random labels fixed
            by the last four inputs; on random weights; on the embedding alone; the more frequent
            carry.
        variable_accuracy, variable_random_model, variable_embedding: Balanced accuracy for each
            variable, and of the controls.
        code_length, code_length_control, code_length_random_model: Online code length in bits per
            carry, and of the controls.

    Attributes:
        reach: Positions to the left that one loop reads; None without a bound.
        reach_before: The same of the injected input, before the first loop.
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
        """Positions per loop of the expected front; 1 without a bound."""
        return self.reach or 1

    @property
    def ahead(self) -> xr.DataArray:
        """Chain length minus the front's position, [loop, chain_length]."""
        front = self.speed_limit * self.data["loop"] + self.reach_before
        return (self.data["chain_length"] - front).transpose("loop", "chain_length")

    @property
    def selectivity(self) -> xr.DataArray:
        """Accuracy above that of the same probe on random labels, [loop, chain_length]."""
        return self.data["accuracy"] - self.data["control_task"]

    @property
    def first_loop(self) -> xr.DataArray:
        """Loops after which each chain length is first decodable; NaN if never."""
        loops = self.data["loop"].astype(float)
        return loops.where(self.data["accuracy"] >= self.threshold).min("loop")

    @property
    def resolved(self) -> float:
        """Least accuracy over all cells that the front has reached."""
        return float(self.data["accuracy"].where(self.ahead <= 0, 1.0).min())

    @property
    def unresolved(self) -> float:
        """Greatest accuracy over all cells three positions or more ahead of the front."""
        return float(self.data["accuracy"].where(self.ahead > 2, 0.0).max())

    @property
    def speed(self) -> float:
        """Positions per loop of the front: the inverse slope of loops on chain lengths.

        Infinite if all become decodable at once; NaN if fewer than half, or three, ever do.
        """
        return front_speed(self.first_loop)


def front_speed(first_loop: xr.DataArray) -> float:
    """The speed of a front from the first loop at each distance, its one axis; NaN for never."""
    (axis,) = first_loop.dims
    known = first_loop.dropna(axis)
    if known.size < max(3, first_loop.size / 2):
        return float("nan")
    slope = float(np.polyfit(known[axis].astype(float), known, 1)[0])
    return 1 / slope if slope > 1e-9 else float("inf")


@checked
def carry_study(
    model: LoopedModel,
    task: Addition,
    *,
    n: Annotated[int, Field(ge=3)] = 48,
    max_chain: PositiveInt | None = None,
    loops: Sequence[int] | None = None,
    n_short: Annotated[int, Field(ge=4)] = 12,
    n_train: PositiveInt = 192,
    n_test: PositiveInt = 96,
    probe: LinearProbe | None = None,
    random_model: Any = None,
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95,
    seed: Seed = 0,
) -> CarryStudyResult:
    """Probe for the carry into each position, by loops run and by chain length, with controls.

    Each cell has its own probe, scored on other additions. These come in matched pairs
    (:class:`ChainSample`), so that a state without the deciding bit scores 0.5.

    Args:
        n, n_short: Bits of the additions, and of the short-to-long control.
        max_chain: Longest chain studied; half of ``n`` if None.
        loops: Loops after which to probe; 0 to ``max_chain + 4`` if None, or to the model's own
            depth.
        n_train, n_test: Pairs of each chain length to train and score on.
        probe: :class:`RidgeProbe` if None.
        random_model: The model with shuffled weights if None.
        threshold: Accuracy that counts as decodable.

    Raises:
        InputError: If the task is no addition, or chains or loops do not fit.
    """
    protocol.need_model(model)
    need_task(task)
    need_model_of(task, model)
    device = protocol.device_of(model)
    need_repeatable(model, as_batch(task, n=3, batch_size=1, device=device).inputs)
    max_chain = max_chain or n // 2
    if loops is None:
        need_loops(model)
        depth = protocol.own_depth(model)
        loops = range(max_chain + 5 if depth is None else min(max_chain + 4, depth) + 1)
    steps = check_increasing(loops)
    probe = probe or RidgeProbe()
    options = {"n": n, "max_chain": max_chain, "loops": steps, "n_short": n_short}
    options |= {"n_train": n_train, "n_test": n_test, "probe": repr(probe), "threshold": threshold}
    with study(seed, study="carry", model=protocol.describe_model(model), **options) as watch:
        generator = torch.Generator().manual_seed(seed)

        def draw(bits: int, chains: int, pairs: int) -> ChainSample:
            drawn = sample_chains(task, bits, max_chain=chains, n_pairs=pairs, generator=generator)
            return ChainSample(**{name: x.to(device) for name, x in vars(drawn).items()})

        sample = draw(n, max_chain, n_train).joined(draw(n, max_chain, n_test))
        short = draw(n_short, min(n_short - 2, max_chain), n_train)
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)  # type: ignore[type-var]
        places = sample.inputs, sample.row, sample.pos
        trained, e = states_at(model, *places, loops=steps)
        random, _ = states_at(random_model, *places, loops=steps, may_diverge=True)
        short_states, _ = states_at(model, short.inputs, short.row, short.pos, loops=steps)
        split = 2 * n_train  # samples before it are trained on, the others scored
        # Random labels are fixed by the local input, and the same in training and test.
        types = context_types(sample.inputs)[sample.row, sample.pos]  # [chain, sample]
        control = control_labels(sample.carry[:, :split].flatten(), types, generator=generator)
        labels = torch.cat([sample.variables, control])  # [label, chain, sample]
        chains = range(1, max_chain + 1)
        per_loop, before = protocol.reach(model), protocol.declared(model, "reach_before")
        if before is None:
            per_loop, before = None, 0
        edges = [math.inf if per_loop is None else per_loop * loop + before for loop in steps]
        return CarryStudyResult.of(
            watch,
            coords={"loop": steps, "chain_length": chains, "variable": VARIABLES},
            in_reach=[[chain <= edge for chain in chains] for edge in edges],
            majority=majority_accuracy(sample.carry[:, :split], sample.carry[:, split:]),
            **_cell_scores(probe, trained, random, e, labels, split),
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


def _cell_scores(
    probe: LinearProbe, trained: Tensor, random: Tensor, e: Tensor, labels: Tensor, split: int
) -> dict[str, Tensor]:
    """A probe for each loop and chain length: on the model, on random weights, on the embedding."""
    n_variables = len(VARIABLES)  # the labels after them are random ones

    def score(states: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracy and balanced accuracy, [label, loop, chain]."""
        fitted = probe.fresh().fit(states[..., :split, :], y[:, None, :, :split])
        truth = y[:, None, :, split:]
        right = (fitted.predict(states[..., split:, :]) == truth).double()
        # Of each class
        recalls = [(right * (truth == cls)).sum(-1) / (truth == cls).sum(-1) for cls in (0, 1)]
        return right.mean(-1), torch.stack(recalls).mean(0)

    accuracy, balanced = score(trained, labels)
    random_accuracy, random_balanced = score(random, labels[:n_variables])
    input_accuracy, input_balanced = score(e[None], labels[:n_variables])
    return {
        "accuracy": accuracy[_CARRY],
        "control_task": accuracy[n_variables:].mean(0),
        "random_model": random_accuracy[_CARRY],
        "embedding": input_accuracy[_CARRY, 0],
        "variable_accuracy": balanced[:n_variables],
        "variable_random_model": random_balanced,
        "variable_embedding": input_balanced[:, 0],
    }


def _shared_scores(
    probe: LinearProbe,
    states: Float[Tensor, "loop chain sample d_model"],
    carry: Int[Tensor, "chain sample"],
    split: int,
    short_states: Float[Tensor, "loop short_chain short_sample d_model"],
    short_carry: Tensor,
) -> dict[str, Tensor]:
    """Accuracy of probes shared by all chain lengths, for each of them."""
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
    carry, control = (labels[which, :, :split].flatten() for which in (_CARRY, len(VARIABLES)))
    pairs = torch.randperm(len(carry) // 2, generator=generator)[:1024]
    # Both members of each pair, side by side
    order = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten().to(carry.device)

    def bits(states: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Separable classes: weights grow without end while the code length has converged.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return online_code_length(states[..., :split, :].flatten(-3, -2)[:, order], y[order])

    return {
        "code_length": bits(trained, carry),
        "code_length_control": bits(trained, control),
        "code_length_random_model": bits(random, carry),
    }


@dataclass(frozen=True, repr=False)
class ChainSample(ShortRepr):
    """Carries of every chain length, from additions in matched pairs.

    One of a pair kills wherever the other generates: all chains keep their length, all carries
    flip, and a model without the deciding bit sees no difference.

    Attributes:
        inputs: Rows 2k and 2k + 1 are a pair.
        row, pos: Row of each carry in ``inputs``, by chain length from 1 on, and the position it
            enters; 2k and 2k + 1 are a pair.
        variables: Classes of :data:`VARIABLES` there.
    """

    inputs: Tensor
    row: Int[Tensor, "chain sample"]
    pos: Int[Tensor, "chain sample"]
    variables: Int[Tensor, "variable chain sample"]

    @property
    def carry(self) -> Int[Tensor, "chain sample"]:
        return self.variables[_CARRY]

    def joined(self, other: ChainSample) -> ChainSample:
        return ChainSample(
            inputs=torch.cat([self.inputs, other.inputs]),
            row=torch.cat([self.row, other.row + len(self.inputs)], dim=-1),
            pos=torch.cat([self.pos, other.pos], dim=-1),
            variables=torch.cat([self.variables, other.variables], dim=-1),
        )


@checked
def sample_chains(
    task: Addition, n: int, *, max_chain: int, n_pairs: PositiveInt, generator: torch.Generator
) -> ChainSample:
    """Draw additions until each chain length from 1 to ``max_chain`` has ``n_pairs`` pairs.

    Each has one chain at a random position, most of length ``max_chain``; other bits are the mix of
    training, or runs of all lengths alike. A pair gives at most one carry to a chain length. Chains
    that reach back to bit 0 are left out.

    ``max_chain`` is at most ``n - 2``.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> sample = sample_chains(Addition(), 12, max_chain=6, n_pairs=10, generator=g)
        >>> sample.carry.float().mean(1).tolist()
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    """
    if not isinstance(task, Addition):
        raise InputError(
            "task of the carry study",
            expected="the addition task",
            given=getattr(task, "name", type(task).__name__),
            fix="Only additions have carries; use probe_study for other tasks.",
        )
    fix = f"It must fit in n = {n} bits: pass a shorter max_chain or a larger n."
    check_integer("max_chain", max_chain, least=1, most=n - 2, fix=fix)
    drawn = [_draw_pairs(task, n, max_chain, n_pairs, generator)]
    while True:  # ends: in each round every chain length has a fair chance to occur
        drawn.append(_draw_pairs(task, n, max_chain, n_pairs, generator))
        inputs = torch.cat(drawn)
        length = task.chain_length_in(inputs[::2]) + 1
        length = length.masked_fill(task.chain_in_reaches_start(inputs[::2]), 0)
        if min(int((length == d).any(1).sum()) for d in range(1, max_chain + 1)) >= n_pairs:
            break
    ends = ~task.propagate(inputs[::2])  # [pair, pos]
    score = torch.rand(length.shape, generator=generator, dtype=torch.float32)
    picked = []
    for d in range(1, max_chain + 1):
        # One position in each of the pairs, if possible half of them at the chain's end.
        here = length == d
        best = (score + (here & ends)).masked_fill(~here, -1.0)  # ends score above 1
        value, pos = best.max(dim=1)
        rows = here.any(1).nonzero()[:, 0]
        rows = rows[score[rows, 0].argsort()]
        at_end = value[rows] >= 1
        first, others = rows[at_end], rows[~at_end]
        n_first = min(len(first), max(n_pairs // 2, n_pairs - len(others)))
        chosen = torch.cat([first[:n_first], others[: n_pairs - n_first]])
        picked.append((chosen, pos[chosen]))
    base, pos = (torch.stack(part) for part in zip(*picked))  # [chain, pair]
    row = torch.stack([2 * base, 2 * base + 1], dim=2).flatten(1)  # [chain, sample]
    pos = pos.repeat_interleave(2, dim=1)
    used, row = torch.unique(row, return_inverse=True)
    inputs = inputs[used]
    variables = torch.stack([read(task, inputs).long()[row, pos] for read in _READ.values()])
    return ChainSample(inputs, row, pos, variables)


def _draw_pairs(
    task: Addition, n: int, max_chain: int, n_pairs: int, generator: torch.Generator
) -> Tensor:
    """Inputs in matched pairs, [2 * n_pairs, pos, ...]: each base, then its partner."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float32)

    index = torch.arange(n)  # bits of an addition
    which = (uniform(n_pairs, 1) * len(PROPAGATE_PROBABILITIES)).long()
    enriched = uniform(n_pairs, n) < torch.tensor(PROPAGATE_PROBABILITIES)[which]
    step = 1 + (uniform(n_pairs, n) * (max_chain + 1)).long()  # bits between deciders
    deciders = (step.cumsum(1) - 1 - (uniform(n_pairs, 1) * step[:, :1]).long()).clamp_max(n)
    even = torch.ones(n_pairs, n + 1, dtype=torch.bool).scatter(1, deciders, False)[:, :n]
    propagates = torch.where(uniform(n_pairs, 1) < 0.5, enriched, even)

    is_long = uniform(n_pairs, 1) < 0.6  # these have a chain of the greatest length
    stops = ~is_long | (uniform(n_pairs, 1) < 0.5)
    shorter = (uniform(n_pairs, 1) * max_chain).long()
    length = torch.where(is_long, max_chain - stops.long(), shorter)
    start = (uniform(n_pairs, 1) * (n - 1 - length)).long()
    inside = (index > start) & (index <= start + length)
    decides = (index == start) | (stops & (index == start + length + 1))
    propagates = (propagates | inside) & ~decides  # [pair, bit]

    a = (uniform(n_pairs, n) < 0.5).long()
    b = torch.where(propagates, 1 - a, a)  # bits differ where they propagate
    a, b = (torch.stack([x, x ^ ~propagates], dim=1).flatten(0, 1) for x in (a, b))
    return task.from_bits(a, b, torch.full((2 * n_pairs,), n)).inputs
