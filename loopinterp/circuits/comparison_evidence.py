"""The evidence of a comparison: what a model and each program do, pair by pair, delay by delay.

Nothing is averaged here; :mod:`loopinterp.circuits.evidence_counts` counts it by stratum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.circuits.interchange_pairs import Stratum
from loopinterp.circuits.pair_strata import strata_of
from loopinterp.circuits.program_counterfactuals import Prediction, ProgramRuns, each_apart
from loopinterp.circuits.subspaces import random_change
from loopinterp.progress import track
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_alignment import Alignment, alignments
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs, PairStrategy
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

TUNED_ON = 4
"""One of so many pairs of the first batch serves to lay the programs over the model; it is not
scored."""

_TUNED_DELAYS = 3
_CLEARLY = 0.02
"""By so much must another alignment suit better than a plainer one."""

LENGTH = "length"

Untried = Literal[
    "initial_state",
    "from_initial_state",
    "first_position",
    "other_token",
    "several_positions",
    "other_loop",
    "repeated",
    "third_interchange",
    "part_of_state",
]
"""A kind of interchange that a comparison has not tried."""


@dataclass(frozen=True, repr=False)
class Evidence(ShortRepr):
    """What one model does after each exchange, and what each program says.

    Arrays of ``data``, with the axes program (and rival), pair, delay, input, batch:

    - ``base`` [pair]: the input whose run is changed, as ``input`` counts them;
    - ``reached`` [program, pair]: whether each program's state after the exchange is one that a
      run reaches;
    - ``within`` [pair, delay]: whether a delay comes before the end; what follows is false beyond;
    - ``moves`` [pair, delay]: whether the exchange changes some answer of the model;
    - ``changes`` [program, pair, delay]: whether each program says that it does;
    - ``agree`` [program, pair, delay]: whether the model's whole answer is the one it says;
      ``random_agree``: after a random change of the same norm;
    - ``apart`` [program, rival, pair, delay]: whether two programs say different things;
    - ``undisturbed`` [program, input]: share of the loops of a run without an exchange at which
      the whole answer is the program's; ``decided``: share of the answers of such a run of which
      the program says something;
    - ``worst_loop`` [batch, program]: share of such inputs at the loop at which it is least;
    - ``alike`` [batch, program, rival]: whether two programs give the same answers at every loop
      of every such run;
    - ``solved`` [batch]: share of inputs that the model answers right after T(n) loops.

    Attributes:
        data: These arrays.
        strata: The label of each pair in each way of sorting them, a row for each pair.
        alignments: How each program lies over the model.
        untried: Codes of the kinds of interchange that no pair tries.
    """

    data: xr.Dataset
    strata: pd.DataFrame
    alignments: list[Alignment]
    untried: list[Untried] = field(default_factory=list)


def gather_evidence(
    model: LoopedModel | Any,
    programs: Sequence[LoopProgram],
    batches: Sequence[Batch],
    strategy: PairStrategy,
    *,
    seed: int,
) -> Evidence:
    """Run the exchanges that a strategy chooses on a model, and ask each program about them.

    Args:
        model: Any looped model.
        programs: The programs.
        batches: Inputs, each of one length; programs are laid over the model on the first only.
        strategy: Chooses pairs.
        seed: Seed of pairs and random changes.
    """
    data, strata, laid, every = [], [], [], []
    for number, batch in enumerate(track(batches, "compare")):
        generator = torch.Generator().manual_seed(seed + number)
        pairs = strategy(model, programs, batch, generator)
        run = InterchangeRun(model, pairs)
        changes = torch.stack([run.difference, random_change(run.difference, generator)])
        exchanged, random = run.after(run.own + changes)
        runs = _RunsByLag(programs, run.pairs)
        scored = torch.ones(len(pairs), dtype=torch.bool)
        if not laid:
            scored = torch.arange(len(pairs)) % TUNED_ON != 0
            laid = [_lay_over(p, run, exchanged, ~scored, runs) for p in programs]
        begun = _begun(pairs, laid)  # elsewhere some program says nothing, so none is asked
        scored &= begun
        every.append(pairs[begun.to(pairs.loop.device)])
        measured = _measured(run, exchanged, random, laid, runs, batch, scored)
        inputs_before = sum(part.sizes["input"] for part in data)
        data.append(measured.assign(base=measured.base + inputs_before))
        lengths, of_input = batch.n.unique(return_inverse=True)
        length = Stratum(tuple(f"n = {n}" for n in lengths.tolist()), of_input[pairs.base])
        sorted_by = {**pairs.strata, **strata_of(pairs, programs[0]), LENGTH: length}
        strata.append(_labels(sorted_by, scored))
    return Evidence(_joined(data), _joined_labels(strata), laid, untried(every))


def untried(batches: Sequence[InterchangePairs]) -> list[Untried]:
    """Codes of the kinds of interchange that no pair tries; some, no strategy can."""
    tried: set[Untried] = set()
    for pairs in batches:
        at = pairs.sites
        token = pairs.inputs[pairs.base[:, None], at.position]
        given = pairs.inputs[at.source, at.position]
        at_once = at.made & (at.loop == at.loop[:, :1]) & (at.position != at.position[:, :1])
        there: dict[Untried, Tensor] = {
            "initial_state": at.made & (at.loop == 0),
            "from_initial_state": at.made & (at.source_loop == 0),
            "first_position": at.made & (at.position == 0),
            "other_token": at.made & (token != given),
            "several_positions": at_once,
            "other_loop": at.made & (at.loop != at.source_loop),
            "repeated": at.made & (at.loop > at.loop[:, :1]),
        }
        tried.update(kind for kind, pair in there.items() if bool(pair.any()))
    return [kind for kind in get_args(Untried) if kind not in tried]


class _RunsByLag:
    """Each program's runs on the inputs, made once for each lag of its answers."""

    def __init__(self, programs: Sequence[LoopProgram], pairs: InterchangePairs) -> None:
        self.programs, self._inputs = programs, pairs.inputs
        self._made: dict[tuple[str, int], ProgramRuns] = {}
        self._n_loops = pairs.n_loops + max(a.shift for a in alignments())

    def __call__(self, program: LoopProgram, lag: int) -> ProgramRuns:
        key = (program.name, lag)
        if key not in self._made:
            self._made[key] = ProgramRuns(program, self._inputs, n_loops=self._n_loops, lag=lag)
        return self._made[key]


