"""Patching sweeps on models of which it is known what each patch must do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.activation_patching import patching_sweep
from loopinterp.circuits.interchange_pairs import InterchangePairs
from loopinterp.circuits.program_counterfactuals import Prediction
from loopinterp.rasp.language import UNKNOWN

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.circuits.activation_patching_result import PatchingSweep
    from loopinterp.rasp.program import LoopProgram

PATCHED = 24
"""Pairs of a patching sweep."""


@torch.no_grad()
def score_patching(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """States patched position by position, and heads patched one by one."""
    del seed  # nothing is drawn
    scores: dict[str, Score] = {}
    half = len(known.batch) // 2
    rows = slice(0, min(half, PATCHED))
    base, source = (x[rows] for x in (known.batch.inputs[:half], known.batch.inputs[half:]))
    scored = (known.batch.targets[:half] >= 0)[rows]
    model, n_loops = known.compiled.model, max(known.n_loops, 1)
    answers = [model(x, n_loops=n_loops).argmax(-1) for x in (base, source)]
    if not bool((answers[0] != answers[1])[scored].any()):
        return scores
    states = patching_sweep(
        model,
        base,
        source,
        n_loops=n_loops,
        component="state",
        positions="each",
        scored=scored,
    )
    said = _predicted(known.compiled.program, base, source, scored, n_loops)
    scores["patched states"] = _alike(states, said)
    heads = patching_sweep(model, base, source, n_loops=n_loops, component="z", scored=scored)
    scores["patched heads"] = _heads(known, heads)
    return scores


def _predicted(
    program: LoopProgram,
    base: Int[Tensor, "batch pos"],
    source: Int[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"],
    n_loops: int,
) -> Float[Tensor, "loop pos"]:
    """Share of answers that become the source's, by the program; NaN where one is undecided.

    All variables at one position are taken from the source after t loops. At the end the state is
    read together with the source's own injected input, so that the answer there is the source's.
    """
    (n, n_pos), both = base.shape, torch.cat([base, source])
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
    own, donor = program.run(both, n_loops=n_loops).outputs[-1].chunk(2)
    after = Prediction(program, pairs).exchanged[torch.arange(len(pairs)), pairs.horizon]
    after = after.view(n_loops + 1, n_pos, n, n_pos)  # [loop, place, example, pos]
    after[-1] = torch.where(torch.eye(n_pos).bool()[:, None], donor, after[-1])
    differ = scored & (own != donor)
    counted = after[:, :, differ]
    right = (counted == donor[differ]).float().mean(-1)
    return right.masked_fill((counted == UNKNOWN).any(-1), torch.nan)


def _alike(states: PatchingSweep, said: Tensor) -> Score:
    recovered = states.data["recovered"].isel(layer=0, head=0)
    measured = torch.from_numpy(recovered.values).to(said)

    def share(first: Tensor, second: Tensor) -> float:
        known = ~(first.isnan() | second.isnan())
        return float(((first - second).abs() < 1e-6)[known].float().mean())

    return Score(share(measured, said), share(measured[1:], said[:-1]))


def _heads(known: KnownModel, sweep: PatchingSweep) -> Score:
    """Largest effect of a head outside the circuit, against that of one inside."""
    config, circuit = known.compiled.model.config, known.compiled.circuit
    inside = np.zeros((config.n_layers, config.n_heads), dtype=bool)
    for head in circuit.heads:
        if head.section == "block":
            inside[head.layer, head.head] = True
    effect = abs(sweep.data["effect"].isel(pos=0)).max("loop").values  # [layer, head]
    outside = effect[~inside]
    return Score(
        float(outside.max()) if outside.size else 0.0,
        float(effect[inside].max()) if inside.any() else float("nan"),
    )
