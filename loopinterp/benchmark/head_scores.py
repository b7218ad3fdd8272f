"""Heads against selectors, on models of which it is known which head computes which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.head_matching import head_name, head_study

if TYPE_CHECKING:
    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.circuits.head_matching import HeadMatch

EXAMPLES = 48


def score_heads(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Whether each head of the circuit is matched with its own selector, and no other head is."""
    compiled = known.compiled
    if not compiled.circuit.heads:
        return {}
    batch = known.batch[slice(0, EXAMPLES)]
    if known.n_loops == 0:
        batch = replace(batch, n_loops=batch.n_loops.clamp(min=1))
    match = head_study(compiled.model, batch, [compiled.program], seed=seed)
    n_layers = compiled.model.config.n_layers
    own = {
        head_name(h.section, h.layer, h.head, n_layers=n_layers): h.selector
        for h in compiled.circuit.heads
    }
    said = {
        name: {
            s for names, heads in zip(match.names, match.computes) if name in heads for s in names
        }
        for name in match.heads
    }
    unasked = _names(match, match.empty)
    asked = {head: selector for head, selector in own.items() if selector not in unasked}
    right = [_among(selector, said[head]) for head, selector in asked.items()]
    outside = [name for name in match.heads if name not in own]
    # An idle head looks at everything evenly.
    partial = _names(match, [s for s in match.selectors if s not in match.everything])
    wrong = sum(bool(said[name] & partial) for name in outside)
    scores = {"no other head": Score(float(wrong), float(len(outside)))}
    if right:
        even = float(match.data["overlap_even"].mean())
        scores["heads found"] = Score(sum(right) / len(right), even)
    return scores


def _among(selector: str, names: set[str]) -> bool:
    """Names of selectors that several parts of a program share carry the part's before them."""
    return any(name == selector or name.endswith(f".{selector}") for name in names)


def _names(match: HeadMatch, selectors: list[str]) -> set[str]:
    """All names of some selectors."""
    return {
        name for s, names in zip(match.selectors, match.names) if s in selectors for name in names
    }
