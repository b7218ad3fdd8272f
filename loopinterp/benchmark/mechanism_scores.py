"""Interchanges, patching, heads and ablation, scored on known-circuit models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from loopinterp.benchmark.known_models import KnownModel, Score
from loopinterp.comparison.heads import head_name, head_study
from loopinterp.comparison.program_runs import Prediction
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
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.boundary import checked
from loopinterp.core.settings import Seed
from loopinterp.interventions.ablation import IDLE, KINDS, NEEDED, ablation_study
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.interventions.patching import patching_sweep
from loopinterp.programs.expressions import Aggregate, SelWidth, Seq, ShiftRight, Tokens
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.nodes import postorder
from loopinterp.programs.program import LoopProgram
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    import pandas as pd


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
    seen: set[str] = set()
    left = [*start]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [to for sender, to in edges if sender == node]
    return seen


def _reads(expressions: Iterable[Seq], *kinds: type) -> bool:
    return any(isinstance(node, kinds) for node in postorder(expressions))
