"""Which of some rival programs a model follows, for any task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.behaviour import behaviour_scores
from loopinterp.circuits.given import check_positive, need_batch, several_programs
from loopinterp.circuits.intervals import Intervals, scores_by_stratum
from loopinterp.circuits.ranking.pairs import RivalSwaps, rival_swaps
from loopinterp.circuits.ranking.result import ProgramRanking
from loopinterp.circuits.runs import (
    AT_THE_END,
    DELAYS,
    delay_name,
    device_of,
    outputs,
    prepare_swaps,
)
from loopinterp.circuits.scoring import agreements, lay_over
from loopinterp.circuits.sections import after
from loopinterp.circuits.subspaces import CONTROL_ENERGY, energy_rank, random_subspaces
from loopinterp.circuits.verdict import THRESHOLD, decide
from loopinterp.errors import InputError
from loopinterp.models.protocol import need_model
from loopinterp.probing.states import check_loops, describe_model
from loopinterp.rasp.program import LoopProgram
from loopinterp.results import study
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch

WATCHED = tuple(delay for delay in DELAYS if delay != AT_THE_END)
"""A program is followed if the model's whole output is the one it says at all of these delays."""


def rank_programs(
    model: LoopedModel | Any,
    programs: Sequence[str | LoopProgram],
    batch: Batch,
    *,
    loops: Sequence[int] | None = None,
    swaps_per_loop: int = 64,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> ProgramRanking:
    """Rank rival programs of any task by what they say about swapped states.

    After some loops, the whole state at one position is taken from another input's run with the
    same token there; each rival says what the output then is, its own variables at that position
    being taken from its own run on the other input. All rivals are scored on the same swaps,
    those on which at least two of them disagree (:mod:`loopinterp.circuits.ranking.pairs`). A
    swap *follows* a rival if the model's whole output is the one it says at once, one and two
    loops later, given what the model answers without the swap
    (:func:`~loopinterp.circuits.agreement`). A rival's score is the share of swaps that follow
    it, each loop counting the same.

    A rival may be laid over the model a loop earlier or later, a position to the left, or with
    answers a loop late; the way is chosen on half of the swaps and scored on the other half.

    Beside the score stand the control, the same swaps in random directions (as many as hold 90%
    of what the swaps change, others for each swap); for every two rivals, how often each is
    followed where the two disagree and where they agree; and the behaviour, how often a rival
    gives the model's answers without any swap, short of T(n) loops and where rivals differ.

    A rival is named by the rule of :func:`~loopinterp.circuits.decide`; else the verdict is
    "none of these", with the nearest. For addition, :func:`~loopinterp.circuits.compare_programs`
    chooses swaps by where the carry has got to, which says more.

    Args:
        model: Any looped model.
        programs: Two rivals or more, which read the model's tokens.
        batch: Examples of one length.
        loops: Loops after which to swap; by default 1 .. T(n) - 1.
        swaps_per_loop: Most swaps after each.
        threshold: Least lower end of a winner's interval.
        seed: Seed of swaps, random directions and bootstrap.

    Raises:
        InputError: fewer than two rivals, two of one name or of different tasks; inputs that are
            not their tokens or not of one length; loops out of range; no swap on which two rivals
            disagree.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=7).model
        >>> batch = Addition().sample(6, batch_size=64, generator=torch.Generator().manual_seed(0))
        >>> rank_programs(model, ["ripple", "sticky_ripple", "lookahead"], batch).verdict.winner
        'ripple'
    """
    rivals = several_programs(programs)
    check_positive("swaps_per_loop", swaps_per_loop)
    last, steps = _check(rivals, need_batch(batch), loops)
    need_model(model)
    with study(
        seed,
        study="ranking",
        model=describe_model(model),
        programs=[p.name for p in rivals],
        n_loops=last,
        swaps_per_loop=swaps_per_loop,
    ) as watch:
        generator = torch.Generator().manual_seed(seed)
        drawn = rival_swaps(
            rivals,
            batch.to("cpu"),
            loops=steps,
            per_loop=swaps_per_loop,
            watched=WATCHED,
            generator=generator,
        )
        if not len(drawn.swaps):
            raise InputError(
                "programs",
                expected="rivals that disagree on what some swap does",
                given=f"{len(rivals)} that agree on all swaps of these {len(batch)} inputs",
                fix="Draw more or longer inputs, or choose other rivals.",
            )
        scores = _score(model, rivals, batch, drawn, generator)
        return _result(scores, rivals, steps, threshold, seed, watch)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Agreement of every swap with every rival, and what stands beside it."""

    drawn: RivalSwaps
    agree: np.ndarray
    control: np.ndarray
    behaviour: np.ndarray
    alignments: list[str]
    rank: int
    solved: float

    @property
    def followed(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether each rival is followed [pair, rival]; the same in random directions."""
        watched = [DELAYS.index(delay) for delay in WATCHED]
        return self.agree[..., watched].prod(-1), self.control[..., watched].prod(-1)


def _score(
    model: LoopedModel | Any,
    rivals: list[LoopProgram],
    batch: Batch,
    drawn: RivalSwaps,
    generator: torch.Generator,
) -> _Scores:
    run = prepare_swaps(model, drawn.swaps.to(device_of(model)))
    swapped = run.swap()
    rank = energy_rank(run.difference, CONTROL_ENERGY)
    random = random_subspaces(len(run.pairs), rank, run.state.shape[-1], generator)
    control = run.swap(random.to(run.state.device))
    laid = [lay_over(program, run, swapped) for program in rivals]
    predictions = [prediction for prediction, _ in laid]
    best = [alignment for _, alignment in laid]
    batch = batch.to(device_of(model))
    answers = outputs(model, batch.inputs, run.pairs.n_loops)[-1]
    right = (answers == batch.targets) | (batch.targets == IGNORE)
    return _Scores(
        drawn=drawn,
        agree=agreements(predictions, run, swapped),
        control=agreements(predictions, run, control),
        behaviour=behaviour_scores(model, rivals, best, batch),
        alignments=[str(alignment) for alignment in best],
        rank=rank,
        solved=float(right.all(-1).double().mean()),
    )


def _result(
    scores: _Scores,
    rivals: list[LoopProgram],
    loops: list[int],
    threshold: float,
    seed: int,
    watch: Any,
) -> ProgramRanking:
    names = [p.name for p in rivals]
    place = scores.drawn.swaps.place.numpy()

    def by_loop(values: np.ndarray) -> Intervals:
        """Scores [loop, ...]; the last row is the mean over loops."""
        return scores_by_stratum([values], [place], n_strata=len(loops), seed=seed)

    followed, control = (by_loop(values) for values in scores.followed)
    delays = by_loop(scores.agree)
    behaviour = scores_by_stratum(
        [scores.behaviour], [np.zeros(len(scores.behaviour), int)], n_strata=1, seed=seed
    )
    verdict = decide(
        names,
        _row(followed, -1),
        followed.value[:-1].T,
        [after(loop) for loop in loops],
        control=_row(control, -1),
        solved=scores.solved,
        threshold=threshold,
    )
    apart = scores.drawn.apart.numpy()
    duels, duels_control = (_where(apart, values) for values in scores.followed)
    common, common_control = (_where(~apart, values) for values in scores.followed)
    return ProgramRanking(
        provenance=watch.provenance(),
        **_columns("followed", followed),
        **_columns("control", control),
        **_columns("score", _row(followed, -1)),
        **_columns("control_score", _row(control, -1)),
        **_columns("behaviour", _row(behaviour, 0)),
        by_delay=delays.value[-1],
        duels=duels,
        duels_control=duels_control,
        common=common,
        common_control=common_control,
        n_apart=apart.sum(0),
        n_swaps=np.bincount(place, minlength=len(loops)),
        programs=names,
        loops=loops,
        delays=[delay_name(d) for d in DELAYS],
        alignments=scores.alignments,
        control_rank=scores.rank,
        solved=scores.solved,
        threshold=threshold,
        verdict_fields=dataclasses.asdict(verdict),
    )


def _where(chosen: np.ndarray, followed: np.ndarray) -> np.ndarray:
    """How often each rival is followed by the swaps chosen of it and another [rival, rival]."""
    count = chosen.sum(0)
    right = np.einsum("sr,srq->rq", followed, chosen.astype(np.float64))
    return np.where(count > 0, right / np.maximum(count, 1), np.nan)


def _row(scores: Intervals, row: int) -> Intervals:
    return Intervals(*(end[row] for end in (scores.value, scores.low, scores.high)))


def _columns(name: str, scores: Intervals) -> dict[str, np.ndarray]:
    """Scores under the names of a result, programs first."""
    ends = {"": scores.value, "_low": scores.low, "_high": scores.high}
    return {name + end: (x[:-1].T if x.ndim == 2 else x) for end, x in ends.items()}


def _check(
    rivals: list[LoopProgram], batch: Batch, loops: Sequence[int] | None
) -> tuple[int, list[int]]:
    """T(n) of the batch, and the loops after which to swap."""
    names = [p.name for p in rivals]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(
            "programs",
            expected="two rivals or more, each with its own name",
            given=repr(names),
            fix="Write a rival, or see interchange_study for one program alone.",
        )
    tasks = sorted({program.task for program in rivals})
    if len(tasks) > 1:
        raise InputError(
            "programs",
            expected="rivals of one task",
            given=f"programs of {', '.join(tasks)}",
            fix="Leave out those of other tasks: their tokens mean something else.",
        )
    for program in rivals:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    last = int(batch.n_loops.max())
    if int(batch.n_loops.min()) < last or last < 2 or len(batch) < 2:
        raise InputError(
            "batch",
            expected="at least two examples of one length, with T(n) of at least 2",
            given=f"{len(batch)} with T(n) from {int(batch.n_loops.min())} to {last}",
            fix="Draw them with task.sample(n, batch_size=...), n an integer.",
        )
    steps = check_loops(range(1, last) if loops is None else loops)
    if not 1 <= steps[0] <= steps[-1] <= last:
        raise InputError(
            "loops",
            expected=f"numbers from 1 to T(n) = {last}",
            given=f"{steps[0]} to {steps[-1]}",
            fix="Leave out the others.",
        )
    return last, steps
