"""Every tool of the library on known-circuit models, and programs identified wrongly there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt

from loopinterp.benchmark.known_models import (
    LENGTHS,
    Disguise,
    KnownModel,
    Score,
    compiled_with_inputs,
)
from loopinterp.benchmark.mechanism_scores import (
    rivals_of,
    score_ablation,
    score_dynamics,
    score_heads,
    score_interchange,
    score_patching,
    score_probes,
    score_verdict,
    score_wavefront,
)
from loopinterp.comparison.counts import count_evidence
from loopinterp.comparison.evidence import gather_evidence
from loopinterp.comparison.pair_strategies import SpreadPairs
from loopinterp.comparison.program_comparison import EXAMPLES, FIRST_LOOK, TO_IDENTIFY
from loopinterp.comparison.rule import decide
from loopinterp.compiler import near_misses
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr, track
from loopinterp.programs import equivalence
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


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

        table = self.data.to_dataframe().reindex(columns=[*self.VARIABLES])
        table = table.assign(task=self.tasks, program=self.programs)
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


@dataclass(frozen=True, repr=False)
class Check(ShortRepr):
    """A question with a known answer, its control, and the score that passes."""

    key: str
    tool: str
    question: str
    control: str
    at_least: float = math.nan
    at_most: float = math.nan


_INTERCHANGE, _HEADS, _PATCHING = (
    "interchange interventions",
    "heads against selectors",
    "patching sweeps",
)

CHECKS = (
    Check(
        "probe finds",
        "probes",
        "Accuracy of a linear probe for a variable on the state, worst loop.",
        "the same probe on the injected input, mean",
        at_least=0.999,
    ),
    Check(
        "probe finds nothing else",
        "probes",
        "Accuracy of a probe on the state without the directions of the variable and of "
        "distractors, minus what the rest of the state predicts: largest excess.",
        "the largest excess with those directions in place",
        at_most=0.03,
    ),
    Check(
        "interchange",
        _INTERCHANGE,
        "IIA of the right variable at the right loop: the worst variable and loop at which two "
        "inputs differ in a way that changes an answer.",
        "the best of the three wrong interchanges below, over whole runs",
        at_least=1.0,
    ),
    Check(
        "interchange by probe",
        _INTERCHANGE,
        "IIA over whole runs of the subspaces in which probes find the variables, all loops: the "
        "method without knowledge of the circuit.",
        "a change of equal norm in a random direction",
        at_least=0.95,
    ),
    Check(
        "wrong variable",
        _INTERCHANGE,
        "Whole-run agreement after an interchange of another variable, where the program "
        "distinguishes the two.",
        "no intervention",
        at_most=0.0,
    ),
    Check(
        "wrong loop",
        _INTERCHANGE,
        "Whole-run agreement after an interchange with another loop, where the variable has "
        "another value.",
        "no intervention",
        at_most=0.0,
    ),
    Check(
        "random change",
        _INTERCHANGE,
        "Whole-run agreement after a change of equal norm in a random direction.",
        "no intervention",
        at_most=0.5,
    ),
    Check(
        "same value",
        _INTERCHANGE,
        "Same-value control: share of whole runs that stay unchanged.",
        "agreement after a random change",
        at_least=1.0,
    ),
    Check(
        "decodable, not used",
        _INTERCHANGE,
        "Share of answers that change after an interchange of the directions of distractors.",
        "accuracy of a probe for the variables in those directions, mean",
        at_most=0.0,
    ),
    Check(
        "heads found",
        _HEADS,
        "Share of the heads that compute a selector and are matched with it.",
        "mean overlap of even attention with the selectors",
        at_least=1.0,
    ),
    Check(
        "no other head",
        _HEADS,
        "Heads that compute no selector but are matched with one that does not select everything.",
        "heads that compute no selector",
        at_most=0.0,
    ),
    Check(
        "patched states",
        _PATCHING,
        "Share of (loop, position) at which a patched state recovers exactly as many answers as "
        "the program predicts.",
        "the same against the program's prediction for the loop before",
        at_least=1.0,
    ),
    Check(
        "patched heads",
        _PATCHING,
        "Largest effect on any answer's logits of a head outside the circuit.",
        "largest effect of a head of the circuit",
        at_most=1e-3,
    ),
    *(
        Check(
            f"ablated: {kind}",
            "ablation",
            "Share of the block's heads and MLPs that are judged needed or idle as the circuit "
            f"says ({kind} ablation).",
            "the share that calling every part needed would get right",
            at_least=1.0,
        )
        for kind in ("zero", "mean", "resample")
    ),
    Check(
        "settling loop",
        "dynamics",
        "Share of tokens whose state converges in the loop in which the variables do.",
        "the share if all converged after the most common number of loops",
        at_least=1.0,
    ),
    Check(
        "answer stable",
        "dynamics",
        "Share of answers that become final in the loop in which the program's do.",
        "the share if all became final in the most common loop",
        at_least=1.0,
    ),
    Check(
        "stability",
        "dynamics",
        "Spectral radius of the Jacobian at the fixed point: 0, as the map is flat around each.",
        "1, from which on a fixed point is unstable",
        at_most=0.01,
    ),
    Check(
        "wavefront",
        "carry study",
        "Share of (loop, chain length) at which the carry is as decodable as in the program.",
        "the same of a model with shuffled weights",
        at_least=0.95,
    ),
    Check(
        "verdict",
        "comparison of programs",
        "IIA over whole runs of the model's program if it is identified, else 0.",
        "IIA of the next program; none where the task has no other",
        at_least=0.95,
    ),
)
"""All checks, in the order of tables, by tool."""

CHECK_OF = {check.key: check for check in CHECKS}
_SCORERS: dict[str, Callable[..., dict[str, Score]]] = {
    "probes": score_probes,
    _INTERCHANGE: score_interchange,
    _HEADS: score_heads,
    _PATCHING: score_patching,
    "ablation": score_ablation,
    "dynamics": score_dynamics,
    "carry study": score_wavefront,
    "comparison of programs": score_verdict,
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GroundTruth(Result, kind="ground-truth"):
    """The score of each model in each check, and its control; NaN where a check does not apply."""

    VARIABLES: ClassVar[Mapping[str, str]] = {"value": "model check", "control": "model check"}

    programs: list[str]
    disguises: list[list[str]]  # of each model, in order

    @property
    def models(self) -> list[str]:
        """The program of each model, with its disguises."""
        return self.data["model"].values.tolist()

    @property
    def passed(self) -> xr.DataArray:
        """1 where a check is passed, 0 where it is not, NaN where it does not apply."""
        value = self.data["value"]
        checks = [CHECK_OF[key] for key in self.data["check"].values]
        # [check] each; of a check's two limits one is NaN, which no score reaches.
        least, most = ([getattr(c, end) for c in checks] for end in ("at_least", "at_most"))
        good = (value.values >= np.array(least)) | (value.values <= np.array(most))
        return value.copy(data=good.astype(float)).where(value.notnull())

    @property
    def missed(self) -> list[tuple[str, str, float, float]]:
        """Failed checks: (model, check, score, control)."""
        rows = self.data.where(self.passed == 0).to_dataframe().dropna(subset="value")
        return [
            (model, check, float(row.value), float(row.control))
            for (model, check), row in rows.iterrows()
        ]

    def table(self) -> pd.DataFrame:
        """Scores, a row for each model and a column for each check."""
        return self.data["value"].to_dataset("check").to_dataframe()


@checked
def ground_truth_study(
    models: Sequence[KnownModel],
    *,
    tools: Annotated[Sequence[str], Field(min_length=1)] | None = None,
    seed: Seed = 0,
) -> GroundTruth:
    """Score tools on compiled models, by questions with known answers.

    :data:`~loopinterp.benchmark.CHECKS` lists questions, controls and the scores that pass. A check
    that does not apply to a model is NaN, such as the carry study on a task other than addition.

    Args:
        models: Models with inputs, from :func:`known_models`.
        tools: Tools to score; by default all.

    Example:
        >>> from loopinterp.benchmark import known_models
        >>> models = known_models(["prefix_xor"], n=4, examples=64)
        >>> result = ground_truth_study(models, tools=["interchange interventions"])
        >>> float(result.data["value"].sel(model="prefix_xor", check="interchange"))
        1.0
    """
    names = [] if isinstance(models, KnownModel) else [known.name for known in models]
    expected, got = "a list of known models of different names", ", ".join(names) or "none"
    fix = "Make them with known_models(['ripple']); distinguish disguises with its label=."
    need(names and len(set(names)) == len(names), "models", expected, got, fix)
    chosen = [check_choice("tool", tool, _SCORERS) for tool in tools or _SCORERS]
    with study(seed, study="ground truth", models=names, tools=chosen) as watch:
        answers: dict[tuple[str, str], Score] = {}
        for known, tool in track(list(product(models, chosen)), "tools on known models"):
            scores = _SCORERS[tool](known, seed=seed)
            answers |= {(known.name, key): score for key, score in scores.items()}
        none = Score(math.nan)
        rows = [[answers.get((name, check.key), none) for check in CHECKS] for name in names]
        return GroundTruth.of(
            watch,
            coords={"model": names, "check": [check.key for check in CHECKS]},
            value=np.array([[score.value for score in row] for row in rows]),
            control=np.array([[score.control for score in row] for row in rows]),
            programs=[known.compiled.program.name for known in models],
            disguises=[list(known.compiled.circuit.disguises) for known in models],
        )
