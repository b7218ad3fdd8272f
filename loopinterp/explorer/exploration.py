"""A few examples, with all that is shown of them at each loop and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loopinterp.results import Result

NOT_SAID = -32768
"""In place of a variable's value that an answer leaves open, and outside an example."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Exploration(Result, kind="exploration"):
    """What :func:`explore` returns.

    It is of a model, or of a program, which has answers and variables alone; an answer of -1 is
    then one that it leaves open.

    Examples may be of several lengths: beyond ``n_pos`` positions and ``n_loops`` loops of an
    example, answers and targets are -1, numbers NaN and attention 0. Loop 0 is the initial state;
    attention at loop t is that by which the state after t loops was made, and 0 at loop 0.

    Arrays:
        row: Its row in the batch that it was chosen from.
        n_pos: Positions of each example.
        n_loops: Loops that are shown of it.
        asked_after: The loop after which it is asked.
        target: The right class; -1 where nothing is asked.
        answer: The classes that the reading finds likeliest, likeliest first.
        probability: Theirs.
        entropy: Entropy of the reading in bits.
        moved: Relative residual of the loop that leads there, ``|h_t - h_{t-1}| / |h_t|``.
        plane: The state in the plane that is shown.
        inner_answer: Where the block has several layers, the likeliest class if the loop ended
            after each of them but the last; -1 at loop 0.
        inner_probability: Its probability.
        key: The positions that a head looks at most, most first.
        attention: How much.
        variable: What each variable of each program is, of one that solves the task.
        implied: The value with which the program would answer as the model does here;
            :data:`NOT_SAID` where none, or more than one, is.

    Attributes:
        asks: What the task asks, in a sentence.
        by_hand: How the first example is done by hand, in sentences ("" if nobody says).
        reasons: Why each example was chosen, in a few words.
        details: The same in a sentence.
        said: Each example in words ("" where the task has none).
        tokens: What stands at each position of each example.
        n_classes: Classes of the readout.
        symbols: A word for each class that is shown, by its number.
        axes: What the two axes of the plane are, where there is one.
        missing: What the model cannot give, and why, as a clause.
        n_examples: Examples among which these were chosen.
        lens: What answers are read through: "coda", the model's own readout, "logit", "tuned" or
            "jacobian".
        of_other_weights: Whether the lens was fitted on other weights than those that it reads.
    """

    VARIABLES: ClassVar = {
        **dict.fromkeys(("row", "n_pos", "n_loops", "asked_after"), "example"),
        "target": "example pos",
        **dict.fromkeys(("answer", "probability"), "example loop pos rank"),
        **dict.fromkeys(("entropy", "moved"), "example loop pos"),
        "plane": "example loop pos axis",
        **dict.fromkeys(("inner_answer", "inner_probability"), "example loop inner pos"),
        **dict.fromkeys(("key", "attention"), "example loop layer head pos nth"),
        **dict.fromkeys(("variable", "implied"), "name example loop pos"),
    }
    OPTIONAL: ClassVar = frozenset(
        {"probability", "entropy", "moved", "plane", "inner_answer", "inner_probability"}
        | {"key", "attention", "variable", "implied"}
    )

    asks: str
    by_hand: str
    reasons: list[str]
    details: list[str]
    said: list[str]
    tokens: list[list[str]]
    n_classes: int
    symbols: dict[str, str]
    axes: list[str]
    missing: dict[str, str]
    n_examples: int
    lens: str = "coda"
    of_other_weights: bool = False
