"""The evidence of a comparison: what a model and each program do, pair by pair, delay by delay.

Nothing is averaged here; :mod:`loopinterp.circuits.program_comparison` counts it by stratum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.circuits.interchange_pairs import KIND, OTHER_VALUE, InterchangePairs
from loopinterp.circuits.pair_strategies import common_strata
from loopinterp.circuits.program_counterfactuals import Prediction, ProgramRuns
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_alignment import Alignment, alignments
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import PairStrategy, Stratum
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

TUNED_ON = 4
"""One of so many pairs of the first batch serves to lay the programs over the model; it is not
scored."""

_TUNED_DELAYS = 3
_CLEARLY = 0.02
"""By so much must another alignment suit better than a plainer one."""

MANIFOLD = "states"
REACHED, UNREACHED = "that a run reaches", "that no run reaches"
LENGTH = "length"


@dataclass(frozen=True)
class Evidence:
    """What one model does after each exchange, and what each program says; arrays of NumPy.

    Attributes:
        strata: Ways of sorting the pairs: labels, and the class of each pair (-1: none).
        reached: Whether each program's state after the exchange is one that a run reaches
            [program, pair].
        within: Whether a delay comes before the end [pair, delay].
        moves: Whether the exchange changes some answer of the model [pair, delay].
        changes: Whether each program says that it does [program, pair, delay].
        agree: Whether the model's whole answer is the one it says [program, pair, delay].
        random_moves: ``moves`` of a random change of the same norm.
        random_agree: ``agree`` after such a change.
        apart: Whether two programs say different things [program, program, pair, delay].
        undisturbed: Share of the loops of a run without an exchange at which the whole answer is
            the program's [program, input].
        decided: Share of the answers of such a run of which the program says something
            [program, input].
        alike: Whether two programs give the same answers at every loop of every such run.
        solved: Share of inputs that the model answers right after T(n) loops.
        alignments: How each program lies over the model.
    """

    strata: Mapping[str, tuple[tuple[str, ...], np.ndarray]]
    reached: np.ndarray
    within: np.ndarray
    moves: np.ndarray
    changes: np.ndarray
    agree: np.ndarray
    random_moves: np.ndarray
    random_agree: np.ndarray
    apart: np.ndarray
    undisturbed: np.ndarray
    decided: np.ndarray
    alike: np.ndarray
    solved: float
    alignments: tuple[Alignment, ...]

    def of_kind(self, kind: str) -> np.ndarray:
        """Which pairs are of one kind."""
        labels, codes = self.strata[KIND]
        return codes == labels.index(kind) if kind in labels else np.zeros(len(codes), bool)


def gather_evidence(
    model: LoopedModel | Any,
    programs: Sequence[LoopProgram],
    batches: Sequence[Batch],
    strategy: PairStrategy,
    strata: Callable[[InterchangePairs], Mapping[str, Stratum]],
    *,
    seed: int,
) -> Evidence:
    """Run the exchanges that a strategy chooses on a model, and ask each program about them.

    Args:
        model: Any looped model.
        programs: The programs.
        batches: Inputs, each of one length; programs are laid over the model on the first only.
        strategy: Chooses pairs.
        strata: What sorts the pairs of this task, beyond what sorts those of all.
        seed: Seed of pairs and random changes.
    """
    parts, laid = [], None
    for number, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed + number)
        pairs = strategy(model, programs, batch, generator)
        more = common_strata(pairs, programs[0].inputs) | dict(strata(pairs))
        pairs = pairs.sorted_by(**more)
        run = InterchangeRun(model, pairs)
        swapped, random = run.interchange(), run.random_change(generator)
        runs = _RunsByLag(programs, run.pairs)
        scored = torch.ones(len(pairs), dtype=torch.bool)
        if laid is None:
            tuning = torch.arange(len(pairs)) % TUNED_ON == 0
            laid = [_lay_over(p, run, swapped, tuning, runs) for p in programs]
            scored = ~tuning
        parts.append(_part(run, swapped, random, programs, laid, runs, batch, scored))
    assert laid is not None
    return _joined(parts, tuple(laid))


class _RunsByLag:
    """Each program's runs on the inputs, made once for each lag of its answers."""

    def __init__(self, programs: Sequence[LoopProgram], pairs: InterchangePairs) -> None:
        self._pairs = pairs
        self._made: dict[tuple[str, int], ProgramRuns] = {}
        self._n_loops = pairs.n_loops + max(a.shift for a in alignments())

    def __call__(self, program: LoopProgram, lag: int) -> ProgramRuns:
        key = (program.name, lag)
        if key not in self._made:
            self._made[key] = ProgramRuns(
                program, self._pairs.inputs, n_loops=self._n_loops, lag=lag
            )
        return self._made[key]


