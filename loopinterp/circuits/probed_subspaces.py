"""The directions along which linear probes read a program's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from loopinterp.circuits.pair_strategies import spread_loops
from loopinterp.models import device_of, iterate
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

PLACES = 8192
"""Most states that a probe is fitted on."""

PENALTY = 30.0
"""Ridge penalty.

With a weak one a probe reads along directions in which the state hardly varies, and an exchange
along those moves hardly anything: with noise of 1% on the weights the IIA of what a probe with
penalty 0.001 finds is 0.53 on the ripple and 0.03 on lookahead (6 bits), where 1 to 1,000 give
1.00 on both. With a strong one it gives rare values up: 100 gives 0.89 on lookahead (12 bits).
"""

REAL = 1e-2
"""Singular values of a probe's coefficients below this share of the largest are rounding."""


@overload
def probe_directions(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch, *, by_token: Literal[True]
) -> dict[int, Float[Tensor, "rank d_model"]]: ...


@overload
def probe_directions(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch, *, by_token: bool = False
) -> Float[Tensor, "rank d_model"]: ...


@torch.no_grad()
def probe_directions(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch, *, by_token: bool = False
) -> Float[Tensor, "rank d_model"] | dict[int, Float[Tensor, "rank d_model"]]:
    """Orthonormal rows that span what probes of some variables read.

    One probe per variable, on the states after loops 1 .. T - 1 together.

    Args:
        model: Any looped model.
        program: Whose variables.
        names: Which of them.
        batch: Inputs of one length.
        by_token: A span for each token at the position, in place of one for all.
    """
    inputs = batch.inputs.to(device_of(model))
    last = int(batch.n_loops.max())
    loops = spread_loops(last, 12)
    kept = {t: h for t, h in iterate(model, inputs, last) if t in loops}
    trace = program.trace(inputs, n_loops=last).variables
    asked = (batch.targets != IGNORE).to(inputs.device)
    states = torch.stack([kept[t][asked] for t in loops]).flatten(0, 1)
    tokens = inputs[asked].repeat(len(loops))
    labels = {n: torch.stack([trace[n][t][asked] for t in loops]).flatten() for n in names}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(states), generator=generator).to(states.device)
    if not by_token:
        some = order[:PLACES]
        return _span(states[some], [values[some] for values in labels.values()])
    spans = {}
    for token in tokens.unique().tolist():
        some = order[(tokens == token)[order]][:PLACES]
        spans[token] = _span(states[some], [values[some] for values in labels.values()])
    return spans


def _span(states: Tensor, labels: Sequence[Tensor]) -> Float[Tensor, "rank d_model"]:
    """Orthonormal rows that span the probes' coefficients; none where nothing varies."""
    rows = []
    for values in labels:
        if len(values.unique()) > 1:
            probe = RidgeProbe(alpha=PENALTY).fit(states, values)
            coef = probe.coef_ - probe.coef_.mean(0) if len(probe.coef_) > 1 else probe.coef_
            _, sizes, basis = torch.linalg.svd(coef, full_matrices=False)
            rows.append(basis[sizes > REAL * sizes[0]])
    if not rows:
        return states.new_zeros(0, states.shape[-1])
    _, sizes, basis = torch.linalg.svd(torch.cat(rows), full_matrices=False)
    return basis[sizes > REAL * sizes[0]]
