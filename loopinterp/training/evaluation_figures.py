"""Findings and figures of an evaluation, and of the grid by operand lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from collections.abc import Mapping, Sequence

    import xarray as xr

    from loopinterp.training.answer_scores import Lowest


_GREATEST = 1e6
"""Perplexities above are drawn there: a model that is sure of a wrong answer has any."""


def readable(distribution: str) -> str:
    """The name of a distribution in words."""
    names = {
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
    return names.get(distribution, distribution)


def cutoff_mark(trained_up_to: int | None) -> list[Reference]:
    """The mark of the greatest length in training on an axis of lengths."""
    if trained_up_to is None:
        return []
    return [Reference(trained_up_to, "longest in training", "x")]


def _loops(result: EvaluationResult) -> str:
    """The loops after which the answer is read."""
    return result.answered_after if result.depth is None else str(result.depth)


def _own_loops(result: EvaluationResult) -> str:
    return f"the {'task' if _loops(result) == 'T(n)' else 'model'}'s own {_loops(result)}"


def _constant_name(distribution: str) -> str:
    short = {"uniform": "random", "chain": "chains"}.get(distribution, distribution)
    return f"{short}: constant"


def _accuracy_panel(
    lines: list[Series], title: str, marks: Sequence[Reference] = (), y_title: str = "exact match"
) -> LinePanel:
    return LinePanel(lines, y_title, title=title, y_range=(0, 1.04), references=marks)


def _perplexity_panel(
    perplexity: xr.DataArray, axis: str, title: str, marks: Sequence[Reference] = ()
) -> LinePanel:
    shown = perplexity.clip(max=_GREATEST)
    names = readable if axis == "distribution" else "n = {}".format
    # A decade at least: on an axis of its own a perplexity of 1.0001 would fill the panel.
    limits = 0.9, max(10.0, 1.1 * float(shown.max()))
    lines = Series.each(shown, axis, names)
    return LinePanel(lines, "perplexity", title=title, y_log=True, y_range=limits, references=marks)


@findings_of.register
def _(result: EvaluationResult) -> list[Finding]:
    """The lowest over all distributions, how far the model goes on each, and when to stop."""
    distributions = result.data["distribution"].values.tolist()
    findings = [_reach(result, distribution) for distribution in distributions]
    if len(distributions) > 1 or result.not_judged:
        lowest = {n: result.lowest(n) for n in result.data["length"].values.tolist()}
        findings.insert(0, lowest_finding(lowest, distributions, result.not_judged))
    if "rule" in result.data.dims:
        findings.append(_stopping(result))
    return findings


def lowest_finding(
    lowest: Mapping[int, Lowest],
    names: Sequence[str],
    not_judged: Sequence[str],
    n_seeds: int | None = None,
) -> Finding:
    """The score of the whole task: its lowest distribution, and those that were not measured.

    Args:
        lowest: By length.
        names: The distributions that were measured.
        not_judged: The task's other ones.
        n_seeds: The number of seeds, where the scores are means over seeds.
    """
    each = " and ".join(
        f"{percent(lowest[n].share)} at length {n} ({where_lowest(lowest[n], names)})"
        for n in sorted({min(lowest), max(lowest)})
    )
    among = f"{len(names)} input distribution{'s' * (len(names) > 1)}"
    over = "" if n_seeds is None else f", mean over {n_seeds} seeds,"
    text = f"The lowest exact match over {among}{over} is {each}.{unmeasured(not_judged)}"
    least = min(low.share for low in lowest.values())
    # Of a part of the task alone nothing good is said of the whole.
    good = None if not_judged and least >= 0.99 else bool(least >= 0.99)
    return Finding(text, value=f"{least:.2f} exact match", good=good)


def unmeasured(not_judged: Sequence[str]) -> str:
    """The distributions of a task that were not measured, as a further sentence."""
    left = ", ".join(map(readable, not_judged))
    return left and f" The task has others, on which nothing was measured: {left}."


def where_lowest(lowest: Lowest, names: Sequence[str]) -> str:
    """The distributions that have the lowest share, in words.

    Example:
        >>> from loopinterp.training.answer_scores import Lowest
        >>> where_lowest(Lowest(0.5, ("chain",)), ["uniform", "chain"])
        'full carry chains'
        >>> where_lowest(Lowest(1.0, ("uniform", "chain")), ["uniform", "chain"])
        'the same on all'
    """
    if len(names) > 1 and len(lowest.distributions) == len(names):
        return "the same on all"
    return ", ".join(map(readable, lowest.distributions))


def _reach(result: EvaluationResult, distribution: str) -> Finding:
    """The greatest length up to which every length tried is at 0.99 or more."""
    at = {"extra_loop": nearest_extra_loop(result), ESTIMATE: "value", "distribution": distribution}
    scores = result.data["exact_match"].sel(at).to_series()
    # Up to the first length that fails, whatever comes after it.
    failing = scores.index[scores < 0.99]
    passed = scores.index[scores.index < failing.min()] if len(failing) else scores.index
    name, text = readable(distribution), ""
    if len(passed) and result.trained_up_to:
        text = f", {passed[-1] / result.trained_up_to:.3g} times the longest in training"
    if len(passed):
        text = (
            f"On {name} at least 99% of {result.n_samples} problems of each length are answered "
            f"wholly right, up to length {passed[-1]}{text}."
        )
    else:
        text = (
            f"On {name} the model answers fewer than 99% of {result.n_samples} problems wholly "
            f"right already at length {scores.index[0]}."
        )
    if len(failing):
        worst = scores.index[scores == scores.min()].tolist()
        verb = "lengths are" if len(worst) > 1 else "length is"
        text += f" Its worst {verb} {', '.join(map(str, worst))}, with {percent(scores.min())}."
    return Finding(text, value=f"{scores.min():.2f} exact match", good=bool(scores.min() >= 0.99))


def _stopping(result: EvaluationResult) -> Finding:
    """Exact match under rules that do not know T(n), in the worst cell of each."""
    exact = result.data["stopped_exact_match"].sel({ESTIMATE: "value"}, drop=True)
    worst = exact.min(["distribution", "length"]).to_series()  # by rule
    rules = worst.drop([name for name in (ORACLE, BEST, ANY) if name in worst.index])
    shares = "; ".join(f"{rule}: {percent(share)}" for rule, share in rules.items())
    text = (
        f"Stopped by a rule that is not told {_loops(result)}, it answers at the worst length and "
        f"distribution this share wholly right: {shares}; read at {_loops(result)}: "
        f"{percent(worst[ORACLE])}."
    )
    if BEST in worst.index:
        # How much below the best loop in hindsight each rule is, at worst.
        gap = exact.sel(rule=BEST) - exact.sel(rule=rules.index.tolist())
        gap = gap.max(["distribution", "length"]).to_series()
        near = [rule for rule, lost in gap.items() if lost <= 0.02]
        if near:
            verb = "stays" if len(near) == 1 else "stay"
            text += (
                f" {', '.join(near)} {verb} within 0.02 of the best loop in hindsight everywhere."
            )
        else:
            text += (
                " None stays within 0.02 of the best loop in hindsight everywhere: "
                f"{gap.idxmin()}, the nearest, falls {gap.min():.2f} short of it."
            )
    return Finding(text, value=f"{rules.max():.2f}")


@figures_of.register
def _(result: EvaluationResult) -> list[Figure]:
    """Exact match above bit accuracy, against length; against loops and rules where asked for."""
    figures = [_by_length(result)]
    if result.data.sizes["extra_loop"] > 1:
        figures.append(_by_loops(result))
    if "rule" in result.data.dims:
        figures.append(_by_rule(result))
        if "loop" in result.data.dims:  # absent from files of before there was hindsight
            figures.append(_rules_on_the_curve(result))
    elif "loop" in result.data.dims:
        figures.append(_by_number_of_loops(result))
    return figures


def _by_length(result: EvaluationResult) -> Figure:
    data = result.data.sel(extra_loop=nearest_extra_loop(result))
    marks = cutoff_mark(result.trained_up_to)
    panels = []
    for title, measure in (("Exact match", "exact_match"), ("Bit accuracy", "bit_accuracy")):
        lines = Series.each(data[measure], "distribution", readable)
        constant = data[f"constant_{measure}"]
        lines += Series.each(constant, "distribution", _constant_name, control=True)
        panels.append(_accuracy_panel(lines, title, marks, title))
    perplexity_note = ""
    if "perplexity" in data:
        title = "Perplexity of the right answer"
        panels.append(_perplexity_panel(data["perplexity"], "distribution", title, marks))
        perplexity_note = "; last, the perplexity of the right answer, 1 where it is sure"
        if float(result.data["perplexity"].max()) > _GREATEST:
            perplexity_note += f" (drawn up to {_GREATEST:.0e})"
    extra, constant = nearest_extra_loop(result), result.data["constant_exact_match"]
    loops = f"{_loops(result)} {extra:+d} loops" if extra else f"{_loops(result)} loops"
    loops = "1 loop" if loops == "1 loops" else loops
    # Where a constant answer scores high, this distribution alone proves little.
    least = constant.min("length").to_series()
    easy = [readable(name) for name in least.index[least > 0.5]]
    constant_note = f"It is wholly right on at most {percent(constant.max())} of the problems."
    if easy:
        constant_note = f"On {' and '.join(easy)} answers are alike, so that it scores high."
    return Figure(
        title="Accuracy against length",
        plot=line_panels(panels, x_title="problem length n"),
        caption=f"Each point: {result.n_samples} fresh problems, answered after {loops}; bands: "
        "95% intervals. Above, the share of problems right at every position; below, that of "
        f"positions, high at times where every problem is wrong{perplexity_note}.",
        control="Dashed: the best answer that is the same for every problem. " + constant_note,
        data=result.to_dataframe("exact_match", "bit_accuracy"),
    )


def _by_loops(result: EvaluationResult) -> Figure:
    exact = result.data["exact_match"]
    mark = [Reference(0, _loops(result), "x")]
    panels = [
        _accuracy_panel(
            Series.each(exact.sel(distribution=name), "length", "n = {}".format),
            readable(name),
            marks=mark,
        )
        for name in exact["distribution"].values.tolist()
    ]
    return Figure(
        title="Accuracy against loops",
        plot=line_panels(panels, x_title=f"loops beyond {_loops(result)}"),
        caption="The same problems, answered after fewer or more loops than "
        f"{_own_loops(result)} (dotted line). Left of it the answer is cut short; right of it a "
        "model that holds what it has found stays right.",
        data=result.to_dataframe("exact_match", "bit_accuracy"),
    )


def _by_rule(result: EvaluationResult) -> Figure:
    exact, loops = result.data["stopped_exact_match"], result.data["stopped_at"]
    panels = []
    for name in exact["distribution"].values.tolist():
        exact_lines, loop_lines = (
            [
                Series.of(rule, cell.sel(rule=rule), control=rule in (ORACLE, BEST, ANY))
                for rule in cell["rule"].values.tolist()
            ]
            for cell in (exact.sel(distribution=name), loops.sel(distribution=name))
        )
        panels.append(_accuracy_panel(exact_lines, readable(name)))
        panels.append(LinePanel(loop_lines, "loops", title=readable(name)))
    return Figure(
        title="When to stop",
        plot=line_panels(panels, x_title="problem length n"),
        caption="Exact match, and the mean number of loops, where each rule stops. A rule may look "
        "at the states and answers of the run, or as a calibrated one at the length of its input, "
        f"but is not told {_loops(result)}; one that stops early cuts answers short.",
        control=f"Dashed: the answer read at {_own_loops(result)}, which has to be known, and what "
        "hindsight would choose: the one loop that is best for all, and any loop that is right.",
        data=tidy({"exact_match": exact, "loops": loops}),
    )


def _by_number_of_loops(result: EvaluationResult) -> Figure:
    """Exact match and perplexity against numbers of loops that do not depend on the length."""
    panels = []
    for name in result.data["distribution"].values.tolist():
        cell, title = result.data.sel(distribution=name), readable(name)
        exact = Series.each(cell["loop_exact_match"], "length", "n = {}".format)
        panels.append(_accuracy_panel(exact, title))
        panels.append(_perplexity_panel(cell["loop_perplexity"], "length", title))
    return Figure(
        title="Accuracy against the number of loops",
        plot=line_panels(panels, x_title="loops"),
        caption="The same problems, answered after the same number of loops whatever their "
        "length: exact match, and the perplexity of the right answer.",
        data=result.to_dataframe("loop_exact_match", "loop_perplexity"),
    )


def _rules_on_the_curve(result: EvaluationResult) -> Figure:
    """Exact match after every loop at the greatest length, and where each rule stops on it."""
    longest = result.data["length"].values.tolist()[-1]
    cells = result.data.sel({"length": longest, ESTIMATE: "value"})
    panels = []
    for name in cells["distribution"].values.tolist():
        cell = cells.sel(distribution=name)
        exact = cell["loop_exact_match"].dropna("loop")
        curve = Series.of("after every loop", exact, markers=False, colour="grey")
        stops = zip(*(cell[k].values.tolist() for k in ("stopped_at", "stopped_exact_match")))
        points = [
            Series(rule, [x], [y]) for rule, (x, y) in zip(cell["rule"].values.tolist(), stops)
        ]
        panels.append(_accuracy_panel([*points, curve], f"{readable(name)}, n = {longest}"))
    return Figure(
        title="Where the rules stop, and what hindsight would choose",
        plot=line_panels(panels, x_title="loops"),
        caption=f"The line is the exact match after each number of loops, for the longest problems "
        f"(n = {longest}). A mark stands where a rule stops on average, at the exact match that it "
        "reaches; a rule that stops each example at a loop of its own may lie off the line.",
        control=f"“{BEST}” is the highest point of the line. “{ANY}” counts an example if it is "
        "right at any loop: no rule can do better, and a short answer is right at some loop by "
        "chance. Both are chosen on the examples that they are scored on.",
        data=result.to_dataframe("stopped_exact_match", "stopped_at"),
    )


@findings_of.register
def _(result: OperandGrid) -> list[Finding]:
    """The mean over the grid at the best number of loops, and its worst cell."""
    exact = result.data["exact_match"].sel({ESTIMATE: "value"})
    means = exact.mean(["n_a", "n_b"]).to_series()  # by number of loops
    to, tied = int(exact["n_a"].max()), means.index[means == means.max()].tolist()
    if means.max() == 0:
        text = f"No answer up to {to} x {to} is wholly right after any of the numbers of loops."
        return [Finding(text, value="0.00 grid mean", good=False)]
    best = tied[0]
    shares = ", ".join(f"{loop}: {percent(share)}" for loop, share in means.items())
    text = (
        f"Over all operand lengths up to {to} x {to}, answers are wholly right on average, by "
        f"loops: {shares}. The worst pair of lengths at {best} loops has "
        f"{percent(exact.sel(loop=best).min())}."
    )
    if len(tied) > 1:
        text += f" As high: {', '.join(map(str, tied[1:]))} loops."
    return [Finding(text, value=f"{means[best]:.2f} grid mean")]


@figures_of.register
def _(result: OperandGrid) -> list[Figure]:
    """A heat map for each number of loops."""
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
