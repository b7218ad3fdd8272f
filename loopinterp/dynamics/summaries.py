"""What the studies of this package found, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.dynamics.regimes import Regime
from loopinterp.results import Finding, percent

if TYPE_CHECKING:
    from loopinterp.dynamics.attention import AttentionStabilisationResult
    from loopinterp.dynamics.convergence import ConvergenceResult
    from loopinterp.dynamics.extrapolation import ExtrapolationResult


def convergence_findings(result: ConvergenceResult) -> list[Finding]:
    """Whether the tokens settle and are right there, and whether the limit is stable."""
    settled = result.settled_share()
    times = result.settled_at[(result.counted == 1) & (result.settled_at >= 0)]
    residual, exact = result.mean_residual()[-1], result.exact_match()[-1]
    when = f", half of them by loop {int(np.median(times))}" if len(times) else ""
    findings = [
        Finding(
            kind="convergence",
            text=(
                f"{percent(settled)} of the tokens settle within {result.n_loops} loops{when}; at "
                f"the last loop the state still moves by {residual:.2g} of its size a loop, and "
                f"{percent(exact)} of the answers are right."
            ),
            value=f"{percent(settled)} settle",
            good=bool(settled >= 0.99),
        )
    ]
    counts = result.regime_counts()
    common = max(counts, key=lambda name: counts[name])
    if common != Regime.FIXED_POINT.label:
        share = counts[common] / max(1, sum(counts.values()))
        text = f"The commonest late trajectory is not a fixed point: {percent(share)} of the "
        findings.append(
            Finding(kind="convergence", text=f"{text}tokens are of class {common!r}.", value=common)
        )
    radius = result.spectral_radius[np.isfinite(result.spectral_radius)]
    if len(radius):
        stable = bool((radius < 1).all())
        where = "at the limits" if (result.limit_status == 1).all() else "where the search ended"
        verdict = "they attract" if stable else "not all of them attract"
        findings.append(
            Finding(
                kind="convergence",
                text=(
                    f"The spectral radius of the loop's Jacobian {where} is "
                    f"{radius.min():.2f} to {radius.max():.2f} over {len(radius)} examples: "
                    f"{verdict} (below 1 a small disturbance dies out)."
                ),
                value=f"{radius.max():.2f}",
                good=stable,
            )
        )
    return findings


def extrapolation_findings(result: ExtrapolationResult) -> list[Finding]:
    """Whether the answer survives many more loops."""
    first, last = result.at_answer().mean(), result.exact[-1].mean()
    fates = result.fates()
    text = (
        f"{percent(first)} of the answers are right at T(n) and {percent(last)} after "
        f"{result.n_loops} loops: {fates['right, then lost']} of {result.exact.shape[1]} are "
        f"lost on the way and {fates['wrong, then found']} are found."
    )
    kept = f"{percent(last)} after {result.n_loops} loops"
    good = bool(last >= first and last >= 0.99)
    return [Finding(kind="convergence", text=text, value=kept, good=good)]


def attention_findings(result: AttentionStabilisationResult) -> list[Finding]:
    """Whether, and when, the heads freeze."""
    frozen = result.frozen_at().reshape(-1)
    still = int((frozen < 0).sum())
    if still == len(frozen):
        text = f"None of the {len(frozen)} heads settles on a pattern in {result.n_loops} loops."
        return [Finding(kind="attention", text=text, value="no head freezes")]
    times = frozen[frozen >= 0]
    span = (
        f"loop {times.min()}"
        if times.min() == times.max()
        else (f"loops {times.min()} to {times.max()}")
    )
    rest = f"; {still} never do" if still else ""
    text = (
        f"{len(times)} of {len(frozen)} heads freeze by {span}: from there on their pattern "
        f"changes by less than 5% of its largest change{rest}."
    )
    return [Finding(kind="attention", text=text, value=f"frozen by {span}")]
