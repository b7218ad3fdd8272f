"""Probes on models whose variables are known: found where they are, and nowhere else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import one_hot

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.errors import check_seed
from loopinterp.probing.linear_probes import RidgeProbe

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.benchmark.known_models import KnownModel


@torch.no_grad()
def score_probes(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Accuracy on held-out examples, of a probe for each variable after each loop.

    Each probe reads three things: the state after the loop, the state without the directions that
    the circuit gives for the variable, and (control) the injected input. What the second may still
    say is what the rest of the program's state says, in whatever disguise: a fourth probe reads
    that from the program's own trace, position and token included. Distractors hold functions of
    whatever they read, so they are no part of the second; what a probe finds in them is the
    control of the exchange that shows it is not used.
    """
    compiled, tokens = known.compiled, known.batch.inputs
    states = compiled.model(tokens, n_loops=known.n_loops, return_type="states")
    distracting = known.of_distractors(states)
    undistracted = states - distracting
    e = compiled.model.embed(tokens).expand_as(states)
    trace = compiled.program.trace(tokens, n_loops=known.n_loops)
    generator = torch.Generator().manual_seed(check_seed(seed))
    train = torch.randperm(len(tokens), generator=generator) < len(tokens) // 2
    found, left, removed, from_input, distracted = [], [], [], [], []
    for name, values in trace.variables.items():
        basis = compiled.circuit.subspace(name)
        without = undistracted - (undistracted @ basis.mT) @ basis
        others = [v for other, v in trace.variables.items() if other != name]
        rest = _contents(tokens, others, len(states))
        for loop, labels in enumerate(values):
            if len(labels[train].unique()) < 2:
                continue
            read = [_accuracy(x[loop], labels, train) for x in (states, without, rest, e)]
            found.append(read[0])
            left.append(read[1] - read[2])
            removed.append(read[0] - read[2])
            from_input.append(read[3])
            if bool(distracting[loop].any()):
                distracted.append(_accuracy(distracting[loop], labels, train))
    if not found:
        return {}
    scores = {
        "probe finds": Score(min(found), sum(from_input) / len(from_input)),
        "probe finds nothing else": Score(max(left), max(removed)),
    }
    if distracted:
        changed = _changed_by_distractors(known, states, distracting)
        scores["decodable, not used"] = Score(changed, sum(distracted) / len(distracted))
    return scores


def _changed_by_distractors(
    known: KnownModel,
    states: Float[Tensor, "loop batch pos d"],
    distracting: Float[Tensor, "loop batch pos d"],
) -> float:
    """Share of final answers that change when distractors are taken from another input."""
    model, tokens = known.compiled.model, known.batch.inputs
    run = partial(model, tokens, n_loops=known.n_loops)
    own = run().argmax(-1)
    asked = known.batch.targets >= 0
    shares = []
    for loop, h in enumerate(states):
        exchanged = h - distracting[loop] + distracting[loop].roll(1, 0)
        answers = run(start_at_loop=loop, state=exchanged).argmax(-1)
        shares.append(float((answers != own)[asked].float().mean()))
    return max(shares)


def _accuracy(
    x: Float[Tensor, "batch pos d"], labels: Int[Tensor, "batch pos"], train: Bool[Tensor, " batch"]
) -> float:
    probe = RidgeProbe(alpha=1e-3).fit(x[train].flatten(0, 1), labels[train].flatten())
    said = probe.predict(x[~train].flatten(0, 1))
    seen = torch.isin(labels[~train], labels[train].unique()).flatten()
    return float((said == labels[~train].flatten())[seen].float().mean())


def _contents(
    tokens: Int[Tensor, "batch pos"], variables: list[Int[Tensor, "loop batch pos"]], n_states: int
) -> Float[Tensor, "loop batch pos d"]:
    """Tokens, positions and variables, one-hot, after each loop."""
    place = torch.arange(tokens.shape[1]).expand_as(tokens)
    fixed = torch.cat([one_hot(tokens), one_hot(place)], -1).float()
    parts = [one_hot(values - values.min()).float() for values in variables]
    return torch.cat([fixed.expand(n_states, *fixed.shape), *parts], -1)
