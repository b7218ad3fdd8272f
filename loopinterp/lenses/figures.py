"""Figures of the lenses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from loopinterp.plotting import LinePanel, Series, line_panels, loop_slider_figure
from loopinterp.results import Figure

if TYPE_CHECKING:
    from loopinterp.lenses.attention import AttentionResult


def attention_figures(result: AttentionResult) -> list[Figure]:
    """The patterns with their slider, and where heads look by loop."""
    return [_patterns(result), _by_loop(result)]


def _head_names(result: AttentionResult) -> list[str]:
    n_layers, n_heads = result.patterns.shape[1:3]
    if n_layers == 1:
        return [f"head {head}" for head in range(n_heads)]
    return [f"layer {layer} head {head}" for layer in range(n_layers) for head in range(n_heads)]


def _patterns(result: AttentionResult) -> Figure:
    n_loops, n_layers, n_heads, n_pos, _ = result.patterns.shape
    names = _head_names(result)
    values = result.patterns.reshape(n_loops, n_layers * n_heads, n_pos, n_pos)
    numbered = result.labels == [str(k) for k in range(n_pos)]
    places = [
        label if numbered else f"{position} · {label}"
        for position, label in enumerate(result.labels)
    ]
    plot = loop_slider_figure(
        values,
        loops=range(n_loops),
        panel_titles=names,
        x=places,
        y=places,
        x_title="looked at (key)",
        y_title="looking (query)",
        value_title="attention",
    )
    keep = values > 1e-3
    loop, panel, query, key = np.nonzero(keep)
    data = pd.DataFrame(
        {
            "loop": loop,
            "head": np.array(names)[panel],
            "query": np.array(places)[query],
            "key": np.array(places)[key],
            "attention": values[keep].round(4),
        }
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
        data=data,
        section="attention",
    )


def _by_loop(result: AttentionResult) -> Figure:
    from loopinterp.lenses.attention import place

    n_loops = result.patterns.shape[0]
    loops = list(range(n_loops))
    names = _head_names(result)
    best = result.strongest()[-1]
    mass, low, high = (
        array.reshape(n_loops, -1, array.shape[-1])[..., best]
        for array in (result.distance_mass, result.distance_low, result.distance_high)
    )
    entropy = result.entropy.reshape(n_loops, -1)
    even = float(result.distance_even[best])
    looks = [
        Series(name, loops, mass[:, k], low=low[:, k], high=high[:, k])
        for k, name in enumerate(names)
    ]
    spread = [Series(name, loops, entropy[:, k]) for k, name in enumerate(names)]
    control = Series("even attention", loops, [even] * n_loops, control=True)
    most = Series("even attention", loops, [result.entropy_even] * n_loops, control=True)
    where = place(result.distances[best])
    plot = line_panels(
        [
            LinePanel(
                [*looks, control], "attention", title=f"Attention to {where}", y_range=(0, 1.02)
            ),
            LinePanel([*spread, most], "bits", title="Entropy of attention"),
        ],
        x_title="loop",
    )
    rows = [
        {
            "loop": loop,
            "head": name,
            f"attention at distance {result.distances[best]}": mass[loop, k],
            "low": low[loop, k],
            "high": high[loop, k],
            "even attention": even,
            "entropy (bits)": entropy[loop, k],
            "even entropy (bits)": result.entropy_even,
        }
        for loop in loops
        for k, name in enumerate(names)
    ]
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
        data=pd.DataFrame(rows),
        section="attention",
    )
