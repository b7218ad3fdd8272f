"""How often the comparison of programs names a program that a model does not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from loopinterp.circuits.comparison_evidence import gather_evidence
from loopinterp.circuits.evidence_counts import count_evidence
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.verdict import decide
from loopinterp.rasp.compiler.compiled import Compiled, compile_program
from loopinterp.rasp.mutations import equivalence, near_misses
from loopinterp.rasp.program_registry import get_program, list_programs
from loopinterp.results import Result, study
from loopinterp.tasks.task_registry import get_task

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

Disguise = Callable[[Compiled], Compiled]

LENGTHS = {"multiplication": 3, "unique_set": 4, "token_addition": 4, "abacus_addition": 4}
"""Problem lengths of the models, where they are not :data:`LENGTH`."""

LENGTH = 8
LONGER = 1.5
"""Programs are laid over a model at one length, and tried at another, so many times as long."""

EXAMPLES = 96


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FalseNames(Result, kind="false-names"):
    """What :func:`false_names_study` returns; one entry of ``model`` for each model.

    - ``lists``: lists of rivals that lack the program that is run: all stock programs of the
      task, and all but one of them, for each;
    - ``wrong``: of these, lists from which a program was named that is not equivalent to it;
    - ``equivalent``: of these, lists from which an equivalent one was named;
    - ``named``: 1 if the program itself is named when it is listed with the stock programs, 0 if
      not.

    Attributes:
        programs: The program that each model runs.
        originals: The stock program that it is a near miss of (itself for a stock program).
        tasks: Its task.
        disguises: What was done to the model.
        wrong_names: Where ``wrong`` is not 0: model, name, and the share of interventions that
            tell the two apart.
    """

    VARIABLES: ClassVar = {
        "lists": "model",
        "wrong": "model",
        "equivalent": "model",
        "named": "model",
    }

    programs: list[str]
    originals: list[str]
    tasks: list[str]
    disguises: list[str]
    wrong_names: list[tuple[str, str, float]]

    def totals(self) -> dict[str, dict[str, int]]:
        """Counts by task: near misses, models, lists, wrong and equivalent names, own names."""
        table = {}
        for task in dict.fromkeys(self.tasks):
            of = np.array([t == task for t in self.tasks])
            misses = {
                p
                for p, o, t in zip(self.programs, self.originals, self.tasks)
                if t == task and p != o
            }
            data = {name: self.data[name].values[of] for name in self.VARIABLES}
            table[task] = {
                "near misses": len(misses),
                "models": int(of.sum()),
                "lists": int(data["lists"].sum()),
                "wrong names": int(data["wrong"].sum()),
                "equivalent names": int(data["equivalent"].sum()),
                "named when listed": int(data["named"].sum()),
            }
        return table


@dataclass(frozen=True)
class _Case:
    """A program to be compiled, and the stock programs that it may be taken for."""

    program: LoopProgram
    original: str
    rivals: tuple[str, ...]


def false_names_study(
    programs: Sequence[str] | None = None,
    *,
    misses_of_each: int = 10,
    disguises: Sequence[tuple[str, Sequence[Disguise]]] = (("bare", ()),),
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> FalseNames:
    """Compile stock programs and near misses of them, and count the wrong names.

    A near miss is a mutation that answers alike at T(n) but works differently
    (:func:`loopinterp.rasp.mutations.near_misses`). Each model is compared with the stock
    programs of its task that are not it, all of them and with each left out. A name is wrong if
    some interchange intervention tells the named program from the one that is run
    (:func:`loopinterp.rasp.mutations.equivalence`).

    Args:
        programs: Stock programs; by default all.
        misses_of_each: Most near misses of each.
        disguises: What is done to each model: a name, and disguises one after the other.
        seed: Seed of mutations, inputs, pairs.
        progress: Called with the name of each model before it is compared.
    """
    stock = list_programs() if programs is None else list(programs)
    with study(seed, study="false names", programs=stock, misses_of_each=misses_of_each) as watch:
        rows, wrong_names = [], []
        for case in _cases(stock, misses_of_each, seed):
            compiled, data = _compiled(case.program, seed)
            for label, disguise in disguises:
                name = f"{case.program.name}, {label}"
                progress(name)
                model = compiled
                for change in disguise:
                    model = change(model)
                row, wrong = _score(model, case, data, seed)
                rows.append((name, case, label, row))
                wrong_names += [(name, *found) for found in wrong]
        return FalseNames.of(
            watch,
            coords={"model": [name for name, *_ in rows]},
            **{key: np.array([row[key] for *_, row in rows]) for key in FalseNames.VARIABLES},
            programs=[case.program.name for _, case, *_ in rows],
            originals=[case.original for _, case, *_ in rows],
            tasks=[case.program.task for _, case, *_ in rows],
            disguises=[label for *_, label, _ in rows],
            wrong_names=wrong_names,
        )


def _cases(stock: Sequence[str], misses_of_each: int, seed: int) -> Iterator[_Case]:
    for name in stock:
        program = get_program(name)
        rivals = tuple(
            other
            for other in list_programs(program.task)
            if get_program(other).inputs == program.inputs
        )
        yield _Case(program, name, rivals)
        for miss in near_misses(program, most=misses_of_each, seed=seed):
            yield _Case(miss, name, rivals)


def _compiled(program: LoopProgram, seed: int) -> tuple[Compiled, list[Batch]]:
    """The program, compiled for its longest inputs, and inputs of two lengths."""
    task = get_task(program.task, **program.task_settings)
    n = LENGTHS.get(program.task, LENGTH)
    generator = torch.Generator().manual_seed(seed)
    data = [
        task.sample(torch.full((EXAMPLES,), length), generator=generator)
        for length in (n, math.ceil(LONGER * n))
    ]
    return compile_program(program, max_length=data[-1].inputs.shape[1]), data


def _score(
    model: Compiled, case: _Case, data: list[Batch], seed: int
) -> tuple[dict[str, int], list[tuple[str, float]]]:
    """Counts of names on one model, and the wrong ones."""
    others = [p for p in case.rivals if p != case.program.name]
    found = {"lists": 0, "wrong": 0, "equivalent": 0}
    wrong: dict[str, float] = {}
    if others:
        counts = _counts(model, [get_program(p) for p in others], data, seed)
        lists = [others] + [[p for p in others if p != out] for out in others if len(others) > 1]
        told: dict[str, float] = {}
        for names in lists:
            winner = decide(counts.sel(program=names, rival=names)).winner
            found["lists"] += 1
            if winner is None:
                continue
            if winner not in told:
                apart = equivalence(winner, case.program)
                told[winner] = 0.0 if apart.equivalent else max(apart.share, apart.natural_share)
            found["wrong" if told[winner] else "equivalent"] += 1
            if told[winner]:
                wrong[winner] = told[winner]
    listed = [case.program, *(get_program(p) for p in others)]
    winner = decide(_counts(model, listed, data, seed)).winner
    return {**found, "named": int(winner == case.program.name)}, list(wrong.items())


def _counts(
    model: Compiled, programs: Sequence[LoopProgram], data: list[Batch], seed: int
) -> xr.Dataset:
    evidence = gather_evidence(model.model, programs, data, SpreadPairs(), seed=seed)
    return count_evidence([evidence]).sel(model=0)
