"""Probes, dynamics, carry study and comparison, scored on known-circuit models."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from loopinterp.benchmark.known_models import KnownModel, Score
from loopinterp.comparison.program_comparison import compare_programs
from loopinterp.comparison.program_runs import ProgramModel
from loopinterp.compiler.assembly import LOGIT
from loopinterp.dynamics import convergence_study, readout_margin, stable_from
from loopinterp.probing import carry_study, with_random_weights
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.addition import Addition


@torch.no_grad()
def score_probes(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Held-out accuracy of a probe for each variable after each loop.

    Probes read the state; the state without the variable's directions and distractors; and
    (control) the injected input. A fourth reads what other variables, position and token tell about
    the variable: the second should find no more. The accuracy on distractors alone is the control
    of the interchange that shows that they are not used.
    """
    compiled, tokens = known.compiled, known.batch.inputs
    states = compiled.model(tokens, n_loops=known.n_loops, return_type="states")
    distracting = known.of_distractors(states)
    undistracted = states - distracting
    e = compiled.model.embed(tokens).expand_as(states)
    trace = compiled.program.trace(tokens, n_loops=known.n_loops)
    generator = torch.Generator().manual_seed(seed)
    train = torch.randperm(len(tokens), generator=generator) < len(tokens) // 2
    accuracies, excess, with_directions, from_input, distracted = [], [], [], [], []
    for name, values in trace.variables.items():
        # [rank, d_model]; the state without its part in the subspace.
        basis = compiled.circuit.subspace(name)
        without = undistracted - (undistracted @ basis.mT) @ basis
        # Tokens, positions and the other variables, one-hot: [loop, batch, pos, content].
        place = torch.arange(tokens.shape[1]).expand_as(tokens)
        fixed = [one_hot(x).float().expand(len(states), *x.shape, -1) for x in (tokens, place)]
        others = [v for other, v in trace.variables.items() if other != name]
        rest = torch.cat([*fixed, *(one_hot(v - v.min()).float() for v in others)], -1)
        for loop, labels in enumerate(values):
            if len(labels[train].unique()) < 2:
                continue
            read = [_accuracy(x[loop], labels, train) for x in (states, without, rest, e)]
            accuracies.append(read[0])
            excess.append(read[1] - read[2])
            with_directions.append(read[0] - read[2])
            from_input.append(read[3])
            if bool(distracting[loop].any()):
                distracted.append(_accuracy(distracting[loop], labels, train))
    if not accuracies:
        return {}
    scores = {
        "probe finds": Score(min(accuracies), sum(from_input) / len(from_input)),
        "probe finds nothing else": Score(max(excess), max(with_directions)),
    }
    if distracted:
        # Share of final answers that change when distractors are taken from another input.
        run = partial(compiled.model, tokens, n_loops=known.n_loops)
        clean, scored, changed = run().argmax(-1), known.batch.targets >= 0, []
        for loop, h in enumerate(states):
            interchanged = h - distracting[loop] + distracting[loop].roll(1, 0)
            answers = run(start_at_loop=loop, state=interchanged).argmax(-1)
            changed.append(float((answers != clean)[scored].float().mean()))
        scores["decodable, not used"] = Score(max(changed), sum(distracted) / len(distracted))
    return scores


def _accuracy(
    x: Float[Tensor, "batch pos d"], labels: Int[Tensor, "batch pos"], train: Bool[Tensor, " batch"]
) -> float:
    probe = RidgeProbe(alpha=1e-3).fit(x[train].flatten(0, 1), labels[train].flatten())
    right = probe.predict(x[~train].flatten(0, 1)) == labels[~train].flatten()
    seen = torch.isin(labels[~train], labels[train].unique()).flatten()
    return float(right[seen].float().mean())


