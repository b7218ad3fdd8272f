"""Which program a looped model runs, by interchange interventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from loopinterp.comparison.counts import count_evidence, shares_of
from loopinterp.comparison.evidence import Evidence, gather_evidence
from loopinterp.comparison.pair_strategies import (
    SpreadPairs,
    check_batches,
    check_programs,
    named_models,
)
from loopinterp.comparison.rule import THRESHOLD, Reason, Verdict, decide
from loopinterp.core.boundary import checked
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.models import describe_model
from loopinterp.programs import equivalence
from loopinterp.programs.program import ProgramOffset
from loopinterp.tasks import list_tasks

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.comparison.pair_strategies import PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

EXAMPLES = 512  # inputs of each length drawn from a task

FIRST_LOOK = 128  # of these in a first look, with few pairs

TO_IDENTIFY = SpreadPairs(pairs=6144, same_value=384, repeated=0.5)
"""Pairs with which a program is identified; exceptions may occur in one input of hundreds."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProgramComparison(Result, kind="program-comparison"):
    """The result of :func:`compare_programs`.

    Arrays of ``data``. ``delay`` counts loops from the interchange, ``"end"`` is T(n); ``stratum``
    is ``"all"`` or ``"CLASS: LABEL"``. Shares are of effective interventions; intervals count
    inputs.

    - ``iia``: share of ``effective`` pairs whose whole answer is predicted; ``no_interchange``:
      where predicting no change is right;
    - ``whole_run``: share predicted at every delay, of ``whole_run_effective`` pairs on
      ``whole_run_inputs`` inputs; ``followed``: at every delay up to this one;
    - ``pairs``: all pairs of a stratum, effective or not;
    - ``undisturbed``: share of loops of clean runs whose whole answer is the program's;
      ``decided``: share of answers that it decides;
    - ``duel``: where two programs predict different answers, share in which the first is right, at
      the delay (``duel_delay``) that separates them best, of ``apart`` pairs; ``alike``: whether
      their clean answers are identical;
    - ``random_change``: ``whole_run`` after a random perturbation of equal norm; ``specific``:
      after the interchange, on the same pairs;
    - ``same_value``: share of runs that a same-value source leaves unchanged.

    Attributes:
        verdicts: The verdict on each model; :func:`~loopinterp.comparison.statement` renders it.
        alignments: The offset of each program on each model (text in older files).
        solved: Share of inputs that each model answers right.
        lengths: Lengths of the inputs; program offsets are chosen at the first.
    """

    VARIABLES: ClassVar = {
        "iia": "model program stratum delay estimate",
        "effective": "model program stratum delay",
        "no_interchange": "model program stratum delay",
        "whole_run": "model program stratum estimate",
        "whole_run_effective": "model program stratum",
        "whole_run_inputs": "model program stratum",
        "followed": "model program delay estimate",
        "pairs": "model program stratum",
        "undisturbed": "model program estimate",
        "decided": "model program",
        "duel": "model program rival estimate",
        "duel_delay": "model program rival",
        "apart": "model program rival",
        "alike": "model program rival",
        "random_change": "model program estimate",
        "specific": "model program estimate",
        "same_value": "model estimate",
    }

    verdicts: dict[str, Verdict]
    alignments: dict[str, list[ProgramOffset | str]]
    solved: dict[str, float]
    lengths: list[int]
    threshold: float

    @property
    def verdict(self) -> Verdict:
        """The verdict on the model; for several models, what holds for all."""
        first, *others = each = list(self.verdicts.values())
        if not others:
            return first

        # Doubts of any model, each once, in their order.
        def of_any(name: str) -> list[Any]:
            return list(dict.fromkeys(value for v in each for value in getattr(v, name)))

        # Only what holds of every model, and the doubts about any.
        programs = {v.identified for v in each}
        identified = first.identified if len(programs) == 1 else None
        why_none = Reason("no_model_identified" if programs == {None} else "models_differ")
        return Verdict(
            identified=identified,
            closest=first.closest,
            clean_fits=[p for p in first.clean_fits if all(p in v.clean_fits for v in others)],
            followed_for=min(v.followed_for if v.closest == first.closest else -1 for v in each),
            longest_delay=min(v.longest_delay for v in each),
            indistinguishable=sorted(of_any("indistinguishable")),
            unseparated=sorted(of_any("unseparated")),
            equivalent=sorted(of_any("equivalent")),
            refuted=all(v.refuted for v in each),
            reasons=[] if identified else [why_none],
            untested=of_any("untested"),
            untried=of_any("untried"),
            off_distribution=max(v.off_distribution for v in each),
        )


