from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopinterp.errors import CheckpointError, InputError
from loopinterp.report import read_run, render_report
from loopinterp.storage import read_arrays, write_arrays
from tests.report import synthetic


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return synthetic.write_run(tmp_path / "run")


def test_a_run_is_read_whole(run: Path) -> None:
    record = read_run(run)
    assert record.name == "run"
    assert list(record.results) == sorted(record.results)
    assert set(record.results) == {
        "attention",
        "convergence",
        "generalisation",
        "program",
        "wavefront",
    }
    assert record.config["seed"] == 0 and record.metrics[0]["step"] == 0
    assert record.made["command"].startswith("loopinterp demo")
    assert record.problems == []


def test_a_damaged_result_is_a_problem_and_the_others_are_read(run: Path) -> None:
    (run / "results" / "wavefront.safetensors").write_text("{")
    record = read_run(run)
    assert "wavefront" not in record.results and "convergence" in record.results
    (problem,) = record.problems
    assert problem.startswith("wavefront.safetensors cannot be read")
    assert "restore it from a copy" in problem
    assert str(run) not in problem  # a report is passed on: it names no folder of this machine


def test_a_damaged_line_of_metrics_is_a_problem(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99']))
    record = read_run(run)
    assert len(record.metrics) == len(lines)
    assert record.problems == [f"Line {len(lines) + 1} of metrics.jsonl is damaged and left out."]


def test_a_run_without_analyses_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    record = read_run(tmp_path)
    assert not record.results and not record.metrics and not record.made


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_run_is_refused(tmp_path: Path, there: bool) -> None:
    folder = tmp_path if there else tmp_path / "absent"
    with pytest.raises(InputError, match=r"without config\.json" if there else "no such folder"):
        read_run(folder)


@pytest.mark.parametrize("text", ["[1]", "null", "{", "\xff"])
def test_a_damaged_configuration_is_one_clear_error(run: Path, text: str) -> None:
    (run / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_run(run)


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b'{"step": "many"}', b'{"a": "\xff"}'])
def test_a_line_of_metrics_of_another_kind_is_a_problem(run: Path, line: bytes) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([line, *lines]))
    record = read_run(run)
    assert len(record.metrics) == len(lines)
    assert record.problems == ["Line 1 of metrics.jsonl is damaged and left out."]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([1], "made.json is no JSON object"),
        ({"stages": 3}, "Entry 'stages' of made.json"),
        ({"stages": {"train": "long"}}, "Entry 'stages' of made.json"),
        ({"versions": [1]}, "Entry 'versions' of made.json"),
        ({"command": 3}, "Entry 'command' of made.json"),
    ],
)
def test_what_is_of_another_type_in_made_json_is_left_out(
    run: Path, made: object, problem: str
) -> None:
    (run / "made.json").write_text(json.dumps(made))
    record = read_run(run)
    render_report(record)
    assert record.made == {}
    (said,) = record.problems
    assert said.startswith(problem)


@pytest.mark.parametrize("part", ["kind", "axes", "coords", "wall_time", "provenance", "fields"])
def test_a_result_with_wrong_axes_or_fields_is_a_problem(run: Path, part: str) -> None:
    path = run / "results" / "attention.safetensors"
    arrays, texts = read_arrays(path)
    (key, text), *_ = texts.items()
    header = json.loads(text)
    if part == "axes":
        header["axes"]["patterns"] = header["axes"]["patterns"][1:]
    elif part == "coords":
        header["coords"]["loop"] = [0]
    elif part == "wall_time":
        header["provenance"]["wall_time"] = "long"
    else:
        header[part] = "another" if part == "kind" else [1]
    write_arrays(path, arrays, metadata={key: json.dumps(header)})
    record = read_run(run)
    assert "attention" not in record.results
    (problem,) = record.problems
    assert problem.startswith("attention.safetensors cannot be read")
    assert "Run the study again" in problem
