"""Figures show the numbers of their results, accuracy beside them; findings claim no more."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.core.results import Figure
from loopinterp.dynamics import (
    ConvergenceResult,
    Regime,
    Status,
    convergence_study,
)
from tests.dynamics.toys import LinearModel, batch_of_ones, rotation

ACCURACY = {"exact match", "accuracy", "answer right from", "right at the end", "wrong at the end"}


@pytest.fixture(scope="module")
def result() -> ConvergenceResult:
    return convergence_study(
        LinearModel(0.5 * torch.eye(2), threshold=1.8), batch_of_ones(), n_loops=20
    )


def _check(figure: Figure) -> None:
    assert figure.title and figure.caption.endswith(".") and figure.control.endswith(".")
    assert figure.data is not None and len(figure.data)
    assert figure.plot.to_json()


def _traces(figure: Figure) -> list[Any]:
    return list(figure.plot.select_traces())


def _line(figure: Figure, name: str) -> np.ndarray:
    lines = [t for t in _traces(figure) if t.name == name and t.fill != "toself"]
    return np.asarray(lines[0].y, float)


def _percentages(text: str) -> list[str]:
    return re.findall(r"\b\d+%", text)


def test_every_figure_of_convergence_has_accuracy_in_it(result: ConvergenceResult) -> None:
    figures = result.figures()
    assert len(figures) == 4
    for figure in figures:
        _check(figure)
        assert figure.section == "convergence"
        names = {trace.name for trace in _traces(figure)}
        has_accuracy = names & ACCURACY or "right" in str(figure.plot.data)
        assert has_accuracy, figure.title


def test_lines_are_the_numbers_of_the_result(result: ConvergenceResult) -> None:
    figure = result.figures()[0]
    np.testing.assert_allclose(_line(figure, "mean"), result.mean_residual()[1:])
    np.testing.assert_allclose(
        _line(figure, "exact match"), result.exact_match().sel(estimate="value")
    )
    assert figure.data is not None
    np.testing.assert_allclose(figure.data["residual_mean"], result.mean_residual())


def test_the_heat_maps_are_the_median_and_the_slowest_example() -> None:
    model = LinearModel(0.5 * torch.eye(2), threshold=1.8)
    result = convergence_study(model, batch_of_ones(n_examples=3), n_loops=20)
    data = result.data.copy(deep=True)
    data["settled_at"][1] += 3
    data["distance"][:, 1] *= 7
    result = dataclasses.replace(result, data=data)
    figure = result.figures()[1]
    median, slowest = (t for t in _traces(figure) if t.type == "heatmap")
    assert list(median.x) == [1, 2]
    for cells, example in ((median, 0), (slowest, 1)):
        values = data["distance"].values[:, example, 1:]
        expected = np.log10(np.where(values > 0, values, np.nan))
        np.testing.assert_allclose(cells.z, expected, rtol=1e-5)
    assert _line(figure, "answer right from").tolist() == [4, 4]
    assert figure.data is not None and len(figure.data) == 2 * 21 * 2
    assert (figure.data["answer_right_from"] == 4).all()


def test_tokens_that_never_settle_leave_a_gap_and_are_counted() -> None:
    orbit = convergence_study(LinearModel(rotation(math.pi / 3)), batch_of_ones(), n_loops=40)
    by_title = {figure.title: figure for figure in orbit.figures()}
    distance = by_title["Distance to the last state reached"]
    settling = by_title["Settling time by position"]
    assert "2 of 2" in distance.caption  # the examples without a limit
    assert np.isnan(_line(settling, "settling time (median)")).all()
    assert not any("behaviour" in title for title in by_title)  # one class, no bars


def test_several_classes_are_drawn_with_their_answers() -> None:
    orbit = convergence_study(LinearModel(rotation(math.pi / 3)), batch_of_ones(), n_loops=40)
    data = orbit.data.copy(deep=True)
    data["regime"][0, 1] = Regime.FIXED_POINT
    data["period"][:, 0] = 17  # nothing is asked there
    by_title = {f.title: f for f in dataclasses.replace(orbit, data=data).figures()}
    becoming = by_title["Long-run behaviour of the trajectories"]
    assert "6 loops" in becoming.caption
    table = becoming.data
    assert table is not None and table["tokens"].sum() == 4


def test_rates_are_drawn_from_the_first_loop_that_has_one(result: ConvergenceResult) -> None:
    # Updates halve: 1/2 and a straight path from loop 2 on, the first that has one before it.
    figure = next(f for f in result.figures() if f.title.startswith("Rate and direction"))
    for name, value in (("contraction", 0.5), ("update cosine", 1.0)):
        line = next(t for t in _traces(figure) if t.name == name and t.fill != "toself")
        assert [line.x[0], line.x[-1]] == [2, result.n_loops]
        assert line.y[0] == pytest.approx(value, rel=1e-3)
    plot: Any = figure.plot
    (mark,) = (a for a in plot.layout.annotations if a.text == "no contraction")
    assert mark.y == 1
    (mark,) = (a for a in plot.layout.annotations if a.text.startswith("spectral radius"))
    assert mark.y == pytest.approx(0.5, rel=1e-3)


def test_a_readout_that_never_changes_has_no_panel(result: ConvergenceResult) -> None:
    constant = dataclasses.replace(result, data=result.data.assign(kl=0 * result.data["kl"]))
    for study, n_panels in ((result, 3), (constant, 2)):
        figure: Any = study.figures()[0]
        assert figure.plot.layout.meta["loopinterp"]["panels"] == n_panels
        assert ("change of the readout" in figure.caption) == (n_panels == 3)


def test_a_diverging_run_can_be_drawn() -> None:
    growing = convergence_study(LinearModel(3.0 * torch.eye(2)), batch_of_ones(), n_loops=100)
    assert len(growing.figures()) == 4
    for figure in growing.figures():
        _check(figure)


def test_a_settled_and_right_model_is_good(result: ConvergenceResult) -> None:
    settling, limits = result.findings()
    assert settling.value == "100% converge" and settling.good is True
    assert "loop 6" in settling.text
    assert _percentages(settling.text) == ["100%", "100%"]  # tokens settled, answers right
    assert limits.good is True and "2 of 2" in limits.text
    assert "0.50 (2 measured)" in limits.text and "below 1" in limits.text


def test_nothing_is_good_where_no_limit_was_found(result: ConvergenceResult) -> None:
    data = result.data.copy(deep=True)
    data["limit_status"][:] = Status.OUT_OF_BUDGET
    settling = dataclasses.replace(result, data=data).findings()[0]
    assert (settling.value, settling.good) == ("100% converge", False)


def test_settled_on_wrong_answers_says_so() -> None:
    wrong = LinearModel(0.5 * torch.eye(2), threshold=5.0)
    settling = convergence_study(wrong, batch_of_ones(), n_loops=20).findings()[0]
    assert settling.value == "100% converge"
    assert _percentages(settling.text) == ["100%", "0%"]  # tokens settled, answers right


@pytest.mark.parametrize("matrix", [rotation(1.0), 3.0 * torch.eye(2)])
def test_where_no_limit_was_found_nothing_is_said_of_its_stability(matrix: torch.Tensor) -> None:
    *_, limits = convergence_study(LinearModel(matrix), batch_of_ones(), n_loops=40).findings()
    assert "not measured" in limits.text and limits.good is False
    assert not any(word in limits.text for word in ("attract", "below 1", "decay"))


def test_a_cycle_is_called_one_and_nothing_more(result: ConvergenceResult) -> None:
    turning = LinearModel(rotation(math.pi / 3))
    *_, limits = convergence_study(turning, batch_of_ones(), n_loops=40).findings()
    assert limits.value.split(" on ") == ["2 of 2", "cycles"] and limits.good is False
    assert not any(word in limits.text for word in ("attract", "below 1", "decay"))
    data = result.data.copy(deep=True)
    data["limit_status"][0] = Status.CYCLE
    *_, limits = dataclasses.replace(result, data=data).findings()
    assert "1 of 2" in limits.text and "1 more end" in limits.text


def test_a_cycle_where_no_answer_is_asked_for_does_not_contradict_what_settles(
    result: ConvergenceResult,
) -> None:
    data = result.data.copy(deep=True)
    data["limit_status"][:] = Status.CYCLE
    everywhere = data.assign(counted=data["counted"] | True)
    *_, limits = dataclasses.replace(result, data=everywhere).findings()
    assert limits.good is False  # every position counts, so one of the two measures is wrong
    settling, *_, limits = dataclasses.replace(result, data=data).findings()
    assert (settling.value, settling.good) == ("100% converge", True)
    assert limits.value == "converge where asked" and limits.good is None


def test_stability_is_claimed_of_measured_and_known_limits_only(result: ConvergenceResult) -> None:
    data = result.data.copy(deep=True)
    data["limit_status"][0] = Status.OUT_OF_BUDGET
    data["spectral_radius"][0] = np.nan
    limits = dataclasses.replace(result, data=data).findings()[-1]
    assert (limits.value, limits.good) == ("0.50", False)
    assert "1 of 2" in limits.text and "1 measured" in limits.text
    data["spectral_residual"][1] = 0.5
    limits = dataclasses.replace(result, data=data).findings()[-1]
    assert limits.value.startswith("1 of 2") and limits.good is None
    data["spectral_residual"][1], data["spectral_radius"][1] = 0, 1.2
    limits = dataclasses.replace(result, data=data).findings()[-1]
    assert (limits.value, limits.good) == ("1.20", False) and "below 1" not in limits.text