@checked
def compare_programs(
    models: LoopedModel | Any | Sequence[LoopedModel | Any],
    programs: Sequence[str | LoopProgram],
    data: Batch | Sequence[Batch] | Task,
    *,
    pairs: PairStrategy | None = None,
    names: Sequence[str] | None = None,
    threshold: Annotated[float, Field(ge=0, le=1)] = THRESHOLD,
    n: int | Sequence[int] | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> ProgramComparison:
    """Compare a model with candidate programs by their predictions of interchange interventions.

    An interchange replaces the model's state at one position, after some loops of a base run, by
    that of a source run. Each program predicts the answer at every delay from the same interchange
    of its variables. Its accuracy (IIA) is the share of effective interventions (an answer of
    program or model changes) whose whole answer it predicts.
    :func:`loopinterp.comparison.rule.decide` identifies a program that holds throughout and beats
    every rival. Programs that only store a variable otherwise are not separated.

    A program may be a loop earlier or later than the model, answer a loop late, or hold its
    variables a position to the left. This offset is chosen on unscored pairs of the first batch.

    Args:
        models: A looped model, or several, with a verdict each.
        programs: One program or more, of the task whose tokens the model reads.
        data: Inputs, each batch of one length, or the task (``batch_size`` of each length ``n``,
            512 by default).
        pairs: How pairs are chosen; by default :class:`~loopinterp.comparison.SpreadPairs` on the
            first 128 inputs of each batch. If these would identify a program, 6144 pairs on all
            inputs decide.
        names: A name for each model.
        threshold: Least lower end of an identified program's interval.

    Example:
        >>> import torch
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=7).model
        >>> batch = Addition().sample(6, batch_size=64, generator=torch.Generator().manual_seed(0))
        >>> compare_programs(model, ["ripple", "sticky_ripple"], batch).verdict.identified
        'ripple'

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.
    """
    candidates = check_programs(programs)
    labelled = named_models(models, names)
    drawn = {"n": n, "batch_size": batch_size, "examples": EXAMPLES, "seed": seed}
    batches = {
        label: check_batches(model, data, candidates, **drawn) for label, model in labelled.items()
    }
    lengths = [int(batch.n[0]) for batch in next(iter(batches.values()))]
    with study(
        seed,
        study="program comparison",
        models=[describe_model(model) for model in labelled.values()],
        programs=[p.name for p in candidates],
        lengths=lengths,
        pairs=repr(pairs or [SpreadPairs(), TO_IDENTIFY]),
    ) as watch:

        @cache
        def equivalent(first: str, second: str) -> bool:
            # Equivalence is decided on inputs of a registered task.
            pair = [p for name in (first, second) for p in candidates if p.name == name]
            return pair[0].task in list_tasks() and equivalence(*pair).equivalent

        def gather(label: str, strategy: PairStrategy, examples: int | None = None) -> Evidence:
            some = [batch[slice(0, examples)] for batch in batches[label]]
            return gather_evidence(labelled[label], candidates, some, strategy, seed=seed)

        # A first look on few pairs; models for which it identifies a program get a second one,
        # on many, which decides.
        first = (pairs, None) if pairs else (SpreadPairs(), FIRST_LOOK)
        evidence = {label: gather(label, *first) for label in labelled}
        counts, verdicts = _decide_each(evidence, threshold, equivalent)
        likely = [label for label, verdict in verdicts.items() if verdict.identified]
        if pairs is None and likely:
            evidence |= {label: gather(label, TO_IDENTIFY) for label in likely}
            counts, verdicts = _decide_each(evidence, threshold, equivalent)
        axes = ("model", "program", "rival", "stratum", "delay")
        return ProgramComparison.of(
            watch,
            coords={axis: counts[axis].values for axis in axes},
            verdicts=verdicts,
            alignments={label: list(each.offsets) for label, each in evidence.items()},
            solved={label: float(counts.solved.sel(model=label)) for label in evidence},
            lengths=lengths,
            threshold=threshold,
            **shares_of(counts),
        )


def _decide_each(
    evidence: Mapping[str, Evidence], threshold: float, equivalent: Callable[[str, str], bool]
) -> tuple[xr.Dataset, dict[str, Verdict]]:
    counts = count_evidence(list(evidence.values())).assign_coords(model=list(evidence))
    rule = {"threshold": threshold, "equivalent": equivalent}
    return counts, {
        label: decide(counts.sel(model=label), untried=each.untried, **rule)
        for label, each in evidence.items()
    }