def _lay_over(
    program: LoopProgram,
    run: InterchangeRun,
    swapped: Tensor,
    tuning: Bool[Tensor, " pair"],
    runs: _RunsByLag,
) -> Alignment:
    """The alignment that suits some pairs best, of those that suit undisturbed runs best.

    Of equals the plainest: another one must be better by a clear margin.
    """
    pairs = run.pairs[tuning.to(run.pairs.loop.device)]
    chosen = tuning.to(swapped.device)
    delays = min(_TUNED_DELAYS, run.pairs.longest) + 1
    natural, after = run.base[chosen, :delays], swapped[chosen, :delays]
    moves = (natural != after).any(-1).any(-1)
    first = int(run.pairs.loop.min())
    options = [a for a in alignments() if first + a.shift >= 0]
    alone = [float(_undisturbed(run, runs(program, a.lag), a)[0].mean()) for a in options]
    best, best_score = options[0], -1.0
    for option, suits in zip(options, alone):
        if suits < max(alone) - _CLEARLY:
            continue
        made = runs(program, option.lag)
        claims = Prediction(program, pairs, option, runs=made, steps=delays - 1).claims(natural)
        active = run.within[chosen, :delays] & (moves[:, None] | claims.changes)
        score = float(claims.agree(after)[active].double().mean().nan_to_num(1.0))
        if score > best_score + _CLEARLY:
            best, best_score = option, score
    return best


def _undisturbed(
    run: InterchangeRun, made: ProgramRuns, alignment: Alignment
) -> tuple[Float[Tensor, " input"], Float[Tensor, " input"]]:
    """Share of loops 1 .. T at which the whole answer is the program's; share that it decides."""
    pairs = run.pairs
    loops = torch.arange(1, pairs.n_loops + 1, device=pairs.loop.device) + alignment.shift
    said = made.trace.outputs[loops]
    decided = (said != UNKNOWN) & pairs.asked
    right = ((said == run.natural[1:]) | ~decided).all(-1).double().mean(0)
    return right, decided.sum((0, 2)) / (pairs.asked.sum(1) * len(loops)).clamp(min=1)


def _part(
    run: InterchangeRun,
    swapped: Tensor,
    random: Tensor,
    programs: Sequence[LoopProgram],
    laid: Sequence[Alignment],
    runs: _RunsByLag,
    batch: Batch,
    scored: Bool[Tensor, " pair"],
) -> Evidence:
    """The evidence of one batch."""
    made = [runs(p, a.lag) for p, a in zip(programs, laid)]
    claims = [
        Prediction(p, run.pairs, a, runs=m).claims(run.base)
        for p, a, m in zip(programs, laid, made)
    ]
    asked = run.pairs.scored[:, None]
    within = run.within
    natural = [_undisturbed(run, m, a) for m, a in zip(made, laid)]
    answers = [runs(p, 0).trace.outputs[1 : run.pairs.n_loops + 1] for p in programs]
    asked_of = run.pairs.asked
    alike = [[bool(((a == b) | ~asked_of).all()) for b in answers] for a in answers]
    targets = batch.targets.to(run.natural.device)
    solved = ((run.natural[-1] == targets) | (targets == IGNORE)).all(-1)
    keep = scored.to(within.device)

    def kept(x: Tensor) -> np.ndarray:
        return (x & within)[keep].cpu().numpy()

    strata = {
        name: (stratum.labels, stratum.codes[scored].numpy())
        for name, stratum in run.pairs.strata.items()
    }
    n = batch.n.unique().tolist()
    strata[LENGTH] = (tuple(f"n = {x}" for x in n), np.zeros(int(scored.sum()), int))
    return Evidence(
        strata=strata,
        reached=np.stack(
            [_reached(m, run.pairs, a)[keep].cpu().numpy() for m, a in zip(made, laid)]
        ),
        within=within[keep].cpu().numpy(),
        moves=kept(((swapped != run.base) & asked).any(-1)),
        changes=np.stack([kept(c.changes) for c in claims]),
        agree=np.stack([kept(c.agree(swapped)) for c in claims]),
        random_moves=kept(((random != run.base) & asked).any(-1)),
        random_agree=np.stack([kept(c.agree(random)) for c in claims]),
        apart=np.stack([np.stack([kept(a.apart(b)) for b in claims]) for a in claims]),
        undisturbed=torch.stack([right for right, _ in natural]).cpu().numpy(),
        decided=torch.stack([decided for _, decided in natural]).cpu().numpy(),
        alike=np.array(alike),
        solved=float(solved.double().mean()),
        alignments=tuple(laid),
    )


