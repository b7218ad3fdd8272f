"""Findings claim no more than the numbers; figures show them, accuracy and controls beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.core.results import Figure
from loopinterp.dynamics import GeometryResult, SettlingClass, geometry_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition
from tests.dynamics.test_geometry import batch
from tests.dynamics.toys import LinearModel, MapModel, rotation


@pytest.fixture(scope="module")
def layered() -> GeometryResult:
    config = LoopedTransformerConfig(
        d_model=8, n_heads=2, n_layers=3, d_vocab=6, d_vocab_out=2, injection="input"
    )
    model = LoopedTransformer(config.replace(loop_norm=True), seed=0).eval()
    return geometry_study(model, Addition(), n=3, batch_size=4, n_loops=16)


def _study_of(matrix: torch.Tensor, **options: Any) -> GeometryResult:
    return geometry_study(LinearModel(matrix, threshold=5.0), batch(), limit_steps=40, **options)


def _changed(result: GeometryResult, **arrays: Any) -> GeometryResult:
    made = {
        name: result.data[name].copy(data=np.broadcast_to(values, result.data[name].shape))
        for name, values in arrays.items()
    }
    return dataclasses.replace(result, data=result.data.assign(made))


def _traces(figure: Figure) -> dict[str, Any]:
    traces: Any = figure.plot.data
    return {t.name: t for t in traces if getattr(t, "fill", None) != "toself"}


def test_figures_have_controls_tables_and_accuracy(layered: GeometryResult) -> None:
    figures = layered.figures()
    assert len({figure.title for figure in figures}) == len(figures) == 4
    for figure in figures:
        assert figure.caption.endswith(".") and figure.control and figure.section == "limits"
        assert figure.data is not None and len(figure.data) and figure.plot.to_json()
        table = figure.data
        assert {"exact_match", "right"} & {*table.columns}, figure.title
    by_loop = _traces(figures[0])
    np.testing.assert_allclose(by_loop["effective rank"].y, layered.data["rank"][1:])
    level = float(layered.data["control_rank"].mean("draw")[0])
    control = by_loop["as many Gaussian vectors"]
    assert {*control.y} == {level}
    layers = _traces(figures[3])
    assert {"layer 0", "layer 1", "layer 2", "exact match"} <= {*layers}


def test_paths_are_drawn_by_class_with_their_limits() -> None:
    result = _study_of(0.5 * torch.eye(3), n_trajectories=2)
    right = result.data["right"].isel(batch=slice(2)).values
    settling, wrong = "settling", "settling, wrong"
    assert len(result.figures()) == 2  # in two dimensions
    explained = result.data["explained"].copy(data=[0.5, 0.3, 0.2])
    result = dataclasses.replace(result, data=result.data.assign(explained=explained))
    plane, space = result.figures()[1:3]
    for figure in (plane, space):
        assert "Dashed" in figure.control and "limits" in figure.control
        traces = _traces(figure)
        assert {*traces} == {settling, wrong, "limit"}
        line = traces[settling]
        # Each path has as many points as loops and a gap after it.
        assert len(line.x) == (right == 1).sum() * (result.n_loops + 2)
        path = result.data["path"].isel(shown=1, pos=2)
        drawn = np.asarray(line.x, float)
        assert np.isin(path.isel(component=0).values, drawn).all()
        ends = np.asarray(traces["limit"].x, float)
        at = result.data["path_limit"].isel(shown=1, pos=1, component=0).item()
        assert np.isin(at, ends[np.isfinite(ends)])
    assert traces[wrong].line.dash == "dash"
    assert space.data is not None and {*space.data["settling"]} == {"settling"}


def test_the_plane_alone_where_there_are_two_features_and_nothing_of_what_is_not_finite() -> None:
    assert len(_study_of(0.5 * torch.eye(2)).figures()) == 2
    burst = _study_of(1e6 * torch.eye(2), n_loops=20)
    assert len(burst.figures()) == 1
    assert burst.findings()[1].value == "not finite"


def test_classes_are_said_with_the_wrong_among_them() -> None:
    ends = _study_of(0.5 * torch.eye(2)).findings()[0]
    assert ends.good is True and "100% converge. " in ends.text and "wrong answer" in ends.text
    turns = _study_of(rotation(1.0)).findings()[0]
    assert turns.good is False and "100% drift" in turns.text and turns.value == "0% settling"


def test_one_point_is_told_from_few_directions() -> None:
    forgets = geometry_study(MapModel(lambda h, e: h / 2 + 1 + 0 * e), batch())
    finding = forgets.findings()[1]
    assert finding.good is False and finding.value == "one point"
    knows = _study_of(0.5 * torch.eye(2)).findings()[1]
    assert "is 1.0 after" in knows.text and knows.value == "1.0 directions"


def test_layers_are_claimed_to_rest_only_where_tokens_do(layered: GeometryResult) -> None:
    moving = _changed(layered, settling=int(SettlingClass.MARGINAL))
    still = _changed(
        layered, settling=int(SettlingClass.SETTLING), layer_residual=1e-4, layer_distance=0.5
    )
    near = _changed(still, layer_distance=5e-4)
    one = dataclasses.replace(layered, no_layers="the block has one layer")
    results = {
        "no limits of layers": moving,
        "distinct limits": still,
        "layers not distinguished": near,
        "not compared": one,
    }
    texts = {}
    for value, result in results.items():
        finding = result.findings()[2]
        assert finding.value == value
        texts[value] = finding.text
    assert "4 of 4" in texts["distinct limits"]
    assert one.no_layers in texts["not compared"]
