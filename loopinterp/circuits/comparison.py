"""Which program a model runs: rivals ranked by interchange interventions, with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.alignment import Alignment, Prediction, agreement, predict
from loopinterp.circuits.alignment_choice import halves, rate_alignments
from loopinterp.circuits.behaviour import behaviour_scores
from loopinterp.circuits.comparison_result import ALL_MODELS, ALL_PLACES, CircuitComparison
from loopinterp.circuits.intervals import Intervals, scores_by_stratum
from loopinterp.circuits.pairs import PLACES, RUN_ON, SwapPairs, swap_pairs
from loopinterp.circuits.runs import DELAYS, VERDICT_DELAY, SwapRun, delay_name, prepare_swaps
from loopinterp.circuits.subspaces import energy_rank, random_subspaces
from loopinterp.circuits.verdict import THRESHOLD, decide
from loopinterp.errors import InputError
from loopinterp.probing.states import describe_model
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.registry import get_program, list_programs
from loopinterp.results import study

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel

CONTROL_ENERGY = 0.9
"""The random control has as many dimensions as hold this share of what the swaps change."""


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
    directions, another draw for each pair, as many as hold 90 % of what the swaps change; the
    output two loops later and after all loops; and the behaviour, how often the program's output
    is the model's without any swap, at loops short of T(n) and where the rivals differ.

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
            _score_model(model, rivals, n, per_place, max_chain, seed + 1000 * k)
            for k, model in enumerate(several)
        ]
        return _result(scored, rivals, labels, threshold, seed, watch)


@dataclass(frozen=True)
class _Scored:
    """One model's pairs, with what each rival says and how far it agrees."""

    pairs: SwapPairs
    agree: np.ndarray  # [pair, program, delay]
    control: np.ndarray  # the same with random directions
    flips: np.ndarray  # [pair, delay, bit]: what the model does
    claims: np.ndarray  # [pair, program, delay, bit]: what each rival says
    alignments: list[str]
    rank: int
    behaviour: np.ndarray  # [example, program]


def _score_model(
    model: Any, rivals: list[LoopProgram], n: int, per_place: int, max_chain: int, seed: int
) -> _Scored:
    pairs = swap_pairs(model, n=n, per_place=per_place, seed=seed, max_chain=max_chain)
    run = prepare_swaps(model, pairs)
    swapped = run.swap()
    rank = energy_rank(run.difference, CONTROL_ENERGY)
    generator = torch.Generator().manual_seed(seed)
    directions = random_subspaces(len(pairs), rank, run.state.shape[-1], generator)
    control = run.swap(directions)
    laid = [_lay_over(program, run, swapped) for program in rivals]
    predictions = [prediction for prediction, _ in laid]
    best = [alignment for _, alignment in laid]
    return _Scored(
        pairs=pairs,
        agree=_agreements(predictions, run, swapped),
        control=_agreements(predictions, run, control),
        flips=_at_bits(swapped != run.base, pairs),
        claims=np.stack([_claims(p, pairs) for p in predictions], axis=1),
        alignments=[str(alignment) for alignment in best],
        rank=rank,
        behaviour=behaviour_scores(model, rivals, best, n=n, seed=seed),
    )


def _lay_over(program: LoopProgram, run: SwapRun, swapped: Tensor) -> tuple[Prediction, Alignment]:
    """What the program says of each pair under the alignment that suits the other half best.

    Returns:
        The prediction, and the alignment that suits all pairs best.
    """
    options = rate_alignments(program, run, swapped)
    half = halves(run.pairs.place)
    said = [
        predict(program, run.pairs, alignment=options.best(~part), delays=run.delays)
        for part in (half, ~half)
    ]
    first = half[None, :, None]
    prediction = Prediction(
        torch.where(first, said[0].base, said[1].base),
        torch.where(first, said[0].swapped, said[1].swapped),
    )
    return prediction, options.best(torch.ones_like(half))


def _agreements(predictions: list[Prediction], run: SwapRun, swapped: Tensor) -> np.ndarray:
    each = [agreement(p, run.base, swapped, run.pairs.scored) for p in predictions]
    return torch.stack(each).permute(2, 0, 1).cpu().numpy()


def _at_bits(values: Tensor, pairs: SwapPairs) -> np.ndarray:
    """[delay, pair, pos] -> [pair, delay, bit] for bits i, i + 1, i + 2."""
    rows = torch.arange(len(pairs), device=values.device)[:, None]
    places = pairs.position[:, None] + torch.arange(RUN_ON, device=values.device)
    return values[:, rows, places].permute(1, 0, 2).cpu().numpy().astype(np.float64)


