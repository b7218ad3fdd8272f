"""Decimal addition: after t loops, the carry of the last t places."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import IGNORE, AbacusAddition
from loopinterp.tasks.abacus_addition import ALPHABET

TASK, PROGRAM = AbacusAddition(), get_program("abacus_ripple")


def test_a_carry_counts_the_places_that_a_loop_has_let_it_see():
    g = torch.Generator().manual_seed(0)
    batch = TASK.sample(7, batch_size=40, generator=g, distribution="chain")
    trace = PROGRAM.trace(batch.inputs, n_loops=9)
    for row, tokens in enumerate(batch.inputs.tolist()):
        text = "".join(ALPHABET[t] for t in tokens)
        a, b = (x[::-1] for x in text.split("=")[0].split("+"))
        for t in range(10):
            for place in range(8):
                last = slice(7 - place, 7 - max(place - t, 0))
                seen = (int(x[last] or 0) for x in (a, b))
                carry = sum(seen) >= 10 ** min(t, place)
                assert trace.variables["carry"][t, row, text.index("=") + place] == (
                    carry and place > 0 and t > 0
                )


def test_a_wrong_sum_in_the_input_changes_no_prediction():
    batch = TASK.sample(6, batch_size=100, generator=torch.Generator().manual_seed(0))
    answered = (batch.inputs == 13).cumsum(dim=1).bool() & (batch.inputs < 10)
    wrong = torch.where(answered, (batch.inputs + 3) % 10, batch.inputs)
    outputs = PROGRAM.trace(wrong, n_loops=6).outputs[-1]
    assert ((outputs == batch.targets) | (batch.targets == IGNORE)).all()


def test_the_sum_can_be_written_token_by_token():
    for a, b in [(95, 8), (999, 1), (0, 0), (12, 34)]:
        tokens = [ALPHABET.index(c) for c in f"{str(a)[::-1]}+{str(b)[::-1]}="]
        while tokens[-1] != ALPHABET.index("$"):
            outputs = PROGRAM.trace(torch.tensor([tokens]), n_loops=4).outputs
            tokens.append(int(outputs[-1, 0, -1]))
        text = "".join(ALPHABET[t] for t in tokens)
        assert text.split("=")[1] == str(a + b)[::-1] + "$"
