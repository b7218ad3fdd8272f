"""Online code length: how many bits it takes to send the labels, given the activations.

Accuracy says whether a probe gets there; code length also says how hard it was to learn. The
labels are sent block by block, each coded by a probe trained on the blocks before
(Voita and Titov, arXiv 2003.12298, section 2.2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.probing.linear import LogisticProbe

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

BLOCK_ENDS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Ends of the blocks, as fractions of the samples: each doubles what is known."""


def online_code_length(
    x: Float[Tensor, "*grid sample d"],
    y: Int[Tensor, "*grid sample"],
    *,
    alpha: float = 1.0,
    block_ends: tuple[float, ...] = BLOCK_ENDS,
) -> Float[Tensor, "*grid"]:
    """Bits per label of the prequential code, for each cell of a grid.

    The first block is sent with the uniform code (log2 of the classes), each later one with the
    probabilities of a :class:`LogisticProbe` trained on all before it. 1 bit per label of two
    balanced classes means that the activations tell nothing.

    Args:
        x: Activations, in the order in which their labels are sent: shuffle them first.
        y: Classes.
        alpha: L2 penalty of the probes.
        block_ends: Ends of the blocks as fractions, increasing, the last 1.

    Raises:
        InputError: If a block is empty, or the first has one class only.
    """
    n = x.shape[-2]
    ends = [round(fraction * n) for fraction in block_ends]
    if ends[0] < 2 or any(b <= a for a, b in zip(ends, ends[1:])) or ends[-1] != n:
        raise InputError(
            "block_ends",
            expected=f"increasing fractions that end at 1, with blocks of {n} samples not empty",
            given=f"blocks that end at {ends}",
            fix="Give more samples, or fewer blocks.",
        )
    n_classes = len(torch.unique(y))
    grid = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1])
    bits = x.new_full(grid, ends[0] * math.log2(n_classes), dtype=torch.float64)
    for start, end in zip(ends, ends[1:]):
        probe = LogisticProbe(alpha=alpha).fit(x[..., :start, :], y[..., :start])
        if len(probe.classes_) < n_classes:
            raise InputError(
                "block_ends",
                expected="every class in the first block",
                given=f"{len(probe.classes_)} of {n_classes} classes in {start} samples",
                fix="Shuffle the samples, or make the first block larger.",
            )
        logs = probe.predict_log_proba(x[..., start:end, :]).double()
        index = torch.searchsorted(probe.classes_, y[..., start:end].contiguous())
        coded = logs.gather(-1, index.expand(logs.shape[:-1])[..., None])
        bits = bits - coded.sum((-2, -1)) / math.log(2)
    return bits / n
