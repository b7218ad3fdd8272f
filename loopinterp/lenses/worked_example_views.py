"""What a worked example says and shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.lenses.worked_example import WorkedExample
from loopinterp.plotting import heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of

SECTION = "example"
_MOST_LOOPS = 12


@findings_of.register
def _(result: WorkedExample) -> list[Finding]:
    """What is asked, how it is done by hand, and when the model has it."""
    task = " ".join(text for text in (result.asks, result.by_hand) if text)
    asked = result.data["target"] >= 0
    right = ((result.data["answer"] == result.data["target"]) & asked).sum("pos").values
    n_loops, n_asked, since = len(right) - 1, int(asked.sum()), result.right_from()
    first = f"The model has {right[1]} of the {n_asked} symbols right after 1 loop"
    if n_loops == 1:
        text = f"{first}, when it is asked."
    elif since is None:
        text = (
            f"{first}, and {right[-1]} after {n_loops}, when it is asked: it gets this one wrong."
        )
    else:
        text = f"{first}, and all of them from loop {since} on (it is asked after {n_loops})."
    return [*([Finding(task)] if task else []), Finding(text)]


@figures_of.register
def _(result: WorkedExample) -> list[Figure]:
    """A table of the input and the answers, whose colour is the share of the right one."""
    loops = result.data["loop"].values[1:]
    if len(loops) > _MOST_LOOPS:
        loops = loops[np.linspace(0, len(loops) - 1, _MOST_LOOPS).round().astype(int)]
    asked = result.data["target"].values >= 0
    words = {**result.rows, "answer": _words(result, result.data["target"].values, asked)}
    for loop in loops:
        words[f"loop {loop}"] = _words(result, result.data["answer"].sel(loop=loop).values, asked)
    shares = np.full((len(words), len(asked)), np.nan)
    shares[-len(loops) :] = result.data["right_share"].sel(loop=loops)
    cells = xr.DataArray(shares, {"row": list(words), "pos": np.arange(len(asked))})
    plot = heatmap_panels({"": cells}, value_title="probability of the right one", scale="faint")
    plot.update_traces(text=list(words.values()), texttemplate="%{text}", hoverongaps=False)
    plot.update_traces(textfont={"size": 11})
    plot.update_yaxes(title_text=None)
    drawn, each = "the one that is answered last", " after each loop"
    if len(loops) == 1:
        drawn, each = "one", ""
    return [
        Figure(
            title="One input, loop by loop" if len(loops) > 1 else "One input",
            plot=plot,
            caption=(
                f"Of {result.n_examples} inputs drawn, {drawn}. Above, what stands at each "
                "position, and the right answer; below, what the model answers"
                f"{each}: the stronger the colour, the surer it is of the right one."
            ),
            data=pd.DataFrame(words).rename_axis("position").reset_index(),
        )
    ]


def _words(result: WorkedExample, classes: np.ndarray, asked: np.ndarray) -> list[str]:
    return [result.symbols[k] if one else "" for k, one in zip(classes, asked)]
