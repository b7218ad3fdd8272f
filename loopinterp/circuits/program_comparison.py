"""Which program a looped model runs: rivals compared by interchange interventions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.comparison_evidence import Evidence, gather_evidence
from loopinterp.circuits.comparison_inputs import check_batches, check_programs, named_models
from loopinterp.circuits.evidence_counts import END, count_evidence
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.verdict import THRESHOLD, Reason, Verdict, decide
from loopinterp.circuits.verdict_words import statement
from loopinterp.errors import check_number
from loopinterp.intervals import wilson_estimate
from loopinterp.models import describe_model
from loopinterp.rasp.mutations import equivalence
from loopinterp.results import Result, study
from loopinterp.tasks import list_tasks

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.circuits.interchange_pairs import PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.program_alignment import Alignment
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProgramComparison(Result, kind="program-comparison"):
    """What :func:`compare_programs` returns.

    Arrays of ``data`` (``delay`` counts loops from the exchange, ``"end"`` is T(n); ``stratum``
    is ``"all"`` or ``"CLASS: LABEL"``; all shares are over pairs on which something happens, the
    program or the model changing an answer):

    - ``iia``: how often the model's whole answer is the one the program says;
    - ``active``: on how many pairs something happens;
    - ``no_interchange``: how often no exchange at all would be right on the same pairs;
    - ``whole_run``: how often it is right at every delay; ``whole_run_active``: of how many;
      ``whole_run_inputs``: of how many inputs these change the run (pairs of one input are alike,
      so that all intervals count inputs);
    - ``followed``: how often it is right at every delay up to this one;
    - ``pairs``: pairs of each stratum, whether something happens or not (which states a run
      reaches depends on the program);
    - ``undisturbed``: share of the loops of runs without an exchange at which the whole answer is
      the program's (interval over runs); ``decided``: share of those answers of which it says
      something;
    - ``duel``: where two programs say different things, how often the first is followed, at the
      delay (``duel_delay``) that separates them best, of ``apart`` pairs; ``alike``: whether they
      give the same answers at every loop of every undisturbed run;
    - ``random_change``: share of whole runs that look as the program says after a change of the
      same norm in a random direction; ``specific``: the same after the exchange, on those pairs;
    - ``same_value``: share of runs that a donor with the same values leaves unchanged.

    Attributes:
        verdicts: The verdict on each model.
        alignments: How each program lies over each model, in words.
        solved: Share of inputs that each model answers right.
        lengths: Lengths of the inputs; programs are laid over the model at the first.
        threshold: Least lower end of the accuracy of a named program.
    """

    VARIABLES: ClassVar = {
        "iia": "model program stratum delay estimate",
        "active": "model program stratum delay",
        "no_interchange": "model program stratum delay",
        "whole_run": "model program stratum estimate",
        "whole_run_active": "model program stratum",
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
    alignments: dict[str, list[str]]
    solved: dict[str, float]
    lengths: list[int]
    threshold: float

    @property
    def verdict(self) -> Verdict:
        """The verdict on the one model; of several, the one that holds of all of them."""
        each = list(self.verdicts.values())
        if len(each) == 1:
            return each[0]
        first, winners = each[0], {v.winner for v in each}
        winner = first.winner if len(winners) == 1 else None
        why_none = Reason("no_model_identified" if winners == {None} else "models_differ")
        return Verdict(
            winner=winner,
            nearest=first.nearest,
            undisturbed=[p for p in first.undisturbed if all(p in v.undisturbed for v in each)],
            followed_for=min(v.followed_for if v.nearest == first.nearest else -1 for v in each),
            longest=min(v.longest for v in each),
            indistinguishable=sorted({p for v in each for p in v.indistinguishable}),
            tied=sorted({program for v in each for program in v.tied}),
            equivalent=sorted({program for v in each for program in v.equivalent}),
            refuted=all(v.refuted for v in each),
            reasons=[] if winner else [why_none],
            untested=list(dict.fromkeys(stratum for v in each for stratum in v.untested)),
            untried=list(dict.fromkeys(kind for v in each for kind in v.untried)),
            off_distribution=max(v.off_distribution for v in each),
            statement=" ".join(f"{k}: {v.statement}" for k, v in self.verdicts.items()),
        )


def compare_programs(
    models: LoopedModel | Any | Sequence[LoopedModel | Any],
    programs: Sequence[str | LoopProgram],
    data: Batch | Sequence[Batch] | Task,
    *,
    pairs: PairStrategy | None = None,
    names: Sequence[str] | None = None,
    threshold: float = THRESHOLD,
    n: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ProgramComparison:
    r"""Compare a model with rival programs by what they say to interchange interventions.

    After some loops of a base run, the state of the model at a position is taken from another
    run, the source's, and the base goes on. Each program says what the answer then is, at every
    delay from 0 to the end: its own variables at that position are taken from its own run on the
    source. Its accuracy (IIA) is how often the model's whole answer is that one, over pairs on
    which the program or the model changes an answer: exchanges of which nothing comes count for
    nobody. A program is named by the rule of :func:`loopinterp.circuits.verdict.decide`: it must
    hold at every delay, in every stratum, and when nothing disturbs the run, and beat every rival
    where they disagree; else the verdict says what does hold.

    A program may be laid over the model a loop earlier or later, with answers a loop late, or
    with its variables a position to the left. That is chosen on some pairs of the first batch,
    which are not scored; other batches, of other lengths, test it elsewhere.

    What this cannot do: whole positions are exchanged, so how a variable is stored (negated, in
    two copies) is not seen, and programs that differ in nothing else are the same to it. A
    program that keeps nothing from loop to loop says that an exchange shows at once and never
    again.

    Args:
        models: Any looped model, or several (seeds of one recipe): each gets its verdict.
        programs: One program or more, all of the task whose tokens the model reads.
        data: Inputs, each batch of one length, or the task to draw them from.
        pairs: How pairs are chosen; by default :class:`~loopinterp.circuits.SpreadPairs` on the
            first :data:`FIRST_LOOK` inputs of each batch, and where these would name a program,
            :data:`TO_NAME`, eight times as many pairs on all inputs, on which it is then named or
            not.
        names: A name for each model.
        threshold: Least lower end of a named program's interval.
        n: Problem length or lengths, where a task is given; see
            :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples of each length, where a task is given; :data:`EXAMPLES` by default.
        seed: Seed of everything random.

    Raises:
        InputError: no model or program, programs of several tasks, inputs that are not theirs or
            not of one length, a threshold that is no share, or no exchange in which a variable
            differs.

    Example:
        >>> import torch
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=7).model
        >>> batch = Addition().sample(6, batch_size=64, generator=torch.Generator().manual_seed(0))
        >>> compare_programs(model, ["ripple", "sticky_ripple"], batch).verdict.winner
        'ripple'

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.
    """
    rivals = check_programs(programs)
    labelled = named_models(models, names)
    drawn = {"n": n, "batch_size": batch_size, "examples": EXAMPLES, "seed": seed}
    batches = {
        label: check_batches(model, data, rivals, **drawn) for label, model in labelled.items()
    }
    check_number("threshold", threshold, least=0, most=1)
    lengths = [int(batch.n[0]) for batch in next(iter(batches.values()))]
    with study(
        seed,
        study="program comparison",
        models=[describe_model(model) for model in labelled.values()],
        programs=[p.name for p in rivals],
        lengths=lengths,
        pairs=repr(pairs or [SpreadPairs(), TO_NAME]),
    ) as watch:

        def gather(label: str, strategy: PairStrategy, examples: int | None = None) -> Evidence:
            some = [batch[slice(0, examples)] for batch in batches[label]]
            return gather_evidence(labelled[label], rivals, some, strategy, seed=seed)

        first = pairs or SpreadPairs()
        found = {label: gather(label, first, None if pairs else FIRST_LOOK) for label in labelled}
        counts, verdicts = _decided(found, rivals, threshold)
        if pairs is None and (named := [label for label in found if verdicts[label].named]):
            found |= {label: gather(label, TO_NAME) for label in named}
            counts, verdicts = _decided(found, rivals, threshold)
        return ProgramComparison.of(
            watch,
            coords={axis: counts[axis].values for axis in _AXES},
            verdicts=verdicts,
            alignments={label: _in_words(e.alignments) for label, e in found.items()},
            solved={label: float(counts.solved.sel(model=label)) for label in found},
            lengths=lengths,
            threshold=threshold,
            **_shares(counts),
        )


EXAMPLES = 512
"""Inputs of each length that are drawn from a task."""

FIRST_LOOK = 128
"""Of these, inputs of each length that a first look takes, with pairs that are few as well."""

TO_NAME = SpreadPairs(pairs=6144, same_value=384, repeated=0.5)
"""Where nothing else is asked for, a program is named on all inputs, and on so many pairs: what a
model does on one input, in one exchange of hundreds or in one second exchange of a thousand is
seen on many only."""

_AXES = ("model", "program", "rival", "stratum", "delay")


def _decided(
    found: Mapping[str, Evidence], rivals: Sequence[LoopProgram], threshold: float
) -> tuple[xr.Dataset, dict[str, Verdict]]:
    """The counts of all models, and the verdict on each."""
    counts = count_evidence(list(found.values())).assign_coords(model=list(found))
    by_name = {program.name: program for program in rivals}

    @cache
    def equivalent(first: str, second: str) -> bool:
        pair = by_name[first], by_name[second]
        return pair[0].task in list_tasks() and equivalence(*pair).equivalent

    verdicts = {}
    for label, evidence in found.items():
        own = counts.sel(model=label)
        verdict = decide(own, threshold=threshold, untried=evidence.untried, equivalent=equivalent)
        laid = _in_words(evidence.alignments)[list(by_name).index(verdict.nearest)]
        in_words = statement(verdict, own.drop_sel(delay=END), laid)
        verdicts[label] = dataclasses.replace(verdict, statement=in_words)
    return counts, verdicts


def _in_words(laid: Sequence[Alignment]) -> list[str]:
    return [str(alignment) for alignment in laid]


def _shares(counts: xr.Dataset) -> dict[str, np.ndarray | xr.DataArray]:
    """The arrays of the result, out of the counts."""
    nothing = counts.nothing_right / counts.active.where(counts.active > 0)
    changed = {"trials": counts.random_active, "independent": counts.random_inputs}
    return {
        "iia": wilson_estimate(counts.right, counts.active, independent=counts.active_inputs),
        "active": counts.active,
        "no_interchange": nothing,
        "whole_run": wilson_estimate(
            counts.run_right, counts.run_active, independent=counts.run_inputs
        ),
        "whole_run_active": counts.run_active,
        "whole_run_inputs": counts.run_inputs,
        "followed": wilson_estimate(
            counts.prefix_right, counts.prefix_active, independent=counts.prefix_inputs
        ),
        "pairs": counts.pairs,
        # A run's loops are alike, so that intervals count runs.
        "undisturbed": wilson_estimate(counts.undisturbed, counts.n_runs.values[:, None]),
        "decided": counts.decided,
        "alike": counts.alike,
        "random_change": wilson_estimate(counts.random_right, **changed),
        "specific": wilson_estimate(counts.exchange_right, **changed),
        "same_value": wilson_estimate(
            counts.unchanged, counts.n_same, independent=counts.same_inputs
        ),
        **_duels(counts.drop_sel(delay=END)),
    }


def _duels(counts: xr.Dataset) -> dict[str, np.ndarray]:
    """For every two programs, at the delay at which one is told from the other best."""
    where = {"trials": counts.apart, "independent": counts.apart_inputs}
    own = wilson_estimate(counts.duel_right, **where)
    rival = wilson_estimate(counts.duel_right.values.swapaxes(1, 2), **where)
    lead = np.maximum(own[..., 1] - rival[..., 2], rival[..., 1] - own[..., 2])
    delay = np.nan_to_num(lead, nan=-2.0).argmax(-1)
    best = delay[..., None]
    return {
        "duel": np.take_along_axis(own, best[..., None], axis=3)[:, :, :, 0],
        "duel_delay": delay,
        "apart": np.take_along_axis(counts.apart.values, best, axis=3)[..., 0],
    }
