"""Findings and figures of the studies whose module has no figures file; imports the others."""

from __future__ import annotations

import numpy as np

from loopinterp.core.intervals import ESTIMATE, band_of, share_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics import geometry_figures, limit_figures  # noqa: F401  (registered)
from loopinterp.dynamics.convergence_figures import (
    float32_note,
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
def _(result: ExtrapolationResult) -> list[Finding]:
    first = float(result.at_answer().mean())
    last = float(result.data["exact"].isel(loop=-1).mean())
    fates = result.fates()
    lost, gained, between = (
        fates[kind] for kind in (AnswerFate.LOST, AnswerFate.GAINED, AnswerFate.LOST_BETWEEN)
    )
    text = (
        f"{percent(first)} of the answers are right at {result.answered_after}, {percent(last)} "
        f"after {result.n_loops} loops."
    )
    if lost or gained:
        text += f" {lost} right answers are lost, {gained} wrong ones become right."
    if between:
        text += f" {between} are right at both and wrong in between."
    good = last >= max(first, 0.99) and not between
    n_decided = result.decided_by_rounding()
    value = f"{percent(last)} after {result.n_loops} loops"
    finding = Finding(text, value=value, good=None if n_decided else good)
    if "float32_exact" not in result.data:
        return [finding, *float32_note(result)]
    compared = f"get the same examples right, at {result.answered_after} and at the end."
    if n_decided:
        right = percent(result.data["float32_exact"].isel(loop=-1).mean())
        compared = (
            f"get {right} of the answers right at the end. Rounding decides for {n_decided} "
            f"examples: they are right in one precision only, at {result.answered_after} or at the "
            "end."
        )
    return [finding, *float32_note(result, n_decided, compared)]


@figures_of.register
def _(result: ExtrapolationResult) -> list[Figure]:
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
    counts = "; ".join(f"{fate.value}: {count}" for fate, count in result.fates().items())
    arrays = {"exact_match": exact, "accuracy": accuracy, "residual": residual, "norm": norm}
    return [
        Figure(
            title="Running the loop on",
            # The first loops of a long run stay readable on a logarithmic axis.
            plot=line_panels(panels, x_title="loops", x_log=result.n_loops >= 60),
            caption=(
                "Above: share of answers that are right if read at that loop (95% intervals). "
                "Below: relative residual and norm of the state (means)."
            ),
            control=f"Answers at {result.answered_after} and after the last loop: {counts}.",
            data=tidy(arrays),
        )
    ]


@findings_of.register
@with_rounding
def _(result: AttentionStabilisationResult) -> list[Finding]:
    frozen = result.frozen_at().values.reshape(-1)
    times = frozen[frozen >= 0]
    if not len(times):
        text = f"None of the {len(frozen)} heads freezes its pattern within {result.n_loops} loops."
        return [Finding(text, value="no head freezes")]
    first, last = times.min(), times.max()
    span = f"loop {last}" if first == last else f"loops {first} to {last}"
    moving = len(frozen) - len(times)
    text = (
        f"{len(times)} of {len(frozen)} heads freeze by {span}: from there on a loop changes their "
        f"pattern by at most {percent(FROZEN)} of its largest change."
    )
    value = f"{len(times)} of {len(frozen)} heads freeze" if moving else f"frozen by {span}"
    return [Finding(text, value=value)]


@figures_of.register
def _(result: AttentionStabilisationResult) -> list[Figure]:
    loops = slice(1, None)
    change = band_of(result.data["change"].sel(loop=loops), "batch")
    exact = share_of(result.data["exact"].sel(loop=loops), "batch")
    median = change.sel({ESTIMATE: "value"})
    if not (median > 0).any():
        return []  # no pattern ever changes, and a logarithmic axis has no place for 0
    control = Series.of("exact match", exact, control=True)
    panels = [
        LinePanel(head_lines(median.where(median > 0)), "change of pattern", y_log=True),
        LinePanel([control], "exact match", y_range=(0, 1.03)),
    ]
    return [
        Figure(
            title="Do the heads freeze?",
            plot=line_panels(panels, x_title="loop"),
            caption=(
                "Change of each head's attention pattern in a loop (Frobenius norm over the "
                "sequence, median of the examples). A falling line is a head that freezes."
            ),
            control="Below: exact match if read after that loop.",
            data=with_exact(tidy({"change": change}), exact),
        )
    ]


@findings_of.register
@with_rounding
def _(result: ReachabilityResult) -> list[Finding]:
    has_limit = result.has_limit()
    n_found, n_examples = int(has_limit.sum()), has_limit.size
    if not n_found:
        text = f"The model reaches no limit from its own initial state in any of {n_examples} runs."
        return [Finding(text, value="no limit found", good=False)]
    one, reached = value_of(result.one_limit()), value_of(result.reached())
    n_compared, n_shared = _shared_limits(result)
    rest = reached.drop_sel(start=OWN_START)
    text = (
        f"{round(float(one) * n_examples)} of {n_examples} inputs reach one and the same limit "
        f"from all {reached.size} initial states."
    )
    if float(rest.min()) < 1:
        least = rest["start"].values[rest.values == float(rest.min())].tolist()
        places = ["another input's limit" if x.startswith("other") else x for x in least]
        text += (
            f" The limit of the clean run is reached least often from "
            f"{', '.join(dict.fromkeys(places))} ({percent(rest.min())} of {n_found} inputs)."
        )
    if n_shared > n_compared / 2:
        text += (
            f" {n_shared} of {n_compared} limits equal the next input's, so they do not depend on "
            "the input."
        )
    value = f"one limit in {percent(one)}"
    # Several limits of one input are a property of the model, no failure.
    good = True if float(one) >= 0.99 and n_compared and not n_shared else None
    return [Finding(text, value=value, good=good), _perturbations(result)]


def _shared_limits(result: ReachabilityResult) -> tuple[int, int]:
    """Inputs with known limits of their own and the next input, and those with equal ones."""
    known = result.data["other_distance"].notnull()
    return int(known.sum()), int((known & ~result.own_limit_differs()).sum())


def _perturbations(result: ReachabilityResult) -> Finding:
    back = value_of(result.recovered())
    undone = back.where((back >= 0.95).cumprod("kick") == 1).dropna("kick")
    if not undone.size:
        smallest = back["kick"][0].item()
        text = (
            f"Only {percent(back[0])} of the runs return to their limit after a perturbation of "
            f"{smallest:g}× the state's norm."
        )
        return Finding(text, value=f"{percent(back[0])} come back", good=False)
    most = undone["kick"][-1].item()
    runs = f"At least {percent(undone.min())} of runs return to their limit"
    if float(undone.min()) == 1:
        runs = "Every run returns to its limit"
    text = f"{runs} after perturbations of up to {most:g}× the state's norm."
    if undone.size < back.size:
        beyond = back[undone.size]
        text += f" At {beyond['kick'].item():g}×, {percent(beyond)} of them return."
    return Finding(text, value=f"recovers from {most:g}×")


@figures_of.register
def _(result: ReachabilityResult) -> list[Figure]:
    if not result.has_limit().any():
        return []
    figures, n_found = [], int(result.has_limit().sum())
    reached, back = result.reached(), result.recovered()
    if float(value_of(reached).min()) < 1:
        n_compared, n_shared = _shared_limits(result)
        bars = [Series.of("limit of the clean run reached from", reached)]
        alignment = band_of(result.data["alignment"], "batch")
        figure = Figure(
            title="Is the same limit reached from every initial state?",
            plot=bars_with_intervals(
                bars, value_title=f"share of {n_found} inputs", value_range=(0, 1)
            ),
            caption=(
                f"Share of inputs that reach the limit of their clean run, to {result.same:g} of "
                "its norm (95% intervals). 'other' starts at the limit of another input."
            ),
            control=(
                f"{n_shared} of {n_compared} inputs share their limit with the next input; for "
                "these, reaching it from there is trivial."
            ),
            data=tidy({"reached": reached, "alignment": alignment}),
        )
        figures.append(figure)
    if float(value_of(back).min()) < 1:
        kicks = result.data["kick_exact"].isel(batch=result.has_limit().values)
        exact = share_of(kicks, "draw", "batch")
        lines = [Series.of("returns to the limit", back), Series.of("answer right there", exact)]
        panel = LinePanel(lines, "share of runs", y_range=(0, 1.03))
        clean = share_of(result.data["exact"].sel(start=OWN_START, drop=True), "batch")
        figure = Figure(
            title="Which perturbations are undone?",
            plot=line_panels(
                [panel],
                x_title="size of the perturbation, relative to the state's norm",
                x_log=True,
            ),
            caption=(
                "Noise is added to every position of a limit, and the loop runs until it converges "
                "again: share of runs that return, and that give the right answer (95% intervals)."
            ),
            control=f"Without perturbation {percent(value_of(clean))} of the answers are right.",
            data=tidy({"back": back, "exact_match": exact}),
        )
        figures.append(figure)
    return figures


@findings_of.register
@with_rounding
def _(result: InputDependenceResult) -> list[Finding]:
    n_found = int((result.data["period"] > 0).sum())
    share, spread = result.share_of_input(), result.spread()
    visible = 0.01  # relative change of a limit that counts as one
    if spread <= visible:
        text = (
            f"The limit does not depend on the input: limits of all inputs and initial states "
            f"differ by {spread:.1g} of their norm."
        )
        return [Finding(text, value="one limit for all", good=False)]
    if share.isnull().any():
        text = (
            "Input dependence is not measured: no input reaches a limit from every initial state "
            f"({n_found} of {result.data.sizes['batch']} do from the model's own)."
        )
        return [Finding(text, value="not known", good=False)]
    value, low, high = (float(share.sel({ESTIMATE: end})) for end in share[ESTIMATE].values)
    text = (
        f"The input explains {percent(value)} ({100 * low:.0f}–{100 * high:.0f}) of the spread of "
        "limits; the initial state explains the rest."
    )
    findings = [Finding(text, value=percent(value), good=low >= 0.9)]
    effect = result.by_distance("effect")
    felt = effect["distance"].values[effect.values > visible]
    if len(felt):
        changes = result.by_distance("answer_changes")
        first = changes.sel(distance=int(changes["distance"][int(changes.argmax("distance"))]))
        text = (
            f"A changed token moves limits (by {visible:.0%} or more on average) up to "
            f"{max(felt.max(), 0)} positions to its right and {max(-felt.min(), 0)} to its left."
        )
        if float(first) > 0:
            text += (
                f" It changes most answers at distance {int(first['distance'])} ({percent(first)})."
            )
        findings.append(Finding(text, value=f"felt {int(np.abs(felt).max())} positions away"))
    return findings


@figures_of.register
def _(result: InputDependenceResult) -> list[Figure]:
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
            title="How far does the effect of a token reach?",
            plot=line_panels(panels, x_title="positions to the right of the changed token"),
            caption=(
                "One token is replaced by that of another input. Above: mean change of the limits "
                "of other positions, relative to their norm. Below: share of answers that change."
            ),
            control="Left of 0: positions before the token, which a causal model cannot change.",
            data=tidy(lines),
        ),
        Figure(
            title="Which limit depends on which token?",
            plot=heatmap_panels(maps, y_title="token at", value_title="log10 change"),
            caption=(
                "How much the limit of a position (across) depends on the token at another (down): "
                "its mean relative change when another token is put in, and its derivative with "
                "respect to the injected input."
            ),
            control=(
                "A token with an effect but no derivative enters by the initial state, or its "
                "change is too large to be linear."
            ),
            data=tidy(mean),
        ),
    ]
