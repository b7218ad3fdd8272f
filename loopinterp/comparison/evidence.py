"""The answers of a model and predictions of programs, by pair and delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from loopinterp.comparison.pair_strategies import strata_of
from loopinterp.comparison.program_runs import Prediction, separations
from loopinterp.core.text import ShortRepr, track
from loopinterp.interventions.engine import InterchangeRun, random_change
from loopinterp.interventions.pairs import Stratum
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import ProgramOffset, alignments, with_output_lag
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.comparison.pair_strategies import PairStrategy
    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.programs.interpreter import Trace
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch

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
"""A kind of interchange that was not tried; no strategy tries the last two."""

_AT_A_TIME = 2**16  # positions of all pairs whose states are looked for together


@dataclass(frozen=True, repr=False)
class Evidence(ShortRepr):
    """One model's answers after each interchange, and each program's predictions.

    Arrays of ``data``:

    - [pair]: ``base``, the input whose run is changed;
    - [pair, delay]: ``within``, whether the run still goes on; ``moves``, whether an answer of the
      model changes;
    - [program, pair, delay]: ``changes``, whether the program predicts a change; ``agree``, whether
      the model's whole answer is the predicted one; ``random_agree``, after a random perturbation;
    - [program, rival, pair, delay]: ``apart``, whether two programs predict different answers;
    - [program, pair]: ``on_distribution``, whether some loop of the clean run has the state;
    - [program, input], of clean runs: ``undisturbed``, share of loops with the program's whole
      answer; ``decided``, share of answers that it decides;
    - [batch, …]: ``worst_loop``, share of inputs at the worst loop; ``alike``, whether two programs
      give the same clean answers; ``solved``, share of inputs that the model answers right.

    Attributes:
        strata: The label of each pair (row) in each stratum (column).
        untried: Kinds of interchange that no pair tries.
    """

    data: xr.Dataset
    strata: pd.DataFrame
    offsets: list[ProgramOffset]
    untried: list[Untried] = field(default_factory=list)


def gather_evidence(
    model: LoopedModel | Any,
    programs: Sequence[LoopProgram],
    batches: Sequence[Batch],
    strategy: PairStrategy,
    *,
    seed: int,
) -> Evidence:
    """Run a strategy's interchanges on a model, and each program's predictions of them.

    Each batch has inputs of one length; program offsets are chosen on the first.
    """
    import xarray as xr

    names, data, strata, tried = [p.name for p in programs], [], [], set()
    offsets: list[ProgramOffset] = []
    for number, batch in enumerate(track(batches, "compare")):
        generator = torch.Generator().manual_seed(seed + number)
        pairs = strategy(model, programs, batch, generator).to("cpu")
        run = InterchangeRun(model, pairs)
        # [change, pair, site, d_model]: the interchange, and a random change of the same norm.
        changes = torch.stack([run.difference, random_change(run.difference, generator)])
        after, random = run.after(run.base_state + changes)
        trace_of = cache(partial(_trace, run.pairs))
        scored = torch.ones(len(pairs), dtype=torch.bool)
        if not offsets:
            # One of four pairs of the first batch chooses the offsets, and is not scored.
            scored = torch.arange(len(pairs)) % 4 != 0
            offsets = [_best_offset(run, after, ~scored, trace_of, p) for p in programs]
        # Before its first loop, and left of its first position, a program predicts nothing.
        begun = _begun(pairs, offsets)
        scored &= begun
        tried |= _tried(pairs[begun])
        predictions = [
            Prediction(p, run.pairs, offset, trace=trace_of(p, offset.lag))
            for p, offset in zip(programs, offsets)
        ]
        arrays = _after_interchange(run, after, random, predictions, scored.to(run.base.device))
        # Two programs are compared with each other without any offset.
        plain = [trace_of(p, 0).outputs[1 : pairs.n_loops + 1] for p in programs]
        arrays |= _clean_runs(run, predictions, plain, batch.targets.to(run.base.device))
        coords = {"program": names, "rival": names, "delay": range(pairs.longest + 1)}
        part = {name: (axes.split(), x.cpu().numpy()) for name, (axes, x) in arrays.items()}
        part["base"][1][:] += sum(before.sizes["input"] for before in data)
        data.append(xr.Dataset(part, coords=coords))
        lengths, of_input = batch.n.unique(return_inverse=True)
        length = Stratum(tuple(f"n = {n}" for n in lengths.tolist()), of_input[pairs.base])
        strata.append(({**pairs.strata, **strata_of(pairs, programs[0]), "length": length}, scored))
    untried = [kind for kind in get_args(Untried) if kind not in tried]
    return Evidence(_joined(data), _labels(strata), offsets, untried)


def _trace(pairs: InterchangePairs, program: LoopProgram, lag: int) -> Trace:
    n_loops = pairs.n_loops + max(option.shift for option in alignments())
    return with_output_lag(program, lag).trace(pairs.inputs, n_loops=n_loops)


def _tried(pairs: InterchangePairs) -> set[Untried]:
    at = pairs.sites
    token = pairs.inputs[pairs.base[:, None], at.position]
    there: dict[Untried, Tensor] = {  # [pair, site]
        "initial_state": at.loop == 0,
        "from_initial_state": at.source_loop == 0,
        "first_position": at.position == 0,
        "other_token": token != pairs.inputs[at.source, at.position],
        "several_positions": (at.loop == at.loop[:, :1]) & (at.position != at.position[:, :1]),
        "other_loop": at.loop != at.source_loop,
        "repeated": at.loop > at.loop[:, :1],
    }
    return {kind for kind, sites in there.items() if bool((at.made & sites).any())}


def _best_offset(
    run: InterchangeRun,
    answers: Int[Tensor, "pair delay pos"],
    tuning: Bool[Tensor, " pair"],
    trace_of: Callable[[LoopProgram, int], Trace],
    program: LoopProgram,
) -> ProgramOffset:
    """The offset that fits some pairs best at the first delays, by a clear margin over earlier
    ones.
    """
    clearly, most_delays = 0.02, 4
    options = list(alignments())
    chosen = (tuning & _begun(run.pairs.to("cpu"), options)).to(answers.device)
    pairs = run.pairs[chosen]
    delays = min(most_delays, pairs.longest + 1)
    # Answers without and with the interchange, [pair, delay, pos]; whether the model changes any.
    natural, after = run.base[chosen, :delays], answers[chosen, :delays]
    moves = (natural != after).any(-1).any(-1)
    fits = [_clean_match(run, trace_of(program, a.lag), a)[0].double().mean() for a in options]
    best, best_score = options[0], -1.0
    for option, fit in zip(options, fits):
        if fit < max(fits) - clearly:
            continue
        trace = trace_of(program, option.lag)
        prediction = Prediction(program, pairs, option, trace=trace, steps=delays - 1)
        claims = prediction.claims(natural)
        # Whole answers right, of effective interchanges [pair, delay].
        effective = run.within[chosen, :delays] & (moves[:, None] | claims.changes)
        score = float(claims.agree(after)[effective].double().mean().nan_to_num(1.0))
        if score > best_score + clearly:
            best, best_score = option, score
    return best


def _begun(pairs: InterchangePairs, offsets: Sequence[ProgramOffset]) -> Bool[Tensor, " pair"]:
    """Pairs at loops and positions that every program has, under any offset."""
    at = pairs.sites
    first = max(-min(offset.shift for offset in offsets), 0)
    left = max(offset.offset for offset in offsets)
    outside = (at.loop < first) | (at.source_loop < first) | (at.position < left)
    return ~(at.made & outside).any(1)


def _clean_match(
    run: InterchangeRun, trace: Trace, offset: ProgramOffset
) -> tuple[Bool[Tensor, "loop input"], Float[Tensor, " input"]]:
    """Loops 1 .. T with the program's whole answer; share of answers it decides."""
    pairs = run.pairs
    # [loop, input, pos]: the program's answers at the model's loops, of those that are asked.
    loops = torch.arange(1, pairs.n_loops + 1, device=pairs.loop.device) + offset.shift
    predicted = trace.outputs[loops]
    decided = (predicted != UNKNOWN) & pairs.asked
    right = ((predicted == run.natural[1:]) | ~decided).all(-1)
    return right, decided.sum((0, 2)) / (pairs.asked.sum(1) * len(loops)).clamp(min=1)


