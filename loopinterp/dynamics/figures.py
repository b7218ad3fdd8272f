"""What the studies of dynamics say and show: here those of extrapolation, attention, initial states
and inputs; the others in modules of their own, which this one imports.
"""

from __future__ import annotations

import numpy as np

from loopinterp.core.intervals import ESTIMATE, band_of, share_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics import geometry_figures, limit_figures  # noqa: F401  (registered)
from loopinterp.dynamics.convergence_figures import (
    value_of,
    with_exact,
    with_rounding,
)
from loopinterp.dynamics.extrapolation import AnswerFate, ExtrapolationResult
from loopinterp.dynamics.input_dependence import InputDependenceResult
from loopinterp.dynamics.inside_loop import FROZEN, AttentionStabilisationResult
from loopinterp.dynamics.limits import OWN_START
from loopinterp.dynamics.reachability import ReachabilityResult
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    head_lines,
    heatmap_panels,
    line_panels,
)


@findings_of.register
@with_rounding
def _(result: ExtrapolationResult) -> list[Finding]:
    """Whether the answer survives many more loops."""
    first = float(result.at_answer().mean())
    last = float(result.data["exact"].isel(loop=-1).mean())
    fates = result.fates()
    between = fates[AnswerFate.LOST_BETWEEN]
    text = (
        f"{percent(first)} of the answers are right at {result.answered_after} and "
        f"{percent(last)} after {result.n_loops} loops: of {result.data.sizes['batch']}, "
        f"{fates[AnswerFate.LOST]} right ones end wrong, {fates[AnswerFate.GAINED]} wrong "
        f"ones end right, and {between} right at both are lost in between."
    )
    good = last >= max(first, 0.99) and not between
    value = f"{percent(last)} after {result.n_loops} loops"
    return [Finding(text, kind="convergence", value=value, good=good)]


@figures_of.register
def _(result: ExtrapolationResult) -> list[Figure]:
    """Exact match against loops, with the residual and the norm below it."""
    cells = result.data.set_coords("length").rename(length="n")
    exact = cells["exact"].groupby("n").map(share_of, args=("batch",))
    accuracy = cells["accuracy"].groupby("n").mean("batch")
    residual, norm = (
        cells[name].groupby("n").mean("batch", skipna=False) for name in ("residual", "norm")
    )
    # Loop 0 has no place on a logarithmic axis, and no residual.
    exact_lines, residual_lines, norm_lines = (
        Series.each(values.isel(loop=slice(1, None)), "n", "n = {}".format, in_order=True)
        for values in (exact, *(v.where((v > 0) & (v < np.inf)) for v in (residual, norm)))
    )
    answers = np.unique(result.data["answer_loops"]).tolist()
    marks = [Reference(answers[0], result.answered_after, "x")] if len(answers) == 1 else []
    if result.trained_loops is not None and result.trained_loops not in answers:
        marks.append(Reference(result.trained_loops, "longest training run", "x"))
    panels = [
        LinePanel(exact_lines, "exact match", y_range=(0, 1.03), references=marks),
        LinePanel(residual_lines, "relative residual", y_log=True),
        LinePanel(norm_lines, "norm of the state", y_log=True),
    ]
    counts = ", ".join(f"{fate.value}: {count}" for fate, count in result.fates().items())
    arrays = {"exact_match": exact, "accuracy": accuracy, "residual": residual, "norm": norm}
    return [
        Figure(
            title="Running the loop on",
            section="convergence",
            # The first loops of a long run stay readable on a logarithmic axis.
            plot=line_panels(panels, x_title="loops", x_log=result.n_loops >= 60),
            caption=(
                "Above: the share of answers that are right if read at that loop (95% intervals). "
                "Below: how far a loop still moves the state, and the state's norm."
            ),
            control=(
                "A state can converge to a wrong answer or leave a right one. From "
                f"{result.answered_after} to the last loop: {counts}."
            ),
            data=tidy(arrays),
        )
    ]


@findings_of.register
def _(result: AttentionStabilisationResult) -> list[Finding]:
    """Whether, and when, the heads freeze."""
    frozen = result.frozen_at().values.reshape(-1)
    times = frozen[frozen >= 0]
    if not len(times):
        text = f"None of the {len(frozen)} heads settles on a pattern in {result.n_loops} loops."
        return [Finding(text, kind="attention", value="no head freezes")]
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
    return [Finding(text, kind="attention", value=value)]


