from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from loopinterp.core.errors import InputError
from loopinterp.core.results import Figure
from loopinterp.figures import CircuitGraph, GraphNode, Series, line_figure, save_figure
from loopinterp.figures.axes import titled

PLOT = line_figure([Series("model", [1, 2], [0, 1])], x_title="loop", y_title="share")
GRAPH = CircuitGraph("ripple", (GraphNode("end", "readout", "output", "readout"),), ())


def test_a_page_and_a_graph_are_written(tmp_path: Path) -> None:
    page = save_figure(PLOT, tmp_path / "plot.html", title="Share by loop").read_text()
    assert "Share by loop" in page
    assert "<svg" in save_figure(GRAPH, tmp_path / "graph.svg").read_text()
    assert "ripple" in save_figure(GRAPH, tmp_path / "graph.HTML").read_text()


def test_a_title_has_room_of_its_own() -> None:
    before: Any = PLOT.layout
    plot: Any = titled(PLOT, "Share <a href='x'>")
    after = plot.layout
    assert after.height > before.height and after.margin.t > 44 + 16
    # The legend begins below the title and ends, with its clear border, above panel titles.
    assert 0 < after.legend.borderwidth < (1 - after.legend.y) * after.height
    assert after.title.text == "<b>Share &lt;a href='x'></b>" and not before.title.text


@pytest.mark.parametrize(("plot", "name"), [(PLOT, "a.gif"), (GRAPH, "a.png"), (PLOT, "a")])
def test_other_endings_are_refused(plot: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        save_figure(plot, tmp_path / name)
    assert caught.value.what == "ending"


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_pictures_are_left_to_kaleido(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    write = "plotly.graph_objects.Figure.write_image"
    monkeypatch.setattr(write, lambda *a, **_: written.append(a))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="kaleido"):
        save_figure(PLOT, tmp_path / f"a.{ending}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert save_figure(PLOT, tmp_path / f"a.{ending}") == tmp_path / f"a.{ending}"
    assert len(written) == 1


def test_a_figure_of_a_result_saves_itself_with_its_title_and_shows_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda *parts: shown.extend(parts))
    figure = Figure(title="Share by loop", plot=PLOT, caption="a < b", control="none")
    assert "Share by loop" in figure.save(tmp_path / "figure.html").read_text()
    figure._ipython_display_()
    plot, below = shown
    assert "Share by loop" in plot.layout.title.text and plot.data == PLOT.data
    assert below.data == "<p>a &lt; b</p><p>none</p>"
    assert repr(figure) == "Figure('Share by loop', Figure)"
    graph = Figure(title="Circuit", plot=GRAPH, caption="")
    assert "<svg" in graph.save(tmp_path / "graph.svg").read_text()
