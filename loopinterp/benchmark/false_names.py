"""How often the comparison identifies a program that the model does not run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt

from loopinterp.benchmark.known_models import LENGTHS, Disguise, compiled_with_inputs
from loopinterp.benchmark.mechanism_scores import rivals_of
from loopinterp.comparison.counts import count_evidence
from loopinterp.comparison.evidence import gather_evidence
from loopinterp.comparison.pair_strategies import SpreadPairs
from loopinterp.comparison.program_comparison import EXAMPLES, FIRST_LOOK, TO_IDENTIFY
from loopinterp.comparison.rule import decide
from loopinterp.compiler import near_misses
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.boundary import checked
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.programs import equivalence
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.task import Batch

RARE = 1e-3
"""Two programs count as rarely separated up to this share of separating interventions."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FalseNames(Result, kind="false-names"):
    """Counts of identified programs, one entry of ``model`` for each model.

    - ``lists``: lists of candidates without the model's program: all other stock programs of the
      task, and all but one of them, for each;
    - ``wrong``: lists with an identified program that more than :data:`RARE` of all interventions
      separate from the model's;
    - ``rare``: the same, separated by fewer interventions;
    - ``equivalent``: lists with an identified program that is equivalent;
    - ``named``: 1 if a stock program is identified when it is listed, else 0; NaN for near misses.

    ``wrong_names`` and ``rare_names`` hold model, name, and the share of interventions that
    separate the two programs.
    """

    VARIABLES: ClassVar = dict.fromkeys(("lists", "wrong", "rare", "equivalent", "named"), "model")
    # Older files do not have it.
    OPTIONAL: ClassVar = frozenset({"rare"})

    programs: list[str]
    originals: list[str]  # the stock program that it is a near miss of, or is itself
    tasks: list[str]
    disguises: list[str]
    wrong_names: list[tuple[str, str, float]]
    rare_names: list[tuple[str, str, float]] = field(default_factory=list)

    def totals(self) -> dict[str, dict[str, int]]:
        """By task: numbers of near misses, models, lists, and names of each kind."""
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


@checked
def false_names_study(
    programs: Sequence[str] | None = None,
    *,
    misses_of_each: NonNegativeInt = 10,
    disguises: Sequence[tuple[str, Sequence[Disguise]]] = (("bare", ()),),
    seed: Seed = 0,
) -> FalseNames:
    """Compile stock programs and near misses of them, and count false identifications.

    Each model is compared with the other stock programs of its task, all of them and with each left
    out, by the two stages of :func:`~loopinterp.comparison.compare_programs`. A name is wrong if
    interchange interventions separate it from the model's program
    (:func:`loopinterp.programs.equivalence`). Names that at most :data:`RARE` of them separate are
    counted apart, as a few thousand pairs cannot show that.

    Args:
        programs: Stock programs; by default all.
        misses_of_each: Most near misses (:func:`loopinterp.compiler.disguises`) of each.
        disguises: Pairs of a name and the disguises to apply to each model, in order.
    """
    names = list_programs() if programs is None else list(programs)
    stock = [get_program(name) for name in names]
    with study(seed, study="false names", programs=names, misses_of_each=misses_of_each) as watch:
        pairs = [
            (original.name, program)
            for original in stock
            for program in (original, *near_misses(original, most=misses_of_each, seed=seed))
        ]
        rows, separations = [], []
        for original, program in track(pairs, "programs"):
            n = LENGTHS.get(program.task, 8)
            # Program offsets are fitted at one length and scored at another, half as long again.
            compiled, data = compiled_with_inputs(
                program, [n, math.ceil(1.5 * n)], examples=EXAMPLES, seed=seed
            )
            for label, changes in disguises:
                name, model = f"{program.name}, {label}", compiled
                for change in changes:
                    model = change(model)
                counts, wrong = _score(model, program, data, seed)
                about = {"model": name, "program": program, "original": original}
                rows.append({**about, "disguise": label, **counts})
                separations += [(name, *pair) for pair in wrong.items()]
        return FalseNames.of(
            watch,
            coords={"model": [row["model"] for row in rows]},
            **{key: np.array([row[key] for row in rows]) for key in FalseNames.VARIABLES},
            programs=[row["program"].name for row in rows],
            originals=[row["original"] for row in rows],
            tasks=[row["program"].task for row in rows],
            disguises=[row["disguise"] for row in rows],
            wrong_names=[x for x in separations if x[2] > RARE],
            rare_names=[x for x in separations if x[2] <= RARE],
        )


def _score(
    model: Compiled, program: LoopProgram, data: list[Batch], seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Counts of names on one model, and the separating share of each wrong name."""
    _, *others = rivals_of(program)
    names = [p.name for p in others]
    # All other programs, and all but one of them.
    lists = [names] if names else []
    if len(names) > 1:
        lists += [[p for p in names if p != out] for out in names]
    winners = _winners(model, others, lists, data, seed)
    share = {}
    for winner in dict.fromkeys(winners):
        result = equivalence(winner, program)
        share[winner] = max(result.share, result.natural_share)
    named = math.nan
    if program.name in list_programs():
        listed = _winners(model, [program, *others], [[program.name, *names]], data, seed)
        named = float(listed == [program.name])
    return {
        "lists": len(lists),
        "wrong": sum(share[winner] > RARE for winner in winners),
        "rare": sum(0 < share[winner] <= RARE for winner in winners),
        "equivalent": sum(share[winner] == 0 for winner in winners),
        "named": named,
    }, {winner: x for winner, x in share.items() if x}


def _winners(
    model: Compiled,
    programs: Sequence[LoopProgram],
    lists: Sequence[list[str]],
    data: list[Batch],
    seed: int,
) -> list[str]:
    """The programs identified from each list, by the two stages of ``compare_programs``."""
    winners: list[str] = []
    for strategy, most in ((SpreadPairs(), FIRST_LOOK), (TO_IDENTIFY, EXAMPLES)):
        if not lists:
            return []
        batches = [batch[:most] for batch in data]
        evidence = gather_evidence(model.model, programs, batches, strategy, seed=seed)
        # Each list is judged on its part of the same counts.
        counts = count_evidence([evidence]).sel(model=0)
        verdicts = [(names, decide(counts.sel(program=names, rival=names))) for names in lists]
        lists = [names for names, verdict in verdicts if verdict.identified is not None]
        winners = [verdict.identified for _, verdict in verdicts if verdict.identified is not None]
    return winners
