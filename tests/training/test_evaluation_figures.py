"""Findings and figures of an evaluation."""

from __future__ import annotations

import numpy as np

from loopinterp.core.results import Figure, study
from loopinterp.models import LengthLine, LoopedTransformer
from loopinterp.tasks import Addition
from loopinterp.training import EvaluationResult, evaluate
from tests.training.tiny_run import TINY


def made_up(
    exact: list[list[float]], extra_loops: tuple[int, ...] = (0,), not_judged: tuple[str, ...] = ()
) -> EvaluationResult:
    """Two distributions, three lengths; the same numbers for every measure."""
    scores = np.array([exact] * len(extra_loops))
    constant = np.array([[0.5, 0.01, 0.0], [1.0, 1.0, 1.0]])
    with study(0) as watch:
        return EvaluationResult.of(
            watch,
            coords={
                "extra_loop": extra_loops,
                "distribution": ["uniform", "chain"],
                "length": [12, 24, 96],
            },
            exact_match=np.stack([scores] * 3, -1),
            bit_accuracy=np.stack([scores] * 3, -1),
            constant_exact_match=constant,
            constant_bit_accuracy=constant,
            task="addition",
            n_samples=300,
            trained_up_to=12,
            not_judged=not_judged,
        )


def trace_names(figure: Figure) -> set[str]:
    return {trace["name"] for trace in figure.plot.to_dict()["data"]}


def test_perfect_models_reach_the_last_length() -> None:
    findings = made_up([[1.0, 1.0, 0.99], [1.0, 1.0, 1.0]]).findings()
    # A constant answer is right on full chains: no evidence.
    assert [f.good for f in findings] == [True, True, None]
    assert [f.value for f in findings] == [
        "0.99 exact match",
        "0.99 exact match",
        "1.00 exact match",
    ]
    assert "random inputs" in findings[1].text and "8 times" in findings[1].text


def test_failures_are_said_plainly() -> None:
    findings = made_up([[1.0, 0.8, 0.995], [0.5, 0.4, 0.3]]).findings()
    assert [f.good for f in findings] == [False, False, False]
    assert [f.value for f in findings] == [
        "0.30 exact match",
        "0.80 exact match",
        "0.30 exact match",
    ]
    # The lowest share at each length, and the longest length that is answered well enough.
    assert all(part in findings[0].text for part in ("50%", "12", "30%", "96"))
    assert "80%, at length 24" in findings[1].text


def test_the_lowest_distribution_comes_first_and_ties_have_no_lowest() -> None:
    result = made_up([[1.0, 0.8, 0.2], [1.0, 0.4, 0.2]])
    assert [result.lowest(n).share for n in (12, 24, 96)] == [1.0, 0.4, 0.2]
    assert result.lowest(24).distributions == ("chain",)
    for n in (12, 96):
        assert result.lowest(n).distributions == ("uniform", "chain")
    assert "chains" not in result.findings()[0].text
    part = made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], not_judged=("propagate",)).findings()[0]
    assert part.good is None and "carry-rich digits" in part.text


def test_the_figure_marks_the_training_cutoff_and_its_control() -> None:
    (figure,) = made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).figures()
    assert figure.section == "generalisation"
    assert {line["x0"] for line in figure.plot.to_dict()["layout"]["shapes"]} == {12}
    assert "longest in training" in figure.caption
    drawn = figure.plot.to_dict()["data"]
    assert trace_names(figure) == {"model", "constant answer"}
    # A constant answer is right on full chains: it is no control there, which the words say.
    assert {trace["xaxis"] for trace in drawn if trace["name"] == "constant answer"} == {"x"}
    assert "full carry chains" in figure.control and "no evidence" in figure.control
    assert figure.data is not None
    assert len(figure.data) == 6


def test_a_constant_answer_that_beats_the_model_is_drawn() -> None:
    (figure,) = made_up([[1.0, 1.0, 1.0], [0.5, 0.4, 0.3]]).figures()
    constant = [t["xaxis"] for t in figure.plot.to_dict()["data"] if t["name"] == "constant answer"]
    assert "x2" in constant and "no evidence" not in figure.control


def test_measures_that_say_no_more_than_exact_match_are_not_drawn() -> None:
    def panels(result: EvaluationResult) -> int:
        return result.figures()[0].plot.to_dict()["layout"]["meta"]["loopinterp"]["panels"]

    assert panels(made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])) == 2
    assert panels(made_up([[1.0, 0.5, 1.0], [1.0, 1.0, 1.0]])) == 4


def test_a_task_on_whose_inputs_a_constant_is_right_is_not_ticked() -> None:
    result = made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    result.data["constant_exact_match"][:] = 1.0
    assert [f.good for f in result.findings()] == [None, None, None]


def test_no_rule_is_said_to_see_less_than_it_does() -> None:
    """A calibrated one sees the length of its input, and nothing else."""
    rules = {"calibrated": LengthLine(1.0, 0.0)}
    model = LoopedTransformer(TINY.model)
    result = evaluate(model, Addition(), [2], n_samples=2, stopping=rules, max_loops=4)
    caption = next(f.caption for f in result.figures() if f.title == "When to stop")
    assert "length" in caption and "its input" in caption and "T(n)" in caption


def test_varied_loops_get_their_own_figure() -> None:
    figures = made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], extra_loops=(-1, 0, 4)).figures()
    assert [f.title for f in figures] == ["Accuracy against length", "Accuracy against loops"]
    assert trace_names(figures[1]) == {"n = 12", "n = 24", "n = 96"}


def test_the_dotted_line_stands_at_the_loops_that_the_task_asks_for() -> None:
    figures = made_up([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], extra_loops=(-1, 0, 4)).figures()
    lines = figures[1].plot.to_dict()["layout"]["shapes"]
    assert [(line["x0"], line["x1"]) for line in lines] == [(0, 0)] * 2
