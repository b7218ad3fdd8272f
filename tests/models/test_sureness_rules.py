"""Rules of sureness against plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import ConfidenceAbove, EntropyBelow, GateAbove, run_rules, run_until
from loopinterp.models.stopping_rules import StoppingRule
from tests.models.looped_toys import Halving, Scripted

MASK = torch.tensor([[True, False], [True, True]]).repeat(3, 1)


def logits_of(generator: torch.Generator) -> torch.Tensor:
    return 3 * torch.randn(12, 6, 2, 3, generator=generator)


def stops(logits: torch.Tensor, rule: StoppingRule) -> list[int]:
    scripted = Scripted(logits)
    stopped = run_until(scripted, torch.zeros(6, 2), rule, max_loops=11, mask=MASK)
    several = run_rules(scripted, torch.zeros(6, 2), [rule], max_loops=11, mask=MASK)
    assert torch.equal(several[0], stopped.loop)
    return stopped.loop.tolist()


@pytest.mark.parametrize("tolerance", [0.05, 0.4, 0.9])
def test_entropy_is_at_most_the_tolerance_everywhere(
    tolerance: float, generator: torch.Generator
) -> None:
    logits = logits_of(generator)
    found = stops(logits, EntropyBelow(tolerance))
    p = logits.double().softmax(-1).tolist()
    for row in range(6):
        asked = [k for k in range(2) if MASK[row, k]]
        worst = [max(-sum(q * math.log(q) for q in p[t][row][k]) for k in asked) for t in range(12)]
        assert found[row] == next((t for t in range(12) if worst[t] <= tolerance), 11)


@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.99])
def test_confidence_is_at_least_the_threshold_everywhere(
    threshold: float, generator: torch.Generator
) -> None:
    logits = logits_of(generator)
    found = stops(logits, ConfidenceAbove(threshold))
    p = logits.double().softmax(-1).tolist()
    for row in range(6):
        asked = [k for k in range(2) if MASK[row, k]]
        least = [min(max(p[t][row][k]) for k in asked) for t in range(12)]
        assert found[row] == next((t for t in range(12) if least[t] >= threshold), 11)


@pytest.mark.parametrize("per_example", [False, True])
def test_a_gate_is_asked_of_the_state(per_example: bool) -> None:
    """h_t = 1 - 2^-t for e = 0 counts down from 1; the gate is open where it is small."""
    inputs = torch.zeros(2, 3, 2)

    def gate(h: torch.Tensor) -> torch.Tensor:
        return 1 - (h[:, 0, 0] if per_example else h[..., 0])

    stopped = run_until(Halving(), inputs, GateAbove(gate, 0.9), max_loops=9)
    assert stopped.loop.tolist() == [4, 4]  # 1 - 1/16 is the first above 0.9
    assert stopped.fired.all()


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.95])
def test_a_cumulated_gate_counts_the_loops_before(
    threshold: float, generator: torch.Generator
) -> None:
    share = torch.rand(12, 6, 2, generator=generator) * 0.9

    def gate(h: torch.Tensor) -> torch.Tensor:
        return share[h[:, 0, 0].long(), h[:, 0, 1].long()]

    found = stops(torch.zeros(12, 6, 2, 3), GateAbove(gate, threshold, cumulated=True))
    for row in range(6):
        stopped = []
        for k in (k for k in range(2) if MASK[row, k]):
            going, by_then = 1.0, [0.0]
            for t in range(1, 12):
                going *= 1 - float(share[t, row, k])
                by_then.append(1 - going)
            stopped.append(by_then)
        ready = [t for t in range(1, 12) if min(each[t] for each in stopped) >= threshold]
        assert found[row] == min(ready, default=11)


def test_sureness_close_to_one_is_not_rounded_away() -> None:
    logits = torch.tensor([0.0, 12.0, 14.0])[:, None, None, None] * torch.tensor([1.0, 0.0])
    rule = ConfidenceAbove(1 - 2e-6)
    scripted = Scripted(logits.expand(3, 1, 1, 2))
    assert run_until(scripted, torch.zeros(1, 1), rule, max_loops=2).loop.tolist() == [2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EntropyBelow(0.0),
        lambda: EntropyBelow(math.nan),
        lambda: ConfidenceAbove(1.0),
        lambda: ConfidenceAbove(0.0),
        lambda: GateAbove(torch.sigmoid, 1.5),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def test_a_rule_without_an_end_takes_one_from_the_caller() -> None:
    for rule in (EntropyBelow(0.1), ConfidenceAbove(0.9), GateAbove(torch.sigmoid)):
        with pytest.raises(InputError, match="max_loops"):
            run_until(Halving(), torch.zeros(1, 1, 2), rule)


def test_a_gate_of_another_shape_is_refused() -> None:
    rule = GateAbove(torch.sigmoid)
    with pytest.raises(InputError, match=r"gate: expected a probability for each place \[1, 1\]"):
        run_until(Halving(), torch.zeros(1, 1, 2), rule, max_loops=2)


@pytest.mark.parametrize("cumulated", [False, True])
def test_a_gate_has_no_say_before_the_first_loop(cumulated: bool) -> None:
    rule = GateAbove(lambda h: h[..., 0] + 2, 0.5, cumulated=cumulated)  # always open
    assert run_until(Halving(), torch.zeros(2, 3, 2), rule, max_loops=4).loop.tolist() == [1, 1]


def test_a_gate_need_not_have_a_hash() -> None:
    class Gate:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, h: torch.Tensor) -> torch.Tensor:
            return 0 * h[..., 0] + 0.4

    rule = GateAbove(Gate(), 0.7, cumulated=True)  # stopped by then: .4, .64, .784
    assert run_until(Halving(), torch.zeros(2, 3, 2), rule, max_loops=4).loop.tolist() == [3, 3]
