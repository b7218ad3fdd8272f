"""What the grid by operand lengths says and shows."""

from __future__ import annotations

from loopinterp.intervals import ESTIMATE
from loopinterp.plotting import heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent
from loopinterp.training.grid_by_operands import OperandGrid

SECTION = "generalisation"


@findings_of.register
def _(result: OperandGrid) -> list[Finding]:
    """The mean over the grid at the best number of loops, and its worst cell."""
    exact = result.data["exact_match"].sel({ESTIMATE: "value"})
    means = exact.mean(["n_a", "n_b"]).to_series()
    to, tied = int(exact["n_a"].max()), means.index[means == means.max()].tolist()
    if means.max() == 0:
        text = f"No answer up to {to} x {to} is wholly right after any of the numbers of loops."
        return [Finding(text, value="0.00 grid mean", good=False)]
    best = tied[0]
    said = ", ".join(f"{loop}: {percent(share)}" for loop, share in means.items())
    text = (
        f"Over all operand lengths up to {to} x {to}, answers are wholly right on average, by "
        f"loops: {said}. The worst pair of lengths at {best} loops has "
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
