"""What a study of edges says and shows."""

from __future__ import annotations

from loopinterp.circuits.edges.edge_attribution import CONTROLS, EDGE_IG
from loopinterp.circuits.edges.edge_graph import edge_graph
from loopinterp.circuits.edges.edge_study_result import TIED, EdgeStudy
from loopinterp.plotting import Series, heatmap_panels, line_figure
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"

_LAGS = {0: "within a loop", 1: "to the next loop", 2: "over two loops or more"}


@findings_of.register
def _(result: EdgeStudy) -> list[Finding]:
    """What pruning left, beside as many edges at random."""
    n, kept = int(result.data["pruned"].count()), int(result.data["pruned"].sum())
    f = result.pruned_faithfulness
    text = (
        f"{kept} of {n} edges between components keep {percent(f)} of the {result.metric} when "
        f"all others carry another input's values; {kept} edges drawn at random keep "
        f"{percent(result.random_faithfulness)}. Without the {kept}, the rest of the model keeps "
        f"{percent(result.completeness.without)}."
    )
    return [Finding(text, value=f"{kept} of {n}", label="edges that are enough")]


@figures_of.register
def _(result: EdgeStudy) -> list[Figure]:
    """Scores of tied edges, faithfulness by share of edges, and the pruned circuit."""
    figures = [_scores(result), _faithfulness(result)]
    if len(result.tied_edges()):
        figures.append(_circuit(result))
    return figures


def _scores(result: EdgeStudy) -> Figure:
    scores = result.data["score"].values.tolist()
    best = EDGE_IG if EDGE_IG in scores else scores[0]
    sizes = result.data["tied_size"].sel(score=best)
    panels = {words: sizes.sel(lag=lag, drop=True) for lag, words in _LAGS.items()}
    return Figure(
        title=f"Edges between components, scored by {best}",
        plot=heatmap_panels(
            {name: panel for name, panel in panels.items() if panel.notnull().any()},
            value_title="share of the change",
            x_title="receiver",
            y_title="sender",
        ),
        caption=(
            "How much the metric changes when the receiver sees what the sender writes on another "
            "input, in shares of the change between the two inputs; mean of absolute values over "
            "examples, summed over loops. Empty: no edge."
        ),
        control="The data has the scores of both controls, norms and random numbers, beside them.",
        data=result.to_dataframe(),
    )


def _faithfulness(result: EdgeStudy) -> Figure:
    of = result.data["faithfulness"].sel(graph=TIED)
    lines = [
        Series.of(str(name), of.sel(score=name), control=name in CONTROLS)
        for name in of["score"].values
    ]
    return Figure(
        title="What the edges of highest score keep of the metric",
        plot=line_figure(lines, x_title="share of edges", y_title="faithfulness", x_log=True),
        caption=(
            "The base's run with another input's values on all edges but those of highest score: "
            "1 is the model's own metric, 0 that of the other input."
        ),
        control="Edges chosen by the norms of what is written and read, and at random.",
        data=result.areas(),
    )


def _circuit(result: EdgeStudy) -> Figure:
    return Figure(
        title="The circuit that pruning leaves",
        plot=edge_graph(result),
        caption=(
            "Components and what each brings to which, within a loop and to the next one (around "
            "the block). An edge is as wide as what changes without it, dashed where it works "
            f"against the answer. The circuit's faithfulness is {result.pruned_faithfulness:.2f}."
        ),
        control=(
            f"As many edges at random have a faithfulness of {result.random_faithfulness:.2f}."
        ),
    )
