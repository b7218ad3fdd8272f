"""Which program is it: the rule that names a winner, or says "none of these"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loopinterp.circuits.intervals import Intervals
from loopinterp.results import percent

NONE = "none of these"
THRESHOLD = 0.9
FLOOR = 0.5


@dataclass(frozen=True)
class Verdict:
    """What a comparison concludes.

    Attributes:
        winner: The program that is named, or :data:`NONE`.
        nearest: The program with the highest score, named or not, among those that beat their
            control (among all if none does).
        score: Its interchange intervention accuracy one loop after the swap.
        low: Lower end of its interval.
        high: Upper end.
        rival: The other program with the highest score ("" if there is no other).
        rival_score: Its score.
        rival_low: Lower end of its interval.
        rival_high: Upper end.
        weakest_place: Where, relative to the front, the nearest program agrees least.
        weakest_score: How often it agrees there.
        reasons: Why no winner is named; empty if one is.
    """

    winner: str
    nearest: str
    score: float
    low: float
    high: float
    rival: str
    rival_score: float
    rival_low: float
    rival_high: float
    weakest_place: str
    weakest_score: float
    reasons: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether a winner is named."""
        return self.winner != NONE


def decide(
    programs: list[str],
    scores: Intervals,
    by_place: np.ndarray,
    places: list[str],
    *,
    control: Intervals,
    solved: float = 1.0,
    threshold: float = THRESHOLD,
    floor: float = FLOOR,
) -> Verdict:
    """Name the program with the highest score, if the evidence is enough.

    It is named if

    - the lower end of its interval reaches ``threshold``;
    - that lies above the upper end of every rival's interval;
    - that lies above the upper end of its own control's interval: a program that says that a
      swap changes nothing agrees with any model on which swaps do nothing, and so with random
      directions as well;
    - there is no place relative to the front where it agrees less often than ``floor``, which a
      mean over places could hide;
    - the model solves the task, as every rival does.

    Args:
        programs: Names of the rivals.
        scores: One score for each, with its interval.
        by_place: Agreement [program, place]; NaN where there are no pairs.
        places: Names of the places.
        control: Score of each program where random directions are swapped.
        solved: Fraction of inputs that the model answers right after all loops.
        threshold: Least lower end of a winner's interval.
        floor: Least agreement of a winner at any place.

    Example:
        >>> s = Intervals(np.array([0.97, 0.4]), np.array([0.94, 0.35]), np.array([0.99, 0.45]))
        >>> by_place, nothing = np.array([[1, 0.94], [0.8, 0]]), Intervals(*np.zeros((3, 2)))
        >>> decide(["latched", "plain"], s, by_place, ["ahead", "at"], control=nothing).winner
        'latched'
    """
    beats_control = scores.low > control.high
    best = int(np.lexsort((-scores.value, ~beats_control))[0])
    order = np.argsort(-scores.value, kind="stable")
    others = [int(p) for p in order if p != best]
    next_best = others[0] if others else None
    weak = int(np.nanargmin(by_place[best]))
    reasons = []
    if scores.low[best] < threshold:
        reasons.append(
            f"its interval reaches down to {percent(scores.low[best])}, below {percent(threshold)}"
        )
    highest = max((scores.high[p] for p in others), default=0.0)
    if scores.low[best] <= highest:
        close = [programs[p] for p in others if scores.high[p] >= scores.low[best]]
        reasons.append(f"its interval overlaps that of {' and '.join(map(plain, close))}")
    if not beats_control[best]:
        reasons.append(f"random directions do as well ({percent(control.value[best])})")
    if by_place[best, weak] < floor:
        reasons.append(
            f"it agrees in only {percent(by_place[best, weak])} of pairs {in_words(places[weak])}"
        )
    if solved < floor:
        reasons.append(f"the model answers only {percent(solved)} of inputs right")
    return Verdict(
        winner=NONE if reasons else programs[best],
        nearest=programs[best],
        score=float(scores.value[best]),
        low=float(scores.low[best]),
        high=float(scores.high[best]),
        rival="" if next_best is None else programs[next_best],
        rival_score=float("nan") if next_best is None else float(scores.value[next_best]),
        rival_low=float("nan") if next_best is None else float(scores.low[next_best]),
        rival_high=float("nan") if next_best is None else float(scores.high[next_best]),
        weakest_place=places[weak],
        weakest_score=float(by_place[best, weak]),
        reasons=tuple(reasons),
    )


def in_words(place: str) -> str:
    """A place relative to the front, in a sentence.

    Example:
        >>> in_words("at"), in_words("ahead")
        ('at the front', 'ahead of the front')
    """
    words = {
        "ahead": "ahead of the front",
        "at": "at the front",
        "one behind": "one position behind the front",
        "two or more behind": "two or more positions behind the front",
        "planted ahead": "with a resolved state planted ahead of the front",
        "erased behind": "with an unresolved state put behind the front",
    }
    return words.get(place, place)


def plain(program: str) -> str:
    """A program's name in words.

    Example:
        >>> plain("latched_chain")
        'latched chain'
    """
    return program.replace("_", " ")
