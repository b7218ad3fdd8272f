"""Methods that study a mechanism, scored on known-circuit models.

Of states: probes, dynamics, the carry study, the comparison with programs. Of parts: interchanges,
patching, heads and ablation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from loopinterp.benchmark.known_models import KnownModel, Score
from loopinterp.comparison.heads import head_name, head_study
from loopinterp.comparison.program_comparison import compare_programs
from loopinterp.comparison.program_runs import Prediction, ProgramModel
from loopinterp.comparison.subspace_search import labelled_states
from loopinterp.comparison.variable_interchange import (
    ANOTHER_LOOP,
    ANOTHER_VARIABLE,
    NOTHING,
    RANDOM,
    SAME_VALUE,
    VariableInterchange,
    interchange_study,
)
from loopinterp.compiler.assembly import LOGIT
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.boundary import checked
from loopinterp.core.settings import Seed
from loopinterp.dynamics import convergence_study, readout_margin, stable_from
from loopinterp.interventions.ablation import IDLE, KINDS, NEEDED, ablation_study
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.interventions.patching import patching_sweep
from loopinterp.probing import carry_study, with_random_weights
from loopinterp.probing.linear_probes import RidgeProbe
from loopinterp.programs.expressions import Aggregate, SelWidth, Seq, ShiftRight, Tokens, postorder
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    import pandas as pd


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


def score_interchange(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Lowest accuracy of the right interchange; whole-run accuracy of wrong ones and of probes."""
    circuit, program = known.compiled.circuit, known.compiled.program
    subspaces = {v: circuit.subspace(v) for v in circuit.variables}
    result = interchange_variables(known, subspaces, seed)
    nothing = result.pooled(NOTHING)[0]
    wrong = {
        "wrong variable": result.pooled(ANOTHER_VARIABLE),
        "wrong loop": result.pooled(ANOTHER_LOOP),
        "random change": result.pooled(RANDOM),
    }
    scores = {key: Score(share, nothing) for key, (share, _, _, n) in wrong.items() if n}
    most = max((score.value for score in scores.values()), default=0.0)
    same, _, _, n_same = result.pooled(SAME_VALUE)
    if n_same:
        scores["same value"] = Score(same, wrong["random change"][0])
    if result.pooled()[3]:
        scores["interchange"] = Score(float(result.iia.min()), most)
        # Probes see the loops of the run: after it, most states have converged and are equal.
        loops = torch.full_like(known.batch.n_loops, known.n_loops + 1)
        batch = replace(known.batch, n_loops=loops)
        probed = probed_subspaces(known.compiled.model, program, batch)
        probed = {v: rows for v, rows in probed.items() if len(rows)}
        by_probe = interchange_variables(known, probed, seed)
        scores["interchange by probe"] = Score(by_probe.pooled()[0], by_probe.pooled(RANDOM)[0])
    return scores


def probed_subspaces(model: Any, program: LoopProgram, batch: Batch) -> dict[str, Tensor]:
    """The subspace ``[rank, d_model]`` that a probe reads, for each variable."""
    return {v: labelled_states(model, program, [v], batch).subspace() for v in program.variables}


def interchange_variables(
    known: KnownModel, subspaces: Mapping[str, Tensor], seed: int
) -> VariableInterchange:
    return interchange_study(
        known.compiled.model,
        known.batch,
        known.compiled.program,
        subspaces=subspaces,
        n_loops=max(known.n_loops, 1),
        pairs_per_loop=32,
        seed=seed,
    )


