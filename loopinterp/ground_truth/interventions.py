"""Interchange interventions and patching sweeps on models that run a known program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from loopinterp.circuits import interchange_study, patching_sweep
from loopinterp.circuits.interchange.result import (
    NOTHING,
    OTHER_LOOP,
    OTHER_VARIABLE,
    RANDOM,
    VARIABLE,
    InterchangeResult,
)
from loopinterp.ground_truth.checks import Score
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.rasp.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.activation_patching_result import PatchingSweep
    from loopinterp.ground_truth.subjects import Subject
    from loopinterp.rasp.program import LoopProgram

_WRONG = {
    "wrong variable": OTHER_VARIABLE,
    "wrong loop": OTHER_LOOP,
    "random directions": RANDOM,
}
PATCHED = 24
"""Pairs of a patching sweep."""

PROBED = 8_192
"""Places that a probe for a subspace is fitted on."""

PENALTY = 30.0
"""Ridge penalty of that probe.

With a weak one it reads along directions in which the state hardly varies, and a swap along those
moves hardly anything: with noise of 1% on the weights the IIA of what a probe with penalty 0.001
finds is 0.53 on the ripple and 0.03 on lookahead (6 bits), where 1 to 1,000 give 1.00 on both.
With a strong one it gives rare values up: 100 gives 0.89 on lookahead (12 bits, no noise).
"""

REAL = 1e-2
"""Singular values of a probe's coefficients below this share of the largest are rounding."""


def score_interchange(subject: Subject, *, seed: int = 0) -> dict[str, Score]:
    """The worst cell of the right swap, all pairs of each wrong one, and swaps as a probe says."""
    circuit = subject.compiled.circuit
    known = _swapped(subject, {v: circuit.subspace(v) for v in circuit.variables}, seed)
    nothing = known.pooled(NOTHING)[0]
    found = {key: known.pooled(swap) for key, swap in _WRONG.items()}
    scores = {key: Score(share, nothing) for key, (share, _, _, n) in found.items() if n}
    if not np.isnan(known.iia).all():
        wrong = max((score.value for score in scores.values()), default=nothing)
        blind = _swapped(subject, probed_subspaces(subject, seed=seed), seed)
        scores["interchange"] = Score(float(np.nanmin(known.iia)), wrong)
        scores["interchange by probe"] = Score(blind.pooled(VARIABLE)[0], blind.pooled(RANDOM)[0])
    return scores


def _swapped(subject: Subject, subspaces: dict[str, Tensor], seed: int) -> InterchangeResult:
    return interchange_study(
        subject.compiled.model,
        subject.compiled.program,
        subject.batch,
        subspaces=subspaces,
        n_loops=max(subject.n_loops, 1),
        pairs_per_cell=32,
        seed=seed,
    )


@torch.no_grad()
def probed_subspaces(subject: Subject, *, seed: int = 0) -> dict[str, Float[Tensor, "rank d"]]:
    """Where a probe finds each variable: the span of its coefficients, of one value less another.

    One probe per variable, on the states after all loops together. Coefficients are what singles
    a variable out among all that is correlated with it; differences of class means are not.
    """
    tokens, program = subject.batch.inputs, subject.compiled.program
    states = subject.compiled.model(tokens, n_loops=subject.n_loops, return_type="states")
    trace = program.trace(tokens, n_loops=subject.n_loops)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(states[..., 0].numel(), generator=generator)[:PROBED]
    found = {}
    for name, values in trace.variables.items():
        labels = values.flatten()[chosen]
        if len(labels.unique()) > 1:
            probe = RidgeProbe(alpha=PENALTY).fit(states.flatten(0, 2)[chosen], labels)
            rows = probe.coef_ - probe.coef_.mean(0) if len(probe.coef_) > 1 else probe.coef_
            _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
            found[name] = basis[sizes > REAL * sizes[0]]
    return found


@torch.no_grad()
def score_patching(subject: Subject, *, seed: int = 0) -> dict[str, Score]:
    """States patched position by position, and heads patched one by one."""
    del seed  # nothing is drawn
    scores: dict[str, Score] = {}
    half = len(subject.batch) // 2
    rows = slice(0, min(half, PATCHED))
    base, source = (x[rows] for x in (subject.batch.inputs[:half], subject.batch.inputs[half:]))
    scored = (subject.batch.targets[:half] >= 0)[rows]
    model, n_loops = subject.compiled.model, max(subject.n_loops, 1)
    answers = [model(x, n_loops=n_loops).argmax(-1) for x in (base, source)]
    if not bool((answers[0] != answers[1])[scored].any()):
        return scores
    states = patching_sweep(
        model,
        base,
        source,
        n_loops=n_loops,
        component="state",
        positions="each",
        scored=scored,
    )
    said = _predicted(subject.compiled.program, base, source, scored, n_loops)
    scores["patched states"] = _alike(states, said)
    heads = patching_sweep(model, base, source, n_loops=n_loops, component="z", scored=scored)
    scores["patched heads"] = _heads(subject, heads)
    return scores


def _predicted(
    program: LoopProgram,
    base: Int[Tensor, "batch pos"],
    source: Int[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"],
    n_loops: int,
) -> Float[Tensor, "loop pos"]:
    """Share of answers that become the source's, by the program; NaN where one is undecided.

    All variables at one position are taken from the source after t loops. At the end the state is
    read together with the source's own injected input, so that the answer there is the source's.
    """
    ran, donor = (program.run(x, n_loops=n_loops) for x in (base, source))
    differ = scored & (ran.outputs[-1] != donor.outputs[-1])
    said = torch.empty(n_loops + 1, base.shape[1])
    for loop in range(n_loops + 1):
        for place in range(base.shape[1]):
            state = {name: x[loop].clone() for name, x in ran.variables.items()}
            for name, values in donor.variables.items():
                state[name][:, place] = values[loop][:, place]
            after = program.run(base, n_loops=n_loops, start_at_loop=loop, variables=state)
            answers = after.outputs[-1].clone()
            if loop == n_loops:
                answers[:, place] = donor.outputs[-1][:, place]
            counted = answers[differ]
            right = (counted == donor.outputs[-1][differ]).float().mean()
            said[loop, place] = torch.nan if bool((counted == UNKNOWN).any()) else right
    return said


def _alike(states: PatchingSweep, said: Tensor) -> Score:
    measured = torch.from_numpy(states.data["recovered"].squeeze(["layer", "head"]).values).to(said)

    def share(first: Tensor, second: Tensor) -> float:
        known = ~(first.isnan() | second.isnan())
        return float(((first - second).abs() < 1e-6)[known].float().mean())

    return Score(share(measured, said), share(measured[1:], said[:-1]))


def _heads(subject: Subject, sweep: PatchingSweep) -> Score:
    """Largest effect of a head outside the circuit, against that of one inside."""
    config, circuit = subject.compiled.model.config, subject.compiled.circuit
    inside = np.zeros((config.n_layers, config.n_heads), dtype=bool)
    for head in circuit.heads:
        if head.section == "block":
            inside[head.layer, head.head] = True
    effect = abs(sweep.data["effect"].isel(pos=0)).max("loop").values
    outside = effect[~inside]
    return Score(
        float(outside.max()) if outside.size else 0.0,
        float(effect[inside].max()) if inside.any() else float("nan"),
    )
