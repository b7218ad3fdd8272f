"""Figures of probing say how to read them, show their controls and link their data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.core.results import Figure
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.probing import CarryStudyResult, carry_study, probe_study
from loopinterp.tasks.addition import Addition
from tests.probing.toys import CarryToy


def plot_of(figure: Figure) -> Any:
    """The plot, whose traces have attributes that its types do not know."""
    return figure.plot


@pytest.fixture(scope="module")
def result() -> CarryStudyResult:
    return carry_study(CarryToy(), Addition(), n=14, max_chain=6, n_short=8, n_train=16, n_test=16)


@pytest.fixture(scope="module")
def figures(result: CarryStudyResult) -> list[Figure]:
    return result.figures()


def test_each_figure_is_complete(figures: list[Figure]) -> None:
    assert len({f.title for f in figures}) == len(figures) == 4
    for figure in figures:
        assert figure.section == "wavefront"
        assert len(figure.caption) > 40 and len(figure.control) > 20
        assert figure.data is not None and len(figure.data)
        json.loads(plot_of(figure).to_json())
        names = [t.name for t in plot_of(figure).data if t.name]
        assert all(len(name) <= 24 for name in names)


def test_the_heat_map_shows_the_wavefront_and_its_controls(
    result: CarryStudyResult, figures: list[Figure]
) -> None:
    maps = [t for t in plot_of(figures[0]).data if t.type == "heatmap"]
    assert len(maps) == 2
    for trace, name in zip(maps, ("accuracy", "random_model")):
        values = result.data[name]
        np.testing.assert_array_equal(np.asarray(trace.z), values.T)
        assert list(trace.x) == values["loop"].values.tolist()
        assert list(trace.y) == values["chain_length"].values.tolist()
    front = next(t for t in plot_of(figures[0]).data if t.type == "scatter")
    chains = result.data["chain_length"].values.tolist()
    assert list(front.x) == list(front.y) == chains
    assert "light cone" in front.name and "light cone" in figures[0].caption
    assert figures[0].data is not None
    assert "in_reach" in figures[0].data
    assert "no probe can" in figures[1].caption and "selectivity" in figures[1].control


def test_the_cut_through_the_front_has_every_control(figures: list[Figure]) -> None:
    lines = {t.name: t for t in plot_of(figures[1]).data if t.type == "scatter" and t.line.width}
    grey = {name for name, t in lines.items() if t.line.dash != "solid"}
    assert grey == {"random weights", "random labels", "embedding alone", "majority class"}
    probe = dict(zip(lines["trained model"].x, lines["trained model"].y))
    assert probe[0] == 1.0 and probe[1] == 0.5


def test_chance_is_marked_where_the_majority_class_scores(
    result: CarryStudyResult, figures: list[Figure]
) -> None:
    majority = float(result.data["majority"].mean())
    for figure, panels in ((figures[1], 1), (figures[2], 3)):
        marks = [(line.y0, line.y1) for line in plot_of(figure).layout.shapes]
        assert marks == [(majority, majority)] * panels


def test_a_model_without_a_front_can_be_drawn_too() -> None:
    frozen = CarryToy(frozen=True)
    result = carry_study(
        frozen, Addition(), n=8, max_chain=4, n_short=6, n_train=8, n_test=8, random_model=frozen
    )
    (figure,) = result.figures()  # it shows that there is none; no speed, no other question
    json.loads(plot_of(figure).to_json())


def test_a_grid_of_probes_is_drawn_by_loop_and_by_group() -> None:
    model = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    )
    batch = Addition().sample(5, batch_size=40, generator=torch.Generator().manual_seed(0))
    position = torch.arange(6).expand(40, 6)
    groups = {"all": position > 0, "late": position > 3}
    targets = {"digit": batch.inputs, "carry": Addition().carry_in(batch)}
    result = probe_study(model, batch.inputs, targets, n_loops=2, groups=groups)
    lines, by_group = result.figures()
    for figure in (lines, by_group):
        assert figure.control and figure.data is not None and len(figure.data) == 8
        json.loads(str(figure.plot.to_json()))
    plot: Any = by_group.plot
    maps = [t for t in plot.data if t.type == "heatmap"]
    gain = result.data["accuracy"] - result.chance
    assert len(maps) == 2
    np.testing.assert_allclose(maps[1].z, gain.sel(target="carry").isel(site=0).T)
    # No gain has the colour in the middle of the scale, and no gain is greater than 1.
    assert (plot.layout.coloraxis.cmin, plot.layout.coloraxis.cmax) == (-1, 1)
