from __future__ import annotations

import numpy as np
import pytest

from loopinterp.circuits.intervals import Intervals
from loopinterp.circuits.verdict import NONE, decide, in_words, plain

PLACES = ["ahead", "at"]


def scores(*triples: tuple[float, float, float]) -> Intervals:
    low, value, high = np.array(triples).T
    return Intervals(value, low, high)


NOTHING = scores((0, 0.1, 0.2), (0, 0.1, 0.2))
WEAK = np.array([[1, 0.3], [0, 0]])
FINE = np.array([[0.97, 0.97], [0.4, 0.4]])


def test_a_clear_winner_is_named():
    found = decide(
        ["a", "b"],
        scores((0.94, 0.97, 0.99), (0.3, 0.4, 0.5)),
        FINE,
        PLACES,
        control=NOTHING,
    )
    assert found.named
    assert (found.winner, found.rival) == ("a", "b")
    assert found.reasons == ()


@pytest.mark.parametrize(
    ("best", "rival", "by_place", "control", "solved", "reason"),
    [
        ((0.88, 0.93, 0.96), (0.3, 0.4, 0.5), FINE, 0.1, 1.0, "below 90%"),
        ((0.94, 0.97, 0.99), (0.91, 0.93, 0.95), FINE, 0.1, 1.0, "overlaps"),
        ((0.94, 0.97, 0.99), (0.3, 0.4, 0.5), FINE, 0.95, 1.0, "random directions"),
        (
            (0.94, 0.97, 0.99),
            (0.3, 0.4, 0.5),
            WEAK,
            0.1,
            1.0,
            "at the front",
        ),
        ((0.94, 0.97, 0.99), (0.3, 0.4, 0.5), FINE, 0.1, 0.2, "20% of inputs right"),
    ],
)
def test_each_condition_alone_withholds_the_name(best, rival, by_place, control, solved, reason):
    found = decide(
        ["a", "b"],
        scores(best, rival),
        by_place,
        PLACES,
        control=scores((control,) * 3, (control,) * 3),
        solved=solved,
    )
    assert found.winner == NONE
    assert found.nearest == "a"
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]


def test_the_nearest_is_the_highest_whatever_the_order_of_programs():
    found = decide(
        ["a", "b"],
        scores((0.3, 0.4, 0.5), (0.5, 0.6, 0.7)),
        np.array([[0.4, 0.4], [0.9, 0.3]]),
        PLACES,
        control=NOTHING,
    )
    assert (found.nearest, found.rival) == ("b", "a")
    assert (found.weakest_place, found.weakest_score) == ("at", 0.3)


def test_a_program_alone_needs_no_rival():
    found = decide(
        ["a"], scores((0.94, 0.97, 0.99)), FINE[:1], PLACES, control=scores((0, 0.1, 0.2))
    )
    assert found.winner == "a"
    assert found.rival == ""


def test_words():
    assert plain("latched_chain") == "latched chain"
    assert in_words("two or more behind") == "two or more positions behind the front"
