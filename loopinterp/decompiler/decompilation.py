"""From a looped model to its program with the evidence, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch.nn.functional import pad

from loopinterp.core.boundary import checked
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.decompiler.evidence import (
    CLEAN,
    INJECTED,
    INTERCHANGED,
    KINDS,
    TRAJECTORY,
    Claim,
    Refusal,
    below_line,
    held_out,
    judged_lengths,
)
from loopinterp.decompiler.exact_reading import (
    CodeTable,
    SameProgram,
    is_finite,
    read_code,
    with_first_guess,
)
from loopinterp.decompiler.interchange_runs import (
    InterchangeTrajectories,
    Runs,
    depends_elsewhere,
    unexplained_steps,
)
from loopinterp.decompiler.program_writing import program_of
from loopinterp.decompiler.region_refinement import against_counterexamples, refine
from loopinterp.decompiler.sharp_values import Experiments, TokenValues, spread_out
from loopinterp.decompiler.transition_table import EDGE
from loopinterp.models import device_of
from loopinterp.models.iteration import need_repeatable
from loopinterp.models.protocol import need_model, need_one_map
from loopinterp.models.study_examples import loops_at
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks.sampling import as_batch

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.decompiler.transition_table import TransitionTable
    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Task

Length = Annotated[int, Field(ge=2)]
Lengths = Annotated[Sequence[Length], Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]

READ_AT = (5, 6)  # lengths at which a program is recovered by default

MOST_TOKENS = 12  # with more, pairs of cells are too many to be tried


@dataclass(frozen=True, eq=False)
class Decompiled(ShortRepr):
    """The result of :func:`decompile`.

    Attributes:
        program: The program; None if there is a refusal.
        closest: The closest program; None if no table could be made.
        automaton: Its transition table, with equivalent values merged.
        tolerance: Share of contexts in which states of one value may behave differently.
        consistency: Share of experiments that agree with the majority of their kind.
        evidence: Of ``closest``, on held-out inputs and interchanges: columns ``n``, ``what``,
            ``agree``, ``of``, ``inputs``, ``value``, ``low``, ``high`` (95%, over inputs).
        unexplained: Of regions: the transitions at which runs leave ``automaton``
            (:func:`~loopinterp.decompiler.interchange_runs.unexplained_steps`).
        read_at: Lengths that it was recovered at.
        table: Of a model with a state code: all transitions, before merging.
        same_as: The registered program that ``automaton`` equals up to its first guess, if all
            transitions are known.
    """

    program: LoopProgram | None
    refusal: Refusal | None = None
    closest: LoopProgram | None = None
    automaton: TransitionTable | None = field(default=None, repr=False)
    tolerance: float = 0.0
    consistency: float = 0.0
    evidence: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)
    unexplained: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)
    read_at: tuple[int, ...] = ()
    table: CodeTable | None = field(default=None, repr=False)
    same_as: SameProgram | None = field(default=None, repr=False)

    @property
    def reason(self) -> str:
        """The refusal as a clause; "" if there is none."""
        return "" if self.refusal is None else str(self.refusal)

    @property
    def claim(self) -> Claim:
        """The strongest claim about ``program`` that the evidence supports."""
        return Claim.of(
            self.evidence,
            given=self.program is not None,
            read_at=self.read_at,
            transitions=self.table.transitions if self.table and self.table.sure else 0,
        )

    def _shown(self) -> list[tuple[str, object]]:
        name = "None" if self.program is None else self.program.name
        about = {"claim": self.claim.grade, "reason": self.reason, "tolerance": self.tolerance}
        return [("program", name), *about.items()]

    def __str__(self) -> str:
        """The program as code, or the refusal and the closest one, and the evidence."""
        lines = [] if self.program else [f"not decompiled: {self.reason}"]
        if self.closest is not None:
            lines += [] if self.program else ["closest program:"]
            lines.append(str(self.closest))
            lines += [f"claim: {self.claim}"] if self.program else []
            lines.append("evidence")
        lines += [
            f"  n = {row['n']}, {KINDS.get(row['what'], row['what'])}: "
            f"{row['agree']} of {row['of']} (on {row['inputs']} inputs)"
            for row in self.evidence.to_dict("records")
        ]
        return "\n".join(lines)


@checked
def decompile(
    model: LoopedModel | Any,
    task: Task,
    *,
    n: Length | Lengths = READ_AT,
    lengths: Lengths | None = None,
    farther: Sequence[Length] = (),
    tolerances: Annotated[Sequence[Share], Field(min_length=1)] = (0.0, 0.05, 0.2),
    contexts: Annotated[int, Field(ge=4)] = 24,
    tries: Annotated[int, Field(ge=2)] = 4,
    most_values: Annotated[int, Field(ge=2)] = 12,
    examples: Annotated[int, Field(ge=8)] = 48,
    sharp: bool = True,
    n_exchanges: Annotated[int, Field(ge=100)] = 6000,
    across_loops: bool = False,
    seed: Seed = 0,
) -> Decompiled:
    """Recover a model's program from its states, by running interventions.

    The program is assumed to be a cellular automaton: each position has one of a few values for its
    token, and a loop computes the next one from the tokens and values of the position and its left
    neighbour. It is learnt in three steps:

    1. States of a token with the same answers in every context are one value. States of every pair
       of neighbours are combined, one loop is run, and the new states are classified.
    2. The smallest such transition table is written as a program.
    3. Held-out inputs and interchanges decide the claim.

    A program is given only if the reading at each length holds at all lengths.

    With ``sharp=False``, for trained models, values are regions of the state space, split wherever
    a run after an interchange leaves the table. If the state between loops is a code of bits
    (``state_code``), all transitions are tried, and the table is compared exactly with the
    registered programs.

    Args:
        model: A looped model with at most :data:`MOST_TOKENS` tokens.
        n: Input lengths at which the program is recovered.
        lengths: Input lengths of the evidence. By default each n, n - 1, and a longer one: 3n / 2
            for the greatest n, or the greatest below it that the model takes.
        farther: Further lengths of the evidence, which do not decide whether a program is given.
        tolerances: Shares of contexts in which states of one value may behave differently, tried in
            turn until one gives a program.
        contexts: Contexts that define a state's behaviour.
        tries: Experiments for each pair of neighbours.
        most_values: Most values of a token.
        examples: Inputs of each distribution of the task.
        n_exchanges: Interchanges from which regions are learnt; half as many decide their number.
        across_loops: Learn half of the regions from states of another loop, which the program must
            then predict too.

    Raises:
        InputError: If T(n) of the task is not linear in n.

    Source: automaton learning by queries (Angluin 1987) with interchange interventions (arXiv
        2106.02997) as queries.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.programs import get_program
        >>> from loopinterp.tasks import get_task
        >>> compiled = compile_program(get_program("prefix_xor"), max_length=7)
        >>> print(decompile(compiled.model, get_task("prefix_sum")).program.step["value"])
        shift_right(var('value'), 1, default=0) ^ tok_map(tokens, {1: 1}, default=0, name='bit_of')
    """
    need_model(model)
    need_one_map(model)
    read_at = sorted({n} if isinstance(n, int) else {*n})
    one = as_batch(task, n=read_at[0], batch_size=1, device=device_of(model))
    need_repeatable(model, one.inputs)
    reader = _Reader(
        model,
        task,
        read_at,
        examples=examples,
        contexts=contexts,
        tries=tries,
        most_values=most_values,
        n_exchanges=n_exchanges,
        seed=seed,
        judged_at=sorted({*(lengths or judged_lengths(model, task, read_at))}),
        farther=sorted({*farther}),
        across_loops=across_loops,
    )
    if sharp and is_finite(model):
        return reader.read_exactly()
    n_tokens = len(reader.runs.tokens)
    if n_tokens > MOST_TOKENS:
        refusal = Refusal("many-tokens", n_tokens, MOST_TOKENS)
        return Decompiled(None, refusal, tolerance=min(tolerances))
    if not sharp:
        return reader.read_regions()
    readers = [replace(reader, lengths=[length]) for length in read_at]
    attempts = []
    for tolerance in sorted(tolerances):
        # The reading at the last length, or at the first one that gives no program.
        for one_length in readers:
            attempt = one_length.read_values(tolerance)
            if attempt.program is None:
                break
        attempts.append(attempt)
        # No other tolerance makes a step read less.
        if attempt.refusal is None or attempt.refusal.code == "reads-farther":
            break
    best = max(attempts, key=reader.score)
    return best if best.program is None else replace(best, read_at=tuple(read_at))


@dataclass(frozen=True, eq=False)
class _Reader:
    """One model, with the lengths that it is read at and those that readings are judged on."""

    model: Any
    task: Task
    lengths: Sequence[int]
    examples: int
    contexts: int
    tries: int
    most_values: int
    n_exchanges: int
    seed: int
    judged_at: Sequence[int]
    farther: Sequence[int]
    across_loops: bool
    judgements: dict[object, tuple[LoopProgram, pd.DataFrame]] = field(default_factory=dict)

    @cached_property
    def runs(self) -> Runs:
        return self._runs(max(self.lengths), self.seed)

    @cached_property
    def tried(self) -> dict[int, dict[bytes, Tensor]]:
        """By token, what readings have seen of states' behaviours."""
        return {token: {} for token in self.runs.tokens}

    def _runs(self, n: int, seed: int, *, times: int = 1) -> Runs:
        batch = inputs_of(self.task, (n,), times * self.examples, seed=seed)
        return Runs(self.model, batch, loops_at(self.model, self.task, n))

    def read_values(self, tolerance: float) -> Decompiled:
        runs, most = self.runs, self.most_values
        generator = torch.Generator().manual_seed(self.seed)  # each tolerance sees the same
        values = {
            token: TokenValues.of(runs, token, self.contexts, generator, tolerance)
            for token in runs.tokens
        }
        for token, each in values.items():  # in the same contexts
            each.tried = self.tried[token]
        experiments = Experiments(runs, values, self.tries, most, generator)
        starts = experiments.starts()

        def refused(*reason: Any) -> Decompiled:
            return Decompiled(None, Refusal(*reason), tolerance=tolerance)

        # Refused before later states are sorted and steps are tried, which may take minutes.
        several = {token for (_, token), counts in starts.items() if len(counts) > 1}
        if several:
            return refused("starts-differ", len(several))
        for token, each in values.items():
            # Far-apart states of all positions with the token, after every loop, in order.
            states = runs.states[:, runs.inputs == token].flatten(0, 1)
            each.classify(spread_out(states, 64))
        n_values = max(map(len, values.values()))
        if n_values > most:
            return refused("many-values", n_values, most)
        elsewhere = depends_elsewhere(
            runs, lambda t, h: values[t].classify(h, most=most), generator
        )
        if elsewhere > tolerance / 2:
            return refused("reads-farther", elsewhere)
        table = experiments.tabulate(starts)
        n_values = max(map(len, values.values()))
        if table is None:
            return refused("many-cells", sum(map(len, values.values())))
        refusal = None
        if tolerance == 0 and table.consistency < 1:
            refusal = Refusal("inconsistent", 1 - table.consistency)
        elif n_values >= most:
            refusal = Refusal("many-values", n_values, most - 1)
        return self._judged(table.merged(), tolerance=tolerance, refusal=refusal)

    def read_exactly(self) -> Decompiled:
        code_table, table, same = read_code(self.model, self.task, self.lengths)
        judged = self._judged(table, program=same and with_first_guess(same))
        result = replace(judged, table=code_table, same_as=same)
        if code_table.sure and (result.evidence["agree"] == result.evidence["of"]).all():
            # Nothing is left to chance, however few of the interchanges changed an answer.
            return replace(result, program=result.closest, refusal=None)
        return result

    def read_regions(self) -> Decompiled:
        generator, again = (torch.Generator().manual_seed(self.seed) for _ in range(2))
        contexts = {t: TokenValues.of(self.runs, t, 1, again) for t in self.runs.tokens}
        elsewhere = depends_elsewhere(self.runs, lambda t, h: contexts[t].read(h), generator)
        # The closest program is worth seeing anyway.
        refusal = Refusal("reads-farther", elsewhere) if elsewhere > 0.02 else None

        def drawn(number: int, seed: int) -> list[InterchangeTrajectories]:
            return [
                InterchangeTrajectories.drawn(
                    self._runs(n, seed), number, generator, across_loops=self.across_loops
                )
                for n in self.lengths
            ]

        runs = drawn(self.n_exchanges, self.seed)
        held_back = drawn(self.n_exchanges // 2, self.seed + 2)
        refinement = refine(runs, held_back, most_values=self.most_values)
        if self.across_loops:
            refinement, runs, held_back = against_counterexamples(
                refinement,
                runs,
                held_back,
                lambda turn: [self._runs(n, self.seed + 3 + turn) for n in self.lengths],
                number=self.n_exchanges,
                most_values=self.most_values,
                generator=generator,
            )
        # Starts of the tokens alone that stand side by side.
        table, tokens = refinement.table, [each.clean.tokens for each in runs]
        start = torch.full_like(table.start, -1)
        for each in tokens:
            at = pad(each[:, :-1], (1, 0), value=EDGE[0]), each
            start[at] = table.start[at]
        table = replace(table, start=start)
        names = table.merged_names()
        values = refinement.regions.values
        unexplained = unexplained_steps(refinement.table, values, held_back, names)
        judged = self._judged(table.renamed(names), refusal=refusal, regions=True)
        return replace(judged, unexplained=unexplained)

    def _judged(
        self,
        table: TransitionTable,
        *,
        tolerance: float = 0.0,
        refusal: Refusal | None = None,
        regions: bool = False,
        program: LoopProgram | None = None,
    ) -> Decompiled:
        # Other tolerances and lengths often give the same table, and so the same evidence.
        key = table.entries, regions
        if program is None and key in self.judgements:
            program, evidence = self.judgements[key]
        else:
            program = program or program_of(table, self.task, readable=not regions)
            parts, generator = [], torch.Generator().manual_seed(self.seed + 1)
            number = 3000 if regions else 1000  # regions are never exact
            for n in dict.fromkeys([*self.judged_at, *self.farther]):
                # Intervals count inputs: four times as many as the program is read off.
                runs = self._runs(n, self.seed + 1, times=4)
                parts.append(held_out(runs, program, number, generator).assign(n=n))
            evidence = pd.concat(parts, ignore_index=True)
            self.judgements[key] = program, evidence
        decisive: Sequence[str] = INTERCHANGED
        if regions:  # those that they are learnt from
            decisive = [TRAJECTORY, INJECTED] if self.across_loops else [TRAJECTORY]
        counted: Any = evidence[evidence["n"].isin(self.judged_at)]
        trajectories, clean = (counted[counted["what"].isin(k)] for k in (decisive, [CLEAN]))
        refusal = refusal or below_line(pd.concat([trajectories, clean]))
        return Decompiled(
            program=None if refusal else program,
            refusal=refusal,
            closest=program,
            automaton=table,
            tolerance=tolerance,
            consistency=table.consistency,
            evidence=evidence,
            read_at=tuple(self.lengths),
        )

    def score(self, result: Decompiled) -> float:
        """Orders readings by the worst low end of trajectories, then the worst clean agreement."""
        if not len(result.evidence):
            return -1.0
        counted: Any = result.evidence[result.evidence["n"].isin(self.judged_at)]
        worst = counted.loc[counted["what"].isin(INTERCHANGED), "low"].min()
        clean = counted.loc[counted["what"] == CLEAN, "value"].min()
        return float(worst if worst == worst else 0) + 1e-3 * float(clean)