@torch.no_grad()
def score_patching(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """States patched position by position, and heads patched one by one."""
    half = len(known.batch) // 2
    rows, other_rows = slice(min(half, 24)), slice(half, half + min(half, 24))
    base, source = known.batch.inputs[rows], known.batch.inputs[other_rows]
    scored = known.batch.targets[rows] >= 0
    model, n_loops = known.compiled.model, max(known.n_loops, 1)
    answers = [model(x, n_loops=n_loops).argmax(-1) for x in (base, source)]
    if not bool((answers[0] != answers[1])[scored].any()):
        return {}
    sweep = partial(patching_sweep, model, base, source, n_loops=n_loops, scored=scored)
    predicted = _predicted(known.compiled.program, base, source, scored, n_loops)
    recovered = sweep(component="state", positions="each").data["recovered"]
    measured = torch.from_numpy(recovered.isel(layer=0, head=0).values).to(predicted)

    def share(first: Tensor, second: Tensor) -> float:
        defined = ~(first.isnan() | second.isnan())
        return float(((first - second).abs() < 1e-6)[defined].float().mean())

    inside = np.zeros((model.config.n_layers, model.config.n_heads), dtype=bool)
    for head in known.compiled.circuit.heads:
        if head.section == "block":
            inside[head.layer, head.head] = True
    effect = sweep(component="z").data["effect"].isel(pos=0)
    effect = abs(effect).max("loop").values  # [layer, head]
    return {
        # Controls: the prediction for the loop before, and the heads of the circuit.
        "patched states": Score(share(measured, predicted), share(measured[1:], predicted[:-1])),
        "patched heads": Score(
            float(effect[~inside].max(initial=0.0)),
            float(effect[inside].max()) if inside.any() else float("nan"),
        ),
    }


def _predicted(
    program: LoopProgram,
    base: Int[Tensor, "batch pos"],
    source: Int[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"],
    n_loops: int,
) -> Float[Tensor, "loop pos"]:
    """Share of the program's answers that become the source's; NaN where one is undecided.

    An interchange takes all variables at one position from the source after t loops.
    """
    (n, n_pos), both = base.shape, torch.cat([base, source])
    # [loop position example] flattened, one pair each
    loop, place, row = torch.cartesian_prod(*map(torch.arange, (n_loops + 1, n_pos, n))).T
    pairs = InterchangePairs(
        inputs=both,
        asked=scored.repeat(2, 1),
        n_loops=n_loops,
        base=row,
        source=row + n,
        positions=place[:, None],
        loop=loop,
        source_loop=loop,
    )
    of_base, of_source = program.run(both, n_loops=n_loops).outputs[-1].chunk(2)
    after = Prediction(program, pairs).interchanged[torch.arange(len(pairs)), pairs.horizon]
    after = after.view(n_loops + 1, n_pos, n, n_pos)  # [loop, place, example, pos]
    # After the last loop only the readout follows: the patched position answers as the source.
    after[-1] = torch.where(torch.eye(n_pos).bool()[:, None], of_source, after[-1])
    differ = scored & (of_base != of_source)
    counted = after[:, :, differ]  # [loop, place, answer that differs]
    right = (counted == of_source[differ]).float().mean(-1)
    return right.masked_fill((counted == UNKNOWN).any(-1), torch.nan)


def score_heads(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Whether each head of the circuit is matched with its selector, and no other head is."""
    compiled = known.compiled
    if not compiled.circuit.heads:
        return {}
    batch = known.batch[slice(48)]
    batch = replace(batch, n_loops=batch.n_loops.clamp(min=1)) if known.n_loops == 0 else batch
    match = head_study(compiled.model, batch, [compiled.program], seed=seed)
    n_layers = compiled.model.config.n_layers
    selector_of = {
        head_name(h.section, h.layer, h.head, n_layers=n_layers): h.selector
        for h in compiled.circuit.heads
    }
    matched = {
        head: {
            s for names, heads in zip(match.names, match.computes) if head in heads for s in names
        }
        for head in match.heads
    }
    names_of = dict(zip(match.selectors, match.names))
    empty = {name for s in match.nothing for name in names_of[s]}
    right = [
        # a selector of several parts of a program has the part's name before its own
        any(name == selector or name.endswith(f".{selector}") for name in matched[head])
        for head, selector in selector_of.items()
        if selector not in empty
    ]
    outside = [head for head in match.heads if head not in selector_of]
    # An idle head attends to everything evenly.
    not_even = {name for s in match.selectors if s not in match.everything for name in names_of[s]}
    wrong = sum(bool(matched[head] & not_even) for head in outside)
    scores = {"no other head": Score(float(wrong), float(len(outside)))}
    if right:
        even = float(match.data["overlap_even"].mean())
        scores["heads found"] = Score(sum(right) / len(right), even)
    return scores


def score_ablation(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Share of parts judged right by each kind of ablation; control: calling every part needed."""
    if known.n_loops == 0 or not used_parts(known.compiled, informed=False):
        return {}  # the answer needs no part of the block
    judged = judged_by_ablation(known.compiled, known.batch[slice(128)], seed=seed)
    return {
        f"ablated: {kind}": Score(float(table["right"].mean()), float(table["used"].mean()))
        for kind, table in judged.groupby("ablation", sort=False)
    }


@checked
def judged_by_ablation(compiled: Compiled, batch: Batch, *, seed: Seed = 0) -> pd.DataFrame:
    """Every part of a known circuit, judged by each kind of ablation.

    Returns:
        :meth:`~loopinterp.interventions.AblationStudy.judged`, with ``used`` (whether this ablation
        must have an effect, by the circuit) and ``right`` (whether it is judged so).
    """
    circuit = compiled.circuit
    components = ("z", "mlp_out") if circuit.neurons else ("attn_out",)
    study = ablation_study(compiled.model, batch, components=components, when=("all",), seed=seed)
    table = study.judged()
    by_kind = {kind: used_parts(compiled, informed=kind != "zero") for kind in KINDS}
    used = [part in by_kind[kind] for part, kind in zip(table["part"], table["ablation"])]
    expected = [NEEDED if x else IDLE for x in used]
    return table.assign(used=used, right=table["need"] == expected)


def used_parts(compiled: Compiled, *, informed: bool) -> set[str]:
    """The heads and MLPs of the block that write a feature on which the answer depends.

    With ``informed``, features must depend on the tokens: mean and resample ablation change no
    others (a counter of loops is equal in all examples).
    """
    circuit, program = compiled.circuit, compiled.program
    if not circuit.neurons:
        # A trained model: attention as a whole is used if the step reads another position.
        reads_others = _reads(program.step.values(), ShiftRight, Aggregate, SelWidth)
        return {"attention 0"} if reads_others else set()
    ids = {name: feature.id for name, feature in circuit.variables.items()}
    answer = {ids[name] for name in program.finish.variables}
    first = {ids[name] for name, x in program.prepare.items() if _reads([x], Tokens)}
    used = _reachable(answer, [(to, sender) for sender, to in circuit.edges])
    of_tokens = _reachable({"tokens", *first}, circuit.edges)
    writing = {
        part
        for part, feature in circuit.edges
        if feature in used and (feature in of_tokens or not informed)
    }
    parts = {h.id: f"head {h.layer}.{h.head}" for h in circuit.heads if h.section == "block"}
    parts |= {g.id: f"MLP {g.layer}" for g in circuit.neurons if g.section == "block"}
    return {name for node, name in parts.items() if node in writing}


def _reachable(start: set[str], edges: Sequence[tuple[str, str]]) -> set[str]:
    seen = set(start)
    while more := {to for sender, to in edges if sender in seen} - seen:
        seen |= more
    return seen


def _reads(expressions: Iterable[Seq], *kinds: type) -> bool:
    return any(isinstance(node, kinds) for node in postorder(expressions))