def _clean_runs(
    run: InterchangeRun,
    predictions: Sequence[Prediction],
    plain: Sequence[Int[Tensor, "loop input pos"]],
    targets: Int[Tensor, "input pos"],
) -> dict[str, tuple[str, Tensor]]:
    matches, decided = zip(*(_clean_match(run, p.trace, p.program_offset) for p in predictions))
    right = torch.stack(matches).double()  # [program, loop, input]
    alike = [[bool(((a == b) | ~run.pairs.asked).all()) for b in plain] for a in plain]
    solved = ((run.natural[-1] == targets) | (targets == IGNORE)).all(-1)
    return {
        "undisturbed": ("program input", right.mean(1)),
        "worst_loop": ("batch program", right.mean(2).amin(1)[None]),
        "decided": ("program input", torch.stack(decided)),
        "alike": ("batch program rival", torch.tensor([alike])),
        "solved": ("batch", solved.double().mean()[None]),
    }


def _after_interchange(
    run: InterchangeRun,
    after: Int[Tensor, "pair delay pos"],
    random: Int[Tensor, "pair delay pos"],
    predictions: Sequence[Prediction],
    rows: Bool[Tensor, " pair"],
) -> dict[str, tuple[str, Tensor]]:
    pairs, within = run.pairs, run.within
    claims = [prediction.claims(run.base) for prediction in predictions]
    # [pair, delay]: the model changes an answer that is scored.
    moves = ((after != run.base) & pairs.scored[:, None]).any(-1)

    def by_program(each: list[Bool[Tensor, "pair delay"]]) -> Bool[Tensor, "program pair delay"]:
        return (torch.stack(each) & within)[:, rows]

    return {
        "base": ("pair", pairs.base[rows]),
        "on_distribution": (
            "program pair",
            torch.stack([_on_distribution(p)[rows] for p in predictions]),
        ),
        "within": ("pair delay", within[rows]),
        "moves": ("pair delay", (moves & within)[rows]),
        "changes": ("program pair delay", by_program([c.changes for c in claims])),
        "agree": ("program pair delay", by_program([c.agree(after) for c in claims])),
        "random_agree": ("program pair delay", by_program([c.agree(random) for c in claims])),
        "apart": ("program rival pair delay", (separations(claims) & within)[:, :, rows]),
    }


