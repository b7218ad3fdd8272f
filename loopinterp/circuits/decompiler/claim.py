"""What a decompilation claims, as codes with their values: how far a program holds, or why none is.

:mod:`~loopinterp.circuits.decompiler.decompilation_study_views` puts them into words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from loopinterp.circuits.decompiler.held_out import (
    PLANTED,
    REPEATED,
    TRAJECTORY,
    UNDISTURBED,
    estimates,
)
from loopinterp.short_repr import ShortRepr

Grade = Literal["exact", "nearly", "none"]
EXACT, NEARLY, NONE = "exact", "nearly", "none"
INTERCHANGED = (TRAJECTORY, PLANTED, REPEATED)
"""The evidence of whole runs after interchanges."""


@dataclass(frozen=True)
class Claim(ShortRepr):
    """How far a program holds, and on which inputs that was checked.

    Attributes:
        grade: ``exact`` where every held-out run went as the program says, clean and after
            interchanges of states of the same and of any other loop, one or two in a run, all of
            these tried at each length. That speaks of inputs of :attr:`lengths` and of no others.
            ``nearly`` where a program is given all the same; ``none`` where there is
            none.
        tried: Held-out interchanges that change an answer of the model or of the program.
        otherwise: After how many of them some answer is not as the program says.
        at_most: Upper end, at 95% over inputs, of the share of such interchanges that go otherwise,
            of the kind and length of which this is most; 1 where none was tried.
        lengths: Of the inputs that it was checked on.
        read_at: Of those that it was read off.
        transitions: Where the state between loops is a code: all transitions that a run can make,
            from the start or from any states that are put in. Each was tried, so that an exact
            program is the model's at any length. 0 where they were not all tried.
    """

    grade: Grade
    tried: int = 0
    otherwise: int = 0
    at_most: float = 1.0
    lengths: tuple[int, ...] = ()
    read_at: tuple[int, ...] = ()
    transitions: int = 0

    @classmethod
    def of(
        cls,
        evidence: pd.DataFrame,
        *,
        given: bool,
        read_at: tuple[int, ...] = (),
        transitions: int = 0,
    ) -> Claim:
        """The strongest claim that all of the evidence supports.

        Args:
            evidence: Of a program, with the columns of
                :attr:`~loopinterp.circuits.decompiler.decompilation.Decompiled.evidence`.
            given: Whether a program is given at all.
            read_at: Lengths that it was read off.
            transitions: All that a run can make, if each was tried.

        Example:
            >>> import pandas as pd
            >>> rows = [(5, "undisturbed", 90, 90, 30), (5, "whole trajectory", 400, 400, 80)]
            >>> seen = pd.DataFrame(rows, columns=["n", "what", "agree", "of", "inputs"])
            >>> Claim.of(seen, given=True).grade  # states of other loops were not tried
            'nearly'
            >>> more = [seen[1:].assign(what=f"whole trajectory, {kind}")
            ...         for kind in ("planted", "two interchanges")]
            >>> claim = Claim.of(pd.concat([seen, *more]), given=True)
            >>> claim.grade, claim.checked_to, claim.tried, round(claim.at_most, 3)
            ('exact', 5, 1200, 0.046)
        """
        if not given or not len(evidence):
            return cls(NONE)
        counts: Any = evidence[evidence["what"].isin(INTERCHANGED)]
        alone: Any = evidence[evidence["what"] == UNDISTURBED]
        asked: Any = pd.concat([alone, counts])
        tried = asked[asked["of"] > 0].groupby("n")["what"].agg(set)
        everything = {UNDISTURBED, *INTERCHANGED}
        complete = all(everything <= tried.get(n, set()) for n in {*evidence["n"]})
        complete = (complete or transitions > 0) and (asked["agree"] == asked["of"]).all()
        counts = counts[counts["of"] > 0]
        low = estimates(counts)[:, 1]
        return cls(
            grade=EXACT if complete else NEARLY,
            tried=int(counts["of"].sum()),
            otherwise=int((counts["of"] - counts["agree"]).sum()),
            at_most=float(1 - low.min()) if len(low) else 1.0,
            lengths=tuple(sorted({*map(int, evidence["n"])})),
            read_at=tuple(read_at),
            transitions=transitions,
        )

    @property
    def checked_to(self) -> int:
        """The greatest length that was checked; 0 where none was."""
        return max(self.lengths, default=0)

    def __str__(self) -> str:
        """In a sentence."""
        return claim_in_words(self)


RefusalCode = Literal[
    "many-tokens",
    "many-values",
    "many-cells",
    "reads-farther",
    "starts-differ",
    "inconsistent",
    "below-line",
    "nothing-to-check",
]


@dataclass(frozen=True)
class Refusal(ShortRepr):
    """Why no program is given.

    Attributes:
        code: ``many-tokens`` (the model reads ``value`` of them, more than are tried),
            ``many-values`` (more than ``value`` of one token), ``many-cells`` (``value`` pairs of
            them), ``reads-farther`` (share of places whose step reads more than the left
            neighbour), ``starts-differ`` (tokens whose positions start with different values beside
            the same left neighbour), ``inconsistent`` (share of experiments that differ from most
            of their kind), ``below-line`` (low end of ``kind`` at length ``n``),
            ``nothing-to-check`` (no interchange changes an answer).
        value: The number that decided.
        line: What it is held against, if anything.
        kind: Of ``below-line``, which kind of evidence.
        n: Of ``below-line``, the length.
    """

    code: RefusalCode
    value: float = 0.0
    line: float = 0.0
    kind: str = ""
    n: int = 0

    def __str__(self) -> str:
        """As a clause."""
        return refusal_in_words(self)


_KINDS = {
    UNDISTURBED: "clean answers",
    TRAJECTORY: "whole trajectories",
    PLANTED: "whole trajectories after planted states",
    REPEATED: "whole trajectories after two interchanges",
}


def claim_in_words(claim: Claim) -> str:
    """What is claimed, on which lengths, with the bound."""
    if claim.grade == NONE:
        return "none"
    right, to = claim.tried - claim.otherwise, f"n = {', '.join(map(str, claim.lengths))}"
    bound = f"at least {1 - claim.at_most:.2%} do, at 95%" if claim.tried else "none was tried"
    read = f"read at n = {', '.join(map(str, claim.read_at))}; " if claim.read_at else ""
    said = f"{right} of {claim.tried} interchanges go as it says ({bound}; {read}checked at {to})"
    if claim.grade == NEARLY:
        return f"nearly: {said}"
    if claim.transitions:
        return f"exact at any length: all {claim.transitions:,} transitions were tried; {said}"
    longer = claim.read_at and claim.checked_to > max(claim.read_at)
    unseen = "" if longer or not claim.read_at else "; no longer inputs than it was read at"
    at = ", ".join(map(str, claim.lengths))
    return f"exact at length{'s' * (len(claim.lengths) > 1)} {at}{unseen}: {said}"


def refusal_in_words(refusal: Refusal) -> str:
    """Why no program is given, as a clause."""
    value, line = refusal.value, refusal.line
    match refusal.code:
        case "many-tokens":
            return f"{value:.0f} tokens, more than {line:.0f}"
        case "many-values":
            return f"a token has {value:.0f} values, more than {line:.0f}"
        case "many-cells":
            return f"{value:.0f} values, too many to try them side by side"
        case "reads-farther":
            return f"a step reads more than the left neighbour (in {value:.1%} of places)"
        case "starts-differ":
            return "positions of one token start with different values beside the same neighbour"
        case "inconsistent":
            return f"the same experiment gives different values ({value:.1%})"
        case "below-line":
            of = _KINDS[refusal.kind]
            return f"the low end of {of} is {value:.1%} at length {refusal.n}, below {line:.0%}"
        case "nothing-to-check":
            return "no interchange changes an answer"