@figures_of.register
def _(result: AttentionStabilisationResult) -> list[Figure]:
    """Change of every head's pattern by loop, above exact match."""
    loops = slice(1, None)
    change = band_of(result.data["change"].sel(loop=loops), "batch")
    exact = share_of(result.data["exact"].sel(loop=loops), "batch")
    median = change.sel({ESTIMATE: "value"})
    control = Series.of("exact match", exact, control=True)
    panels = [
        LinePanel(head_lines(median.where(median > 0)), "change of pattern", y_log=True),
        LinePanel([control], "exact match", y_range=(0, 1.03)),
    ]
    return [
        Figure(
            title="Do the heads freeze?",
            section="attention",
            plot=line_panels(panels, x_title="loop"),
            caption=(
                "Above: how much a head's attention pattern changes in a loop (Frobenius norm over "
                "the sequence, median of the examples). A falling line is a head that freezes."
            ),
            control=(
                "Below, exact match if read after that loop: heads can freeze before the answer is "
                "right, or long after."
            ),
            data=with_exact(tidy({"change": change}), exact),
        )
    ]


@findings_of.register
@with_rounding
def _(result: ReachabilityResult) -> list[Finding]:
    """Whether an input has one limit, and whether it is come back to."""
    has_limit = result.found()
    n_found, n_examples = int(has_limit.sum()), has_limit.size
    if not n_found:
        text = (
            f"From its own start the model reaches no limit in any of the {n_examples} examples, "
            "so it cannot be said what else is reached from elsewhere."
        )
        return [Finding(text, value="no limit found", good=False)]
    one, reached = value_of(result.one_limit()), value_of(result.reached())
    differing = value_of(share_of(result.own_limit_differs(), "batch"))
    rest = reached.drop_sel(start=OWN_START)
    least = rest["start"].values[rest.values == float(rest.min())].tolist()
    where = "from every other start alike"
    if len(least) < rest.size:
        where = f"least often from {', '.join(map(repr, least))}"
    text = (
        f"{percent(one)} of {n_examples} inputs lead to one and the same limit from all "
        f"{reached.size} starts; the own limit is reached {where} "
        f"({percent(rest.min())} of the {n_found} inputs that have one)."
    )
    if float(differing) < 0.5:
        text += (
            f" But only {percent(differing)} of the inputs have another limit than the next input: "
            "what is reached from everywhere does not know the input."
        )
    good = min(float(one), float(differing)) >= 0.99
    return [Finding(text, value=f"one limit in {percent(one)}", good=good), _kicks(result)]


def _kicks(result: ReachabilityResult) -> Finding:
    """Up to which size kicks are undone."""
    back = value_of(result.recovered())
    undone = back.where((back >= 0.95).cumprod("kick") == 1).dropna("kick")
    if not undone.size:
        text = (
            f"Kicked by {back['kick'][0].item():g} of its size, a limit is come back to in "
            f"{percent(back[0])} of the cases only."
        )
        return Finding(text, value=f"{percent(back[0])} come back", good=False)
    most = undone["kick"][-1].item()
    text = (
        f"Kicks of up to {most:g} times the size of the state are undone: {percent(undone.min())} "
        f"of the limits or more are come back to."
    )
    if undone.size < back.size:
        beyond = back[undone.size]
        text += f" Of kicks of {beyond['kick'].item():g}, {percent(beyond)} are."
    return Finding(text, value=f"kicks to {most:g}")


@figures_of.register
def _(result: ReachabilityResult) -> list[Figure]:
    """Who reaches the own limit from where, and what a kick does; nothing where there is none."""
    if not result.found().any():
        return []
    reached, back = result.reached(), result.recovered()
    chance = share_of(~result.own_limit_differs(), "batch").expand_dims(start=["the next input's"])
    bars = [
        Series.of("own limit reached from", reached),
        Series.of("is its own limit too (control)", chance, control=True),
    ]
    alignment = band_of(result.data["alignment"], "batch")
    other = value_of(band_of(result.data["other_alignment"], "batch"))
    exact = share_of(result.data["kick_exact"].isel(batch=result.found().values), "draw", "batch")
    lines = [Series.of("limit come back to", back), Series.of("answer right there", exact)]
    panel = LinePanel(lines, "share of kicks", y_range=(0, 1.03))
    size = "size of the kick, over the size of the state"
    unkicked = value_of(share_of(result.data["exact"].sel(start=OWN_START, drop=True), "batch"))
    return [
        Figure(
            title="Is the same limit reached from every start?",
            plot=bars_with_intervals(bars, value_title="share of inputs", value_range=(0, 1)),
            caption=(
                f"The share of the inputs that reach their own limit, to {result.same:g} of its "
                "norm, with 95% intervals. 'other' starts at the limit of another input."
            ),
            control=(
                "Hatched: inputs that share their limit with the next input, where reaching it "
                f"says nothing. The cosine of the limits of two inputs is {float(other):.2f} in "
                "the median."
            ),
            data=tidy({"reached": reached, "alignment": alignment}),
        ),
        Figure(
            title="How large a kick is undone?",
            plot=line_panels([panel], x_title=size, x_log=True),
            caption=(
                "Noise is added to every position of a limit, and the loop goes on until it rests "
                "again: share of the kicks after which it is back, and after which the answer is "
                "right (95% intervals)."
            ),
            control=f"Without a kick {percent(unkicked)} of the answers are right.",
            data=tidy({"back": back, "exact_match": exact}),
        ),
    ]


