from __future__ import annotations

from loopinterp.report.how_it_was_made import made_figures, seconds, setting_groups
from loopinterp.report.run_record import RunRecord
from tests.report import synthetic


def rows(n: int) -> list[dict[str, float]]:
    return [
        {"step": k, "loss": 1 / (k + 1), "exact_match": 0.5, "longest_n": k // 10, "lr": 1e-3}
        for k in range(n)
    ]


def test_the_training_curve_has_a_panel_for_each_curve() -> None:
    ((figure,), _) = made_figures(RunRecord(name="run", metrics=rows(40)))
    assert [trace["name"] for trace in figure.plot.to_dict()["data"]] == [
        "loss",
        "exact match",
        "longest length",
    ]
    assert figure.plot.to_dict()["layout"]["yaxis"]["type"] == "log"


def test_a_long_training_is_thinned_in_the_figure_but_whole_in_its_table() -> None:
    ((figure,), _) = made_figures(RunRecord(name="run", metrics=rows(5000)))
    x = figure.plot.to_dict()["data"][0]["x"]
    assert 300 < len(x) < 1200
    assert figure.data is not None and len(figure.data) == 5000


def test_metrics_of_another_kind_give_no_curve() -> None:
    assert made_figures(RunRecord(name="run", metrics=[{"epoch": 1}])) == ([], [])


def test_what_cannot_be_drawn_is_said_and_the_rest_is_drawn() -> None:
    record = RunRecord(name="r", metrics=[{"step": 1, "loss": "x"}], made={"stages": {"train": 1}})
    figures, problems = made_figures(record)
    assert [figure.title for figure in figures] == ["Time by stage"]
    assert problems == ["The metrics of training cannot be drawn (TypeError)."]


def test_stages_are_those_of_the_run_else_those_of_the_studies() -> None:
    results = {"attention": synthetic.attention()}
    assert RunRecord(name="run", results=results).stage_seconds == {"attention": 0.8}
    made = {"stages": {"train": 80}}
    record = RunRecord(name="run", results=results, made=made)
    assert record.stage_seconds == {"train": 80.0}
    ((figure,), _) = made_figures(record)
    assert "1 min 20 s in all" in figure.caption
    assert figure.data is not None and figure.data["seconds"].tolist() == [80.0]


def test_settings_are_flattened_within_their_group() -> None:
    groups = setting_groups({"a": {"b": {"c": [1, 2.5]}, "on": True}, "empty": {}, "seed": 3})
    assert groups == {"run": {"seed": "3"}, "a": {"b.c": "1, 2.5", "on": "yes"}}


def test_whole_minutes_and_hours_are_said_as_such() -> None:
    assert [seconds(value) for value in (10.4, 59, 60, 3599, 3600, 7199)] == [
        "10 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "1 h 59 min",
    ]
