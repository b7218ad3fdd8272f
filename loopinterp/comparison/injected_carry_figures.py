"""Findings and figures of injected carries: their persistence, by token."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.comparison.injected_carry import KINDS, MOST, TOKENS, InjectedCarry
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import heatmap_panels
from loopinterp.programs.program_offset import spell_loops


@findings_of.register
def _(result: InjectedCarry) -> list[Finding]:
    findings = []
    several = result.data.sizes["model"] > 1
    for model in map(str, result.data.model.values):
        where = f"In {model}, a" if several else "A"
        injected, erased = (_persistence(result, model, kind) for kind in KINDS)
        text = (
            f"{where} carry that is put in by hand behind the front is held for {injected}"
            f"{_recovery(result.counts(model))}; one that is taken away stays away for {erased}. A "
            "plain ripple holds either for 1 loop, a sticky one holds a planted carry for ever."
        )
        value = _loops(result.quantile(0.5, model))
        label = f"Hold time of a carry{f', {model}' if several else ''}"
        findings.append(Finding(text, value=value, label=label))
    return findings


def _persistence(result: InjectedCarry, model: str, kind: str) -> str:
    middle, low, high = (result.quantile(q, model, kind) for q in (0.5, 0.05, 0.95))
    if np.isnan(middle):
        return "an unknown time (no such pair)"
    span = f"{low:.0f} to {_loops(high)}" if low != high else "all of them"
    n = int(result.counts(model, kind).sum())
    return f"{_loops(middle)} (median of {n}; 5% to 95%: {span})"


def _recovery(lives: np.ndarray) -> str:
    """How many carries ended; those of :data:`MOST` loops were not seen to end."""
    ended, n = int(lives[:MOST].sum()), int(lives.sum())
    if ended == n:
        return " and then mended" if n else ""
    return f"; {percent(ended / n) if ended else 'none'} of them were seen to be mended"


def _loops(life: float) -> str:
    return f"{MOST} loops or more" if life >= MOST else spell_loops(round(life))


@figures_of.register
def _(result: InjectedCarry) -> list[Figure]:
    axes = {"token": list(TOKENS), "token to the left": list(TOKENS)}
    panels = {}
    for model in map(str, result.data.model.values):
        for kind in KINDS:
            medians = [
                [result.quantile(0.5, model, kind, token=t, left_token=s) for s in TOKENS]
                for t in TOKENS
            ]
            name = f"{model}, {kind}" if result.data.sizes["model"] > 1 else kind
            panels[name] = xr.DataArray(medians, axes)
    return [
        Figure(
            title="How long a carry that was put in by hand lives",
            plot=heatmap_panels(panels, value_title="loops", value_range=(0, MOST), columns=2),
            caption=(
                f"Median number of loops for which the answer shows the other carry, {KINDS[0]} "
                f"(a carry where there is none) and {KINDS[1]} (none where there is one), by the "
                "token at the bit and the one to its left. Empty: no such pair, as the left "
                f"neighbour decides the carry. {MOST} means {MOST} or more."
            ),
            control=(
                "Known programs: 1 everywhere for a plain ripple; for a sticky one, planted "
                f"carries stay for ever ({MOST}) and erased ones come back after 1 loop."
            ),
            data=result.to_dataframe(),
        )
    ]
