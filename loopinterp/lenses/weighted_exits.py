"""Weighted exits: answers of mixtures of all loops, by a gate's distribution over exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.runs import chunks
from loopinterp.models.iteration import bind
from loopinterp.models.stopped_run import score_loops
from loopinterp.models.stopping import GateAbove

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

N_DEALS = 16
"""Deals of the distributions over exits among tokens."""


def weighted_exits(
    model: Any,
    inputs: Tensor,
    targets: Tensor,
    mask: Tensor,
    gate: Callable[[Tensor], Tensor],
    n_loops: int,
    per_token: bool,
    seed: int,
) -> dict[str, Tensor]:
    """Weighted exits of the asked tokens, with their own distribution and with others'."""
    one = bind(model, inputs[:1])
    size = 4 * (1 + N_DEALS) * one.readout(one.h0).numel()
    rows_of = list(chunks(len(inputs), size))
    exits = torch.cat([_exits(model, inputs[r], gate, n_loops)[:, mask[r]] for r in rows_of], 1)
    generator = torch.Generator().manual_seed(seed)
    n_tokens = exits.shape[1]
    deals = [torch.arange(n_tokens)]
    deals += [torch.randperm(n_tokens, generator=generator) for _ in range(N_DEALS)]
    right, done = [], 0
    for rows in rows_of:
        here = slice(done, done := done + int(mask[rows].sum()))
        # [deal, loop, asked token], the first of them not dealt
        weights = torch.stack([exits[:, deal[here]] for deal in deals])
        answers = _mixed(model, inputs[rows], mask[rows], weights)
        right.append(answers == targets[rows][mask[rows]])
    by_token = torch.cat(right, 1).cpu()  # [deal, asked token]
    mean_exit = (exits * torch.arange(1, n_loops + 1)[:, None]).sum(0)  # [asked token]
    if per_token:
        exact, loops = by_token, mean_exit
    else:
        example = torch.arange(len(inputs)).repeat_interleave(mask.sum(1))
        exact = torch.stack([all_of_example(row, example) for row in by_token])
        loops = torch.zeros(len(inputs)).scatter_reduce(
            0, example, mean_exit, "mean", include_self=False
        )
    own, dealt = exact[0].bool(), exact[1:].double().mean(1)
    return {"weighted_exact": own, "weighted_loops": loops, "weighted_dealt": dealt}


def _exits(
    model: Any, inputs: Tensor, gate: Callable[[Tensor], Tensor], n_loops: int
) -> Float[Tensor, "loop batch pos"]:
    """The gate's distribution over exits, on the CPU; the last loop takes what is left."""
    rule = GateAbove(gate, cumulated=True)
    (going,) = score_loops(model, inputs, [rule], max_loops=n_loops, per_token=True)
    going = torch.cat([going[:-1], torch.zeros_like(going[:1])])  # none is left after the last
    return -going.diff(dim=0).cpu()


def _mixed(model: Any, inputs: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Most probable classes [deal, asked token] of mixtures with weights [deal, loop, token]."""
    iteration, mixture = bind(model, inputs), 0
    for loop, h in iteration.run(weights.shape[1], may_diverge=True):
        if loop == 0:
            continue
        logits = iteration.read(h, loop)[mask.to(h.device)]  # [token, class]
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        mixture = mixture + weights[:, loop - 1, :, None].to(p) * p
    return torch.as_tensor(mixture).argmax(-1).cpu()


def all_of_example(right: Tensor, example: Tensor) -> Tensor:
    """Products of rows' shares within each example."""
    ones = torch.ones(int(example.max()) + 1, dtype=torch.float64)
    return ones.scatter_reduce(0, example, right.double(), "prod")
