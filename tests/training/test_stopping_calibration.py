"""The line of loops against length that is learned from training lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import Addition
from loopinterp.training import calibrate_stopping, evaluate
from loopinterp.training.stopping_calibration import best_line
from tests.training.test_evaluation import Ripple


@given(slope=st.integers(0, 2), offset=st.integers(1, 4), hold=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_known_line_is_found(slope: int, offset: int, hold: bool) -> None:
    positions = [4, 7, 9, 10]
    wanted = [slope * n + offset for n in positions]
    exact = np.zeros((4, 30))
    for row, loop in zip(exact, wanted):
        row[loop : None if hold else loop + 1] = 1.0
    line = best_line(exact, positions)
    # An answer that is held is read two loops later, where one loop fewer does no harm.
    assert [line.loops(n) for n in positions] == [loop + 2 * hold for loop in wanted]
    assert line.loops(40) == 40 * slope + offset + 2 * hold


def test_the_rule_goes_on_past_the_lengths_that_it_was_learned_on() -> None:
    """Ripple needs n - 1 loops for the longest chain, far fewer for random digits."""
    line = calibrate_stopping(Ripple(), Addition(), [3, 4, 5, 6], n_samples=30)
    assert line.slope == 1.0
    result = evaluate(Ripple(), Addition(), [40], n_samples=20, stopping={"learned": line})
    stopped = result.data["stopped_exact_match"].sel(rule="learned", estimate="value")
    assert (stopped == 1).all()


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([4], {}, "lengths: expected at least two"),
        ([0, 4], {}, "expected an integer >= 1"),
        ([3, 4], {"n_samples": 0}, "n_samples"),
        ([3, 4], {"max_loops": 0}, "max_loops"),
        ([3, 4], {"distributions": ["chains"]}, "Did you mean 'chain'"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(lengths, options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrate_stopping(Ripple(), Addition(), lengths, **options)
