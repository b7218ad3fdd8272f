"""Figures and sentences of an :class:`~loopinterp.training.evaluation.EvaluationResult`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.results import Figure, Finding, percent

if TYPE_CHECKING:
    from loopinterp.training.evaluation import EvaluationResult

_READABLE = {
    "uniform": "random digits",
    "chain": "full carry chains",
    "propagate": "carry-rich digits",
    "biased": "biased bits",
}


def evaluation_figures(result: EvaluationResult) -> list[Figure]:
    """Exact match above bit accuracy, against length; and against loops where those were varied."""
    figures = [_by_length(result)]
    if len(result.extra_loops) > 1:
        figures.append(_by_loops(result))
    return figures


def evaluation_summary(result: EvaluationResult) -> list[Finding]:
    """How far the model generalises, in a sentence for each distribution."""
    nearest = min(range(len(result.extra_loops)), key=lambda k: abs(result.extra_loops[k]))
    findings = []
    for d, distribution in enumerate(result.distributions):
        scores = result.exact_match[nearest, d]
        worst = int(scores.argmin())
        reach = _reach(result, scores.tolist())
        name = _READABLE.get(distribution, distribution)
        beyond = ""
        if result.trained_up_to and reach:
            beyond = f", {reach / result.trained_up_to:.3g} times the longest it was trained on"
        text = (
            f"On {name} the model answers at least 99% of problems wholly right up to length "
            f"{reach}{beyond}."
            if reach
            else f"On {name} the model answers fewer than 99% of problems wholly right already "
            f"at length {result.lengths[0]}."
        )
        if reach != result.lengths[-1]:
            text += f" Its worst length is {result.lengths[worst]}, with {percent(scores[worst])}."
        findings.append(
            Finding(
                kind="generalisation",
                text=text,
                value=f"{scores.min():.2f}",
                good=bool(scores.min() >= 0.99),
            )
        )
    return findings


def _reach(result: EvaluationResult, scores: list[float]) -> int:
    """The greatest length up to which every length is at 0.99 or more; 0 if none is."""
    reach = 0
    for length, score in zip(result.lengths, scores):
        if score < 0.99:
            break
        reach = length
    return reach


def _by_length(result: EvaluationResult) -> Figure:
    from loopinterp.plotting import LinePanel, Reference, Series, line_panels

    k = min(range(len(result.extra_loops)), key=lambda i: abs(result.extra_loops[i]))
    panels = []
    for title, measure in (("Exact match", "exact_match"), ("Bit accuracy", "bit_accuracy")):
        values = getattr(result, measure)[k]
        low, high = getattr(result, f"{measure}_low")[k], getattr(result, f"{measure}_high")[k]
        constant = getattr(result, f"constant_{measure}")
        lines = [
            Series(_READABLE.get(name, name), result.lengths, values[d], low[d], high[d])
            for d, name in enumerate(result.distributions)
        ]
        lines += [
            Series(f"{_short(name)}: constant", result.lengths, constant[d], control=True)
            for d, name in enumerate(result.distributions)
        ]
        marks = []
        if result.trained_up_to is not None:
            marks = [Reference(result.trained_up_to, "longest in training", "x")]
        panels.append(LinePanel(lines, title, title=title, y_range=(0, 1.04), references=marks))
    loops = "T(n)" if result.extra_loops[k] == 0 else f"T(n) {result.extra_loops[k]:+d}"
    return Figure(
        title="Accuracy against length",
        plot=line_panels(panels, x_title="problem length n"),
        caption=f"Each point is {result.n_samples} fresh problems of that length, answered after "
        f"{loops} loops; bands are 95% intervals. Above, the share of problems that are right "
        "at every position; below, the share of positions. Read the upper panel first: a model "
        "that gets most positions right can still get every long problem wrong. What lies right "
        "of the dotted line is longer than anything the model was trained on.",
        control="The dashed lines are the best answer that is the same everywhere. "
        + _constant_note(result),
        data=result.to_frame(),
        section="generalisation",
    )


def _constant_note(result: EvaluationResult) -> str:
    """Where a constant answer scores high, say that this distribution alone proves little."""
    easy = [
        _READABLE.get(name, name)
        for d, name in enumerate(result.distributions)
        if result.constant_exact_match[d].min() > 0.5
    ]
    if not easy:
        return "It is wrong on nearly every problem that the model should get right."
    return (
        f"On {' and '.join(easy)} it is right, since every answer there is the same: that "
        "distribution tests whether the carry arrives, and the others whether it is a carry."
    )


def _by_loops(result: EvaluationResult) -> Figure:
    from loopinterp.plotting import LinePanel, Reference, Series, line_panels

    panels = [
        LinePanel(
            [
                Series(
                    f"n = {length}",
                    result.extra_loops,
                    result.exact_match[:, d, k],
                    result.exact_match_low[:, d, k],
                    result.exact_match_high[:, d, k],
                )
                for k, length in enumerate(result.lengths)
            ],
            "exact match",
            title=_READABLE.get(name, name),
            y_range=(0, 1.04),
            references=[Reference(0, "T(n)", "x")],
        )
        for d, name in enumerate(result.distributions)
    ]
    return Figure(
        title="Accuracy against loops",
        plot=line_panels(panels, x_title="loops beyond T(n)"),
        caption="The same problems, answered after fewer or more loops than the task's own T(n) "
        "(dotted line). Left of it the answer is cut short; right of it a model that holds what "
        "it has found stays right.",
        data=result.to_frame(),
        section="generalisation",
    )


def _short(distribution: str) -> str:
    return {"uniform": "random", "chain": "chains"}.get(distribution, distribution)
