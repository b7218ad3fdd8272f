"""Which program a looped model runs: rivals compared by interchange interventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.comparison_evidence import (
    MANIFOLD,
    REACHED,
    UNREACHED,
    Evidence,
    gather_evidence,
    scored_pairs,
)
from loopinterp.circuits.comparison_inputs import check_batches, check_programs, name_models
from loopinterp.circuits.interchange_pairs import KIND, SAME_VALUE
from loopinterp.circuits.pair_strategies import SpreadPairs
from loopinterp.circuits.task_strata import strata_of
from loopinterp.circuits.verdict import ALL, THRESHOLD, Counts, Verdict, decide
from loopinterp.intervals import wilson_estimate
from loopinterp.models import describe_model
from loopinterp.models.looped_model import need_model
from loopinterp.results import Result, study

if TYPE_CHECKING:
    from loopinterp.circuits.interchange_pairs import PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

END = "end"
"""The delay that reads each pair's answer after T(n) loops."""


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
        said = " ".join(f"{name}: {v.statement}" for name, v in self.verdicts.items())
        return Verdict(
            winner=winner,
            nearest=first.nearest,
            undisturbed=[p for p in first.undisturbed if all(p in v.undisturbed for v in each)],
            followed_for=min(v.followed_for for v in each),
            longest=min(v.longest for v in each),
            reasons=[] if winner else ["the models do not all run the same program"],
            statement=said,
        )


