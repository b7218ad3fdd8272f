"""What is claimed of a program that was read off a model, by its evidence and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from loopinterp.circuits.decompiler.held_out import PLANTED, TRAJECTORY, UNDISTURBED
from loopinterp.intervals import wilson_estimate
from loopinterp.short_repr import ShortRepr

EXACT, NEARLY, NONE = "exact", "nearly", "none"


@dataclass(frozen=True)
class Claim(ShortRepr):
    """How much is said of a program.

    Attributes:
        grade: ``exact`` where all that was held out went as the program says, undisturbed and after
            exchanges of states of the same and of any other loop, all three tried at each length;
            ``nearly`` where a program is given all the same; ``none`` where there is none.
        tried: Exchanges that were held out and change an answer of the model or of the program.
        otherwise: After how many of them some answer is not as the program says.
        at_most: Upper end, at 95%, of the share of such exchanges that go otherwise, of the kind
            and length of which this is most; NaN where none was tried.
        lengths: Of the inputs.
    """

    grade: str
    tried: int = 0
    otherwise: int = 0
    at_most: float = float("nan")
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, evidence: pd.DataFrame, *, given: bool) -> Claim:
        """The strongest claim that all of the evidence supports.

        Args:
            evidence: Of a program, with the columns of
                :attr:`~loopinterp.circuits.decompiler.decompilation.Decompiled.evidence`.
            given: Whether a program is given at all.

        Example:
            >>> import pandas as pd
            >>> rows = [(5, "undisturbed", 90, 90), (5, "whole trajectory", 400, 400)]
            >>> seen = pd.DataFrame(rows, columns=["n", "what", "agree", "of"])
            >>> Claim.of(seen, given=True).grade  # states of other loops were not tried
            'nearly'
            >>> more = pd.concat([seen, seen[1:].assign(what="whole trajectory, planted")])
            >>> print(Claim.of(more, given=True))
            exact: all of 800 exchanges go as it says (at least 99.05% do, at 95%; n = 5)
        """
        if not given or not len(evidence):
            return cls(NONE)
        counts: Any = evidence[evidence["what"].isin([TRAJECTORY, PLANTED])]
        alone: Any = evidence[evidence["what"] == UNDISTURBED]
        asked: Any = pd.concat([alone, counts])
        tried = asked[asked["of"] > 0].groupby("n")["what"].agg(set)
        everything = {UNDISTURBED, TRAJECTORY, PLANTED}
        complete = all(everything <= tried.get(n, set()) for n in {*evidence["n"]})
        complete = complete and (asked["agree"] == asked["of"]).all()
        counts = counts[counts["of"] > 0]
        low = wilson_estimate(counts["agree"], counts["of"])[..., 1]
        return cls(
            grade=EXACT if complete else NEARLY,
            tried=int(counts["of"].sum()),
            otherwise=int((counts["of"] - counts["agree"]).sum()),
            at_most=float(1 - low.min()) if len(low) else float("nan"),
            lengths=tuple(sorted({*map(int, evidence["n"])})),
        )

    def __str__(self) -> str:
        """In a sentence."""
        if self.grade == NONE:
            return "none"
        lengths = f"n = {', '.join(map(str, self.lengths))}"
        least = f"at least {1 - self.at_most:.2%} do, at 95%" if self.tried else "none was tried"
        surely = f"{least}; {lengths}"
        if self.grade == EXACT:
            return f"exact: all of {self.tried} exchanges go as it says ({surely})"
        right = self.tried - self.otherwise
        return f"nearly: {right} of {self.tried} exchanges go as it says ({surely})"
