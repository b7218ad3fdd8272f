"""How often the comparison of programs names a program that a model does not run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.benchmark.known_models import Disguise, compiled_with_inputs, disguised
from loopinterp.benchmark.verdict_scores import rivals_of
from loopinterp.circuits.comparison_evidence import gather_evidence
from loopinterp.circuits.comparison_inputs import check_program_list
from loopinterp.circuits.evidence_counts import count_evidence
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.program_comparison import EXAMPLES, FIRST_LOOK, TO_NAME
from loopinterp.circuits.verdict import decide
from loopinterp.progress import track
from loopinterp.rasp.mutations import equivalence, near_misses
from loopinterp.rasp.program_registry import list_programs
from loopinterp.results import Result, study

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.compiled import Compiled
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

LENGTHS = {"multiplication": 3, "unique_set": 4, "token_addition": 4, "abacus_addition": 4}
"""Problem lengths of the models, where they are not :data:`LENGTH`."""

LENGTH = 8
LONGER = 1.5
"""Programs are laid over a model at one length, and tried at another, so many times as long."""


RARE = 1e-3
"""Share of interventions up to which two programs that they tell apart count as rarely apart."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FalseNames(Result, kind="false-names"):
    """What :func:`false_names_study` returns; one entry of ``model`` for each model.

    - ``lists``: lists of rivals that lack the program that is run: all stock programs of the
      task, and all but one of them, for each;
    - ``wrong``: of these, lists from which a program was named that more than :data:`RARE` of
      all interventions tell from it;
    - ``rare``: lists from which one was named that some tell from it, but so few;
    - ``equivalent``: of these, lists from which an equivalent one was named;
    - ``named``: of a stock program's model, 1 if it is named when it is listed, 0 if not; NaN of
      the near misses.

    Attributes:
        programs: The program that each model runs.
        originals: The stock program that it is a near miss of (itself for a stock program).
        tasks: Its task.
        disguises: What was done to the model.
        wrong_names: Where ``wrong`` is not 0: model, name, and the share of interventions that
            tell the two apart.
        rare_names: The same of ``rare``.
    """

    VARIABLES: ClassVar = {
        "lists": "model",
        "wrong": "model",
        "rare": "model",
        "equivalent": "model",
        "named": "model",
    }
    # Files of before these were counted by themselves are read all the same.
    OPTIONAL: ClassVar = frozenset({"rare"})

    programs: list[str]
    originals: list[str]
    tasks: list[str]
    disguises: list[str]
    wrong_names: list[tuple[str, str, float]]
    rare_names: list[tuple[str, str, float]] = field(default_factory=list)

    def totals(self) -> dict[str, dict[str, int]]:
        """Counts by task: near misses, models, lists, names of each kind, own names."""
        import pandas as pd

        table = self.data.to_dataframe().assign(task=self.tasks, program=self.programs)
        by_task = table.groupby("task", sort=False)
        misses = table["program"].where(table["program"] != self.originals).groupby(table["task"])
        counts = {
            "near misses": misses.nunique(),
            "models": by_task.size(),
            "lists": by_task["lists"].sum(),
            "wrong names": by_task["wrong"].sum(),
            "rarely apart": by_task["rare"].sum(),
            "equivalent names": by_task["equivalent"].sum(),
            "named when listed": by_task["named"].sum(),
        }
        counted = pd.DataFrame(counts).astype(int)
        return counted.reindex(list(dict.fromkeys(self.tasks))).to_dict("index")


