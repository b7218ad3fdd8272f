"""Stopping rules: what score each gives, against formulas written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models.settling_rules import (
    AccelerationBelow,
    AnswerHeld,
    ReadoutKL,
    ResidualBelow,
)
from loopinterp.models.stopping_rules import (
    Fixed,
    LengthLine,
    LoopView,
    MaxConfidence,
    Oracle,
    StoppingRule,
)

RULES = [
    Fixed(3),
    LengthLine(1.0, 0.0),
    Oracle(),
    MaxConfidence(),
    ResidualBelow(0.03),
    ReadoutKL(5e-4),
    AccelerationBelow(0.03),
    AnswerHeld(2),
]
ONLINE = [rule for rule in RULES if rule.tolerance is not None]


def view(
    state: torch.Tensor,
    *,
    loop: int = 1,
    mask: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    n_loops: torch.Tensor | None = None,
) -> LoopView:
    """A view whose readout is the state itself."""
    mask = torch.ones(state.shape[:2], dtype=torch.bool) if mask is None else mask
    before = None
    if previous is not None:
        before = LoopView(loop - 1, previous, mask, n_loops, lambda h: h, None)
    return LoopView(loop, state, mask, n_loops, lambda h: h, before)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_rule_meets_the_protocol(rule: StoppingRule) -> None:
    assert isinstance(rule, StoppingRule)
    n_loops = torch.tensor([4, 6])
    assert isinstance(rule.horizon(9, n_loops), int)
    seen = view(torch.randn(2, 3, 4), previous=torch.randn(2, 3, 4), n_loops=n_loops)
    assert rule.score(seen).shape == (2,)


def test_only_maximum_confidence_looks_back() -> None:
    assert {type(rule) for rule in RULES} - {type(rule) for rule in ONLINE} == {MaxConfidence}


def test_fixed_and_oracle_count_the_loops_left() -> None:
    seen = view(torch.zeros(2, 1, 1), loop=4, n_loops=torch.tensor([4, 7]))
    assert Fixed(6).score(seen).tolist() == [2.0, 2.0]
    assert Oracle().score(seen).tolist() == [0.0, 3.0]


def test_a_line_counts_the_positions_of_the_input() -> None:
    rule = LengthLine(2.0, -3.0)
    assert [rule.loops(n) for n in (1, 2, 10)] == [0, 1, 17]
    assert rule.score(view(torch.zeros(2, 10, 1), loop=4)).tolist() == [13.0, 13.0]


def test_residual_is_the_worst_scored_position() -> None:
    previous = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [5.0, 0.0]]])
    state = torch.tensor([[[3.0, 5.0], [0.0, 2.0], [50.0, 0.0]]])
    mask = torch.tensor([[True, True, False]])
    score = ResidualBelow(0.1).score(view(state, previous=previous, mask=mask))
    assert score.item() == pytest.approx(max(1 / math.sqrt(34), 1 / 2))


def test_a_state_that_stays_zero_has_settled() -> None:
    zero = torch.zeros(1, 2, 3)
    assert ResidualBelow(0.1).score(view(zero, previous=zero)).tolist() == [0.0]
    assert ResidualBelow(0.1).score(view(zero, previous=zero + 1)).tolist() == [math.inf]


def test_readout_kl_is_the_worst_scored_position() -> None:
    now = [[0.5, 0.5], [0.9, 0.1], [0.99, 0.01]]
    before = [[0.6, 0.4], [0.8, 0.2], [0.01, 0.99]]
    mask = torch.tensor([[True, True, False]])
    expected = max(
        sum(p * math.log(p / q) for p, q in zip(a, b)) for a, b in zip(now[:2], before[:2])
    )
    logits, previous = (torch.tensor([rows]).log() + 3.0 for rows in (now, before))
    score = ReadoutKL(0.1).score(view(logits, previous=previous, mask=mask))
    assert score.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "rule", [ResidualBelow(0.1), ReadoutKL(0.1)], ids=lambda r: type(r).__name__
)
def test_nothing_has_settled_before_the_first_loop(rule: StoppingRule) -> None:
    assert rule.score(view(torch.randn(2, 3, 4), loop=0)).tolist() == [math.inf, math.inf]


def test_confidence_is_the_mean_cross_entropy_against_its_own_argmax() -> None:
    probabilities = [[[0.7, 0.3], [0.1, 0.9]], [[0.5, 0.5], [0.2, 0.8]]]
    mask = torch.tensor([[True, True], [True, False]])
    logits = torch.tensor(probabilities).log()
    each = [-(math.log(0.7) + math.log(0.9)) / 2, -math.log(0.5)]
    score = MaxConfidence(per="sample").score(view(logits, mask=mask))
    assert score.tolist() == pytest.approx(each, rel=1e-5)
    # The batch's mean weighs positions, not examples.
    pooled = -(math.log(0.7) + math.log(0.9) + math.log(0.5)) / 3
    score = MaxConfidence(per="batch").score(view(logits, mask=mask))
    assert score.tolist() == pytest.approx([pooled, pooled], rel=1e-5)


def test_confidence_equals_pytorchs_cross_entropy(generator: torch.Generator) -> None:
    logits = torch.randn(5, 7, 11, generator=generator) * 4
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), logits.argmax(-1).flatten(), reduction="none"
    )
    score = MaxConfidence().score(view(logits))
    torch.testing.assert_close(score, expected.view(5, 7).mean(-1))


def test_confidence_does_not_look_before_its_window() -> None:
    logits = torch.randn(2, 3, 4)
    rule = MaxConfidence(min_loop=3)
    assert rule.score(view(logits, loop=2)).tolist() == [math.inf, math.inf]
    assert rule.score(view(logits, loop=3)).isfinite().all()


def test_confidence_in_half_precision_is_reckoned_in_float32() -> None:
    logits = torch.tensor([[[9.0, 0.0]]], dtype=torch.bfloat16)
    score = MaxConfidence().score(view(logits))
    assert score.dtype == torch.float32
    assert score.item() == pytest.approx(math.log1p(math.exp(-9)), rel=1e-3)


def test_horizons() -> None:
    n_loops = torch.tensor([4, 7])
    assert Fixed(6).horizon(None, None) == 6
    assert Fixed(6).horizon(4, None) == 4
    assert Oracle().horizon(None, n_loops) == 7
    assert Oracle().horizon(5, n_loops) == 5
    assert MaxConfidence().horizon(12, None) == 12
    assert ResidualBelow(0.1).horizon(12, None) == 12
    assert ReadoutKL(0.1).horizon(12, None) == 12


def test_a_view_forgets_all_but_the_loop_before() -> None:
    first = view(torch.zeros(1, 1, 1), loop=0)
    third = first.next(first.state + 1).next(first.state + 2).next(first.state + 3)
    assert third.loop == 3
    assert third.previous is not None and third.previous.state.item() == 2
    assert third.previous.previous is None


def test_a_selected_view_keeps_what_was_read() -> None:
    reads = []

    def read(h: torch.Tensor) -> torch.Tensor:
        reads.append(h.shape[0])
        return h * 2

    mask = torch.ones(3, 1, dtype=torch.bool)
    seen = LoopView(0, torch.arange(3.0).view(3, 1, 1), mask, torch.arange(3), read, None)
    assert seen.logits.flatten().tolist() == [0, 2, 4]
    chosen = seen.select(torch.tensor([True, False, True]))
    assert chosen.logits.flatten().tolist() == [0, 4]
    assert chosen.n_loops is not None and chosen.n_loops.tolist() == [0, 2]
    assert reads == [3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(-1), r"Fixed\(n\): expected an integer >= 0, got -1"),
        (lambda: Fixed(True), "expected an integer"),
        (lambda: LengthLine(math.nan, 0.0), r"LengthLine\(slope\)"),
        (lambda: AccelerationBelow(0.0), "a number > 0"),
        (lambda: AnswerHeld(0), "expected an integer >= 1"),
        (lambda: MaxConfidence(min_loop=-2), "min_loop"),
        (lambda: MaxConfidence(min_loop=5).horizon(4, None), "max_loops.*>= 5"),
        (lambda: ResidualBelow(0.0), "a number > 0"),
        (lambda: ResidualBelow(math.nan), "a number > 0"),
        (lambda: ReadoutKL(-1.0), "a number > 0"),
        (lambda: ReadoutKL(math.inf), "a number > 0"),
        (lambda: Oracle().horizon(5, None), "Pass n_loops=batch.n_loops"),
        (lambda: MaxConfidence().horizon(None, None), "max_loops: expected an integer >= 1"),
        (lambda: ResidualBelow(0.1).horizon(None, None), "max_loops"),
        (lambda: ReadoutKL(0.1).horizon(0, None), "max_loops"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_an_unknown_grouping_is_refused(no_type_checks: None) -> None:
    with pytest.raises(InputError, match="one of batch, sample, got 'token'"):
        MaxConfidence(per="token")  # type: ignore[arg-type]
