"""Findings and figures of an evaluation and of an operand grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
from loopinterp.training.evaluation import (
    ANY,
    BEST,
    ORACLE,
    EvaluationResult,
    OperandGrid,
    nearest_extra_loop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import plotly.graph_objects as go
    import xarray as xr

    from loopinterp.training.answer_scores import Lowest


_BASELINES = (ORACLE, BEST, ANY)
_GREATEST = 1e6  # larger perplexities are drawn at this value
_NAMES = {
    "uniform": "random inputs",
    "chain": "full carry chains",
    "propagate": "carry-rich digits",
    "biased": "biased bits",
    "mixed": "operands of mixed lengths",
    "equal": "operands of equal length",
    "independent": "operands of independent lengths",
    "nines": "operands of nines",
    "few": "few distinct elements",
    "distinct": "distinct elements only",
    "varied": "varied numbers of distinct elements",
}


def readable(distribution: str) -> str:
    return _NAMES.get(distribution, distribution)


def cutoff_mark(trained_up_to: int | None) -> list[Reference]:
    return [] if trained_up_to is None else [Reference(trained_up_to, "", "x")]


def _loops(result: EvaluationResult) -> str:
    return result.answered_after if result.depth is None else str(result.depth)


def _columns(
    data: xr.Dataset,
    rows: Mapping[str, Callable[[xr.Dataset], list[Series]]],
    x_title: str,
    marks: Sequence[Reference] = (),
) -> go.Figure:
    """A column per distribution, a row per quantity."""
    panels, names = [], data["distribution"].values.tolist()
    for row, (quantity, lines_of) in enumerate(rows.items()):
        lines = [lines_of(data.sel(distribution=name)) for name in names]
        ends = (one.y if one.high is None else one.high for each in lines for one in each)
        highest = max(np.nanmax(np.asarray(end)) for end in ends)
        # A decade at least: on an axis of its own a perplexity of 1.0001 would fill the panel.
        limits = {"perplexity": (0.9, max(10.0, 1.1 * highest)), "loops": (0, 1.05 * highest)}
        style = {"y_range": limits.get(quantity, (0, 1.04)), "y_log": quantity == "perplexity"}
        for name, each in zip(names, lines):
            title = "" if row else readable(name)
            panels.append(LinePanel(each, quantity, title=title, references=marks, **style))
    plot = line_panels(panels, x_title=x_title, columns=len(names))
    return plot.update_layout(legend_y=1 + 0.14 / len(rows))  # clear of the titles


def _by_n(values: xr.DataArray) -> list[Series]:
    return Series.each(values, "length", "n = {}".format, in_order=True)


def _by_rule(values: xr.DataArray) -> list[Series]:
    rules = values["rule"].values.tolist()
    return [Series.of(k, values.sel(rule=k), control=k in _BASELINES) for k in rules]


@findings_of.register
def _(result: EvaluationResult) -> list[Finding]:
    distributions = result.data["distribution"].values.tolist()
    findings = [_reach(result, distribution) for distribution in distributions]
    if len(distributions) > 1 or result.not_judged:
        lowest = {n: result.lowest(n) for n in result.data["length"].values.tolist()}
        finding = lowest_finding(lowest, distributions, result.not_judged)
        if finding.good and all(_has_one_answer(result, name) for name in distributions):
            finding = replace(finding, good=None)
        findings.insert(0, finding)
    if "rule" in result.data.dims:
        findings.append(_stopping(result))
    return findings


def lowest_finding(
    lowest: Mapping[int, Lowest],
    names: Sequence[str],
    not_judged: Sequence[str],
    n_seeds: int | None = None,
) -> Finding:
    """The score of the whole task: its lowest distribution, and those not measured.

    ``lowest`` is by length; with ``n_seeds``, scores are means over seeds.
    """
    each = " and ".join(
        f"{percent(lowest[n].share)} at length {n} ({where_lowest(lowest[n], names)})"
        for n in sorted({min(lowest), max(lowest)})
    )
    among = f"{len(names)} input distribution{'s' * (len(names) > 1)}"
    over = "" if n_seeds is None else f" (mean of {n_seeds} seeds)"
    text = f"The lowest exact match over {among}{over} is {each}.{unmeasured(not_judged)}"
    least = min(low.share for low in lowest.values())
    # A part of the task is no evidence that all of it is learnt.
    good = None if not_judged and least >= 0.99 else bool(least >= 0.99)
    return Finding(text, value=f"{least:.2f} exact match", good=good)


def unmeasured(not_judged: Sequence[str]) -> str:
    return f" Not measured: {', '.join(map(readable, not_judged))}." if not_judged else ""


def where_lowest(lowest: Lowest, names: Sequence[str]) -> str:
    if len(names) > 1 and len(lowest.distributions) == len(names):
        return "the same on all"
    return ", ".join(map(readable, lowest.distributions))


def _has_one_answer(result: EvaluationResult, distribution: str) -> bool:
    constant = result.data["constant_exact_match"].sel(distribution=distribution)
    return bool(constant[-1] >= 0.99)  # at the greatest length


def _reach(result: EvaluationResult, distribution: str) -> Finding:
    """The length up to which every length is at 0.99 or more."""
    at = {"extra_loop": nearest_extra_loop(result), ESTIMATE: "value", "distribution": distribution}
    scores = result.data["exact_match"].sel(at).to_series()
    # Up to the first length that fails, whatever comes after it.
    failing = scores.index[scores < 0.99]
    passed = scores.index[scores.index < failing.min()] if len(failing) else scores.index
    name, times, good = readable(distribution), "", bool(scores.min() >= 0.99)
    if len(passed):
        if result.trained_up_to:
            times = f" ({passed[-1] / result.trained_up_to:.3g} times the longest in training)"
        text = f"On {name}, at least 99% of answers are right up to length {passed[-1]}{times}."
    else:
        text = f"On {name}, under 99% of answers are right already at length {scores.index[0]}."
    if len(failing):
        worst = ", ".join(map(str, scores.index[scores == scores.min()]))
        text += f" The minimum is {percent(scores.min())}, at length {worst}."
    if good and _has_one_answer(result, distribution):
        text += " One constant answer is right on all of them, so these inputs are no evidence."
        good = None
    return Finding(text, value=f"{scores.min():.2f} exact match", good=good)


def _stopping(result: EvaluationResult) -> Finding:
    exact = result.data["stopped_exact_match"].sel({ESTIMATE: "value"}, drop=True)
    worst = exact.min(["distribution", "length"]).to_series()  # by rule
    rules = worst.drop([name for name in _BASELINES if name in worst.index])
    best = rules.index[rules == rules.max()].tolist()
    subject = f"Of {len(rules)} stopping rules, {best[0]} has the highest exact match"
    if len(rules) == 1:
        subject = f"The stopping rule {best[0]} has an exact match"
    elif len(best) == len(rules):
        subject = f"All {len(rules)} stopping rules have the same exact match"
    elif len(best) > 1:
        subject = f"Of {len(rules)} stopping rules, {len(best)} share the highest exact match"
    text = (
        f"{subject} at the worst length and distribution: {percent(rules.max())}. Reading at "
        f"{_loops(result)} gives {percent(worst[ORACLE])}."
    )
    if BEST in worst.index:
        # How much below the best loop in hindsight each rule is, at worst.
        gap = exact.sel(rule=BEST) - exact.sel(rule=rules.index.tolist())
        gap = gap.max(["distribution", "length"]).to_series()
        near = gap.index[gap <= 0.02].tolist()
        if near:
            names = f"{near[0]} is" if len(near) == 1 else f"{len(near)} rules are"
            text += f" {names} nowhere more than 0.02 below the best loop in hindsight."
        else:
            text += (
                f" Every rule is somewhere {gap.min():.2f} or more below the best loop in "
                "hindsight."
            )
    return Finding(text, value=f"{rules.max():.2f}")


@figures_of.register
def _(result: EvaluationResult) -> list[Figure]:
    figures = [_by_length(result)]
    if result.data.sizes["extra_loop"] > 1:
        rows, zero = {"exact match": lambda x: _by_n(x["exact_match"])}, Reference(0, axis="x")
        figures.append(
            Figure(
                title="Accuracy against loops",
                plot=_columns(result.data, rows, f"loops beyond {_loops(result)}", [zero]),
                caption=f"The same problems, answered before or after {_loops(result)} loops "
                "(dotted line). Left of the line the answer is cut short; right of it, it has to "
                "be kept.",
                data=result.to_dataframe("exact_match", "bit_accuracy"),
            )
        )
    if "rule" in result.data.dims:
        figures.append(_when_to_stop(result))
        if "loop" in result.data.dims:  # absent from files of before there was hindsight
            figures.append(_rules_on_the_curve(result))
    elif "loop" in result.data.dims:
        rows = {
            "exact match": lambda x: _by_n(x["loop_exact_match"]),
            "perplexity": lambda x: _by_n(x["loop_perplexity"].clip(max=_GREATEST)),
        }
        figures.append(
            Figure(
                title="Accuracy against the number of loops",
                plot=_columns(result.data, rows, "loops"),
                caption="The same problems, answered after the same number of loops at every "
                "length: exact match, and the perplexity of the right answer.",
                data=result.to_dataframe("loop_exact_match", "loop_perplexity"),
            )
        )
    return figures


def _by_length(result: EvaluationResult) -> Figure:
    extra, marks = nearest_extra_loop(result), cutoff_mark(result.trained_up_to)
    data = result.data.sel(extra_loop=extra)
    names = data["distribution"].values.tolist()
    # A model that is right where a constant answer is has no control; one that fails has.
    worst = data["exact_match"].sel({ESTIMATE: "value"}, drop=True).min("length")
    one_answer = [
        name
        for name in names
        if _has_one_answer(result, name) and worst.sel(distribution=name) >= 0.99
    ]

    def with_control(measure: str, cell: xr.Dataset) -> list[Series]:
        lines = [Series.of("model", cell[measure])]
        if str(cell["distribution"].values) not in one_answer:
            constant = cell[f"constant_{measure}"]
            lines.append(Series.of("constant answer", constant, control=True))
        return lines

    rows: dict[str, Callable[[xr.Dataset], list[Series]]] = {}
    rows["exact match"] = partial(with_control, "exact_match")
    loops = f"{_loops(result)} {extra:+d} loops" if extra else f"{_loops(result)} loops"
    caption = (
        f"{result.n_samples} fresh problems a point, answered after "
        f"{'1 loop' if loops == '1 loops' else loops}; bands: 95% intervals"
        f"{'; dotted: longest in training' * bool(marks)}. Exact match: problems right at every "
        "position"
    )
    # Where everything is right, bit accuracy and perplexity are flat lines at 1.
    if float(data["exact_match"].sel({ESTIMATE: "value"}).min()) < 0.99:
        rows["bit accuracy"] = partial(with_control, "bit_accuracy")
        caption += "; bit accuracy: positions right (can be high although no problem is right)"
    if "perplexity" in data and (highest := float(data["perplexity"].max())) > 1.1:
        rows["perplexity"] = lambda cell: [
            Series.of("model", cell["perplexity"].clip(max=_GREATEST))
        ]
        capped = f" (drawn up to {_GREATEST:.0e})" if highest > _GREATEST else ""
        caption += f"; perplexity: of the right answer{capped}"
    control = "Dashed: the best answer that is the same for every problem."
    if one_answer:
        control += (
            f" On {' and '.join(map(readable, one_answer))} one answer is right for all problems: "
            "these inputs are no evidence, and the line is not drawn."
        )
    return Figure(
        title="Accuracy against length",
        plot=_columns(data, rows, "problem length n", marks),
        caption=f"{caption}.",
        control=control,
        data=result.to_dataframe("exact_match", "bit_accuracy"),
    )


def _when_to_stop(result: EvaluationResult) -> Figure:
    where = "every position" if result.stopping_reads == "state" else "the answer's positions"
    exact, loops = result.data["stopped_exact_match"], result.data["stopped_at"]
    rows = {
        "exact match": lambda cell: _by_rule(cell["stopped_exact_match"]),
        "loops": lambda cell: _by_rule(cell["stopped_at"]),
    }
    return Figure(
        title="When to stop",
        plot=_columns(result.data, rows, "problem length n"),
        caption="Exact match, and the mean number of loops, where each rule stops. A rule sees "
        f"states and answers at {where}, a calibrated one the length of its input; none is given "
        f"{_loops(result)}. A rule that stops early cuts answers short.",
        control=f"Dashed: the answer read at {_loops(result)}, which has to be known; and two "
        "choices in hindsight, the one loop that is best for all and any loop that is right.",
        data=tidy({"exact_match": exact, "loops": loops}),
    )


def _rules_on_the_curve(result: EvaluationResult) -> Figure:
    longest = result.data["length"].values.tolist()[-1]

    def points(cell: xr.Dataset) -> list[Series]:
        exact = cell["loop_exact_match"].dropna("loop")
        curve = Series.of("after every loop", exact, markers=False, colour="grey")
        stops = zip(*(cell[k].values for k in ("rule", "stopped_at", "stopped_exact_match")))
        return [*(Series(str(rule), [x], [y]) for rule, x, y in stops), curve]

    cells = result.data.sel({"length": longest, ESTIMATE: "value"})
    return Figure(
        title="Where the rules stop, and what hindsight would choose",
        plot=_columns(cells, {"exact match": points}, "loops"),
        caption="The line is the exact match after each number of loops, for the longest problems "
        f"(n = {longest}). A mark is a rule: the mean loop at which it stops, and its exact match "
        "there. Rules that stop each example at a loop of its own may lie off the line.",
        control=f"“{BEST}” is the highest point of the line. “{ANY}” counts an example that is "
        "right at any loop, by chance too. Both are chosen on the examples that they are scored "
        "on.",
        data=result.to_dataframe("stopped_exact_match", "stopped_at"),
    )


@findings_of.register
def _(result: OperandGrid) -> list[Finding]:
    exact = result.data["exact_match"].sel({ESTIMATE: "value"})
    means = exact.mean(["n_a", "n_b"]).to_series()  # by number of loops
    to, best = int(exact["n_a"].max()), means.index[means == means.max()].tolist()
    if means.max() == 0:
        text = f"No answer up to {to} x {to} is wholly right after any of the numbers of loops."
        return [Finding(text, value="0.00 grid mean", good=False)]
    worst = exact.sel(loop=best[0]).min()
    text = (
        f"Up to {to} x {to}, {percent(means.max())} of answers are wholly right after "
        f"{' or '.join(map(str, best))} loop{'s' * (best != [1])}, the best number. The worst pair "
        f"of lengths has {percent(worst)}."
    )
    return [Finding(text, value=f"{means.max():.2f} grid mean")]


@figures_of.register
def _(result: OperandGrid) -> list[Figure]:
    exact = result.data["exact_match"].sel({ESTIMATE: "value"}, drop=True)
    loops = exact["loop"].values.tolist()
    trained = "" if result.trained_up_to is None else f" Trained up to {result.trained_up_to}."
    return [
        Figure(
            title="Exact match by the lengths of both operands",
            plot=heatmap_panels(
                {f"{n} loop{'s' * (n != 1)}": exact.sel(loop=n, drop=True) for n in loops},
                value_title="exact match",
                x_title="digits of b",
                y_title="digits of a",
                value_range=(0, 1),
                columns=3,
                square=True,
            ),
            caption=f"Each cell is the share of {result.n_samples} answers that are wholly right, "
            f"as greedy generation would write them.{trained}",
            data=result.to_dataframe("exact_match"),
        )
    ]
