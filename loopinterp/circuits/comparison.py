"""Which program a model runs: rivals ranked by interchange interventions, with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.circuits.comparison_result import ALL_MODELS, ALL_PLACES, CircuitComparison
from loopinterp.circuits.intervals import Intervals, scores_by_stratum
from loopinterp.circuits.pairs import PLACES
from loopinterp.circuits.runs import DELAYS, VERDICT_DELAY, delay_name
from loopinterp.circuits.scoring import ModelScores, score_model
from loopinterp.circuits.verdict import THRESHOLD, decide
from loopinterp.errors import InputError
from loopinterp.probing.states import describe_model
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.registry import get_program, list_programs
from loopinterp.results import study

if TYPE_CHECKING:
    from loopinterp.models.protocol import LoopedModel


def compare_programs(
    models: LoopedModel | Any | Sequence[LoopedModel | Any],
    programs: Sequence[str | LoopProgram] | None = None,
    *,
    names: Sequence[str] | None = None,
    n: int = 24,
    per_place: int = 64,
    max_chain: int = 9,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> CircuitComparison:
    r"""Rank rival programs of binary addition by what they say about swapped states.

    The state of one bit is taken from a source run, put into the base run, and the model goes on
    from there (:mod:`loopinterp.circuits.pairs` says which pairs). Each rival says what the
    output then is (:mod:`loopinterp.circuits.alignment`): its own variables at that bit are taken
    from its own run on the source. The score of a rival, its interchange intervention accuracy
    (IIA), is how often the model's whole output is the one it says: the mean over the places
    relative to the front, each counting the same. Every rival is scored on the same pairs.

    A rival may be laid over the model in several ways (a loop earlier or later, answers read a
    loop late, variables a position to the left). The best way is chosen on half of the pairs and
    scored on the other half, and the other way round, so that choosing does not flatter.

    Three more numbers stand beside the score: the control, the same swap restricted to random
    directions, another draw for each pair, as many as hold 90% of what the swaps change; the
    output two loops later and after all loops; and the behaviour, how often the program's output
    is the model's without any swap, at loops short of T(n) and where the rivals differ.

    What this cannot do: a program that keeps nothing from loop to loop (one shot) says that a swap
    shows at once and never again, as random directions do too, so it is never named; its
    behaviour tells it apart. And agreement one loop later does not say for how long: read it
    beside two loops and the end. Models of one recipe have come out as plain or as sticky ripples
    from seed to seed, and some hold only what was resolved many loops ago, which is neither.

    Args:
        models: A model of the pairs format, or several (seeds of one recipe): then scores are
            pooled too, with intervals over models and inputs.
        programs: The rivals; by default every program of addition.
        names: A name for each model.
        n: Bits of each operand.
        per_place: Pairs for each place relative to the front.
        max_chain: Longest way from the deciding bit to the swapped one.
        threshold: Least lower end of a winner's interval.
        seed: Seed of pairs, random directions and bootstrap.

    Raises:
        InputError: no model, programs of another task, or names that do not fit.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.
    """
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    rivals = _rivals(programs)
    labels = _names(names, len(several))
    described = [describe_model(model) for model in several]
    with study(
        seed, study="programs", models=described, n=n, per_place=per_place, max_chain=max_chain
    ) as watch:
        scored = [
            score_model(
                model, rivals, n=n, per_place=per_place, max_chain=max_chain, seed=seed + 1000 * k
            )
            for k, model in enumerate(several)
        ]
        return _result(scored, rivals, labels, threshold, seed, watch)


def _result(
    scored: list[ModelScores],
    rivals: list[LoopProgram],
    labels: list[str],
    threshold: float,
    seed: int,
    watch: Any,
) -> CircuitComparison:
    programs = [p.name for p in rivals]
    groups = [[s] for s in scored] + ([scored] if len(scored) > 1 else [])
    shown = labels + ([ALL_MODELS] if len(scored) > 1 else [])
    iia = [_by_place(group, "agree", seed) for group in groups]
    control = [_by_place(group, "control", seed) for group in groups]
    behaviour = [_behaviour(group, seed) for group in groups]
    verdicts = {
        delay: [
            _decide(group, programs, score, random, DELAYS.index(delay), threshold)
            for group, score, random in zip(groups, iia, control)
        ]
        for delay in (VERDICT_DELAY, VERDICT_DELAY + 1)
    }

    return CircuitComparison(
        provenance=watch.provenance(),
        **_columns("iia", iia),
        **_columns("control", control),
        **_columns("behaviour", behaviour),
        flips=np.stack([s.by_carry(s.flips) for s in scored]),
        claims=np.stack([np.moveaxis(s.by_carry(s.claims), 2, 0) for s in scored]),
        n_pairs=np.stack([s.counts() for s in scored]),
        models=shown,
        programs=programs,
        places=[*PLACES, ALL_PLACES],
        delays=[delay_name(d) for d in DELAYS],
        alignments=[s.alignments for s in scored],
        control_ranks=[s.rank for s in scored],
        front_measured=[s.pairs.measured for s in scored],
        solved=[s.pairs.solved for s in scored],
        threshold=threshold,
        verdicts=verdicts[VERDICT_DELAY],
        verdicts_later=verdicts[VERDICT_DELAY + 1],
    )


def _columns(name: str, parts: list[Intervals]) -> dict[str, np.ndarray]:
    """Scores of each model under the names of a result: value, and ends of its interval."""
    ends = {"": "value", "_low": "low", "_high": "high"}
    return {name + end: np.stack([getattr(p, field) for p in parts]) for end, field in ends.items()}


def _by_place(group: list[ModelScores], what: str, seed: int) -> Intervals:
    """Scores [program, place, delay]; the last place is the mean of all."""
    values = [getattr(s, what) for s in group]
    places = [s.pairs.place.cpu().numpy() for s in group]
    scores = scores_by_stratum(values, places, n_strata=len(PLACES), seed=seed)
    ends = (scores.value, scores.low, scores.high)
    return Intervals(*(np.swapaxes(end, 0, 1) for end in ends))


def _behaviour(group: list[ModelScores], seed: int) -> Intervals:
    """Scores [program]; NaN where no two rivals differ."""
    values = [s.behaviour for s in group]
    alike = [np.zeros(len(v), int) for v in values]
    scores = scores_by_stratum(values, alike, n_strata=1, seed=seed)
    return Intervals(scores.value[0], scores.low[0], scores.high[0])


def _decide(
    group: list[ModelScores],
    programs: list[str],
    score: Intervals,
    control: Intervals,
    delay: int,
    threshold: float,
) -> dict[str, Any]:
    """The verdict on one group of models by one delay, JSON-ready."""

    def all_places(scores: Intervals) -> Intervals:
        ends = (scores.value, scores.low, scores.high)
        return Intervals(*(end[:, -1, delay] for end in ends))

    verdict = decide(
        programs,
        all_places(score),
        score.value[:, :-1, delay],
        list(PLACES),
        control=all_places(control),
        solved=float(np.mean([s.pairs.solved for s in group])),
        threshold=threshold,
    )
    return dataclasses.asdict(verdict)


def _rivals(programs: Sequence[str | LoopProgram] | None) -> list[LoopProgram]:
    chosen = list_programs("addition") if programs is None else list(programs)
    rivals = [get_program(p) if isinstance(p, str) else p for p in chosen]
    wrong = [p.name for p in rivals if p.task != "addition"]
    twice = len({p.name for p in rivals}) < len(rivals)
    if wrong or twice or not rivals:
        raise InputError(
            "programs",
            expected="at least one program of addition, each with its own name",
            given=f"{[p.name for p in rivals]}",
            fix=f"Choose among {', '.join(list_programs('addition'))}, or write your own.",
        )
    return rivals


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    given = [f"model {k}" for k in range(count)] if names is None else list(names)
    if count < 1 or len(given) != count or len(set(given)) < count:
        raise InputError(
            "names",
            expected=f"one name for each of {count} models (at least one model)",
            given=repr(given),
            fix="Pass as many different names as models.",
        )
    return given
