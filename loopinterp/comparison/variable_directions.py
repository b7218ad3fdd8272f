"""The directions along which a program's variables can be read off the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from loopinterp.comparison.pair_strategies import spread_loops
from loopinterp.models import device_of, iterate
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch

_MOST_STATES = 8192
"""Most states that directions are fitted on."""

_PENALTY = 30.0
"""Ridge penalty.

A weak one reads along directions in which the state hardly varies, and an interchange along those
changes little: with noise of 1% on the weights the IIA of a probe with penalty 0.001 is 0.53 on
the ripple and 0.03 on lookahead (6 bits); penalties of 1 to 1,000 give 1.00 on both. A strong one
loses rare values: 100 gives 0.89 on lookahead (12 bits).
"""

_ROUNDING = 1e-2
"""Singular values below this share of the largest are rounding."""


def probe_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"]
) -> Float[Tensor, "row d_model"]:
    """The coefficients of a ridge probe, which separate the values best."""
    coef = RidgeProbe(alpha=_PENALTY).fit(states, values).coef_
    return coef - coef.mean(0) if len(coef) > 1 else coef


def mean_directions(
    states: Float[Tensor, "place d_model"], values: Int[Tensor, " place"]
) -> Float[Tensor, "class d_model"]:
    """Mean state of each value, less the mean of these means.

    Source: mass-mean probes, Marks & Tegmark, arXiv 2310.06824, who find that interventions along
    such a direction move a model more than along those of other probes that read as well.
    """
    # [class, d_model].
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

    def subspace(self, directions: Directions = probe_directions) -> Float[Tensor, "rank d_model"]:
        """Orthonormal rows that span the directions of the variables, each fitted by itself."""
        return _span(self.states, self.labels, directions)

    def subspace_by_token(
        self, directions: Directions = probe_directions
    ) -> Float[Tensor, "token rank d_model"]:
        """:meth:`subspace` for each token at the position; rows of 0 where there are fewer."""
        rows = (self.tokens == token for token in range(self.n_tokens))
        spans = [_span(self.states[row], self.labels[:, row], directions) for row in rows]
        return pad_sequence(spans, batch_first=True)


@torch.no_grad()
def labelled_states(
    model: Any, program: LoopProgram, names: Sequence[str], batch: Batch
) -> LabelledStates:
    """Run a model and a program on the same inputs.

    Args:
        model: Any looped model.
        program: The program.
        names: Its variables that label the states.
        batch: Inputs of one length.
    """
    inputs = batch.inputs.to(device_of(model))
    last = int(batch.n_loops.max())
    loops = spread_loops(last, 12)
    asked = (batch.targets != IGNORE).to(inputs.device)
    # States of asked positions, one loop after the other: [place, d_model].
    states = torch.cat([h[asked] for t, h in iterate(model, inputs, last) if t in loops])
    trace = program.trace(inputs, n_loops=last).variables
    labels = torch.stack([torch.cat([trace[n][t][asked] for t in loops]) for n in names])
    tokens = inputs[asked].repeat(len(loops))
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))
    order = order.to(states.device)
    return LabelledStates(states[order], tokens[order], labels[:, order], len(program.inputs))


def _span(
    states: Float[Tensor, "place d_model"],
    labels: Int[Tensor, "variable place"],
    directions: Directions,
) -> Float[Tensor, "rank d_model"]:
    """Orthonormal rows that span the directions of variables; none where nothing varies."""
    states, labels = states[:_MOST_STATES], labels[:, :_MOST_STATES]
    bases = [_orthonormal(directions(states, v)) for v in labels if len(v.unique()) > 1]
    return _orthonormal(torch.cat(bases)) if bases else states.new_zeros(0, states.shape[-1])


def _orthonormal(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "rank d_model"]:
    _, sizes, basis = torch.linalg.svd(rows.double(), full_matrices=False)
    return basis[sizes > _ROUNDING * sizes[0]].to(rows)
