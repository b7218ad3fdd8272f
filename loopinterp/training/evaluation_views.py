"""What an evaluation says and shows."""

from __future__ import annotations

from loopinterp.intervals import ESTIMATE
from loopinterp.plotting import LinePanel, Reference, Series, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy
from loopinterp.training.evaluation import ORACLE, EvaluationResult

SECTION = "generalisation"

_READABLE = {
    "uniform": "random inputs",
    "chain": "full carry chains",
    "propagate": "carry-rich digits",
    "biased": "biased bits",
}


def _readable(distribution: str) -> str:
    return _READABLE.get(distribution, distribution)


def _loops(result: EvaluationResult) -> str:
    """The loops after which the answer is asked for."""
    return "T(n)" if result.depth is None else str(result.depth)


def _whose(result: EvaluationResult) -> str:
    return "the task's own T(n)" if result.depth is None else f"the model's own {result.depth}"


def _constant_name(distribution: str) -> str:
    short = {"uniform": "random", "chain": "chains"}.get(distribution, distribution)
    return f"{short}: constant"


@findings_of.register
def _(result: EvaluationResult) -> list[Finding]:
    """How far the model generalises, in a sentence for each distribution; and when to stop."""
    distributions = result.data["distribution"].values.tolist()
    findings = [_reach(result, distribution) for distribution in distributions]
    return [*findings, *([_stopping(result)] if "rule" in result.data.dims else [])]


def _reach(result: EvaluationResult, distribution: str) -> Finding:
    """The greatest length up to which every length tried is at 0.99 or more."""
    scores = (
        result.data["exact_match"]
        .sel({"extra_loop": result.nearest_extra_loop, ESTIMATE: "value"})
        .sel(distribution=distribution)
        .to_series()
    )
    failing = scores.index[scores < 0.99]
    passed = scores.index[scores.index < failing.min()] if len(failing) else scores.index
    name = _readable(distribution)
    if len(passed):
        text = (
            f"On {name} at least 99% of {result.n_samples} problems of each length are answered "
            f"wholly right, up to length {passed[-1]}"
        )
        if result.trained_up_to:
            text += f", {passed[-1] / result.trained_up_to:.3g} times the longest in training"
        text += "."
    else:
        text = (
            f"On {name} the model answers fewer than 99% of {result.n_samples} problems wholly "
            f"right already at length {scores.index[0]}."
        )
    if len(failing):
        text += f" Its worst length is {scores.idxmin()}, with {percent(scores.min())}."
    return Finding(text, value=f"{scores.min():.2f} exact match", good=bool(scores.min() >= 0.99))


def _stopping(result: EvaluationResult) -> Finding:
    """Exact match under rules that are not told T(n), in the worst cell of each."""
    worst = result.data["stopped_exact_match"].sel({ESTIMATE: "value"})
    worst = worst.min(["distribution", "length"]).to_series()
    rules = worst.drop(ORACLE)
    said = "; ".join(f"{rule}: {percent(share)}" for rule, share in rules.items())
    text = (
        f"Stopped by a rule that is not told {_loops(result)}, it answers at the worst length and "
        f"distribution this share wholly right: {said}; read at {_loops(result)}: "
        f"{percent(worst[ORACLE])}."
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
    return figures


def _by_length(result: EvaluationResult) -> Figure:
    data = result.data.sel(extra_loop=result.nearest_extra_loop)
    marks = []
    if result.trained_up_to is not None:
        marks = [Reference(result.trained_up_to, "longest in training", "x")]
    panels = []
    for title, measure in (("Exact match", "exact_match"), ("Bit accuracy", "bit_accuracy")):
        constant = data[f"constant_{measure}"]
        lines = [
            *Series.each(data[measure], "distribution", _readable),
            *Series.each(constant, "distribution", _constant_name, control=True),
        ]
        panels.append(LinePanel(lines, title, title=title, y_range=(0, 1.04), references=marks))
    extra = result.nearest_extra_loop
    loops = f"{_loops(result)} {extra:+d} loops" if extra else f"{_loops(result)} loops"
    loops = "1 loop" if loops == "1 loops" else loops
    return Figure(
        title="Accuracy against length",
        plot=line_panels(panels, x_title="problem length n"),
        caption=f"Each point is {result.n_samples} fresh problems of that length, answered after "
        f"{loops}; bands are 95% intervals. Above, the share of problems that are right "
        "at every position; below, that of positions, which can be high where every long problem "
        "is wrong.",
        control="Dashed: the best answer that is the same everywhere. " + _constant_note(result),
        data=result.to_dataframe("exact_match", "bit_accuracy"),
    )


def _constant_note(result: EvaluationResult) -> str:
    """Where a constant answer scores high, say that this distribution alone proves little."""
    constant = result.data["constant_exact_match"]
    least = constant.min("length").to_series()
    easy = [_readable(name) for name in least.index[least > 0.5]]
    if not easy:
        return f"It is wholly right on at most {percent(constant.max())} of the problems."
    return (
        f"On {' and '.join(easy)} it scores high, since answers there are alike: read the others "
        "beside it."
    )


def _by_loops(result: EvaluationResult) -> Figure:
    exact = result.data["exact_match"]
    panels = [
        LinePanel(
            Series.each(exact.sel(distribution=name), "length", "n = {}".format),
            "exact match",
            title=_readable(name),
            y_range=(0, 1.04),
            references=[Reference(0, _loops(result), "x")],
        )
        for name in exact["distribution"].values.tolist()
    ]
    return Figure(
        title="Accuracy against loops",
        plot=line_panels(panels, x_title=f"loops beyond {_loops(result)}"),
        caption=f"The same problems, answered after fewer or more loops than {_whose(result)} "
        "(dotted line). Left of it the answer is cut short; right of it a model that holds what "
        "it has found stays right.",
        data=result.to_dataframe("exact_match", "bit_accuracy"),
    )


def _by_rule(result: EvaluationResult) -> Figure:
    exact, loops = result.data["stopped_exact_match"], result.data["stopped_at"]
    rules = exact["rule"].values.tolist()
    panels = []
    for name in exact["distribution"].values.tolist():
        title = _readable(name)
        for array, y_title, y_range in ((exact, "exact match", (0, 1.04)), (loops, "loops", None)):
            cell = array.sel(distribution=name)
            lines = [Series.of(rule, cell.sel(rule=rule), control=rule == ORACLE) for rule in rules]
            panels.append(LinePanel(lines, y_title, title=title, y_range=y_range))
    return Figure(
        title="When to stop",
        plot=line_panels(panels, x_title="problem length n"),
        caption="Exact match, and the mean number of loops, where each rule stops. A rule sees the "
        "states and answers of the run, not the length of the problem; one that stops early cuts "
        "answers short.",
        control=f"Dashed: the answer read at {_whose(result)}, which has to be known.",
        data=tidy({"exact_match": exact, "loops": loops}),
    )
