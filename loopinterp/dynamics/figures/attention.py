"""Figures of attention stabilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.intervals import wilson_interval
from loopinterp.results import Figure

if TYPE_CHECKING:
    from loopinterp.dynamics.attention import AttentionStabilisationResult


def attention_figures(result: AttentionStabilisationResult) -> list[Figure]:
    """Change of every head's pattern by loop, above exact match."""
    import pandas as pd

    from loopinterp.plotting import LinePanel, Series, line_panels, ramp

    loops = np.arange(1, result.n_loops)
    _, n_layers, n_examples, n_heads = result.change.shape
    shades = ramp(n_layers * n_heads)
    lines, tables = [], []
    for layer in range(n_layers):
        for head in range(n_heads):
            change = result.change[1:, layer, :, head]
            low, middle, high = np.quantile(change, (0.1, 0.5, 0.9), axis=1)
            name = f"head {layer}.{head}" if n_layers > 1 else f"head {head}"
            shade = shades[layer * n_heads + head]
            lines.append(Series(name, loops, np.where(middle > 0, middle, np.nan), colour=shade))
            columns = {"loop": loops, "layer": layer, "head": head, "change_median": middle}
            tables.append(pd.DataFrame(columns | {"change_10": low, "change_90": high}))
    hits = result.exact[1:].sum(axis=1)
    low, high = wilson_interval(hits, n_examples)
    exact = Series("exact match", loops, hits / n_examples, low=low, high=high, colour="green")
    data = pd.concat(tables, ignore_index=True)
    plot = line_panels(
        [
            LinePanel(lines, "change of pattern", y_log=True),
            LinePanel([exact], "exact match", y_range=(0, 1.03)),
        ],
        x_title="loop",
    )
    return [
        Figure(
            title="Do the heads freeze?",
            plot=plot,
            caption=(
                "Above: how much a head's attention pattern changes from one loop to the next "
                "(Frobenius norm over the sequence, median of the examples). A falling line is a "
                "head that freezes."
            ),
            control=(
                "Below, exact match when the answer is read after that loop: heads can freeze "
                "before the answer is right, or long after."
            ),
            data=data.assign(exact_match=(hits / n_examples)[data["loop"].to_numpy() - 1]),
            section="attention",
        )
    ]