def _lay_over(
    program: LoopProgram,
    run: InterchangeRun,
    exchanged: Int[Tensor, "pair delay pos"],
    tuning: Bool[Tensor, " pair"],
    runs: _RunsByLag,
) -> Alignment:
    """The alignment that suits some pairs best, of those that suit undisturbed runs best.

    Of equals the plainest: another one must be better by a clear margin.
    """
    options = list(alignments())
    chosen = (tuning & _begun(run.pairs, options)).to(exchanged.device)
    pairs = run.pairs[chosen]
    delays = min(_TUNED_DELAYS, pairs.longest) + 1
    natural, after = run.base[chosen, :delays], exchanged[chosen, :delays]
    moves = (natural != after).any(-1).any(-1)
    alone = [float(_undisturbed(run, runs(program, a.lag), a)[0].double().mean()) for a in options]
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


def _begun(pairs: InterchangePairs, laid: Sequence[Alignment]) -> Bool[Tensor, " pair"]:
    """Which pairs lie where a program has begun and is, whichever of the alignments it has."""
    at = pairs.sites
    first = max(-min(alignment.shift for alignment in laid), 0)
    left = max(alignment.offset for alignment in laid)
    outside = (at.loop < first) | (at.source_loop < first) | (at.position < left)
    return ~(at.made & outside).any(1).cpu()


def _undisturbed(
    run: InterchangeRun, made: ProgramRuns, alignment: Alignment
) -> tuple[Bool[Tensor, "loop input"], Float[Tensor, " input"]]:
    """At which loops 1 .. T the whole answer is the program's; share of answers it decides."""
    pairs = run.pairs
    loops = torch.arange(1, pairs.n_loops + 1, device=pairs.loop.device) + alignment.shift
    said = made.trace.outputs[loops]
    decided = (said != UNKNOWN) & pairs.asked
    right = ((said == run.natural[1:]) | ~decided).all(-1)
    return right, decided.sum((0, 2)) / (pairs.asked.sum(1) * len(loops)).clamp(min=1)