@findings_of.register
@with_rounding
def _(result: InputDependenceResult) -> list[Finding]:
    """What share of the spread is the input's, and how far a token is felt."""
    n_found = int((result.data["period"] > 0).sum())
    share, spread = result.share_of_input(), result.spread()
    visible = 0.01  # relative change of a limit that counts as one
    if spread <= visible:
        text = (
            f"All inputs lead from all starts to limits that differ by {spread:.1g} of their size: "
            "the limit does not know the input."
        )
        return [Finding(text, value="one limit for all", good=False)]
    if share.isnull().any():
        text = (
            f"A limit was found from the model's own start for {n_found} of "
            f"{result.data.sizes['batch']} inputs, and for none from every start, so it cannot be "
            "said whether limits know the input."
        )
        return [Finding(text, value="not known", good=False)]
    value, low, high = (float(share.sel({ESTIMATE: end})) for end in share[ESTIMATE].values)
    text = (
        f"{percent(value)} of the spread of limits is the input's (95% interval {percent(low)} to "
        f"{percent(high)}), the rest comes from where the run starts."
    )
    findings = [Finding(text, value=percent(value), good=low >= 0.9)]
    effect = result.by_distance("effect")
    felt = effect["distance"].values[effect.values > visible]
    if len(felt):
        changes = result.by_distance("answer_changes")
        first = changes.sel(distance=int(changes["distance"][int(changes.argmax("distance"))]))
        text = (
            f"Another token moves limits (by {visible:.0%} or more in the mean) up to "
            f"{max(felt.max(), 0)} positions to its right and {max(-felt.min(), 0)} to its left; "
            f"it changes the most answers, {percent(first)}, at distance "
            f"{int(first['distance'])}."
        )
        findings.append(Finding(text, value=f"felt {int(np.abs(felt).max())} positions away"))
    return findings


@figures_of.register
def _(result: InputDependenceResult) -> list[Figure]:
    """How far a token is felt, and who feels whom."""
    if not result.data["effect"].notnull().any():
        return []  # no limits, or no tokens changed
    lines = {name: result.by_distance(name) for name in ("effect", "answer_changes")}
    changed = Series.of("answer changes", lines["answer_changes"], colour="red")
    panels = [
        LinePanel([Series.of("limit moves", lines["effect"])], "relative change"),
        LinePanel([changed], "share of answers", y_range=(0, 1.03)),
    ]
    mean = {
        title: result.data[name].where(result.data["counted"]).mean("batch")
        for title, name in {"token changed": "effect", "derivative": "sensitivity"}.items()
    }
    maps = {
        title: np.log10(values.where(values > 1e-6).rename(source="token at"))
        for title, values in mean.items()
        if values.notnull().any()
    }
    return [
        Figure(
            title="How far is a token felt?",
            plot=line_panels(panels, x_title="positions to the right of the changed token"),
            caption=(
                "One token becomes that of another input. Above: how far the limits of other "
                "positions move, over their norm, in the mean; below: the share of answers that "
                "change."
            ),
            control=(
                "Left of 0 stand positions before the changed token: a model that sees no later "
                "positions shows nothing there."
            ),
            data=tidy(lines),
        ),
        Figure(
            title="Which limit depends on which token?",
            plot=heatmap_panels(maps, y_title="token at", value_title="log10 change"),
            caption=(
                "How much the limit of a position (across) changes with the token at another one "
                "(down), relative to its norm, in the mean over examples: by putting in another "
                "token, and by the derivative with respect to the injected input."
            ),
            control=(
                "Where the derivative shows nothing and the other token does, the input enters by "
                "the start, or the change is too large to be linear."
            ),
            data=tidy(mean),
        ),
    ]
