"""What noise on the weights leaves of the tools, said and shown."""

from __future__ import annotations

from loopinterp.benchmark.noise_robustness import Robustness
from loopinterp.plotting import Series, line_figure
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "ground-truth"

SOLVED = 0.99
"""Models that answer so many examples right still work."""


@findings_of.register
def _(result: Robustness) -> list[Finding]:
    """The largest noise at which the models still work, and what the tools say there."""
    works = result.data.where(result.data["exact_match"] >= SOLVED).dropna("noise", how="all")
    if not works.sizes["noise"]:
        text = "With the least noise that was tried the compiled models no longer work."
        return [Finding(text)]
    scores = works.sel(noise=works["noise"].max())["value"].dropna("check")
    text = (
        f"With noise of {percent(scores['noise'])} on every weight the compiled models "
        f"still work, and the tools score at least {float(scores.min()):.3g} "
        f"({scores['check'].values[scores.values.argmin()]})."
    )
    return [Finding(text)]


@figures_of.register
def _(result: Robustness) -> list[Figure]:
    """Scores against noise, beside what the models themselves can still do."""
    levels = result.data["noise"].values.tolist()
    right = Series.of("exact match of the model", result.data["exact_match"], control=True)
    plot = line_figure(
        [*Series.each(result.data["value"], "check"), right],
        x_title="noise on the weights, relative to their size",
        y_title="score",
        y_range=(0, 1.02),
    )
    plot.update_xaxes(type="log", tickvals=levels, ticktext=list(map(str, levels)))
    return [
        Figure(
            title="How much noise on the weights the tools stand",
            plot=plot,
            caption=(
                f"The models ({', '.join(result.programs)}) are rotated, and noise is put on every "
                "weight. Compiled values are restored in every layer, so that small noise changes "
                "nothing; what is found of a circuit must hold as long as the model works."
            ),
            control="The model's own exact match: beyond it there is no circuit to be found.",
            data=result.to_dataframe(),
        )
    ]
