"""What is asked of every tool, and how a tool passes."""

from __future__ import annotations

from dataclasses import dataclass

from loopinterp.short_repr import ShortRepr


@dataclass(frozen=True, repr=False)
class Check(ShortRepr):
    """One question that has a known answer.

    Attributes:
        key: Short name.
        tool: The tool that is scored.
        question: What the number is.
        control: What the control beside it is.
        limit: The number that the score must reach.
        highest: Whether the limit is an upper one.
    """

    key: str
    tool: str
    question: str
    control: str
    limit: float
    highest: bool = False


@dataclass(frozen=True)
class Score:
    """The answer of one tool on one model; NaN where a model cannot be asked.

    Attributes:
        value: The score.
        control: Its control.
    """

    value: float
    control: float = float("nan")


CHECKS = (
    Check(
        "probe finds",
        "probes",
        "Accuracy of a linear probe for a variable on the state that holds it: the worst of all "
        "variables and loops.",
        "the same probe on the injected input alone, mean",
        0.999,
    ),
    Check(
        "probe finds nothing else",
        "probes",
        "Accuracy of a probe on the state without the variable's directions (and without those of "
        "distractors), less what the other contents of the state say about it: the largest excess.",
        "the largest excess with those directions in place",
        0.03,
        highest=True,
    ),
    Check(
        "interchange",
        "interchange interventions",
        "IIA of the right variable at the right loop: the worst of all variables and loops at "
        "which two inputs differ in a way that matters to an answer.",
        "the best of the three wrong exchanges below, over whole runs",
        1.0,
    ),
    Check(
        "interchange by probe",
        "interchange interventions",
        "IIA over whole runs of the subspace in which a probe finds the variable, over all "
        "variables and loops: what one would do without knowing the circuit.",
        "a change of equal norm in a random direction",
        0.95,
    ),
    Check(
        "wrong variable",
        "interchange interventions",
        "Agreement over whole runs when another variable is exchanged, where the program tells "
        "the two apart.",
        "no exchange at all",
        0.0,
        highest=True,
    ),
    Check(
        "wrong loop",
        "interchange interventions",
        "Agreement over whole runs when the variable is taken from another loop, where that has "
        "another value.",
        "no exchange at all",
        0.0,
        highest=True,
    ),
    Check(
        "random change",
        "interchange interventions",
        "Agreement over whole runs after a change of equal norm in a random direction.",
        "no exchange at all",
        0.5,
        highest=True,
    ),
    Check(
        "same value",
        "interchange interventions",
        "Share of whole runs that stay as they are when the donor has the same value of the "
        "variable, in another context.",
        "agreement after a random change",
        1.0,
    ),
    Check(
        "decodable, not used",
        "interchange interventions",
        "Share of answers that change when the directions of distractors are exchanged.",
        "accuracy of a probe for the variables in those directions, mean",
        0.0,
        highest=True,
    ),
    Check(
        "heads found",
        "heads against selectors",
        "Share of the heads that compute a selector and are said to compute that one.",
        "mean overlap of even attention with the selectors",
        1.0,
    ),
    Check(
        "no other head",
        "heads against selectors",
        "Heads that compute no selector, but are said to compute one that is not everything.",
        "heads that compute no selector",
        0.0,
        highest=True,
    ),
    Check(
        "patched states",
        "patching sweeps",
        "Share of (loop, position) at which patching the state recovers exactly as many answers "
        "as the program says.",
        "the same against what the program says of the loop before",
        1.0,
    ),
    Check(
        "patched heads",
        "patching sweeps",
        "Largest effect of a head that is not in the circuit, on any answer's logits.",
        "largest effect of a head that is",
        1e-3,
        highest=True,
    ),
    *(
        Check(
            f"ablated: {kind}",
            "ablation",
            "Share of the heads and MLPs of the block that are judged needed or idle as the "
            f"circuit says, where a part is {words}.",
            "the share that calling every part needed would judge right",
            1.0,
        )
        for kind, words in (
            ("zero", "set to zero"),
            ("mean", "set to its mean over the examples"),
            ("resample", "taken from another example"),
        )
    ),
    Check(
        "settling loop",
        "dynamics",
        "Share of tokens whose state settles in the loop in which the program's variables do.",
        "the share if all settled after the most common number of loops",
        1.0,
    ),
    Check(
        "answer stable",
        "dynamics",
        "Share of places whose answer is kept from the loop on from which the program's is.",
        "the share if all were kept from the most common loop on",
        1.0,
    ),
    Check(
        "stability",
        "dynamics",
        "Spectral radius of the Jacobian at the fixed point. Maps of finite values are flat "
        "around each: 0.",
        "1, from which on a fixed point is not stable",
        0.01,
        highest=True,
    ),
    Check(
        "wavefront",
        "carry study",
        "Share of (loop, chain length) at which the carry is as decodable as in the program.",
        "the same of a model with shuffled weights",
        0.95,
    ),
    Check(
        "verdict",
        "comparison of programs",
        "IIA over whole runs of the program that is run, if of all of its task it is the one "
        "named; else 0.",
        "IIA of the next program; nothing where the task has no other",
        0.95,
    ),
)
"""In the order in which tables show them."""

BY_KEY = {check.key: check for check in CHECKS}