def _claims(prediction: Prediction, pairs: SwapPairs) -> np.ndarray:
    """1 where the program says that a bit flips, 0 where not, NaN where it does not say."""
    changed = _at_bits(prediction.base != prediction.swapped, pairs)
    open_ = (prediction.base == UNKNOWN) != (prediction.swapped == UNKNOWN)
    changed[_at_bits(open_, pairs) > 0] = np.nan
    return changed


def _result(
    scored: list[_Scored],
    rivals: list[LoopProgram],
    labels: list[str],
    threshold: float,
    seed: int,
    watch: Any,
) -> CircuitComparison:
    programs = [p.name for p in rivals]
    places = [*PLACES, ALL_PLACES]
    groups = [[s] for s in scored] + ([scored] if len(scored) > 1 else [])
    shown = labels + ([ALL_MODELS] if len(scored) > 1 else [])
    iia = [_by_place(group, "agree", seed) for group in groups]
    control = [_by_place(group, "control", seed) for group in groups]
    behaviour = [_behaviour(group, seed) for group in groups]
    delay = DELAYS.index(VERDICT_DELAY)
    verdicts = [
        decide(
            programs,
            _headline(score, delay),
            score.value[:, :-1, delay],
            places[:-1],
            control=_headline(random, delay),
            solved=float(np.mean([s.pairs.solved for s in group])),
            threshold=threshold,
        )
        for group, score, random in zip(groups, iia, control)
    ]

    def stack(parts: list[Intervals], end: str) -> np.ndarray:
        return np.stack([getattr(part, end) for part in parts])

    return CircuitComparison(
        provenance=watch.provenance(),
        **{f"iia{end and '_' + end}": stack(iia, end or "value") for end in ("", "low", "high")},
        **{
            f"control{end and '_' + end}": stack(control, end or "value")
            for end in ("", "low", "high")
        },
        **{
            f"behaviour{end and '_' + end}": stack(behaviour, end or "value")
            for end in ("", "low", "high")
        },
        flips=np.stack([_by_carry(s, s.flips) for s in scored]),
        claims=np.stack([np.moveaxis(_by_carry(s, s.claims), 2, 0) for s in scored]),
        n_pairs=np.stack([_counts(s) for s in scored]),
        models=shown,
        programs=programs,
        places=places,
        delays=[delay_name(d) for d in DELAYS],
        alignments=[s.alignments for s in scored],
        control_ranks=[s.rank for s in scored],
        front_measured=[s.pairs.measured for s in scored],
        solved=[s.pairs.solved for s in scored],
        threshold=threshold,
        verdicts=[dataclasses.asdict(v) for v in verdicts],
    )


def _by_place(group: list[_Scored], what: str, seed: int) -> Intervals:
    """Scores [program, place, delay]; the last place is the mean of all."""
    values = [getattr(s, what) for s in group]
    places = [s.pairs.place.cpu().numpy() for s in group]
    scores = scores_by_stratum(values, places, n_strata=len(PLACES), seed=seed)
    ends = (scores.value, scores.low, scores.high)
    return Intervals(*(np.swapaxes(end, 0, 1) for end in ends))


def _behaviour(group: list[_Scored], seed: int) -> Intervals:
    """Scores [program]; NaN where no two rivals differ."""
    values = [s.behaviour for s in group]
    alike = [np.zeros(len(v), int) for v in values]
    scores = scores_by_stratum(values, alike, n_strata=1, seed=seed)
    return Intervals(scores.value[0], scores.low[0], scores.high[0])


def _headline(scores: Intervals, delay: int) -> Intervals:
    """Scores [program] over all places at one delay."""
    return Intervals(*(getattr(scores, end)[:, -1, delay] for end in ("value", "low", "high")))


def _by_carry(scored: _Scored, values: np.ndarray) -> np.ndarray:
    """Means over pairs [place, carry, ...] of each place and base carry; NaN where none."""
    shape = values.shape[1:]
    table = np.full((len(PLACES), 2, *shape), np.nan)
    place, carry = scored.pairs.place.cpu().numpy(), scored.pairs.carry.cpu().numpy()
    for p in range(len(PLACES)):
        for base in (0, 1):
            here = values[(place == p) & (carry == base)]
            said = ~np.isnan(here)
            count = said.sum(0)
            total = np.where(said, here, 0.0).sum(0)
            table[p, base] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return table


def _counts(scored: _Scored) -> np.ndarray:
    place, carry = scored.pairs.place.cpu().numpy(), scored.pairs.carry.cpu().numpy()
    return np.array(
        [[((place == p) & (carry == c)).sum() for c in (0, 1)] for p in range(len(PLACES))]
    )


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
