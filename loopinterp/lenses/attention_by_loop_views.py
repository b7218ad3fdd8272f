"""What a study of attention by loop says and shows."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.intervals import ESTIMATE
from loopinterp.lenses.attention_by_loop import AttentionResult
from loopinterp.plotting import LinePanel, Series, line_panels, loop_slider_figure
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "attention"


@findings_of.register
def _(result: AttentionResult) -> list[Finding]:
    """The head with the strongest preference, and what it prefers."""
    best = result.strongest()
    mass = result.data["mass"].sel(best).mean("loop")
    value = float(mass.sel({ESTIMATE: "value"}))
    even = float(result.data["mass_even"].sel(distance=best["distance"]))
    if float(mass.sel({ESTIMATE: "low"})) <= even:
        text = (
            "No head clearly prefers a distance: none gives any of them more attention than if "
            "it were spread evenly, by more than the interval over examples."
        )
        return [Finding(text, value="no preference")]
    text = (
        f"{_head_name(result, best).capitalize()} has the strongest preference: {percent(value)} "
        f"of its attention goes to {place(best['distance'])} (mean over loops), against "
        f"{percent(even)} if it were spread evenly over what a position may see."
    )
    return [Finding(text, value=percent(value))]


@figures_of.register
def _(result: AttentionResult) -> list[Figure]:
    """The patterns with their slider, and where heads look by loop."""
    return [_patterns(result), _by_loop(result)]


def _head_name(result: AttentionResult, at: dict[str, int]) -> str:
    head = f"head {at['head']}"
    return head if result.data.sizes["layer"] == 1 else f"layer {at['layer']}, {head}"


def _by_head(result: AttentionResult) -> xr.Dataset:
    """The arrays with one axis of heads, by their names."""
    places = np.ndindex(result.data.sizes["layer"], result.data.sizes["head"])
    names = [_head_name(result, {"layer": layer, "head": head}) for layer, head in places]
    by_head = result.data.stack(by_head=("layer", "head"), create_index=False)
    return by_head.drop_vars(("layer", "head")).rename(by_head="head").assign_coords(head=names)


def _patterns(result: AttentionResult) -> Figure:
    numbered = result.labels == [str(k) for k in range(len(result.labels))]
    places = [label if numbered else f"{k} · {label}" for k, label in enumerate(result.labels)]
    patterns = _by_head(result)["patterns"].transpose("loop", "head", "query", "key")
    patterns = patterns.assign_coords(query=places, key=places)
    plot = loop_slider_figure(
        patterns, x_title="looked at (key)", y_title="looking (query)", value_title="attention"
    )
    return Figure(
        title="Attention patterns, loop by loop",
        plot=plot,
        caption=(
            "One example. Each row is a position, and its colour shows how much it looks at each "
            "position of the sequence (a row sums to 1). Move the slider to go from loop to loop; "
            "a pattern that no longer changes belongs to a head that has settled."
        ),
        control=(
            "A head without preference would colour alike all the positions that a row may see; "
            "the next figure measures every head against that, over many examples."
        ),
        data=tidy({"attention": patterns}).query("attention > 1e-3").round(4),
    )


def _by_loop(result: AttentionResult) -> Figure:
    best = result.strongest()["distance"]
    data, by_head = (
        cells.sel(distance=best, drop=True) for cells in (result.data, _by_head(result))
    )
    looks, spread = (Series.each(by_head[name], "head") for name in ("mass", "entropy"))
    even_mass = data["mass_even"].expand_dims(loop=data["loop"])
    even_entropy = xr.full_like(data["entropy"][:, 0, 0], result.entropy_even)
    where = place(best)
    plot = line_panels(
        [
            LinePanel(
                [*looks, Series.of("even attention", even_mass, control=True)],
                "attention",
                title=f"Attention to {where}",
                y_range=(0, 1.02),
            ),
            LinePanel(
                [*spread, Series.of("even attention", even_entropy, control=True)],
                "bits",
                title="Entropy of attention",
            ),
        ],
        x_title="loop",
    )
    table = tidy({"mass": data["mass"], "entropy": data["entropy"]})
    return Figure(
        title="Where heads look as loops go on",
        plot=plot,
        caption=(
            f"Above, the share of attention that each head gives to {where}, with 95% intervals "
            f"over {result.n_examples} examples. Below, how widely a head spreads its attention: "
            "0 bits is a single position."
        ),
        control=(
            "The dashed grey line is attention spread evenly over the positions that may be seen. "
            "A head on that line has no preference."
        ),
        data=table.assign(
            distance=best, mass_even=float(data["mass_even"]), entropy_even=result.entropy_even
        ),
    )


def place(distance: int) -> str:
    """A distance in words.

    Example:
        >>> place(0), place(1), place(-3)
        ('the position itself', 'the left neighbour', '3 positions to the right')
    """
    if distance == 0:
        return "the position itself"
    side = "left" if distance > 0 else "right"
    if abs(distance) == 1:
        return f"the {side} neighbour"
    return f"{abs(distance)} positions to the {side}"