@torch.no_grad()
def score_dynamics(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """When each token converges, when each answer becomes final, and how stable the end is."""
    model, program = known.compiled.model, known.compiled.program
    if model.config.d_vocab_out < 2:
        return {}
    batch = known.batch[slice(32)]
    # A value shifted through the sequence has left it after as many loops as positions; and the
    # program converges some loops before the end.
    n_loops = max(known.n_loops, batch.inputs.shape[1], 12) + 4
    trace = program.trace(batch.inputs, n_loops=n_loops)
    result = convergence_study(
        known.without_distractors,
        batch,
        n_loops=n_loops,
        n_spectral=2,
        positions="all",
        seed=seed,
    )
    # Loops after which no variable at a position changes any more.
    converged = torch.stack([trace.converged(name) for name in trace.variables]).amax(0)
    # The study counts the first loop that moves nothing; the program, the last that does.
    settled_at = torch.from_numpy(result.data["settled_at"].values)
    measured = torch.where(settled_at < 0, n_loops, settled_at - 1)
    scores = {"settling loop": _agreement(measured, converged)}
    logits = model(batch.inputs, n_loops=n_loops, return_type="all_logits")
    # A program's undecided answers are logits that are nearly equal.
    decided = readout_margin(logits) > LOGIT / 2
    answers = torch.where(decided, logits.argmax(-1), UNKNOWN)
    scores["answer stable"] = _agreement(stable_from(answers), stable_from(trace.outputs))
    radius = float(result.data["spectral_radius"].max())
    if int(converged.max()) < n_loops - 1 and not math.isnan(radius):
        scores["stability"] = Score(radius, 1.0)
    return scores


def _agreement(measured: Tensor, expected: Tensor) -> Score:
    most_common = expected.flatten().mode().values
    equal = (measured == expected).float().mean(), (expected == most_common).float().mean()
    return Score(*map(float, equal))


# Length of the additions from which on the carry study has pairs of every chain length
_LEAST_BITS = 12


def score_wavefront(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Share of (loop, chain length) at which the carry is as decodable as in the program.

    The reference is the same study of a :class:`~loopinterp.comparison.ProgramModel`.
    """
    program, n = known.compiled.program, known.batch.inputs.shape[1] - 1
    if program.task != "addition" or n < _LEAST_BITS:
        return {}
    max_chain, pairs = 6, 96
    study = partial(
        carry_study,
        task=Addition(),
        n=n,
        max_chain=max_chain,
        n_short=_LEAST_BITS - 2,
        loops=range(max_chain + 2),
        n_train=pairs,
        n_test=pairs,
        random_model=with_random_weights(known.compiled.model, seed=seed),
        seed=seed,
    )
    holds = any(f.role == "tokens" for f in known.compiled.circuit.features)
    itself = ProgramModel(program, max_length=n + 1, hold_tokens=holds)
    expected, measured = study(itself), study(known.without_distractors)
    # Probes of one fact differ by 0.05 at chance, with so many pairs.
    shares = [
        float((abs(expected.data["accuracy"] - measured.data[name]) <= 0.15).mean())
        for name in ("accuracy", "random_model")
    ]
    return {"wavefront": Score(*shares)}


def score_verdict(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Whether the model's program is identified among all programs of its task.

    Not applicable if no interchange changes an answer of the program.
    """
    program = known.compiled.program
    result = compare_programs(known.compiled.model, rivals_of(program), known.batch, seed=seed)
    share = result.data["whole_run"].sel(stratum="all", estimate="value").isel(model=0)
    right, others = float(share.sel(program=program.name)), share.drop_sel(program=program.name)
    if math.isnan(right):
        return {}
    identified = result.verdict.identified == program.name
    best_other = float(others.max()) if others.size else math.nan
    return {"verdict": Score(right if identified else 0.0, best_other)}


def rivals_of(program: LoopProgram) -> list[LoopProgram]:
    """A program, then the other stock programs of its task, inputs and settings."""
    stock = [get_program(name) for name in list_programs(program.task) if name != program.name]
    same = program.inputs, program.task_settings
    return [program, *(p for p in stock if (p.inputs, p.task_settings) == same)]
