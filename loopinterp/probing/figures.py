"""Figures of the carry study and of probe grids, drawn from saved results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.intervals import wilson_interval
from loopinterp.probing.carry_result import first_decodable
from loopinterp.results import Figure

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.probing.carry_result import CarryStudyResult
    from loopinterp.probing.grid_result import ProbeResult

_SECTION = "wavefront"
_ACCURACY = (0.4, 1.02)
_NEAR_FRONT = 8


def carry_figures(result: CarryStudyResult) -> list[Figure]:
    """The wavefront, the cut through it with all controls, and what was read besides."""
    return [
        _wavefront(result),
        _front_profile(result),
        _first_loops(result),
        _variables(result),
        _code_lengths(result),
    ]


def _wavefront(result: CarryStudyResult) -> Figure:
    from loopinterp.plotting import HeatPanel, Series, heatmap_panels

    loops, chains = result.loops, result.chain_lengths
    reach = [loop for loop in loops if chains[0] <= loop <= chains[-1]]
    front = Series("chain length = loops", reach, reach, colour="red", markers=False)
    panels = [
        HeatPanel(result.accuracy.T, "trained model", overlay=[front]),
        HeatPanel(result.shared_probe.T, "shared probe", overlay=[front]),
        HeatPanel(result.random_model.T, "random weights", overlay=[front]),
        HeatPanel(result.control_task.T, "random labels", overlay=[front]),
    ]
    plot = heatmap_panels(
        panels,
        x=loops,
        y=chains,
        x_title="loops run",
        y_title="chain length",
        value_title="accuracy",
        value_range=(0.5, 1.0),
        columns=2,
    )
    caption = (
        "Each cell: how often a linear probe tells the carry into a position (0 or 1) from the "
        "state there, by the loops run and by how many positions the carry has to travel. Bright "
        "is always right, dark is a coin toss. On the red line and right of it, information that "
        "moves one position a loop has arrived. Every cell has its own probe; the shared probe is "
        "one for each number of loops, trained on all chain lengths."
    )
    control = (
        "Random weights: the same probes on the model with its weights shuffled "
        f"(at most {_max_beyond(result.random_model, result):.2f} from chain length 4 on). Random "
        "labels: the same probes asked for labels that are fixed at random by the last four "
        "inputs; what they reach is how much of the accuracy is owed to the probe. Carries are "
        "balanced, so the majority class scores "
        f"{result.majority.mean():.2f} in every row."
    )
    return Figure(
        title="The carry travels through the model",
        plot=plot,
        caption=caption,
        control=control,
        data=_grid_frame(
            result,
            accuracy=result.accuracy,
            random_model=result.random_model,
            control_task=result.control_task,
            shared_probe=result.shared_probe,
            last_loop_probe=result.last_loop_probe,
            short_to_long=result.short_to_long,
        ),
        section=_SECTION,
    )


def _front_profile(result: CarryStudyResult) -> Figure:
    from loopinterp.plotting import Reference, Series, line_figure

    shape = result.accuracy.shape
    lines = [
        ("trained model", result.accuracy, False),
        ("shared probe", result.shared_probe, False),
        ("last loop's probe", result.last_loop_probe, False),
        (f"trained on {result.n_short} bits", result.short_to_long, False),
        ("random weights", result.random_model, True),
        ("random labels", result.control_task, True),
        ("embedding alone", np.broadcast_to(result.embedding, shape), True),
        ("majority class", np.broadcast_to(result.majority, shape), True),
    ]
    series, rows = [], []
    for name, values, control in lines:
        x, mean, low, high = _around_front(result, values)
        band: dict[str, Any] = {} if control else {"low": low, "high": high}
        series.append(Series(name, x, mean, control=control, **band))
        rows += [
            {"line": name, "ahead_of_front": a, "mean": m, "least": lo, "greatest": hi}
            for a, m, lo, hi in zip(x, mean, low, high)
        ]
    plot = line_figure(
        series,
        x_title="chain length - loops run",
        y_title="accuracy",
        y_range=_ACCURACY,
        references=[Reference(0.5, "chance")],
    )
    caption = (
        "The same accuracies by distance from the front: at 0 and left of it the carry can have "
        "arrived, right of it the deciding bit is out of sight. Lines are means over all loops, "
        "bands run from the worst to the best cell. Trained model: a probe for each cell. Shared "
        "probe: one for all chain lengths. Last loop's probe: a shared one trained once the model "
        "has settled, so it shows whether a fresh carry is written in the direction in which it "
        "is kept."
    )
    control = (
        "Grey lines: the same probe on the model with shuffled weights, on random labels, on the "
        "embedding alone, and the majority class."
    )
    return Figure(
        title="Behind and ahead of the front",
        plot=plot,
        caption=caption,
        control=control,
        data=_frame(rows),
        section=_SECTION,
    )


def _first_loops(result: CarryStudyResult) -> Figure:
    from loopinterp.plotting import Series, line_figure

    chains = result.chain_lengths
    sum_bit = result.variable_accuracy[result.variables.index("sum")]
    lines = [
        ("carry in", result.accuracy, False),
        ("sum bit", sum_bit, False),
        ("carry in, last probe", result.last_loop_probe, False),
        ("random weights", result.random_model, True),
    ]
    series, table = [], {"chain_length": chains}
    for name, values, control in lines:
        first = first_decodable(values, result.loops, result.threshold)
        series.append(Series(name, chains, first, control=control))
        table[name] = first.tolist()
    series.append(Series("one position a loop", chains, chains, control=True, markers=False))
    plot = line_figure(series, x_title="chain length", y_title="loops until decodable")
    caption = (
        "How many loops it takes until a probe reads each chain length with accuracy "
        f"{result.threshold:g} or more. A straight line means a constant speed; its slope is "
        f"{_speed_text(result)}. A gap: never reached."
    )
    control = (
        "Dashed: one position a loop, the fastest that attention to one neighbour allows; and the "
        "model with shuffled weights, which passes on a few positions at most."
    )
    return Figure(
        title="First loop at which a carry can be read",
        plot=plot,
        caption=caption,
        control=control,
        data=_frame(table),
        section=_SECTION,
    )


def _variables(result: CarryStudyResult) -> Figure:
    from loopinterp.plotting import LinePanel, Reference, Series, line_panels

    panels, frames = [], []
    sources = [
        ("trained model", result.variable_accuracy),
        ("random weights", result.variable_random_model),
        ("embedding alone", result.variable_embedding[:, None]),
    ]
    for title, values in sources:
        mean = np.nanmean(values, axis=-1)
        mean = np.broadcast_to(mean, (len(result.variables), len(result.loops)))
        panels.append(
            LinePanel(
                [Series(v, result.loops, mean[i]) for i, v in enumerate(result.variables)],
                "accuracy",
                title,
                y_range=_ACCURACY,
                references=[Reference(0.5, "chance")],
            )
        )
        frames += [
            {"source": title, "variable": v, "loop": loop, "balanced_accuracy": mean[i, t]}
            for i, v in enumerate(result.variables)
            for t, loop in enumerate(result.loops)
        ]
    caption = (
        "Balanced accuracy (the mean over the two classes, so that chance is 0.5) for each "
        "variable of the addition, averaged over chain lengths. Generate and propagate concern "
        "the position's own two bits; carry in, carry out and sum need the positions before."
    )
    control = (
        "The two lower panels: what is in the inputs and the wiring alone. A variable that is read "
        "as well there was given, not computed."
    )
    return Figure(
        title="What else can be read at each loop",
        plot=line_panels(panels, x_title="loops run"),
        caption=caption,
        control=control,
        data=_frame(frames),
        section=_SECTION,
    )


def _code_lengths(result: CarryStudyResult) -> Figure:
    from loopinterp.plotting import Reference, Series, line_figure

    chains = np.asarray(result.chain_lengths)
    ideal = [float((chains > loop).mean()) for loop in result.loops]
    lines = {
        "trained model": result.code_length,
        "one position a loop": np.asarray(ideal),
        "random weights": result.code_length_random_model,
        "random labels": result.code_length_control,
    }
    series = [
        Series(name, result.loops, values, control=name != "trained model")
        for name, values in lines.items()
    ]
    plot = line_figure(
        series,
        x_title="loops run",
        y_title="bits per carry",
        y_range=(0.0, 1.05),
        references=[Reference(1.0, "nothing known")],
    )
    caption = (
        "Online code length: bits needed to send each carry to someone who holds the states and "
        "learns a probe as the carries arrive. 1 bit: the states tell nothing. It counts how "
        "hard the probe is to learn, as accuracy does not."
    )
    control = (
        "Dashed: a front of one position a loop, read without any cost of learning; the model with "
        "shuffled weights; and random labels."
    )
    return Figure(
        title="How many bits the carries still cost",
        plot=plot,
        caption=caption,
        control=control,
        data=_frame({"loop": result.loops, **{k: v.tolist() for k, v in lines.items()}}),
        section=_SECTION,
    )


def grid_figures(result: ProbeResult) -> list[Figure]:
    """For each site the targets by loop with their controls, and by group if there are several."""
    figures = [_grid_lines(result, s) for s in range(len(result.sites))]
    if len(result.groups) > 1:
        figures += [_grid_groups(result, s) for s in range(len(result.sites))]
    return figures


def _grid_lines(result: ProbeResult, s: int) -> Figure:
    from loopinterp.plotting import LinePanel, Series, line_panels

    site, group, n = result.sites[s], result.groups[0], result.n_test[0]
    sources = [
        ("trained model", result.accuracy[:, s, 0], n),
        ("random labels", result.control_task[:, s, 0], None),
        ("random weights", result.random_model[:, s, 0], n),
        ("embedding alone", result.embedding[:, 0], n),
        ("majority class", result.majority[:, 0], None),
    ]
    panels = [
        LinePanel(
            [
                Series(target, result.loops, values[:, k], **_interval(values[:, k], trials))
                for k, target in enumerate(result.targets)
            ],
            "accuracy",
            title,
            y_range=(0.0, 1.02),
        )
        for title, values, trials in sources
    ]
    frame = result.to_frame()
    return Figure(
        title=f"Decodable variables at {site}",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"Accuracy of a linear probe for each variable at each loop (positions: {group}), on "
            "examples it was not trained on; bands are 95% intervals over places."
        ),
        control=(
            "Lower panels, on the same axes: the same probe on random labels fixed by the local "
            "input, on the model with shuffled weights, on the embedding alone, and the majority "
            "class."
        ),
        data=frame.query("site == @site"),
        section=_SECTION,
    )


def _grid_groups(result: ProbeResult, s: int) -> Figure:
    from loopinterp.plotting import HeatPanel, heatmap_panels

    site = result.sites[s]
    gain = result.accuracy[:, s] - result.chance[:, s]
    panels = [HeatPanel(gain[..., k].T, target) for k, target in enumerate(result.targets)]
    frame = result.to_frame()
    return Figure(
        title=f"Decodable variables by position at {site}",
        plot=heatmap_panels(
            panels,
            x=result.loops,
            y=result.groups,
            x_title="loop",
            y_title="positions",
            value_title="gain",
            value_range=(-1.0, 1.0),
            scale="diverging",
        ),
        caption="Accuracy of the probe less that of its best control, by loop and position group.",
        control=(
            "Subtracted in each cell: the best of the random-weights model, the embedding alone "
            "and the majority class."
        ),
        data=frame.query("site == @site"),
        section=_SECTION,
    )


def _interval(values: np.ndarray, n: int | None) -> dict[str, Any]:
    if n is None:
        return {}
    low, high = wilson_interval(values * n, n)
    return {"low": low, "high": high}


def _around_front(
    result: CarryStudyResult, values: np.ndarray
) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """Mean, least and greatest over the cells at each distance from the front."""
    ahead = np.asarray(result.chain_lengths) - np.asarray(result.loops)[:, None]
    at = [d for d in range(-_NEAR_FRONT, _NEAR_FRONT + 1) if (ahead == d).any()]
    cells = [values[ahead == d] for d in at]
    return (
        at,
        np.array([c.mean() for c in cells]),
        np.array([c.min() for c in cells]),
        np.array([c.max() for c in cells]),
    )


def _max_beyond(values: np.ndarray, result: CarryStudyResult, least_chain: int = 4) -> float:
    chosen = values[:, np.asarray(result.chain_lengths) >= least_chain]
    return float(chosen.max()) if chosen.size else float("nan")


def _speed_text(result: CarryStudyResult) -> str:
    if not np.isfinite(result.speed):
        return "not defined here"
    return f"{1 / result.speed:.2f} loops per position"


def _grid_frame(result: CarryStudyResult, **arrays: np.ndarray) -> pd.DataFrame:
    loop, chain = np.meshgrid(result.loops, result.chain_lengths, indexing="ij")
    columns = {"loop": loop, "chain_length": chain, **arrays}
    return _frame({name: values.ravel() for name, values in columns.items()})


def _frame(data: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(data)
