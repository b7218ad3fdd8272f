"""Copying by shifting: after t loops the symbol t positions before, and then it is held."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.rasp.programs.answer_places import BEFORE
from loopinterp.tasks import Copy


def test_symbols_move_one_position_a_loop_until_they_are_where_they_belong():
    n = torch.tensor([4, 7, 7, 1])
    batch = Copy().sample(n, generator=torch.Generator().manual_seed(0))
    trace = get_program("copy").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        symbols = [min(token, 2) for token in tokens]
        length = int(n[row])
        for t in range(13):
            moved = min(t, length)
            assert (trace.variables["left"][t, row, : length + 1] == BEFORE).all()
            for pos in range(length + 1, len(symbols)):
                assert trace.variables["symbol"][t, row, pos] == symbols[pos - moved]
                assert trace.variables["left"][t, row, pos] == length - moved
