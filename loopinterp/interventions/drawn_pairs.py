"""Interchanges of the state of one position, drawn between inputs with the same token there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopinterp.interventions.pairs import InterchangePairs, SecondInterchange

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch

_TRIES = 8
"""As many are drawn for each one that is taken."""


def drawn_pairs(
    batch: Batch,
    n_loops: int,
    number: int,
    generator: torch.Generator,
    *,
    across_loops: bool = False,
) -> InterchangePairs:
    """Interchanges at one loop; fewer than ``number`` if too few inputs share tokens.

    With ``across_loops`` half of the states come from any loop.
    """
    tries, (size, n_pos) = _TRIES * number, batch.inputs.shape
    base, source = torch.randint(size, (2, tries), generator=generator)
    position = torch.randint(n_pos, (tries,), generator=generator)
    loop = torch.randint(n_loops + 1, (tries,), generator=generator)
    same_token = batch.inputs[base, position] == batch.inputs[source, position]
    rows = (same_token & (base != source)).nonzero().squeeze(1)[:number]
    pairs = InterchangePairs.of(
        batch,
        base=base[rows],
        source=source[rows],
        positions=position[rows, None],
        loop=loop[rows],
        n_loops=n_loops,
    )
    if not across_loops:
        return pairs
    any_loop = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    same = torch.rand(pairs.loop.shape, generator=generator, dtype=torch.float32) < 0.5
    return replace(pairs, source_loop=pairs.loop.where(same, any_loop))


def balanced_pairs(
    batch: Batch,
    values: Int[Tensor, "loops input pos"],
    number: int,
    generator: torch.Generator,
) -> InterchangePairs:
    """Interchanges across loops in which rare kinds come as often as common ones.

    A *kind* is the value that is put in, the one that it replaces, and the one to the left of it,
    each with its token. ``values`` are of every state of the clean runs, h_0 to h_T.
    """
    n_loops = len(values) - 1
    pairs = drawn_pairs(batch, n_loops, _TRIES * number, generator)
    any_loop = torch.randint(n_loops + 1, pairs.loop.shape, generator=generator)
    pairs = replace(pairs, source_loop=any_loop)
    if not len(pairs):
        return pairs
    position = pairs.positions[:, 0]
    left, (token, left_token) = (position - 1).clamp(min=0), pairs.tokens
    kinds = torch.stack([  # [part of the kind, pair]
        position == 0, left_token, values[pairs.loop, pairs.base, left], token,
        values[pairs.loop, pairs.base, position],
        values[pairs.source_loop, pairs.source, position],
    ])  # fmt: skip
    _, kind, counts = kinds.unique(dim=1, return_inverse=True, return_counts=True)
    rare = 1 / counts[kind].double()
    return pairs[rare.multinomial(min(number, len(pairs)), generator=generator)]


def repeated_pairs(
    batch: Batch, n_loops: int, number: int, generator: torch.Generator
) -> InterchangePairs:
    """Two interchanges in one run, with states of any loop.

    The second is made at that loop or later, at the same position in half of them.
    """
    pairs = drawn_pairs(batch, n_loops, _TRIES * number, generator)
    count, (size, n_pos) = len(pairs), batch.inputs.shape
    source = torch.randint(size, (count,), generator=generator)
    any_position = torch.randint(n_pos, (count,), generator=generator)
    same = torch.rand(count, generator=generator, dtype=torch.float32) < 0.5
    position = pairs.positions[:, 0].where(same, any_position)
    later = torch.rand(count, generator=generator, dtype=torch.float32) * (pairs.horizon + 1)
    first_loop, second_loop = torch.randint(n_loops + 1, (2, count), generator=generator)
    second = SecondInterchange(source, position, pairs.loop + later.long(), second_loop)
    same_token = batch.inputs[pairs.base, position] == batch.inputs[source, position]
    rows = (same_token & (source != pairs.base)).nonzero().squeeze(1)[:number]
    return replace(pairs, source_loop=first_loop, second=second)[rows]
