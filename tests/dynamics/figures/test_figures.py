"""The figures show the numbers of their results, and no figure stands without accuracy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.dynamics import (
    AttentionStabilisationResult,
    ConvergenceResult,
    attention_stabilisation_study,
    convergence_study,
    extrapolation_study,
)
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.results import Figure
from tests.dynamics.toys import LinearModel, batch_of_ones, rotation

ACCURACY = {"exact match", "accuracy", "answer right from", "right at the end", "wrong at the end"}


@pytest.fixture(scope="module")
def result() -> ConvergenceResult:
    return convergence_study(
        LinearModel(0.5 * torch.eye(2), threshold=1.8), batch_of_ones(), n_loops=20
    )


@pytest.fixture(scope="module")
def attention() -> AttentionStabilisationResult:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, n_layers=2, d_vocab=5, d_vocab_out=2)
    tokens = torch.tensor([[0, 1, 2], [4, 3, 1]])
    batch = dataclasses.replace(batch_of_ones(), inputs=tokens)
    return attention_stabilisation_study(LoopedTransformer(config), batch, n_loops=5)


def _check(figure: Figure) -> None:
    assert figure.title and figure.caption.endswith(".") and figure.control.endswith(".")
    assert figure.data is not None and len(figure.data)
    assert figure.plot.to_json()


def _traces(figure: Figure) -> list[Any]:
    return list(figure.plot.select_traces())


def _line(figure: Figure, name: str) -> np.ndarray:
    lines = [t for t in _traces(figure) if t.name == name and t.fill != "toself"]
    return np.asarray(lines[0].y, float)


def test_every_figure_of_convergence_has_accuracy_in_it(result: ConvergenceResult) -> None:
    figures = result.figures()
    assert len(figures) == 7
    for figure in figures:
        _check(figure)
        assert figure.section == "convergence"
        names = {trace.name for trace in _traces(figure)}
        beside = names & ACCURACY or "right" in str(figure.plot.data)
        assert beside, figure.title


def test_lines_are_the_numbers_of_the_result(result: ConvergenceResult) -> None:
    figure = result.figures()[0]
    np.testing.assert_allclose(_line(figure, "mean"), result.mean_residual()[1:])
    np.testing.assert_allclose(_line(figure, "exact match"), result.exact_match())
    assert figure.data is not None
    np.testing.assert_allclose(figure.data["residual_mean"], result.mean_residual())


def test_the_heat_maps_are_the_median_and_the_slowest_example() -> None:
    model = LinearModel(0.5 * torch.eye(2), threshold=1.8)
    result = convergence_study(model, batch_of_ones(n_examples=3), n_loops=20)
    settled = result.settled_at.copy()
    settled[1] += 3
    distance = result.distance.copy()
    distance[:, 1] *= 7
    result = dataclasses.replace(result, settled_at=settled, distance=distance)
    figure = result.figures()[1]
    median, slowest = (t for t in _traces(figure) if t.type == "heatmap")
    assert list(median.x) == [1, 2]
    for cells, example in ((median, 0), (slowest, 1)):
        values = distance[:, example, 1:]
        expected = np.log10(np.where(values > 0, values, np.nan))
        np.testing.assert_allclose(cells.z, expected, rtol=1e-5)
    assert _line(figure, "answer right from").tolist() == [4, 4]
    assert figure.data is not None and len(figure.data) == 2 * 21 * 2
    assert (figure.data["answer_right_from"] == 4).all()


def test_tokens_that_never_settle_leave_a_gap_and_are_counted() -> None:
    orbit = convergence_study(LinearModel(rotation(math.pi / 3)), batch_of_ones(), n_loops=40)
    by_title = {figure.title: figure for figure in orbit.figures()}
    assert "no limit was found" in by_title["Distance to the limit"].caption
    assert np.isnan(_line(by_title["Settling time by position"], "settled (median)")).all()
    assert "takes 6 loops" in by_title["What the trajectories become"].caption
    table = by_title["What the trajectories become"].data
    assert table is not None and table["tokens"].sum() == 4


def test_a_diverging_run_can_be_drawn() -> None:
    growing = convergence_study(LinearModel(3.0 * torch.eye(2)), batch_of_ones(), n_loops=100)
    titles = [figure.title for figure in growing.figures()]
    assert "Local stability" not in titles and len(titles) == 6
    for figure in growing.figures():
        _check(figure)


def test_stability_shows_radius_and_observed_rate(result: ConvergenceResult) -> None:
    figure = next(f for f in result.figures() if f.title == "Local stability")
    assert figure.data is not None
    np.testing.assert_allclose(figure.data["spectral_radius"], 0.5, rtol=1e-3)
    np.testing.assert_allclose(figure.data["asymptotic_rate"], 0.5, rtol=0.02)


def test_extrapolation_has_a_line_for_each_length() -> None:
    batch = batch_of_ones(n_examples=4)
    batch = dataclasses.replace(batch, n=torch.tensor([2, 2, 3, 3]))
    model = LinearModel(0.5 * torch.eye(2), threshold=1.8)
    for n_loops in (40, 80):
        study = extrapolation_study(model, batch, n_loops=n_loops, trained_loops=9)
        (figure,) = study.figures()
        _check(figure)
        assert _line(figure, "n = 2").tolist() == [0.0] * 3 + [1.0] * (n_loops - 3)
        assert "n = 3" in {trace.name for trace in _traces(figure)}
        assert "right and stays right: 4" in figure.control
        layout: Any = figure.plot.layout
        marks = [a.text for a in layout.annotations]
        assert {"T(n)", "longest training run"} <= set(marks)
        assert (layout.xaxis.type == "log") == (n_loops == 80)


def test_attention_has_a_line_for_each_head(attention: AttentionStabilisationResult) -> None:
    (figure,) = attention.figures()
    _check(figure)
    assert figure.section == "attention"
    expected = np.median(attention.change[1:, 1, :, 0], axis=1)
    np.testing.assert_allclose(_line(figure, "head 1.0"), expected)
    exact = attention.exact[1:].mean(axis=1)
    np.testing.assert_allclose(_line(figure, "exact match"), exact)
