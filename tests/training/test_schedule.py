"""The learning rate over whole runs."""

from __future__ import annotations

import pytest

from loopinterp.training.config import OptimiserConfig
from loopinterp.training.schedule import learning_rate_factor


def run(optimiser: OptimiserConfig, n_steps: int, done_at: int | None = None) -> list[float]:
    return [
        learning_rate_factor(
            optimiser,
            step=step,
            n_steps=n_steps,
            curriculum_done_at=done_at if done_at is not None and step >= done_at else None,
        )
        for step in range(n_steps)
    ]


def test_linear_goes_up_stays_and_comes_down() -> None:
    factors = run(OptimiserConfig(warmup_steps=10, decay=0.2), 100)
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:81] == [1.0] * 72
    assert factors[90] == pytest.approx(0.5)
    assert 0 < factors[-1] < 0.06
    assert sorted(factors[80:], reverse=True) == factors[80:]


def test_no_warm_up_and_no_decay_is_constant() -> None:
    assert set(run(OptimiserConfig(warmup_steps=0, decay=0.0), 20)) == {1.0}
    assert set(run(OptimiserConfig(warmup_steps=0, schedule="constant"), 20)) == {1.0}


def test_cosine_waits_for_the_curriculum() -> None:
    factors = run(OptimiserConfig(warmup_steps=0, schedule="cosine"), 100, done_at=60)
    assert factors[:61] == [1.0] * 61
    assert factors[80] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.0, abs=0.01)


def test_cosine_stays_up_if_the_curriculum_never_ends() -> None:
    assert set(run(OptimiserConfig(warmup_steps=0, schedule="cosine"), 50)) == {1.0}


def test_warm_up_longer_than_the_run_is_no_error() -> None:
    factors = run(OptimiserConfig(warmup_steps=100, decay=0.0), 10)
    assert factors == pytest.approx([(k + 1) / 100 for k in range(10)])
