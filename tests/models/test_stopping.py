"""Stopping rules: what score each gives, against formulas written out in plain Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.models import (
    STOPPING_RULES,
    ConfidenceAbove,
    EntropyBelow,
    GateAbove,
    LoopView,
    run_rules,
    run_until,
)
from loopinterp.models.stopped_run import StoppingRule, score_loops
from loopinterp.models.stopping import (
    AccelerationBelow,
    AnswerHeld,
    Fixed,
    LengthLine,
    MaxConfidence,
    Oracle,
    ReadoutKL,
    ResidualBelow,
)
from tests.models.looped_toys import Halving, Scripted

RULES = [*STOPPING_RULES.values(), Fixed(3), LengthLine(1.0, 0.0), Oracle()]


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
        (lambda: Fixed(-1), "^n: .*-1"),
        (lambda: Fixed(True), "^n:"),
        (lambda: LengthLine(math.nan, 0.0), "^slope:"),
        (lambda: AccelerationBelow(0.0), "^tolerance:"),
        (lambda: AnswerHeld(0), "^hold:"),
        (lambda: MaxConfidence(min_loop=-2), "min_loop"),
        (lambda: MaxConfidence(min_loop=5).horizon(4, None), "max_loops.*>= 5"),
        (lambda: ResidualBelow(0.0), "^tolerance:"),
        (lambda: ResidualBelow(math.nan), "^tolerance:"),
        (lambda: ReadoutKL(-1.0), "^tolerance:"),
        (lambda: ReadoutKL(math.inf), "^tolerance:"),
        (lambda: Oracle().horizon(5, None), "^n_loops:"),
        (lambda: MaxConfidence().horizon(None, None), "^max_loops:"),
        (lambda: ResidualBelow(0.1).horizon(None, None), "max_loops"),
        (lambda: ReadoutKL(0.1).horizon(0, None), "max_loops"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_an_unknown_grouping_is_refused(no_type_checks: None) -> None:
    with pytest.raises(InputError, match=r"^per:"):
        MaxConfidence(per="token")  # type: ignore[arg-type]


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
    assert stopped.loop.tolist() == [3] * 4  # the first loop with two accelerations


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
        answers = [logits[t, row].argmax(-1)[mask[row]].tolist() for t in range(16)]
        stops_at = [
            t for t in range(hold, 16) if all(answers[t - k] == answers[t] for k in range(hold + 1))
        ]
        assert stopped.loop[row] == (stops_at[0] if stops_at else 15)
        assert stopped.fired[row] == bool(stops_at)


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
    loops = stops(logits, EntropyBelow(tolerance))
    p = logits.double().softmax(-1).tolist()
    for row in range(6):
        scored = [k for k in range(2) if MASK[row, k]]
        worst = [
            max(-sum(q * math.log(q) for q in p[t][row][k]) for k in scored) for t in range(12)
        ]
        assert loops[row] == next((t for t in range(12) if worst[t] <= tolerance), 11)


@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.99])
def test_confidence_is_at_least_the_threshold_everywhere(
    threshold: float, generator: torch.Generator
) -> None:
    logits = logits_of(generator)
    loops = stops(logits, ConfidenceAbove(threshold))
    p = logits.double().softmax(-1).tolist()
    for row in range(6):
        scored = [k for k in range(2) if MASK[row, k]]
        least = [min(max(p[t][row][k]) for k in scored) for t in range(12)]
        assert loops[row] == next((t for t in range(12) if least[t] >= threshold), 11)


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

    loops = stops(torch.zeros(12, 6, 2, 3), GateAbove(gate, threshold, cumulated=True))
    for row in range(6):
        stopped = []
        for k in (k for k in range(2) if MASK[row, k]):
            going, by_then = 1.0, [0.0]
            for t in range(1, 12):
                going *= 1 - float(share[t, row, k])
                by_then.append(1 - going)
            stopped.append(by_then)
        ready = [t for t in range(1, 12) if min(each[t] for each in stopped) >= threshold]
        assert loops[row] == min(ready, default=11)


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
    with pytest.raises(InputError, match=r"^gate:"):
        run_until(Halving(), torch.zeros(1, 1, 2), rule, max_loops=2)


@pytest.mark.parametrize("value", [-0.1, 1.1, 12.0])
def test_a_gate_that_gives_no_probability_is_refused(value: float) -> None:
    rule = GateAbove(lambda h: torch.full(h.shape[:2], value))  # logits, for instance
    with pytest.raises(InputError) as caught:
        run_until(Halving(), torch.zeros(2, 3, 2), rule, max_loops=2)
    assert caught.value.what == "gate"


@pytest.mark.parametrize("cumulated", [False, True])
def test_a_gate_has_no_say_before_the_first_loop(cumulated: bool) -> None:
    rule = GateAbove(lambda h: torch.ones(h.shape[:2]), 0.5, cumulated=cumulated)  # always open
    assert run_until(Halving(), torch.zeros(2, 3, 2), rule, max_loops=4).loop.tolist() == [1, 1]


def test_a_gate_need_not_have_a_hash() -> None:
    class Gate:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, h: torch.Tensor) -> torch.Tensor:
            return 0 * h[..., 0] + 0.4

    rule = GateAbove(Gate(), 0.7, cumulated=True)  # stopped by then: .4, .64, .784
    assert run_until(Halving(), torch.zeros(2, 3, 2), rule, max_loops=4).loop.tolist() == [3, 3]


class Rising:
    """States that rise by ``speed`` a loop from 1, or alternate by it, in a dtype."""

    def __init__(self, speed: float, dtype: torch.dtype, *, returns: bool = False) -> None:
        self.speed, self.dtype, self.returns = speed, dtype, returns

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ones(*inputs.shape, 4, dtype=self.dtype)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e.clone()

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        up = h + self.speed
        return torch.where(h > e, e, up) if self.returns else up

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.tensor([0, 10, 20, 30]).to(h)


MOVEMENT_RULES = (ResidualBelow(1e-6), ReadoutKL(1e-12), AccelerationBelow(1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_flicker_of_one_rounding_stops_and_a_drift_of_one_does_not(dtype: torch.dtype) -> None:
    rule = ResidualBelow(1e-6)
    eps, x = torch.finfo(dtype).eps, torch.zeros(2, 3, dtype=torch.int64)
    flicker = run_until(Rising(eps, dtype, returns=True), x, rule, max_loops=30)
    drift = run_until(Rising(eps, dtype), x, rule, max_loops=30)
    # Eight loops are needed to know that the state leads nowhere.
    assert flicker.fired.all() and (flicker.loop == 8).all()
    assert not drift.fired.any()
    # The same states in float32 are movement.
    assert not run_until(
        Rising(eps, torch.float32, returns=True), x, rule, max_loops=30
    ).fired.any()


def test_all_rules_of_movement_know_rounding() -> None:
    """At the ninth state, where 8 loops are known, each scores 0; before, each its own measure."""
    dtype, x = torch.bfloat16, torch.zeros(1, 2, dtype=torch.int64)
    eps = torch.finfo(dtype).eps
    model = Rising(eps, dtype, returns=True)
    for rule in MOVEMENT_RULES:
        (scores,) = score_loops(model, x, [rule], max_loops=12)
        assert (scores[8:] == 0).all() and (scores[3:8] > 0).all(), rule
    (residual,) = score_loops(model, x, [MOVEMENT_RULES[0]], max_loops=7)
    assert residual[1:, 0].tolist() == pytest.approx([eps] * 7, rel=2 * eps)