def _reached(
    made: ProgramRuns, pairs: InterchangePairs, alignment: Alignment
) -> Bool[Tensor, " pair"]:
    """Whether the program's state after the exchange is one that a run of the base passes through.

    Tokens are part of the state, so no run but the base's own can reach it; it may do so at
    another loop.
    """
    reached = torch.zeros(len(pairs), dtype=torch.bool, device=pairs.loop.device)
    variables, shift = made.trace.variables, alignment.shift
    at = (pairs.positions - alignment.offset).clamp(min=0)
    for rows in torch.arange(len(pairs), device=reached.device).split(64):
        base, same = pairs.base[rows], None
        for values in variables.values():
            state = values[pairs.loop[rows] + shift, base]
            taken = values[
                (pairs.source_loop[rows] + shift)[:, None], pairs.source[rows, None], at[rows]
            ]
            state = state.scatter(1, at[rows], taken)
            equal = (values[:, base] == state).all(-1)
            same = equal if same is None else same & equal
        if same is not None:
            reached[rows] = same.any(0)
    return reached


def _joined(parts: Sequence[Evidence], laid: tuple[Alignment, ...]) -> Evidence:
    """The evidence of several batches as one; shorter horizons are padded with "not within"."""
    delays = max(part.within.shape[-1] for part in parts)

    def joined(name: str, axis: int) -> np.ndarray:
        arrays = []
        for part in parts:
            array = getattr(part, name)
            widths = [(0, 0)] * (array.ndim - 1) + [(0, delays - array.shape[-1])]
            arrays.append(np.pad(array, widths) if name in _BY_DELAY else array)
        return np.concatenate(arrays, axis=axis)

    return Evidence(
        strata=_joined_strata(parts),
        alike=np.logical_and.reduce([part.alike for part in parts]),
        solved=float(np.mean([part.solved for part in parts])),
        alignments=laid,
        **{name: joined(name, axis) for name, axis in _PAIR_AXIS.items()},
    )


_PAIR_AXIS = {
    "reached": 1,
    "within": 0,
    "moves": 0,
    "changes": 1,
    "agree": 1,
    "random_moves": 0,
    "random_agree": 1,
    "apart": 2,
    "undisturbed": 1,
    "decided": 1,
}
"""Along which axis the pairs (or inputs) of several batches are put together."""

_BY_DELAY = {"within", "moves", "changes", "agree", "random_moves", "random_agree", "apart"}


def _joined_strata(
    parts: Sequence[Evidence],
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    joined = {}
    names = {name: None for part in parts for name in part.strata}
    for name in names:
        labels = tuple(
            dict.fromkeys(
                label for part in parts if name in part.strata for label in part.strata[name][0]
            )
        )
        codes = []
        for part in parts:
            own, code = part.strata.get(name, ((), np.full(len(part.within), -1)))
            lookup = np.array([*(labels.index(label) for label in own), -1])
            codes.append(lookup[code])
        joined[name] = (labels, np.concatenate(codes))
    return joined


def scored_pairs(evidence: Evidence) -> np.ndarray:
    """The pairs that exchange another value; those of the same value are a control."""
    return evidence.of_kind(OTHER_VALUE)
