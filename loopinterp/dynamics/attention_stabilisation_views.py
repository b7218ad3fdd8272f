"""What a study of attention stabilisation says and shows."""

from __future__ import annotations

from loopinterp.dynamics.attention_stabilisation import FROZEN, AttentionStabilisationResult
from loopinterp.intervals import ESTIMATE, band_of, share_of
from loopinterp.plotting import LinePanel, Series, head_lines, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "attention"


@findings_of.register
def _(result: AttentionStabilisationResult) -> list[Finding]:
    """Whether, and when, the heads freeze."""
    frozen = result.frozen_at().values.reshape(-1)
    times = frozen[frozen >= 0]
    if not len(times):
        text = f"None of the {len(frozen)} heads settles on a pattern in {result.n_loops} loops."
        return [Finding(text, value="no head freezes")]
    first, last = times.min(), times.max()
    span = f"loop {last}" if first == last else f"loops {first} to {last}"
    still = len(frozen) - len(times)
    rest = f"; {still} do not" if still else ""
    text = (
        f"{len(times)} of {len(frozen)} heads freeze by {span}: from there to the end of the run "
        f"({result.n_loops} loops) their pattern changes by at most {percent(FROZEN)} of its "
        f"largest change{rest}."
    )
    value = f"{len(times)} of {len(frozen)} heads freeze" if still else f"frozen by {span}"
    return [Finding(text, value=value)]


@figures_of.register
def _(result: AttentionStabilisationResult) -> list[Figure]:
    """Change of every head's pattern by loop, above exact match."""
    loops = slice(1, None)
    change = band_of(result.data["change"].sel(loop=loops), "batch")
    exact = share_of(result.data["exact"].sel(loop=loops), "batch")
    median = change.sel({ESTIMATE: "value"})
    plot = line_panels(
        [
            LinePanel(head_lines(median.where(median > 0)), "change of pattern", y_log=True),
            LinePanel(
                [Series.of("exact match", exact, control=True)], "exact match", y_range=(0, 1.03)
            ),
        ],
        x_title="loop",
    )
    share = exact.sel({ESTIMATE: "value"}).to_series()
    table = tidy({"change": change})
    return [
        Figure(
            title="Do the heads freeze?",
            plot=plot,
            caption=(
                "Above: how much a head's attention pattern changes from one loop to the next "
                "(Frobenius norm over the sequence, median of the examples). A falling line is a "
                "head that freezes."
            ),
            control=(
                "Below, exact match when the answer is read after that loop: heads can freeze "
                "before the answer is right, or long after."
            ),
            data=table.assign(exact_match=table["loop"].map(share)),
        )
    ]