def _on_distribution(prediction: Prediction) -> Bool[Tensor, " pair"]:
    """Whether the clean base run, at some loop, has the program's state after an interchange."""
    pairs, variables = prediction.pairs, prediction.trace.variables
    on_distribution = torch.zeros_like(pairs.base, dtype=torch.bool)

    def in_clean_run(rows: Any, state: Mapping[str, Tensor]) -> Bool[Tensor, " some"]:
        # Every variable at every position is equal [loop, pair], at some loop.
        equal = [(variables[n][:, pairs.base[rows]] == x).all(-1) for n, x in state.items()]
        return torch.stack(equal).all(0).any(0)

    # Each compares all loops of a run; some at a time bound memory.
    at_a_time = max(_AT_A_TIME // pairs.inputs.shape[1], 1)
    for start in range(0, len(pairs), at_a_time):
        rows = slice(start, start + at_a_time)
        on_distribution[rows] = in_clean_run(rows, prediction.state(rows))
    if pairs.second is not None:  # then both states must be reached
        for rows in (pairs.second.made & on_distribution).nonzero().squeeze(1).split(at_a_time):
            if len(rows):
                delay, each = (pairs.second.loop - pairs.loop)[rows], torch.arange(len(rows))
                later = prediction.after(rows).variables
                state = {name: values[delay, each] for name, values in later.items()}
                on_distribution[rows] = in_clean_run(rows, state)
    return on_distribution


def _labels(batches: Sequence[tuple[dict[str, Stratum], Bool[Tensor, " pair"]]]) -> pd.DataFrame:
    import pandas as pd

    columns = [
        # A code of -1 takes the last label, None.
        {k: np.array([*s.labels, None], object)[s.codes[scored]] for k, s in strata.items()}
        for strata, scored in batches
    ]
    table = pd.concat([pd.DataFrame(part) for part in columns], ignore_index=True)
    for name in table:
        labels = [label for strata, _ in batches if name in strata for label in strata[name].labels]
        table[name] = pd.Categorical(table[name], categories=list(dict.fromkeys(labels)))
    return table


def _joined(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    import xarray as xr

    joined = xr.Dataset()
    # Arrays have one of these axes each, along which they are joined.
    for axis in ("pair", "input", "batch"):
        named = [part[[name for name in part if axis in part[name].dims]] for part in parts]
        joined = joined.merge(xr.concat(named, axis, join="outer", fill_value=False))
    return joined
