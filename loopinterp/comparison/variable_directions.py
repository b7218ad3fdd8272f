"""The directions along which a program's variables can be read off the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from loopinterp.models import device_of, iterate
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch


def probe_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"], penalty: float = 30.0
) -> Float[Tensor, "row d_model"]:
    """The coefficients of a ridge probe, which separate the values best.

    A weak penalty reads along directions in which the state hardly varies, and an interchange
    along those changes little: with noise of 1% on the weights the IIA of a probe with penalty
    0.001 is 0.53 on the ripple and 0.03 on lookahead (6 bits); penalties of 1 to 1,000 give 1.00
    on both. A strong one loses rare values: 100 gives 0.89 on lookahead (12 bits).
    """
    coef = RidgeProbe(alpha=penalty).fit(states, values).coef_
    return coef - coef.mean(0) if len(coef) > 1 else coef


def mean_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"]
) -> Float[Tensor, "class d_model"]:
    """Mean state of each value, less the mean of these means.

    Source: mass-mean probes, Marks & Tegmark, arXiv 2310.06824, who find that interventions along
    such a direction move a model more than along those of other probes that read as well.
    """
    means = torch.stack([states[values == value].mean(0) for value in values.unique()])
    return means - means.mean(0)


Directions = Callable[["Tensor", "Tensor"], "Tensor"]
"""Rows along which the values of a variable differ, from states and values."""


class LabelledStates(NamedTuple):
    """States of a model in random order, with the values of a program's variables.

    Attributes:
        states: After loops 1 .. T - 1, at the asked positions.
        tokens: The token at each.
        labels: The value of each variable.
        n_tokens: Tokens of the program.
    """

    states: Float[Tensor, "place d_model"]
    tokens: Int[Tensor, " place"]
    labels: Int[Tensor, "variable place"]
    n_tokens: int

    def subspace(
        self, directions: Directions = probe_directions, rows: Any = slice(None)
    ) -> Float[Tensor, "rank d_model"]:
        """Orthonormal rows that span the directions of the variables, each fitted by itself.

        They are fitted on the first 8192 of the states ``rows``.
        """
        states, labels = self.states[rows][:8192], self.labels[:, rows][:, :8192]
        bases = [_orthonormal(directions(states, v)) for v in labels if len(v.unique()) > 1]
        return _orthonormal(torch.cat(bases)) if bases else states.new_zeros(0, states.shape[-1])

    def subspace_by_token(
        self, directions: Directions = probe_directions
    ) -> Float[Tensor, "token rank d_model"]:
        """:meth:`subspace` for each token at the position; rows of 0 where there are fewer."""
        # [rank, d_model] of each token; ranks may differ.
        spans = [self.subspace(directions, self.tokens == token) for token in range(self.n_tokens)]
        return pad_sequence(spans, batch_first=True)


def _orthonormal(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "rank d_model"]:
    _, sizes, basis = torch.linalg.svd(rows.double(), full_matrices=False)
    return basis[sizes > 1e-2 * sizes[0]].to(rows)  # smaller singular values are rounding


@torch.no_grad()
def labelled_states(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch
) -> LabelledStates:
    """Run a model and a program, variables of which label the states, on inputs of one length."""
    inputs = batch.inputs.to(device_of(model))
    last = int(batch.n_loops.max())
    loops = spread_loops(last, 12)
    is_asked = (batch.targets != IGNORE).to(inputs.device)
    # States of asked positions, one loop after the other: [place, d_model].
    states = torch.cat([h[is_asked] for t, h in iterate(model, inputs, last) if t in loops])
    trace = program.trace(inputs, n_loops=last).variables
    # The value of each variable at the same places, [variable, place].
    labels = torch.stack([torch.cat([trace[n][t][is_asked] for t in loops]) for n in names])
    tokens = inputs[is_asked].repeat(len(loops))
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))
    order = order.to(states.device)
    return LabelledStates(states[order], tokens[order], labels[:, order], len(program.inputs))


def spread_loops(n_loops: int, most: int) -> list[int]:
    """Numbers of loops from 1 to T - 1 (to 1 if T is 1), evenly.

    Example:
        >>> spread_loops(25, 5)
        [1, 7, 12, 18, 24]
    """
    last = max(n_loops - 1, 1)
    count = min(most, last)
    return sorted({round(1 + k * (last - 1) / max(count - 1, 1)) for k in range(count)})
