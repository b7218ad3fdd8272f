"""Online code length: how many bits it takes to send the labels, given the activations.

Accuracy says whether a probe gets there; code length also says how hard it was to learn. The
labels are sent block by block, each coded by a probe trained on the blocks before
(Voita and Titov, arXiv 2003.12298, section 2.2).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.probing.linear_probes import LogisticProbe

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

_DOUBLINGS = 6
_LEAST_BLOCK = 8


def online_code_length(
    x: Float[Tensor, "*#grid sample d"],
    y: Int[Tensor, "*#grid sample"],
    *,
    alpha: float = 1.0,
) -> Float[Tensor, "*cell"]:
    """Bits per label of the prequential code, for each cell of a grid.

    Each block doubles what is known: they end at n/64, n/32, ..., n samples, from 8 at least. The
    first is sent with the uniform code (log2 of the classes), and so are others until every class
    has occurred; each later one with the probabilities of a :class:`LogisticProbe` trained on all
    before it. 1 bit per label of two balanced classes means that the activations tell nothing.

    Args:
        x: Activations, in the order in which their labels are sent: shuffle them first.
        y: Classes.
        alpha: L2 penalty of the probes.

    Raises:
        InputError: there are no samples.
    """
    n = x.shape[-2]
    if not n:
        raise InputError(
            "y", expected="at least one label to send", given="none", fix="Give samples."
        )
    doubling = [n >> k for k in range(_DOUBLINGS, -1, -1)]
    ends = [end for end in doubling if end >= _LEAST_BLOCK or end == n]
    n_classes = len(torch.unique(y))
    grid = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1])
    bits = x.new_full(grid, ends[0] * math.log2(n_classes), dtype=torch.float64)
    for start, end in pairwise(ends):
        if len(torch.unique(y[..., :start])) < n_classes:
            bits = bits + (end - start) * math.log2(n_classes)
            continue
        probe = LogisticProbe(alpha=alpha).fit(x[..., :start, :], y[..., :start])
        logs = probe.predict_log_proba(x[..., start:end, :]).double()
        index = torch.searchsorted(probe.classes_, y[..., start:end].contiguous())
        coded = logs.gather(-1, index.expand(logs.shape[:-1])[..., None])
        bits = bits - coded.sum((-2, -1)) / math.log(2)
    return bits / n