def false_names_study(
    programs: Sequence[str] | None = None,
    *,
    misses_of_each: int = 10,
    disguises: Sequence[tuple[str, Sequence[Disguise]]] = (("bare", ()),),
    seed: int = 0,
) -> FalseNames:
    """Compile stock programs and near misses of them, and count the wrong names.

    A near miss is a mutation that answers alike at T(n) but works differently
    (:func:`loopinterp.rasp.mutations.near_misses`). Each model is compared with the stock
    programs of its task that are not it, all of them and with each left out, by the two looks of
    :func:`~loopinterp.circuits.compare_programs`. A name is wrong if interchange interventions
    tell the named program from the one that is run
    (:func:`loopinterp.rasp.mutations.equivalence`). Where :data:`RARE` of them do or fewer, no
    comparison that draws some thousands can see it, and such names are counted by themselves.

    Args:
        programs: Stock programs; by default all.
        misses_of_each: Most near misses of each.
        disguises: What is done to each model: a name, and disguises one after the other.
        seed: Seed of mutations, inputs, pairs.

    Raises:
        InputError: no list of programs, or a name that none has.
    """
    stock = check_program_list(list_programs() if programs is None else programs)
    names = [program.name for program in stock]
    with study(seed, study="false names", programs=names, misses_of_each=misses_of_each) as watch:
        rows, told = [], []
        programs_of = list(_stock_and_misses(stock, misses_of_each, seed))
        for original, program in track(programs_of, "programs"):
            n = LENGTHS.get(program.task, LENGTH)
            compiled, data = compiled_with_inputs(
                program, [n, math.ceil(LONGER * n)], examples=EXAMPLES, seed=seed
            )
            for label, disguise in disguises:
                name = f"{program.name}, {label}"
                counts, wrong = _score(disguised(compiled, disguise), program, data, seed)
                about = {"model": name, "program": program, "original": original}
                rows.append({**about, "disguise": label, **counts})
                told += [(name, *found) for found in wrong.items()]
        return FalseNames.of(
            watch,
            coords={"model": [row["model"] for row in rows]},
            **{key: np.array([row[key] for row in rows]) for key in FalseNames.VARIABLES},
            programs=[row["program"].name for row in rows],
            originals=[row["original"] for row in rows],
            tasks=[row["program"].task for row in rows],
            disguises=[row["disguise"] for row in rows],
            wrong_names=[one for one in told if one[2] > RARE],
            rare_names=[one for one in told if one[2] <= RARE],
        )


def _stock_and_misses(
    stock: Sequence[LoopProgram], misses_of_each: int, seed: int
) -> Iterator[tuple[str, LoopProgram]]:
    """Stock programs and near misses of each, with the stock program's name."""
    for program in stock:
        yield program.name, program
        for miss in near_misses(program, most=misses_of_each, seed=seed):
            yield program.name, miss


def _score(
    model: Compiled, program: LoopProgram, data: list[Batch], seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Counts of names on one model; and those of others, with the share that tells them apart."""
    _, *others = rivals_of(program)
    names = [p.name for p in others]
    lists = [names] if names else []
    if len(names) > 1:
        lists += [[p for p in names if p != out] for out in names]
    named = _winners(model, others, lists, data, seed)
    apart = {winner: _told_apart(winner, program) for winner in dict.fromkeys(named)}
    own = math.nan
    if program.name in list_programs():
        listed = _winners(model, [program, *others], [[program.name, *names]], data, seed)
        own = float(listed == [program.name])
    return {
        "lists": len(lists),
        "wrong": sum(apart[winner] > RARE for winner in named),
        "rare": sum(0 < apart[winner] <= RARE for winner in named),
        "equivalent": sum(apart[winner] == 0 for winner in named),
        "named": own,
    }, {winner: share for winner, share in apart.items() if share}


def _told_apart(winner: str, program: LoopProgram) -> float:
    """Share of interventions, or of undisturbed runs, that tell two programs apart."""
    found = equivalence(winner, program)
    return 0.0 if found.equivalent else max(found.share, found.natural_share)


def _winners(
    model: Compiled,
    programs: Sequence[LoopProgram],
    lists: Sequence[list[str]],
    data: list[Batch],
    seed: int,
) -> list[str]:
    """The program named from each list, of those from which one is named.

    The two looks of ``compare_programs``; all lists are judged on the same pairs.
    """
    looks = ((SpreadPairs(), FIRST_LOOK), (TO_NAME, EXAMPLES))
    winners: list[str] = []
    for strategy, most in looks:
        if not lists:
            return []
        seen = [batch[:most] for batch in data]
        evidence = gather_evidence(model.model, programs, seen, strategy, seed=seed)
        counts = count_evidence([evidence]).sel(model=0)
        found = [(some, decide(counts.sel(program=some, rival=some)).winner) for some in lists]
        lists = [some for some, winner in found if winner is not None]
        winners = [winner for _, winner in found if winner is not None]
    return winners
