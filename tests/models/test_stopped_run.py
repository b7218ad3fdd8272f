"""The driver: where examples stop, what is handed back, and who still computes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.models.stopped_run import StoppingRule, run_rules, run_until, score_loops
from loopinterp.models.stopping import (
    STOPPING_RULES,
    AccelerationBelow,
    AnswerHeld,
    Fixed,
    MaxConfidence,
    Oracle,
    ReadoutKL,
    ResidualBelow,
)
from tests.models.looped_toys import Halving, Scripted

INPUTS = torch.tensor([1.5, 2.0, 9.0, -3.0]).view(4, 1, 1).expand(4, 3, 2).contiguous()


def first_below(scores: list[float], tolerance: float, last: int) -> tuple[int, bool]:
    for loop, score in enumerate(scores):
        if score <= tolerance:
            return loop, True
    return last, False


def test_fixed_is_n_steps() -> None:
    stopped = run_until(Halving(), INPUTS, Fixed(5))
    assert stopped.loop.tolist() == [5] * 4 and stopped.fired.all()
    torch.testing.assert_close(stopped.state, Halving().states(INPUTS, 5)[5])
    torch.testing.assert_close(stopped.logits, stopped.state)


def test_no_loops_at_all_is_the_initial_state() -> None:
    stopped = run_until(Halving(), INPUTS, Fixed(0))
    assert stopped.fired.all() and (stopped.state == 1).all()


def test_the_oracle_stops_each_example_at_its_own_loop() -> None:
    model = Halving()
    n_loops = torch.tensor([3, 1, 4, 1])
    stopped = run_until(model, INPUTS, Oracle(), n_loops=n_loops)
    assert stopped.loop.tolist() == [3, 1, 4, 1] and stopped.fired.all()
    states = model.states(INPUTS, 4)
    for row, loop in enumerate(n_loops.tolist()):
        torch.testing.assert_close(stopped.state[row], states[loop, row])
    assert model.rows == [4, 2, 2, 1]  # examples that stopped leave the computation


def test_a_limit_cuts_the_oracle_short_and_says_so() -> None:
    stopped = run_until(
        Halving(), INPUTS, Oracle(), n_loops=torch.tensor([3, 1, 4, 1]), max_loops=2
    )
    assert stopped.loop.tolist() == [2, 1, 2, 1]
    assert stopped.fired.tolist() == [False, True, False, True]
    torch.testing.assert_close(stopped.state[0], Halving().states(INPUTS, 2)[2, 0])


@pytest.mark.parametrize("tolerance", [0.3, 0.03, 1e-3])
def test_residual_stops_where_the_formula_says(tolerance: float) -> None:
    model, last = Halving(rate=0.3), 20
    stopped = run_until(model, INPUTS, ResidualBelow(tolerance), max_loops=last)
    for row, e in enumerate([1.5, 2.0, 9.0, -3.0]):
        h = [e + (1 - e) * 0.7**t for t in range(last + 1)]
        residuals = [math.inf] + [abs(b - a) / abs(b) for a, b in itertools.pairwise(h)]
        loop, fired = first_below(residuals, tolerance, last)
        assert (stopped.loop[row].item(), stopped.fired[row].item()) == (loop, fired)
        assert stopped.state[row].flatten().tolist() == pytest.approx([h[loop]] * 6, rel=1e-5)
        assert stopped.scores[: loop + 1, row].tolist() == pytest.approx(
            residuals[: loop + 1], rel=1e-3
        )
        assert stopped.scores[loop + 1 :, row].isnan().all()


def test_readout_kl_stops_where_plain_python_says(generator: torch.Generator) -> None:
    logits = torch.randn(9, 6, 2, 3, generator=generator)
    # Example i freezes from loop i + 1 on: its divergence is then exactly zero.
    for row in range(6):
        logits[row + 1 :, row] = logits[row + 1, row]
    stopped = run_until(Scripted(logits), torch.zeros(6, 2), ReadoutKL(1e-6), max_loops=8)
    assert stopped.loop.tolist() == [row + 2 for row in range(6)]
    for row in range(6):
        torch.testing.assert_close(stopped.logits[row], logits[row + 2, row])


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_maximum_confidence_is_the_argmin_over_the_whole_trajectory(
    per, generator: torch.Generator
) -> None:
    logits = torch.randn(8, 5, 4, 3, generator=generator) * 3
    mask = torch.rand(5, 4, generator=generator) < 0.6
    mask[:, 0] = True
    rule = MaxConfidence(per=per, min_loop=2)
    stopped = run_until(Scripted(logits), torch.zeros(5, 4), rule, max_loops=6, mask=mask)
    doubt = -logits.log_softmax(-1).amax(-1)  # [loop, batch, pos]
    if per == "sample":
        expected = [
            min(range(2, 7), key=lambda t: doubt[t, row][mask[row]].mean().item())
            for row in range(5)
        ]
    else:
        expected = [min(range(2, 7), key=lambda t: doubt[t][mask].mean().item())] * 5
    assert stopped.loop.tolist() == expected and stopped.fired.all()
    for row, loop in enumerate(expected):
        torch.testing.assert_close(stopped.logits[row], logits[loop, row])
        assert stopped.state[row, 0, 0] == loop
    assert stopped.scores[:2].isinf().all() and stopped.scores[2:].isfinite().all()


def test_of_equally_sure_loops_the_earliest_is_taken() -> None:
    logits = torch.zeros(5, 1, 1, 2)
    logits[2:4, 0, 0, 1] = 4.0
    stopped = run_until(Scripted(logits), torch.zeros(1, 1), MaxConfidence(), max_loops=4)
    assert stopped.loop.tolist() == [2]


def test_maximum_confidence_can_be_confidently_wrong_early() -> None:
    logits = torch.zeros(4, 1, 1, 2)
    logits[1, 0, 0, 0], logits[3, 0, 0, 1] = 9.0, 5.0
    stopped = run_until(Scripted(logits), torch.zeros(1, 1), MaxConfidence(), max_loops=3)
    assert stopped.loop.tolist() == [1]  # the rule follows confidence, not correctness


@pytest.mark.parametrize("rule", [MaxConfidence(), ReadoutKL(0.1), ResidualBelow(0.1)])
def test_what_is_not_a_number_never_fires_and_is_no_answer(rule) -> None:
    logits = torch.full((4, 2, 1, 2), math.nan)
    model = Scripted(logits)
    model.step = lambda h, e: h * torch.tensor([math.nan, 1.0]) + torch.tensor([math.nan, 0])
    model.readout = lambda h: torch.full((h.shape[0], 1, 2), math.nan)
    assert run_rules(model, torch.zeros(2, 1), [rule], max_loops=3).tolist() == [[3, 3]]
    with pytest.raises(InputError) as refused:
        run_until(model, torch.zeros(2, 1), rule, max_loops=3)
    assert str([0, 1]) in refused.value.given


def test_nan_on_the_way_to_an_answer_is_none_of_it() -> None:
    logits = torch.zeros(4, 1, 1, 2)
    logits[1] = math.nan
    logits[3, 0, 0, 1] = 5.0
    stopped = run_until(Scripted(logits), torch.zeros(1, 1), MaxConfidence(), max_loops=3)
    assert stopped.loop.tolist() == [3] and stopped.logits.tolist() == [[[0.0, 5.0]]]


def test_the_readout_is_left_alone_until_a_rule_or_the_answer_needs_it() -> None:
    model = Scripted(torch.randn(7, 3, 2, 2))
    run_until(model, torch.zeros(3, 2), Oracle(), n_loops=torch.tensor([2, 6, 2]))
    assert model.reads == [2, 1]


def test_no_gradients_are_kept() -> None:
    stopped = run_until(Halving(), INPUTS.clone().requires_grad_(), Fixed(2))
    assert not stopped.logits.requires_grad


@given(
    targets=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    rate=st.floats(0.05, 0.95),
    exponent=st.integers(1, 4),
)
@settings(max_examples=15, deadline=None)
def test_a_batch_equals_its_examples_one_by_one(
    targets: list[float], rate: float, exponent: int
) -> None:
    inputs = torch.tensor(targets).view(-1, 1, 1).expand(-1, 2, 3).contiguous()
    for rule in (ResidualBelow(10.0**-exponent), ReadoutKL(10.0**-exponent), MaxConfidence()):
        joint = run_until(Halving(rate), inputs, rule, max_loops=12)
        for row in range(len(targets)):
            single = run_until(Halving(rate), inputs[row : row + 1], rule, max_loops=12)
            assert joint.loop[row] == single.loop[0] and joint.fired[row] == single.fired[0]
            torch.testing.assert_close(joint.state[row], single.state[0])


@given(exponents=st.tuples(st.floats(0.5, 4), st.floats(0.5, 4)))
@settings(max_examples=30, deadline=None)
def test_a_tighter_tolerance_never_stops_earlier(exponents: tuple[float, float]) -> None:
    loose, tight = (10**-x for x in sorted(exponents))
    for rule in (ResidualBelow, ReadoutKL):
        early = run_until(Halving(), INPUTS, rule(loose), max_loops=15)
        late = run_until(Halving(), INPUTS, rule(tight), max_loops=15)
        assert (late.loop >= early.loop).all()


def test_positions_outside_the_mask_have_no_say(generator: torch.Generator) -> None:
    mask = torch.tensor([[True, True, False]]).expand(4, 3)
    other = INPUTS.clone()
    other[:, 2] = torch.randn(4, 2, generator=generator) * 100
    for rule in (ResidualBelow(0.01), ReadoutKL(1e-3), MaxConfidence(), MaxConfidence(per="batch")):
        a = run_until(Halving(), INPUTS, rule, max_loops=15, mask=mask)
        b = run_until(Halving(), other, rule, max_loops=15, mask=mask)
        assert torch.equal(a.loop, b.loop)
        torch.testing.assert_close(a.state[:, :2], b.state[:, :2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loops": -1}, "^max_loops:"),
        ({"mask": torch.ones(4, 3)}, "^mask:"),
        ({"mask": torch.ones(4, 2, dtype=torch.bool)}, r"\[4, 3\]"),
        ({"mask": torch.zeros(4, 3, dtype=torch.bool)}, "^mask:"),
        ({"n_loops": torch.ones(4)}, "^n_loops:"),
        ({"n_loops": torch.ones(3, dtype=torch.long)}, "^n_loops:"),
        ({"n_loops": torch.tensor([1, 2, 3, -1])}, "^n_loops: .*-1"),
    ],
)
def test_input_that_does_not_fit_is_refused(options, message: str, no_type_checks: None) -> None:
    with pytest.raises(InputError, match=message):
        run_until(Halving(), INPUTS, Fixed(2), **options)


def test_a_rule_without_an_end_needs_a_limit() -> None:
    for rule in (ResidualBelow(0.1), ReadoutKL(0.1), MaxConfidence()):
        with pytest.raises(InputError, match="max_loops"):
            run_until(Halving(), INPUTS, rule)
    with pytest.raises(InputError, match="n_loops"):
        run_until(Halving(), INPUTS, Oracle())


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_rules_run_together_stop_where_each_does_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(11, 5, 3, 2, generator=generator)
    logits[6:, :2] = logits[6, :2]
    model, inputs = Scripted(logits), torch.zeros(5, 3)
    n_loops = torch.tensor([3, 1, 9, 9, 4])
    rules = [Fixed(4), Oracle(), MaxConfidence(), MaxConfidence(per="batch", min_loop=3)]
    rules += [ReadoutKL(0.3), ResidualBelow(0.2), AccelerationBelow(0.1), AnswerHeld(2)]
    mask = torch.rand(5, 3, generator=generator) < 0.5
    mask[:, 1] = True
    options = {"max_loops": 10, "mask": mask, "n_loops": n_loops}
    joint = run_rules(model, inputs, rules, **options)
    for rule, loops in zip(rules, joint):
        assert loops.tolist() == run_until(model, inputs, rule, **options).loop.tolist(), rule


def test_no_rules_are_refused() -> None:
    with pytest.raises(InputError, match=r"^rules:"):
        run_rules(Halving(), INPUTS, [], max_loops=3)


@pytest.mark.parametrize("rule", [r for r in STOPPING_RULES.values() if r.tolerance is not None])
def test_a_token_scores_as_if_it_alone_counted(rule: StoppingRule) -> None:
    """The oracle is a mask of one position."""
    model = Halving()
    inputs = 3 * torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    (by_token,) = score_loops(model, inputs, [rule], max_loops=6, per_token=True)
    assert by_token.shape == (7, 4, 3)
    for pos in range(3):
        mask = torch.zeros(4, 3, dtype=torch.bool)
        mask[:, pos] = True
        (alone,) = score_loops(model, inputs, [rule], max_loops=6, mask=mask)
        torch.testing.assert_close(by_token[:, :, pos], alone, equal_nan=True)