def _measured(
    run: InterchangeRun,
    exchanged: Int[Tensor, "pair delay pos"],
    random: Int[Tensor, "pair delay pos"],
    laid: Sequence[Alignment],
    runs: _RunsByLag,
    batch: Batch,
    scored: Bool[Tensor, " pair"],
) -> xr.Dataset:
    """The arrays of one batch."""
    import xarray as xr

    pairs, within, keep = run.pairs, run.within, scored.to(run.within.device)
    made = [runs(p, a.lag) for p, a in zip(runs.programs, laid)]
    predictions = [Prediction(p, pairs, a, runs=m) for p, a, m in zip(runs.programs, laid, made)]
    claims = [prediction.claims(run.base) for prediction in predictions]
    undisturbed, decided = zip(*(_undisturbed(run, m, a) for m, a in zip(made, laid)))
    alone = torch.stack(undisturbed).double()
    answers = [runs(p, 0).trace.outputs[1 : pairs.n_loops + 1] for p in runs.programs]
    targets = batch.targets.to(run.natural.device)
    solved = ((run.natural[-1] == targets) | (targets == IGNORE)).all(-1)

    def kept(*by_program: Bool[Tensor, "pair delay"]) -> Bool[Tensor, "program pair delay"]:
        return (torch.stack(by_program) & within)[:, keep]

    undisturbed_alike = [
        [[bool(((a == b) | ~pairs.asked).all()) for b in answers] for a in answers]
    ]
    arrays = {
        "base": ("pair", pairs.base[keep]),
        "reached": ("program pair", torch.stack([_reached(p)[keep] for p in predictions])),
        "within": ("pair delay", within[keep]),
        "moves": (
            "pair delay",
            kept(((exchanged != run.base) & pairs.scored[:, None]).any(-1))[0],
        ),
        "changes": ("program pair delay", kept(*(c.changes for c in claims))),
        "agree": ("program pair delay", kept(*(c.agree(exchanged) for c in claims))),
        "random_agree": ("program pair delay", kept(*(c.agree(random) for c in claims))),
        "apart": (
            "program rival pair delay",
            (each_apart(claims) & within)[:, :, keep],
        ),
        "undisturbed": ("program input", alone.mean(1)),
        "worst_loop": ("batch program", alone.mean(2).amin(1)[None]),
        "decided": ("program input", torch.stack(decided)),
        "alike": ("batch program rival", torch.tensor(undisturbed_alike)),
        "solved": ("batch", solved.double().mean()[None]),
    }
    names = [p.name for p in runs.programs]
    return xr.Dataset(
        {name: (axes.split(), array.cpu().numpy()) for name, (axes, array) in arrays.items()},
        coords={"program": names, "rival": names, "delay": range(within.shape[1])},
    )


def _reached(prediction: Prediction) -> Bool[Tensor, " pair"]:
    """Whether the program's state after each interchange is one that the clean base run reaches.

    Tokens are part of the state, so no run but the base's own can reach it; it may do so at
    another loop.
    """
    pairs, variables = prediction.pairs, prediction.runs.trace.variables
    reached = torch.zeros_like(pairs.base, dtype=torch.bool)

    def on_distribution(rows: Any, state: Mapping[str, Tensor]) -> Bool[Tensor, " some"]:
        own = [
            (variables[name][:, pairs.base[rows]] == values).all(-1)
            for name, values in state.items()
        ]
        return torch.stack(own).all(0).any(0)

    for start in range(0, len(pairs), 64):
        rows = slice(start, start + 64)
        reached[rows] = on_distribution(rows, prediction.state(rows))
    if pairs.second is not None:
        for rows in (pairs.second.made & reached).nonzero().squeeze(1).split(64):
            if len(rows):
                reached[rows] = on_distribution(rows, prediction.second_state(rows))
    return reached


def _labels(strata: dict[str, Stratum], scored: Bool[Tensor, " pair"]) -> pd.DataFrame:
    """The label of each scored pair in each stratum."""
    import pandas as pd

    columns = {}
    for name, stratum in strata.items():
        labels = np.array([*stratum.labels, None], dtype=object)[stratum.codes[scored].cpu()]
        columns[name] = pd.Categorical(labels, categories=list(dict.fromkeys(stratum.labels)))
    return pd.DataFrame(columns)


def _joined(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """The arrays of several batches; beyond the end of a shorter run nothing holds."""
    import xarray as xr

    def along(axis: str) -> xr.Dataset:
        named = (part[[name for name in part if axis in part[name].dims]] for part in parts)
        return xr.concat(list[xr.Dataset](named), axis, join="outer", fill_value=False)

    return along("pair").merge(along("input")).merge(along("batch"))


def _joined_labels(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The labels of several batches, which need not have the same strata or classes."""
    import pandas as pd

    joined = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    for name in joined:
        known = (part[name].cat.categories for part in parts if name in part)
        classes = list(dict.fromkeys(label for labels in known for label in labels))
        joined[name] = pd.Categorical(joined[name], categories=classes)
    return joined
