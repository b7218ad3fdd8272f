"""Evidence for a program on held-out inputs and interventions, and the claim it supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from loopinterp.comparison.program_runs import Prediction
from loopinterp.core.errors import InputError
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.text import ShortRepr
from loopinterp.interventions.engine import InterchangeRun
from loopinterp.interventions.pairs import balanced_pairs, drawn_pairs, repeated_pairs
from loopinterp.models import bind, device_of
from loopinterp.programs.paired_runs import numbered

if TYPE_CHECKING:
    from loopinterp.decompiler.interchange_runs import Runs
    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Task

CLEAN, END, TRAJECTORY = "undisturbed", "at the end", "whole trajectory"
INJECTED = "whole trajectory, planted"
REPEATED = "whole trajectory, two interchanges"
INTERCHANGED = (TRAJECTORY, INJECTED, REPEATED)

KINDS = {  # the kinds of evidence in words
    CLEAN: "clean answers",
    TRAJECTORY: "whole trajectories",
    INJECTED: "whole trajectories after injected states",
    REPEATED: "whole trajectories after two interchanges",
}

ENOUGH = 0.9
"""A program is given if every interval of its evidence begins at or above this.

The evidence is of clean answers and of whole trajectories, at each length.
"""


def held_out(
    runs: Runs, program: LoopProgram, number: int, generator: torch.Generator
) -> pd.DataFrame:
    """:func:`agreement` at one length, on three equal sets of interchanges.

    Sources have the base's loop; or any loop, with states rare in the program as frequent as common
    ones (*injected*); or a run has two interchanges.
    """
    model, batch, n_loops = runs.model, runs.batch, runs.n_loops
    # The other kinds draw as if they were the first, so that each depends on the seed alone.
    again = torch.Generator()
    again.set_state(generator.get_state())
    tables = [agreement(model, program, drawn_pairs(batch, n_loops, number, generator))]
    trace = program.trace(batch.inputs, n_loops=n_loops)
    # All variables after every loop, [variable, (loop, input, pos)].
    variables = torch.stack([x.flatten() for x in trace.variables.values()])
    # One number for each combination of the variables' values, [loop, input, pos].
    values = numbered(variables)[0].view(n_loops + 1, *batch.inputs.shape)
    others = {
        INJECTED: balanced_pairs(batch, values, number, again),
        REPEATED: repeated_pairs(batch, n_loops, number, again),
    }
    for kind, pairs in others.items():
        table = agreement(model, program, pairs)
        tables.append(table[table["what"] == TRAJECTORY].assign(what=kind))
    return pd.concat(tables, ignore_index=True)


def agreement(
    model: LoopedModel | Any, program: LoopProgram, pairs: InterchangePairs
) -> pd.DataFrame:
    """Shares of whole answers that the program predicts, with 95% intervals over inputs.

    Clean runs are scored after every loop; runs after effective interchanges one and two loops
    later, at the end, and at every loop (whole trajectories).

    Returns:
        Columns ``what``, ``agree``, ``of``, ``inputs``, ``value``, ``low``, ``high``.
    """
    run, prediction = InterchangeRun(model, pairs), Prediction(program, pairs)
    outputs, is_asked = prediction.trace.outputs, pairs.asked
    undecided = outputs < 0
    same = (outputs == run.natural.cpu()) | undecided | ~is_asked
    # At the end an answer must be given, and be the model's.
    same[-1] &= ~(undecided[-1] & is_asked)
    rows = [(CLEAN, same.all(-1).flatten(), torch.arange(same.shape[1]).repeat(len(same)))]

    clean, after, within = run.base.cpu(), run.interchange().cpu(), run.within.cpu()
    claims = prediction.claims(clean)
    counted = pairs.scored[:, None] & within[..., None]
    # [pair]: a counted answer of the model or of the program changes at some delay.
    effective = ((after != clean) & counted).any(-1).any(-1) | (claims.changes & within).any(-1)
    agree = claims.agree(after) | ~within  # [pair, delay]
    for delay, what in ((1, "1 loop later"), (2, "2 loops later")):
        if delay < within.shape[1]:
            chosen = effective & within[:, delay]
            rows.append((what, agree[chosen, delay], pairs.base[chosen]))
    last, base = agree[torch.arange(len(pairs)), pairs.horizon], pairs.base[effective]
    rows += [(END, last[effective], base), (TRAJECTORY, agree[effective].all(-1), base)]
    counts = pd.DataFrame(
        [(what, int(hits.sum()), len(hits), len(inputs.unique())) for what, hits, inputs in rows],
        columns=["what", "agree", "of", "inputs"],
    )
    return counts.assign(**dict(zip(("value", "low", "high"), estimates(counts).T)))


def estimates(counts: pd.DataFrame) -> np.ndarray:
    """Shares with 95% intervals over inputs [row, (value, low, high)]."""
    return wilson_estimate(counts["agree"], counts["of"], independent=counts["inputs"])


def judged_lengths(model: LoopedModel | Any, task: Task, read_at: Sequence[int]) -> list[int]:
    """Lengths at which a program is checked by default; see :func:`decompile`."""
    longest = max(read_at)
    near = {m for n in read_at for m in (max(n - 1, 2), n)}
    for n in range(longest * 3 // 2, longest, -1):
        inputs = task.sample(n, batch_size=1, generator=torch.Generator().manual_seed(0)).inputs
        try:
            bind(model, inputs.to(device_of(model)))
        except (InputError, IndexError):  # a table of positions ends before, ours or another's
            continue
        return sorted({*near, n})
    return sorted(near)


EXACT, NEARLY, NONE = "exact", "nearly", "none"


@dataclass(frozen=True)
class Claim(ShortRepr):
    """How far a program holds, and on which inputs that was checked.

    Attributes:
        grade: ``exact`` if every held-out run is as predicted, clean and after one or two
            interchanges of states of the same or another loop, all kinds tried at each length;
            ``nearly`` if a program is given otherwise; ``none`` if there is none.
        tried: Held-out effective interventions.
        otherwise: Those after which some answer is not as predicted.
        at_most: Upper end (95%, over inputs) of the share that deviates, for the worst kind and
            length; 1 if none was tried.
        lengths: Input lengths of the check.
        read_at: Input lengths of the recovery.
        transitions: Their number, if the state is a code and all that a run or an interchange can
            make were tried; an exact program then holds at any length.
    """

    grade: Literal["exact", "nearly", "none"]
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
        clean: Any = evidence[evidence["what"] == CLEAN]
        decisive: Any = pd.concat([clean, counts])
        tried = decisive[decisive["of"] > 0].groupby("n")["what"].agg(set)
        everything = {CLEAN, *INTERCHANGED}
        complete = all(everything <= tried.get(n, set()) for n in {*evidence["n"]})
        complete = (complete or transitions > 0) and (decisive["agree"] == decisive["of"]).all()
        counts = counts[counts["of"] > 0]
        low = estimates(counts)[:, 1]  # of each kind and length
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
        """The greatest length checked; 0 if none."""
        return max(self.lengths, default=0)

    def __str__(self) -> str:
        if self.grade == NONE:
            return "none"
        right, lengths = self.tried - self.otherwise, ", ".join(map(str, self.lengths))
        bound = f"at least {1 - self.at_most:.2%} at 95%" if self.tried else "none was tried"
        read = f"recovered at n = {', '.join(map(str, self.read_at))}; " if self.read_at else ""
        counts = (
            f"it predicts {right} of {self.tried} interchanges "
            f"({bound}; {read}checked at n = {lengths})"
        )
        if self.grade == NEARLY:
            return f"nearly: {counts}"
        if self.transitions:
            return f"exact at any length: all {self.transitions:,} transitions were tried; {counts}"
        longer = self.read_at and self.checked_to > max(self.read_at)
        no_longer = "" if longer or not self.read_at else "; no longer inputs were checked"
        return f"exact at length{'s' * (len(self.lengths) > 1)} {lengths}{no_longer}: {counts}"


@dataclass(frozen=True)
class Refusal(ShortRepr):
    """Why no program is given, as a code and the number that decided; ``str`` puts it into words.

    Attributes:
        value: A count or a share, as the words below say.
        line: The threshold, if any.
        kind, n: Kind and length of the evidence that is ``below-line``.
    """

    code: Literal[
        "many-tokens", "many-values", "many-cells", "reads-farther", "starts-differ",
        "inconsistent", "below-line", "nothing-to-check",
    ]  # fmt: skip
    value: float = 0.0
    line: float = 0.0
    kind: str = ""
    n: int = 0

    def __str__(self) -> str:
        kind = KINDS.get(self.kind, "")
        return _REFUSALS[self.code].format(value=self.value, line=self.line, kind=kind, n=self.n)


_REFUSALS = {
    "many-tokens": "the model reads {value:.0f} tokens, more than {line:.0f}",
    "many-values": "a token has {value:.0f} values, more than {line:.0f}",
    "many-cells": "{value:.0f} values are too many to try side by side",
    "reads-farther": "a step reads more than the left neighbour ({value:.1%} of positions)",
    "starts-differ": "one token starts with different values beside the same neighbour",
    "inconsistent": "equal experiments give different values ({value:.1%})",
    "below-line": "the share of {kind} predicted may be as low as {value:.1%} (length {n}); "
    "{line:.0%} is needed",
    "nothing-to-check": "no interchange changes an answer",
}


def below_line(evidence: pd.DataFrame) -> Refusal | None:
    low: Any = evidence["low"].dropna()
    if not (evidence.loc[low.index, "what"] != CLEAN).any():
        return Refusal("nothing-to-check")
    if low.min() >= ENOUGH:
        return None
    row = evidence.loc[low.idxmin()]
    return Refusal("below-line", float(row["low"]), ENOUGH, kind=row["what"], n=int(row["n"]))
