"""Rules of settling that look further back than one loop, against plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from loopinterp.models.settling_rules import AccelerationBelow, AnswerHeld
from loopinterp.models.stopped_run import run_until
from tests.models.looped_toys import Halving, Scripted

ENDS = [1.5, 2.0, 9.0, -3.0]
INPUTS = torch.tensor(ENDS).view(4, 1, 1).expand(4, 3, 2).contiguous()


@pytest.mark.parametrize("tolerance", [0.3, 0.03, 1e-3])
def test_acceleration_wants_two_hits_in_a_row(tolerance: float) -> None:
    stopped = run_until(Halving(rate=0.3), INPUTS, AccelerationBelow(tolerance), max_loops=25)
    for row, e in enumerate(ENDS):
        h = [e + (1 - e) * 0.7**t for t in range(26)]
        d = [math.nan] + [b - a for a, b in itertools.pairwise(h)]
        hit = [False, False] + [abs(d[t] - d[t - 1]) / abs(h[t]) <= tolerance for t in range(2, 26)]
        assert stopped.loop[row] == next(t for t in range(3, 26) if hit[t] and hit[t - 1])
        assert stopped.fired[row]


def test_a_steady_drift_has_no_acceleration() -> None:
    model = Halving()
    model.step = lambda h, e: h + 1.0
    stopped = run_until(model, INPUTS, AccelerationBelow(1e-4), max_loops=9)
    assert stopped.loop.tolist() == [3] * 4, "the first loop with two accelerations"


def test_one_hit_is_not_enough(generator: torch.Generator) -> None:
    model = Halving()
    # Updates 1, 1, 3, 3, 3: one hit at loop 2, two in a row at loops 4 and 5.
    path = [1.0, 2.0, 3.0, 6.0, 9.0, 12.0]
    states = dict(itertools.pairwise(path))
    model.step = lambda h, e: torch.full_like(h, states[h[0, 0, 0].item()])
    stopped = run_until(model, INPUTS, AccelerationBelow(1e-4), max_loops=5)
    assert stopped.loop.tolist() == [5] * 4 and stopped.fired.all()


@pytest.mark.parametrize("hold", [1, 2, 4])
def test_an_answer_is_held_where_plain_python_says(hold: int, generator: torch.Generator) -> None:
    logits = torch.randn(16, 6, 2, 2, generator=generator)
    mask = torch.tensor([[True, False], [True, True]]).repeat(3, 1)
    stopped = run_until(
        Scripted(logits), torch.zeros(6, 2), AnswerHeld(hold), max_loops=15, mask=mask
    )
    for row in range(6):
        said = [logits[t, row].argmax(-1)[mask[row]].tolist() for t in range(16)]
        held = [t for t in range(hold, 16) if all(said[t - k] == said[t] for k in range(hold + 1))]
        assert stopped.loop[row] == (held[0] if held else 15)
        assert stopped.fired[row] == bool(held)