def compare_programs(
    models: LoopedModel | Any | Sequence[LoopedModel | Any],
    programs: Sequence[str | LoopProgram],
    data: Batch | Sequence[Batch],
    *,
    pairs: PairStrategy | None = None,
    names: Sequence[str] | None = None,
    threshold: float = THRESHOLD,
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
        data: Inputs, each batch of one length.
        pairs: How pairs are chosen; :class:`~loopinterp.circuits.SpreadPairs` by default.
        names: A name for each model.
        threshold: Least lower end of a named program's interval.
        seed: Seed of everything random.

    Raises:
        InputError: no model or program, programs of several tasks, inputs that are not theirs or
            not of one length, or no exchange in which a variable differs.

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
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    rivals = check_programs(programs)
    batches = check_batches(data, rivals)
    labels = name_models(names, len(several))
    for model in several:
        need_model(model)
    strategy = pairs or SpreadPairs()
    lengths = [int(batch.n[0]) for batch in batches]
    with study(
        seed,
        study="program comparison",
        models=[describe_model(model) for model in several],
        programs=[p.name for p in rivals],
        lengths=lengths,
        pairs=repr(strategy),
    ) as watch:
        strata = strata_of(rivals[0].task)
        found = [
            gather_evidence(model, rivals, batches, strategy, strata, seed=seed)
            for model in several
        ]
        classes = stratum_classes(found)
        delays = max(e.within.shape[1] for e in found)
        tables = [EvidenceTable(e, classes, delays) for e in found]
        arrays = {
            name: np.stack([getattr(t, name) for t in tables])
            for name in ProgramComparison.VARIABLES
        }
        verdicts = {
            label: decide(table.counts([p.name for p in rivals], classes), threshold=threshold)
            for label, table in zip(labels, tables)
        }
        return ProgramComparison.of(
            watch,
            coords={
                "model": labels,
                "program": [p.name for p in rivals],
                "rival": [p.name for p in rivals],
                "stratum": classes,
                "delay": [*map(str, range(delays)), END],
            },
            verdicts=verdicts,
            alignments={label: [str(a) for a in e.alignments] for label, e in zip(labels, found)},
            solved={label: e.solved for label, e in zip(labels, found)},
            lengths=lengths,
            threshold=threshold,
            **arrays,
        )


def stratum_classes(found: Sequence[Evidence]) -> list[str]:
    """Names of all classes of all strata, "all" first."""
    names = {
        f"{stratum}: {label}": None
        for evidence in found
        for stratum, (labels, codes) in evidence.strata.items()
        if stratum != KIND
        for k, label in enumerate(labels)
        if (codes[scored_pairs(evidence)] == k).any()
    }
    return [ALL, *(f"{MANIFOLD}: {label}" for label in (REACHED, UNREACHED)), *names]


class EvidenceTable:
    """The evidence on one model, counted by program, stratum and delay."""

    def __init__(self, evidence: Evidence, classes: Sequence[str], delays: int) -> None:
        e, other = evidence, scored_pairs(evidence)
        self.evidence = e
        masks = self._masks(classes)[:, :, other]  # [program, stratum, pair]
        happens = (e.moves | e.changes)[:, other]
        agree, changes, within = e.agree[:, other], e.changes[:, other], e.within[other]
        last = within.sum(-1) - 1

        def with_end(x: np.ndarray) -> np.ndarray:
            """[..., pair, delay] -> one more delay, each pair's last."""
            index = np.broadcast_to(last[:, None], (*x.shape[:-1], 1))
            padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, delays - x.shape[-1])])
            return np.concatenate([padded, np.take_along_axis(x, index, axis=-1)], axis=-1)

        def count(x: np.ndarray) -> np.ndarray:
            """[program, pair, delay] -> [program, stratum, delay]."""
            return np.einsum("psn,pnd->psd", masks.astype(np.int64), with_end(x).astype(np.int64))

        self.active = count(happens)
        self.right = count(happens & agree)
        self.iia = wilson_estimate(self.right, self.active)
        still = count(happens & ~changes)
        self.no_interchange = np.where(self.active > 0, still / np.maximum(self.active, 1), np.nan)

        ever = happens.any(-1)
        holds = np.asarray((agree | ~within).all(-1))
        self.whole_run_active = np.einsum("psn,pn->ps", masks, ever.astype(np.int64))
        self.whole_run_right = np.einsum("psn,pn->ps", masks, (ever & holds).astype(np.int64))
        self.whole_run = wilson_estimate(self.whole_run_right, self.whole_run_active)
        # Runs that have ended say nothing of later delays.
        so_far = np.logical_or.accumulate(happens, -1) & within
        kept = np.logical_and.accumulate(agree | ~within, -1)
        self.prefix_active = with_end(so_far).sum(1)
        self.prefix_right = with_end(so_far & kept).sum(1)
        self.followed = wilson_estimate(self.prefix_right, self.prefix_active)
        self.pairs = masks.sum(-1)

        n_runs = e.undisturbed.shape[1]
        # A run's loops are alike, so that intervals count runs.
        self.n_runs, self.undisturbed_right = n_runs, e.undisturbed.sum(1)
        self.undisturbed = wilson_estimate(self.undisturbed_right, n_runs)
        self.decided = e.decided.mean(1)
        self.alike = e.alike
        self._duels(other)
        self._controls(other, changes, holds)

    def _masks(self, classes: Sequence[str]) -> np.ndarray:
        e = self.evidence
        table = np.zeros((len(e.agree), len(classes), len(e.within)), bool)
        for at, name in enumerate(classes):
            stratum, _, label = name.partition(": ")
            if name == ALL:
                table[:, at] = True
            elif stratum == MANIFOLD:
                table[:, at] = e.reached if label == REACHED else ~e.reached
            elif stratum in e.strata and label in e.strata[stratum][0]:
                labels, codes = e.strata[stratum]
                table[:, at] = codes == labels.index(label)
        return table

    def _duels(self, other: np.ndarray) -> None:
        """For every two programs, the pairs on which they differ, delay by delay."""
        apart = self.evidence.apart[:, :, other]
        agree = self.evidence.agree[:, None, other]
        self.apart_by_delay = apart.sum(2)
        self.duel_right = (apart & agree).sum(2)
        own = wilson_estimate(self.duel_right, self.apart_by_delay)
        rival = wilson_estimate(self.duel_right.swapaxes(0, 1), self.apart_by_delay)
        # The delay at which one is told from the other best, whichever it is.
        lead = np.maximum(own[..., 1] - rival[..., 2], rival[..., 1] - own[..., 2])
        lead = np.nan_to_num(lead, nan=-2.0)
        self.duel_delay = lead.argmax(-1)
        best = self.duel_delay[..., None]
        self.duel = np.take_along_axis(own, best[..., None], axis=2)[:, :, 0]
        self.apart = np.take_along_axis(self.apart_by_delay, best, axis=2)[..., 0]

    def _controls(self, other: np.ndarray, changes: np.ndarray, holds: np.ndarray) -> None:
        e = self.evidence
        said = changes.any(-1)
        random_holds = (e.random_agree[:, other] | ~e.within[other]).all(-1)
        self.random_active = said.sum(-1)
        self.random_right = (said & random_holds).sum(-1)
        self.swap_right = (said & holds).sum(-1)
        self.random_change = wilson_estimate(self.random_right, self.random_active)
        self.specific = wilson_estimate(self.swap_right, self.random_active)
        same = e.of_kind(SAME_VALUE)
        self.n_same, self.unchanged = int(same.sum()), int((~e.moves[same].any(-1)).sum())
        self.same_value = wilson_estimate(self.unchanged, self.n_same)

    def counts(self, programs: Sequence[str], classes: Sequence[str]) -> Counts:
        """What the verdict rests on; the last column, "end", is no delay of its own."""
        return Counts(
            programs=programs,
            right=self.right[:, 0, :-1],
            active=self.active[:, 0, :-1],
            run_right=self.whole_run_right,
            run_active=self.whole_run_active,
            strata=classes,
            prefix_right=self.prefix_right[:, :-1],
            prefix_active=self.prefix_active[:, :-1],
            duel_right=self.duel_right,
            apart=self.apart_by_delay,
            undisturbed=self.undisturbed_right,
            decided=self.decided,
            n_runs=self.n_runs,
            random_right=self.random_right,
            swap_right=self.swap_right,
            random_active=self.random_active,
            unchanged=self.unchanged,
            n_same=self.n_same,
            solved=self.evidence.solved,
        )
