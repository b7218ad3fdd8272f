"""From a looped model to its program, with the evidence, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from loopinterp.circuits.decompiler.automaton_program import (
    program_of,
    programs_of,
    with_first_guess,
)
from loopinterp.circuits.decompiler.behaviour import Behaviour, Runs
from loopinterp.circuits.decompiler.claim import INTERCHANGED, Claim, Refusal
from loopinterp.circuits.decompiler.coded_states import (
    CodeTable,
    Surroundings,
    is_finite,
    tabulate_code,
)
from loopinterp.circuits.decompiler.counterexample_rounds import against_counterexamples
from loopinterp.circuits.decompiler.exchange_runs import ExchangeRuns
from loopinterp.circuits.decompiler.held_out import PLANTED, TRAJECTORY, UNDISTURBED, held_out
from loopinterp.circuits.decompiler.program_automaton import SameProgram, same_program
from loopinterp.circuits.decompiler.region_refinement import refine
from loopinterp.circuits.decompiler.state_values import TokenValues, spread_out
from loopinterp.circuits.decompiler.table_exits import unexplained_steps
from loopinterp.circuits.decompiler.transition_table import (
    TransitionTable,
    side_by_side,
    start_values,
    tabulate,
)
from loopinterp.errors import InputError, check_integer, check_seed
from loopinterp.models import bind, device_of
from loopinterp.models.looped_model import need_model, need_one_map
from loopinterp.models.repeatability import need_repeatable
from loopinterp.models.run_length import rule_of
from loopinterp.rasp.counts import Linear
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.study_data import as_batch

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.circuits.decompiler.cell_automaton import CellAutomaton
    from loopinterp.models import LoopedModel, LoopedTransformer
    from loopinterp.rasp.counts import LoopCount
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Task

TOLERANCES = (0.0, 0.05, 0.2)
ENOUGH = 0.9
"""A program is given if no low end of what it says falls below this: of clean answers and of whole
trajectories, at each length, 95% intervals over inputs."""

READ_AT = (5, 6)
"""Lengths that a program is read off where none is said."""

MOST_TOKENS = 12
"""With more, pairs of cells are too many to be tried."""

_READABLE = 14
"""Cells of an automaton for which the shortest way to write it is looked for."""

_SPREAD, _ELSEWHERE = 64, 256
"""States of each token looked at first; places where all but two neighbours is changed."""

_HELD_OUT, _HELD_OUT_REGIONS = 1000, 3000
"""Exchanges of each length that the evidence is of, and of regions, which are never all right."""

_INPUTS = 4
"""Inputs of the evidence for each that the program is read off: intervals count them."""

_ANSWERS_ELSEWHERE = 0.02
"""Share of these places whose next answer may change, where values are regions."""


@dataclass(frozen=True, eq=False)
class Decompiled(ShortRepr):
    """What :func:`decompile` returns.

    Attributes:
        program: The program, if the model is one of the kind that can be read.
        refusal: Why there is none; None if there is one.
        closest: The program that comes closest, the same as ``program`` where that is given; None
            where not even a table could be made.
        automaton: The same as a table, without values that behave alike.
        tolerance: Share of contexts in which states of one value may behave differently.
        consistency: Share of the experiments that gave what most of their kind did.
        evidence: Of ``closest``, on held-out inputs and exchanges: columns ``n``, ``what``,
            ``agree``, ``of``, ``inputs`` (on how many of them these were), ``value``, ``low``,
            ``high`` (95%, over inputs).
        unexplained: Of regions, cell by cell, the steps at which runs leave ``automaton``
            (:func:`~loopinterp.circuits.decompiler.table_exits.unexplained_steps`).
        read_at: Lengths that it was read off.
        table: Of a model whose state is a code: all of its transitions, before any were merged.
        same_as: The registered program that ``automaton`` is, up to where it starts; decided
            exactly. None where it is none of them, or not all transitions are known.
    """

    program: LoopProgram | None
    refusal: Refusal | None = None
    closest: LoopProgram | None = None
    automaton: CellAutomaton | None = field(default=None, repr=False)
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
        """What is claimed of ``program``: all that the evidence supports, and no more."""
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
        """The program as code, or why there is none and what comes closest; and the evidence."""
        head = [] if self.program else [f"not decompiled: {self.reason}"]
        if self.closest is not None and self.program is None:
            head.append("what comes closest:")
        shown = [] if self.closest is None else [str(self.closest)]
        shown += [f"claim: {self.claim}"] if self.program else []
        shown += ["evidence"] if shown else []
        rows = [
            f"  n = {row['n']}, {row['what']}: {row['agree']} of {row['of']} "
            f"(on {row['inputs']} inputs)"
            for row in self.evidence.to_dict("records")
        ]
        return "\n".join([*head, *shown, *rows])


def decompile(
    model: LoopedModel | Any,
    task: Task,
    *,
    n: int | Sequence[int] = READ_AT,
    lengths: Sequence[int] | None = None,
    farther: Sequence[int] = (),
    tolerances: Sequence[float] = TOLERANCES,
    contexts: int = 24,
    tries: int = 4,
    most_values: int = 12,
    examples: int = 48,
    sharp: bool = True,
    n_exchanges: int = 6000,
    across_loops: bool = False,
    seed: int = 0,
) -> Decompiled:
    """Read a model's program off its states.

    The program is one whose positions have, for each token, a few values, and whose loop computes
    the next value of a position from its own and its left neighbour's token and value (a cellular
    automaton that reads its input). It is learnt by experiment, as an automaton is:

    1. States of a token that are followed by the same answers wherever they are put in are one
       value (:mod:`~loopinterp.circuits.decompiler.behaviour`).
    2. States of every pair of neighbours are put side by side, one loop is run, and what came of
       it is sorted in the same way; values that are new are tried in their turn, until there are
       none (:mod:`~loopinterp.circuits.decompiler.transition_table`).
    3. The table is made as small as it can be, and written as a program
       (:mod:`~loopinterp.circuits.decompiler.automaton_program`).
    4. Inputs and exchanges that are drawn anew say how far it is right
       (:mod:`~loopinterp.circuits.decompiler.held_out`), and so what is claimed of it: that it is
       exact, if none goes otherwise, or nearly right (:attr:`Decompiled.claim`).

    It is read off at each length by itself, and given only if each reading holds at all lengths.

    States that an exchange of natural states never makes are met in step 2 only, by experiments
    that put natural states side by side in ways that may never occur.

    The states of a trained model have no sharp values. With ``sharp=False`` steps 1 and 2 are
    others: values are regions of the space of states, cut finer wherever an exchange leaves the
    table (:mod:`~loopinterp.circuits.decompiler.region_refinement`), and the table counts what runs
    after exchanges do. Its program is the coarsest one of that kind that says what the model does,
    to the shares in ``evidence``, and not what is computed to the last state.

    A model whose state between loops is a code of bits (``state_code``) is not learnt by
    experiment. All of its transitions are tried
    (:mod:`~loopinterp.circuits.decompiler.coded_states`), and the smallest table of them is
    compared with the registered programs exactly
    (:mod:`~loopinterp.circuits.decompiler.program_automaton`). Where it is one of them, up to its
    first guess, it is written as that one.

    A model of which any of this does not hold is not decompiled: where it has more than
    :data:`MOST_TOKENS` tokens, where a step reads more than the left neighbour, where there are
    more values, where positions of one token start with different values beside the same
    neighbour, where the same experiment gives different values, or where the low end of clean
    answers or of whole trajectories is below :data:`ENOUGH` at some length.

    Args:
        model: Any looped model.
        task: Its task.
        n: Lengths of the inputs that are looked at.
        lengths: Of those that the evidence is of. If omitted each n and n - 1, and a longer one:
            3n / 2 for the greatest n, or the longest below it that the model takes, if it takes any
            beyond n.
        farther: Others that there is evidence of, which does not decide whether there is a program.
        tolerances: Tried one after the other, until one gives a program.
        contexts: In which a state's behaviour is seen.
        tries: Experiments for each pair of neighbours.
        most_values: Of a token.
        examples: Inputs of each distribution of the task.
        sharp: Whether states of one value are to behave alike, but for ``tolerances``.
        n_exchanges: From which regions are learnt; half as many say how many of them there are.
        across_loops: Whether half of the exchanged states that regions are learnt from come from
            another loop than the one at which they are put in, and then those that the table gets
            wrong are looked for and learnt from
            (:mod:`~loopinterp.circuits.decompiler.counterexample_rounds`). This asks for more than
            runs with exchanges at one loop can show, and decides as well whether there is a
            program.
        seed: Of all that is drawn.

    Raises:
        InputError: what is no model, numbers out of range, or a task whose T(n) is not linear.

    Source: automaton learning by queries (Angluin 1987) with interchange interventions (arXiv
        2106.02997) as queries.

    Example:
        >>> from loopinterp.rasp import compile_program, get_program
        >>> from loopinterp.tasks import get_task
        >>> compiled = compile_program(get_program("prefix_xor"), max_length=7)
        >>> print(decompile(compiled.model, get_task("prefix_sum")).program.step["value"])
        shift_right(var('value'), 1, default=0) ^ tok_map(tokens, {1: 1}, default=0, name='bit_of')
    """
    need_model(model)
    need_one_map(model)
    looked_at = _checked_lengths("n", n)
    for name, value, least in (
        ("contexts", contexts, 4),
        ("tries", tries, 2),
        ("most_values", most_values, 2),
        ("examples", examples, 8),
        ("n_exchanges", n_exchanges, 100),
    ):
        check_integer(name, value, least=least)
    one = as_batch(task, n=looked_at[0], batch_size=1, device=device_of(model))
    need_repeatable(model, one.inputs)
    if not tolerances or any(not 0 <= t < 1 for t in tolerances):
        given = repr(tuple(tolerances))
        fix = "Pass (0,) for models without noise."
        raise InputError("tolerances", expected="shares from 0 to below 1", given=given, fix=fix)
    finite = sharp and is_finite(model)
    if lengths is None:
        judged_at = judged_lengths(model, task, looked_at)
    else:
        judged_at = _checked_lengths("lengths", lengths)
    options: dict[str, Any] = {
        "examples": examples,
        "contexts": contexts,
        "seed": check_seed(seed),
        "judged_at": judged_at,
        "farther": _checked_lengths("farther", farther) if farther else [],
        "across_loops": across_loops,
    }
    together = [looked_at] if finite or not sharp else [[one] for one in looked_at]
    readers = [_Reader(model, task, some, **options) for some in together]
    n_tokens = len(readers[-1].runs.tokens)
    if n_tokens > MOST_TOKENS and not finite:
        refusal = Refusal("many-tokens", n_tokens, MOST_TOKENS)
        return Decompiled(None, refusal, tolerance=min(tolerances))
    if finite:
        return readers[0].read_whole()
    if not sharp:
        return readers[0].read_regions(n_exchanges, most_values)
    tried = []
    for tolerance in sorted(tolerances):
        found = _read_at_each(readers, tolerance, tries, most_values)
        tried.append(found)
        if found.result.program is not None or found.final:
            break
    best = max(tried, key=lambda one: one.score).result
    return replace(best, read_at=tuple(looked_at)) if best.program is not None else best


def _read_at_each(
    readers: Sequence[_Reader], tolerance: float, tries: int, most_values: int
) -> _Attempt:
    """What is read at the last length, or at the first one that gives no program."""
    found = readers[0].read(tolerance, tries, most_values)
    for reader in readers[1:]:
        if found.result.program is None:
            break
        found = reader.read(tolerance, tries, most_values)
    return found


@dataclass(frozen=True)
class _Attempt:
    result: Decompiled
    score: float
    final: bool = False
    """Whether no other tolerance can help."""


class _Reader:
    """One model, inputs of some lengths, and those that what is read off them is judged on."""

    def __init__(
        self,
        model: Any,
        task: Task,
        lengths: Sequence[int],
        *,
        examples: int,
        contexts: int,
        seed: int,
        judged_at: Sequence[int],
        farther: Sequence[int],
        across_loops: bool,
    ) -> None:
        self.model, self.task, self.lengths, self.seed = model, task, lengths, seed
        self.examples, self.contexts = examples, contexts
        self.judged_at, self.farther = judged_at, farther
        self.across_loops = across_loops
        self.runs = self._runs(max(lengths), seed)

    def _runs(self, n: int, seed: int) -> Runs:
        batch = inputs_of(self.task, (n,), self.examples, seed=seed)
        n_loops = n_loops_of(self.model, batch.inputs.shape[1], self.task.n_loops(n))
        return Runs(self.model, batch, n_loops)

    def _exchange_runs(self, number: int, seed: int) -> list[ExchangeRuns]:
        return [
            ExchangeRuns.of(
                self._runs(n, seed), number, self.generator, across_loops=self.across_loops
            )
            for n in self.lengths
        ]

    def read(self, tolerance: float, tries: int, most_values: int) -> _Attempt:
        self.generator = torch.Generator().manual_seed(self.seed)  # each tolerance sees the same
        values = {}
        for token in self.runs.tokens:
            contexts = Behaviour.of(self.runs, token, self.contexts, self.generator)
            values[token] = TokenValues(contexts, tolerance)
        places = side_by_side(self.runs)
        starts = start_values(
            self.runs, places, values, tries=tries, most=most_values, generator=self.generator
        )
        # Refused before later states are sorted and steps are tried, which may take minutes.
        several = {own for (_, own), of in starts.items() if len(of) > 1}
        if several:
            return self._none(tolerance, Refusal("starts-differ", len(several)))
        for token, of in values.items():
            of.sort(spread_out(self.runs.states_of(token), _SPREAD))
        many = {token: len(of) for token, of in values.items() if len(of) > most_values}
        if many:
            return self._none(tolerance, Refusal("many-values", max(many.values()), most_values))
        elsewhere = self._depends_elsewhere(lambda t, h: values[t].sort(h, most=most_values))
        if elsewhere > tolerance / 2:
            return self._none(tolerance, Refusal("reads-farther", elsewhere), final=True)
        table = tabulate(
            self.runs, values, places, starts, tries=tries, most=most_values,
            generator=self.generator,
        )  # fmt: skip
        if not table.closed:
            return self._none(tolerance, Refusal("many-cells", sum(map(len, values.values()))))
        return self._judged(tolerance, table, values, most_values)

    def _none(self, tolerance: float, refusal: Refusal, *, final: bool = False) -> _Attempt:
        return _Attempt(Decompiled(None, refusal, tolerance=tolerance), -1.0, final)

    def read_whole(self) -> Decompiled:
        """Read all transitions of a model with a state code."""
        self.generator = torch.Generator().manual_seed(self.seed)
        table, automaton, same = _whole(self.model, self.task, self.lengths)
        judged = self._held_out(automaton, 1.0, program=same and with_first_guess(same))
        read = replace(judged.result, table=table, same_as=same)
        evidence = read.evidence
        if table.sure and (evidence["agree"] == evidence["of"]).all():
            # Nothing is left to chance, however few of the interchanges changed an answer.
            return replace(read, program=read.closest, refusal=None)
        return read

    def read_regions(self, n_exchanges: int, most_values: int) -> Decompiled:
        """Read with regions of states as values."""
        self.generator = torch.Generator().manual_seed(self.seed)
        one = torch.Generator().manual_seed(self.seed)
        places = {token: Behaviour.of(self.runs, token, 1, one) for token in self.runs.tokens}
        elsewhere = self._depends_elsewhere(lambda token, h: places[token].read(h))
        # What comes closest is worth seeing all the same.
        far = elsewhere > _ANSWERS_ELSEWHERE
        refusal = Refusal("reads-farther", elsewhere) if far else None
        runs = self._exchange_runs(n_exchanges, self.seed)
        held_back = self._exchange_runs(n_exchanges // 2, self.seed + 2)
        found = refine(runs, held_back, most_values=most_values)
        if self.across_loops:
            found, runs, held_back = against_counterexamples(
                found,
                runs,
                held_back,
                lambda turn: [self._runs(n, self.seed + 3 + turn) for n in self.lengths],
                number=n_exchanges,
                most_values=most_values,
                generator=self.generator,
            )
        automaton = found.table.automaton(found.regions.sizes, runs)
        names = automaton.merged_names()
        unexplained = unexplained_steps(found.table, found.regions, held_back, names)
        judged = self._held_out(
            automaton.renamed(names), found.table.consistency, refusal=refusal, readable=False
        )
        return replace(judged.result, unexplained=unexplained)

    @torch.no_grad()
    def _depends_elsewhere(self, sort: Callable[[int, Tensor], Tensor]) -> float:
        """Share of places whose next value changes with all that is not the place or left of it."""
        runs, generator = self.runs, self.generator
        size, n_pos = runs.batch.inputs.shape
        rows, others = torch.randint(size, (2, _ELSEWHERE), generator=generator)
        at = torch.randint(n_pos, (_ELSEWHERE,), generator=generator)
        loops = torch.randint(max(runs.n_loops, 1), (_ELSEWHERE,), generator=generator)
        places = torch.arange(n_pos)
        near = (places == at[:, None]) | (places == at[:, None] - 1)
        tokens = runs.inputs[rows].where(near.to(runs.inputs.device), runs.inputs[others])
        h = runs.states[loops, rows].clone()
        mixed = h.where(near[..., None].to(h.device), runs.states[loops, others])
        each = torch.arange(_ELSEWHERE)
        before = bind(runs.model, runs.inputs[rows]).step(h)[each, at]
        after = bind(runs.model, tokens).step(mixed)[each, at]
        changed = 0
        own = runs.batch.inputs[rows, at]
        for token in runs.tokens:
            mine = own == token
            if mine.any():
                both = sort(token, torch.cat([before[mine], after[mine]]))
                changed += int((both[: int(mine.sum())] != both[int(mine.sum()) :]).sum())
        return changed / _ELSEWHERE

    def _judged(
        self,
        tolerance: float,
        table: TransitionTable,
        values: Mapping[int, TokenValues],
        most_values: int,
    ) -> _Attempt:
        """The program of a table, and whether it says enough of what the model does."""
        refusal = None
        if tolerance == 0 and table.consistency < 1:
            refusal = Refusal("inconsistent", 1 - table.consistency)
        elif any(len(of) >= most_values for of in values.values()):
            refusal = Refusal("many-values", max(map(len, values.values())), most_values - 1)
        automaton = table.automaton({token: len(of) for token, of in values.items()}).merged()
        return self._held_out(automaton, table.consistency, tolerance=tolerance, refusal=refusal)

    def _held_out(
        self,
        automaton: CellAutomaton,
        consistency: float,
        *,
        tolerance: float = 0.0,
        refusal: Refusal | None = None,
        readable: bool = True,
        program: LoopProgram | None = None,
    ) -> _Attempt:
        """The program of an automaton, and whether it says enough of what the model does."""
        program = program or _written(automaton, self.task, readable=readable)
        number = _HELD_OUT if readable else _HELD_OUT_REGIONS
        evidence = self._evidence(program, number)
        counted: Any = evidence[evidence["n"].isin(self.judged_at)]
        decisive: Sequence[str] = INTERCHANGED
        if not readable:  # of regions: what they are learnt from
            decisive = [TRAJECTORY, PLANTED] if self.across_loops else [TRAJECTORY]
        undisturbed = counted[counted["what"] == UNDISTURBED]
        trajectories = counted[counted["what"].isin(decisive)]
        worst = trajectories["low"].min()
        refusal = refusal or _below_line(pd.concat([trajectories, undisturbed]))
        read = Decompiled(
            program=None if refusal else program,
            refusal=refusal,
            closest=program,
            automaton=automaton,
            tolerance=tolerance,
            consistency=consistency,
            evidence=evidence,
            read_at=tuple(self.lengths),
        )
        score = float(worst if worst == worst else 0) + 1e-3 * float(undisturbed["value"].min())
        return _Attempt(read, score, final=refusal is None)

    def _evidence(self, program: LoopProgram, number: int) -> pd.DataFrame:
        parts = []
        generator = torch.Generator().manual_seed(self.seed + 1)
        for n in dict.fromkeys([*self.judged_at, *self.farther]):
            batch = inputs_of(self.task, (n,), _INPUTS * self.examples, seed=self.seed + 1)
            n_loops = n_loops_of(self.model, batch.inputs.shape[1], self.task.n_loops(n))
            found = held_out(self.model, program, batch, n_loops, number, generator)
            parts.append(found.assign(n=n))
        return pd.concat(parts, ignore_index=True)


def finite_program(model: LoopedModel | Any, task: Task) -> LoopProgram | None:
    """The program of a model whose transitions can all be tried; None of any other model.

    A registered one, from the model's own first guess, where it is that; else as it is read off.
    """
    if not is_finite(model):
        return None
    _, automaton, same = _whole(model, task)
    return (same and with_first_guess(same)) or _written(automaton, task, name="read off")


def _whole(
    model: LoopedTransformer, task: Task, lengths: Sequence[int] = ()
) -> tuple[CodeTable, CellAutomaton, SameProgram | None]:
    """All transitions of a model, its smallest automaton, and the registered program that it is."""
    inputs = Surroundings.of(task, sorted({1, 2, 3, *lengths}))
    table = tabulate_code(model, inputs.pairs)
    automaton = table.automaton.asked_at(inputs.asked).merged()
    found = (same_program(automaton, one, inputs) for one in programs_of(task))
    same = next((one for one in found if one is not None), None)
    return table, automaton.asked_at(inputs.asked, otherwise=0), same


def _written(
    automaton: CellAutomaton, task: Task, *, name: str = "decompiled", readable: bool = True
) -> LoopProgram:
    return program_of(
        automaton,
        task,
        n_loops=loop_count(task),
        name=name,
        doc="Read off a model.",
        readable=readable and len(automaton.cells) <= _READABLE,
    )


def _below_line(evidence: pd.DataFrame) -> Refusal | None:
    """The low end that is furthest below the line, if one is."""
    low: Any = evidence["low"].dropna()
    if not (evidence.loc[low.index, "what"] != UNDISTURBED).any():
        return Refusal("nothing-to-check")
    if low.min() >= ENOUGH:
        return None
    row = evidence.loc[low.idxmin()]
    return Refusal("below-line", float(row["low"]), ENOUGH, kind=row["what"], n=int(row["n"]))


def judged_lengths(model: LoopedModel | Any, task: Task, read_at: Sequence[int]) -> list[int]:
    """Lengths that a program is checked at: those it is read at, each less one, and a longer one.

    The longer one is 3n / 2 for the greatest n, or the greatest below it that the model takes.
    """
    longest = max(read_at)
    near = {m for n in read_at for m in (max(n - 1, 2), n)}
    beyond = (n for n in range(longest * 3 // 2, longest, -1) if _takes(model, task, n))
    return sorted({*near, next(beyond, longest)})


def _takes(model: LoopedModel | Any, task: Task, n: int) -> bool:
    """Whether a model embeds inputs of a length."""
    inputs = task.sample(n, batch_size=1, generator=torch.Generator().manual_seed(0)).inputs
    try:
        bind(model, inputs.to(device_of(model)))
    except (InputError, IndexError):  # a table of positions that ends before, ours or another's
        return False
    return True


def n_loops_of(model: Any, n_positions: int, otherwise: int) -> int:
    """Loops that a model was made for, or else T(n)."""
    rule = rule_of(model)
    return otherwise if rule is None else rule(n_positions)


def loop_count(task: Task) -> LoopCount:
    """T(n) of a task as data.

    Raises:
        InputError: it is not linear in n.
    """
    counts = {n: task.n_loops(n) for n in (2, 3, 5, 8, 13)}
    slope = counts[3] - counts[2]
    found = Linear(slope=slope, offset=counts[2] - 2 * slope)
    if any(found(n) != count for n, count in counts.items()):
        raise InputError(
            f"T(n) of task {task.name}",
            expected="a linear function of n",
            given=", ".join(f"T({n}) = {count}" for n, count in counts.items()),
            fix="Only such programs are read so far.",
        )
    return found


def _checked_lengths(what: str, given: int | Sequence[int]) -> list[int]:
    """Lengths in order, each once."""
    each = [given] if isinstance(given, int) else list(given)
    if not each:
        raise InputError(what, expected="at least one length", given="none", fix="Pass 6, say.")
    return sorted({check_integer(what, n, least=2) for n in each})
