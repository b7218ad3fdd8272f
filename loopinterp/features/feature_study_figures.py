"""Findings and figures of a feature study."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.features.feature_study import MEAN, OF_LOOP, PCA, RANDOM, RARE, SHARED, FeatureStudy
from loopinterp.figures import LinePanel, Series, heatmap_panels, line_figure, line_panels

ONE_LOOP = 1.5  # a feature with a smaller effective number of loops is one of one loop
_CONTROLS = {RANDOM: "random directions", PCA: "principal components", MEAN: "mean ablation"}
_NAMES = {SHARED: "shared autoencoder", OF_LOOP: "autoencoder of the loop", **_CONTROLS}


def _one_loop_share(effective: xr.DataArray) -> float:
    known = effective.values[~np.isnan(effective.values)]
    return float((known < ONE_LOOP).mean()) if len(known) else np.nan


@findings_of.register
def _(result: FeatureStudy) -> list[Finding]:
    data, n_loops = result.data, result.data.sizes["loop"]
    effective, random = data["effective_loops"], data["effective_loops_random"]
    if not effective.notnull().any():
        text = f"No feature of the shared autoencoder is active at {RARE} positions or more."
        return [Finding(text, value="none", label="loops of a feature")]
    middle = float(effective.median())
    text = (
        f"A feature of the shared autoencoder is active in {middle:.1f} of {n_loops} loops (median "
        f"effective number); for random directions it is {float(random.median()):.1f}. "
        f"{percent(_one_loop_share(effective))} of features belong to one loop, and "
        f"{percent(_one_loop_share(random))} of random directions."
    )
    findings = [Finding(text, value=f"{middle:.1f} of {n_loops} loops", label="loops of a feature")]
    answers = data["kept_all"].sel({ESTIMATE: "value"})
    text = (
        f"If the reconstruction of the shared autoencoder replaces `{result.component}` in all "
        f"loops, {percent(answers.sel(dictionary=SHARED))} of answers stay. With as many principal "
        f"components {percent(answers.sel(dictionary=PCA))} stay, with random directions "
        f"{percent(answers.sel(dictionary=RANDOM))}, and with the mean "
        f"{percent(answers.sel(dictionary=MEAN))}."
    )
    findings.append(
        Finding(text, value=percent(answers.sel(dictionary=SHARED)), label="answers kept")
    )
    if "fve_across" in data and n_loops > 1:
        across, same_loop = data["fve_across"].values, np.eye(n_loops, dtype=bool)
        same, other = (float(np.nanmean(across[x])) for x in (same_loop, ~same_loop))
        text = (
            f"An autoencoder of one loop explains {percent(same)} of the variance of that loop's "
            f"states, and {percent(other)} of another loop's (means over loops)."
        )
        findings.append(Finding(text, value=percent(other), label="variance of another loop"))
    return findings


def _named_loops(result: FeatureStudy) -> list[str]:
    """Loops by name: however far apart, cells of a map are equally wide."""
    return [f"loop {loop}" for loop in result.data["loop"].values]


@figures_of.register
def _(result: FeatureStudy) -> list[Figure]:
    figures = [_activity(result), _effective(result), _spliced(result)]
    if "fve_across" in result.data and result.data.sizes["loop"] > 1:
        figures.append(_across(result))
    return [*figures, _strongest(result)]


def _activity(result: FeatureStudy) -> Figure:
    activity = result.data["activity"]
    share = activity / activity.sum("loop").where(activity.sum("loop") > 0)
    places = xr.DataArray(np.arange(share.sizes["loop"]), dims="loop")
    live = share.dropna("feature").transpose("feature", "loop")
    shown = live.sortby((live * places).sum("loop"))
    names: Any = {"feature": np.arange(shown.sizes["feature"]), "loop": _named_loops(result)}
    plot = heatmap_panels(
        {"": shown.assign_coords(names)},
        value_title="share",
        x_title="",
        y_title="feature, sorted",
        scale="mass",
    )
    return Figure(
        title="Activity of each feature, by loop",
        plot=plot,
        caption=(
            "Each row is a live feature of the shared autoencoder; its shares of activity sum to 1 "
            f"over the loops. Rows are sorted by their mean loop. {result.n_dead} of "
            f"{activity.sizes['feature']} features are never active."
        ),
        data=result.to_dataframe("activity"),
    )


def _effective(result: FeatureStudy) -> Figure:
    grid = np.linspace(1, result.data.sizes["loop"], 101)
    lines = []
    for name, title in (
        ("effective_loops", "shared autoencoder"),
        ("effective_loops_random", "random directions"),
        ("effective_loops_shuffled", "loops permuted"),
    ):
        values = result.data[name].values
        values = values[~np.isnan(values)]
        below = [(values <= x + 1e-9).mean() if len(values) else np.nan for x in grid]
        lines.append(Series(title, grid, below, control=name != "effective_loops", markers=False))
    return Figure(
        title="In how many loops is a feature active?",
        plot=line_figure(
            lines,
            x_title="effective number of loops",
            y_title="share of features with at most so many",
            y_range=(0, 1),
        ),
        caption=(
            "The effective number of loops is exp of the entropy of a feature's activity by loop: "
            "1 if it is active in one loop, and the number of loops if it is active equally often "
            f"in all. Features active at fewer than {RARE} positions are left out."
        ),
        control=(
            "Random directions: features of an untrained autoencoder, on the same states. With "
            "loops permuted at each position, a feature has no information about its loop."
        ),
        data=result.to_dataframe("effective_loops", "effective_loops_shuffled"),
    )


def _spliced(result: FeatureStudy) -> Figure:
    panels = []
    for name, title, y_range in (
        ("fve", "variance explained", (-0.5, 1)),
        ("kept", "answers kept", (0, 1)),
    ):
        values = result.data[name].transpose("dictionary", "loop", ESTIMATE)
        lines = [
            Series.of(_NAMES[d], values.sel(dictionary=d), control=d in _CONTROLS)
            for d in map(str, values["dictionary"].values)
        ]
        panels.append(LinePanel(lines, title, y_range=y_range))
    return Figure(
        title="Reconstruction, and answers kept with one loop spliced",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Above: the fraction of the variance around the loop's mean that is explained. Below: "
            f"`{result.component}` of one loop is replaced by its reconstruction; the share of "
            f"answers of {result.n_examples} held-out examples that stay (95% intervals over "
            "examples)."
        ),
        control=(
            f"Grey: as many principal components as features are active ({result.n_active:.1f}), "
            "random directions, and the mean of each position."
        ),
        data=result.to_dataframe("fve", "kept", "loss"),
    )


def _across(result: FeatureStudy) -> Figure:
    names = {
        "variance explained": "fve_across",
        "variance, recentred": "fve_recentred",
        "cosine of directions": "cosine_across",
        "cosine, control": "cosine_control",
    }
    loops = _named_loops(result)
    panels = {
        title: result.data[name].clip(0, 1).assign_coords(loop=loops, trained_loop=loops)
        for title, name in names.items()
    }
    return Figure(
        title="Autoencoders of one loop at another",
        plot=heatmap_panels(
            panels,
            x_title="states of",
            y_title="trained at",
            value_title="share or cosine",
            value_range=(0, 1),
            y_down=True,
            columns=2,
        ),
        caption=(
            "Above: the fraction of variance that an autoencoder of one loop explains at another, "
            "and the same after the states are moved to the mean of its own loop; values below 0 "
            "are shown as 0. Below: the mean cosine of its live directions with the closest one of "
            "the other loop's autoencoder. On the diagonal both are of one loop and differ in "
            "their seed."
        ),
        control="The same with differences of two random states of that loop as directions.",
        data=result.to_dataframe(*names.values()),
    )


def _strongest(result: FeatureStudy) -> Figure:
    """Top examples of features, from the smallest effective number of loops to the largest."""
    effective = result.data["effective_loops"].values
    known = np.flatnonzero(~np.isnan(effective))
    order = known[np.argsort(effective[known], kind="stable")]
    few = order[np.unique(np.linspace(0, len(order) - 1, min(4, len(order))).astype(int))]
    features = few.tolist() or [int(result.data["activity"].sum("loop").argmax("feature"))]
    titles = [f"feature {k}: {effective[k]:.1f} loops" for k in features]
    around = [_around(result, k) for k in features]
    plot = heatmap_panels(
        {title: activations for title, (activations, _) in zip(titles, around)},
        value_title="share",
        x_title="position from the strongest",
        y_title="",
        value_range=(0, 1),
        scale="mass",
        columns=2,
        y_down=True,
    )
    heatmaps: Any = plot.data
    for heatmap, (_, tokens) in zip(heatmaps, around):
        heatmap.update(text=tokens, texttemplate="%{text}")
    tables = [result.top_examples(k, result.data.sizes["rank"]) for k in features]
    lines = [f"{title}\n{table.to_string(index=False)}" for title, table in zip(titles, tables)]
    return Figure(
        title="Examples in which features are most active",
        plot=plot,
        caption=(
            "Each row is an example, the strongest first, at the loop in which the feature is most "
            "active there. Numbers are tokens; the colour is the activation at their position, as "
            "a share of the largest. Features go from the smallest to the largest effective number "
            "of loops."
        ),
        code="\n\n".join(lines),
    )


def _around(result: FeatureStudy, feature: int) -> tuple[xr.DataArray, np.ndarray]:
    """Activations and tokens around the strongest position of each top example, [rank, place]."""
    data = result.data.isel(feature=feature)
    positions, examples = data["top_pos"].values, data["top_example"].values
    places = np.arange(-8, 9)
    at = positions[:, None] + places  # [rank, place]
    outside = (at < 0) | (at >= data.sizes["pos"])
    at = np.where(outside, 0, at)
    largest = max(float(data["top_value"].max()), 1e-12)
    values = np.take_along_axis(data["top_trace"].values, at, 1) / largest
    tokens = np.full(at.shape, "", dtype=object)
    if "tokens" in result.data:
        tokens = result.data["tokens"].values[examples[:, None], at].astype(str).astype(object)
    coords = {"rank": [str(rank + 1) for rank in range(len(at))], "place": places}
    shown = xr.DataArray(np.where(outside, np.nan, values), coords, dims=("rank", "place"))
    return shown, np.where(outside, "", tokens)
