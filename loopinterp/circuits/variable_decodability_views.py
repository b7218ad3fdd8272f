"""What a study of decodability says and shows."""

from __future__ import annotations

from loopinterp.circuits.variable_decodability import Decodability
from loopinterp.plotting import heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of

SECTION = "program"

READABLE = 0.95
"""Balanced accuracy from which a variable counts as read."""

_MAX_PANELS = 6


@findings_of.register
def _(result: Decodability) -> list[Finding]:
    """How many variables can be read loop for loop, after one loop and more.

    Before the first loop there may be nothing to read: an initial state of zeros holds nothing.
    """
    read = _readable(result, "accuracy")
    given = _readable(result, "embedding")
    if "random_weights" in result.data:
        given |= _readable(result, "random_weights")
    names = [name for name in result.data["variable"].values.tolist() if name in read]
    some = f" ({', '.join(names)})" if names else ""
    n_all = result.data.sizes["variable"]
    text = (
        f"{len(read)} of {n_all} program variables{some} can be read from the model loop for loop, "
        f"after one loop and more, with balanced accuracy of at least {READABLE}"
    )
    if read & given:
        text += (
            f"; {len(read & given)} of them just as well from the input alone or with shuffled "
            "weights"
        )
    text += (
        ". That says where to look, not what is used: rival programs' variables can be read alike."
    )
    return [Finding(text, value=f"{len(read)} of {n_all}")]


def _readable(result: Decodability, name: str) -> set[str]:
    """Variables whose mean over loops from 1 on, loop for loop, is high enough."""
    later = result.loop_for_loop(name).sel(loop=slice(1, None)).mean("loop")
    return set(later["variable"].values[(later >= READABLE).values].tolist())


@figures_of.register
def _(result: Decodability) -> list[Figure]:
    """Loop-by-loop matrices of the variables, beside a model with shuffled weights."""
    first: dict[str, str] = {}
    for name in result.data["variable"].values.tolist():
        first.setdefault(name.split(".")[0], name)
    shown = list(first.values())[:_MAX_PANELS]
    panels = {name.replace("_", " "): result.data["accuracy"].sel(variable=name) for name in shown}
    if "random_weights" in result.data:
        shuffled = result.data["random_weights"].sel(variable=shown[0])
        panels[f"{next(iter(panels))}, shuffled weights"] = shuffled
    plot = heatmap_panels(
        panels,
        y_title="model loop",
        value_title="balanced accuracy",
        value_range=(0.4, 1),
        square=True,
    )
    return [
        Figure(
            title="Which program variables can be read, loop against loop",
            plot=plot,
            caption=(
                "Balanced accuracy of a linear probe of each program's variable as it is after "
                "each program loop (across), on the model's state after each of its loops (up). "
                "A sharp diagonal: the model is as far as the program, loop for loop. That a "
                "variable can be read does not mean that it is used: the verdict rests on "
                "interchange interventions."
            ),
            control=(
                "The last panel is the model with shuffled weights; the data also has the probe "
                "on labels of other examples, on the input embedding alone, and chance."
            ),
            data=result.to_dataframe(),
        )
    ]
