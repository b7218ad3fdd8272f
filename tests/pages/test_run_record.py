from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import Provenance, config_hash
from loopinterp.core.run_files import LinesDigest, Mismatch, Seal, record_how_it_was_made
from loopinterp.core.storage import (
    digest_tensors,
    read_arrays,
    read_json,
    write_arrays,
    write_tensors,
)
from loopinterp.pages import read_run, render_report, write_report
from loopinterp.pages.run_record import Problem, Trouble, spell_problem
from tests.pages import synthetic


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return synthetic.write_run(tmp_path / "run")


def _hash(run: Path) -> str:
    return config_hash(read_json(run / "config.json"))


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
    assert (problem.trouble, problem.name) == (Trouble.RESULT_UNREADABLE, "wavefront.safetensors")
    # A report is passed on: it names no folder of this machine.
    assert str(run) not in spell_problem(problem)


def test_a_result_of_other_weights_or_of_another_run_is_left_out_with_the_reason(
    run: Path,
) -> None:
    weights = {"w": torch.ones(2)}
    here = _hash(run)
    write_tensors(run / "model" / "model.safetensors", weights, Seal(here).texts())
    old, new = ({"model": {"weights_sha256": d}} for d in ("0ld", digest_tensors(weights)))
    both = [old["model"], new["model"]]
    cases = {
        "older": (Provenance(seed=0, config=old), Mismatch.OTHER_WEIGHTS),
        "others": (Provenance(seed=0, run="e15e"), Mismatch.OTHER_RUN),
        "nobodys": (Provenance(seed=0), Mismatch.UNKNOWN_MODEL),
        "mine": (Provenance(seed=0, config=new), None),
        "runs": (Provenance(seed=0, run=here), None),
        "both": (
            Provenance(seed=0, run=here, config={"models": both}),
            None,
        ),
    }
    for path in (run / "results").iterdir():
        path.unlink()
    for name, (provenance, _) in cases.items():
        made = synthetic.made_up("convergence")
        dataclasses.replace(made, provenance=provenance).save(run / "results", name)
    record = read_run(run)
    assert set(record.results) == {"mine", "runs", "both"}
    assert record.problems == [
        Problem(Trouble.RESULT_DISOWNED, f"{name}.safetensors", why)
        for name, (_, why) in sorted(cases.items())
        if why
    ]
    assert record.weights == digest_tensors(weights)
    page = render_report(record)
    assert record.weights in page and spell_problem(record.problems[-1]) in page


def test_results_beside_damaged_weights_are_shown_with_a_word(run: Path) -> None:
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"half")
    record = read_run(run)
    assert len(record.results) == 5 and record.weights == ""
    (problem,) = record.problems
    assert problem.trouble is Trouble.WEIGHTS_UNREADABLE


def test_a_pipe_in_place_of_the_weights_is_not_waited_for(run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    weights.parent.mkdir(exist_ok=True)
    weights.unlink(missing_ok=True)
    os.mkfifo(weights)
    assert read_run(run).n_parameters is None


def test_what_is_no_plain_file_among_results_is_skipped_with_a_word(run: Path) -> None:
    results = run / "results"
    (results / "folder.safetensors").mkdir()
    (results / "zeros.safetensors").symlink_to("/dev/zero")
    os.mkfifo(results / "pipe.safetensors")
    record = read_run(run)
    assert len(record.results) == 5
    assert {problem.trouble for problem in record.problems} == {Trouble.RESULT_UNREADABLE}
    assert [problem.name for problem in record.problems] == [
        "folder.safetensors",
        "pipe.safetensors",
        "zeros.safetensors",
    ]


HUGE = str(10**400)


@pytest.mark.parametrize(
    "value",
    ["1.5e308", "Infinity", "-Infinity", "NaN", HUGE, "1" * 5000, '"\\ud800"', "[" * 200_000],
)
def test_one_bad_value_does_not_cost_the_report(run: Path, value: str) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    bad_line = f'{{"step": 3, "loss": {value}}}'
    (run / "metrics.jsonl").write_text("\n".join([lines[0], bad_line, *lines[1:]]))
    made = f'{{"run": "{_hash(run)}", "command": "demo", "stages": {{"train": {value}}}}}'
    (run / "made.json").write_text(made)
    record = read_run(run)
    assert len(record.metrics) == len(lines) and len(record.results) == 5
    line, made_of = record.problems
    assert line == Problem(Trouble.LINE_DAMAGED, "2")
    assert made_of in (Problem(Trouble.ENTRY_DAMAGED, "stages"), Problem(Trouble.MADE_UNREADABLE))
    shutil.rmtree(run / "results")  # which take long to draw, whatever the value
    assert spell_problem(line) in write_report(run).read_text()


def test_metrics_that_cannot_be_read_are_a_problem(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/proc/self/mem")  # a plain file that fails when it is read
    record = read_run(run)
    assert record.metrics == [] and len(record.results) == 5
    assert record.problems == [Problem(Trouble.METRICS_UNREADABLE, detail="Input/output error")]


@pytest.mark.parametrize(
    "made", ['{"command": "a\\ud800"}', '{"unsaid": {"\\ud800": "b"}}', '{"versions": {"a": [1]}}']
)
def test_texts_that_are_none_are_left_out(run: Path, made: str) -> None:
    (run / "made.json").write_text(made.replace("{", f'{{"run": "{_hash(run)}", ', 1))
    record = read_run(run)
    assert record.made == {} and len(record.problems) == 1
    shutil.rmtree(run / "results")
    assert write_report(run).read_text().endswith("</html>")


def test_a_result_with_bad_values_is_a_problem_and_the_rest_is_drawn(run: Path) -> None:
    write_tensors(
        run / "results" / "half.safetensors",
        {"patterns": torch.ones(2, dtype=torch.bfloat16)},
        {"loopinterp.result": "{}"},
    )
    path = run / "results" / "attention.safetensors"
    arrays, texts = read_arrays(path)
    (key, text), *_ = texts.items()
    labels = [chr(0xD800), *json.loads(text)["fields"]["labels"][1:]]
    header = json.loads(text)
    header["fields"]["labels"] = labels
    write_arrays(path, arrays, metadata={key: json.dumps(header)})
    problems = {(problem.trouble, problem.name) for problem in read_run(run).problems}
    assert (Trouble.RESULT_UNREADABLE, "half.safetensors") in problems
    page = write_report(run).read_text()
    assert "half.safetensors" in page and "Exact match" in page


def test_a_damaged_line_of_metrics_is_a_problem(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99']))
    record = read_run(run)
    assert len(record.metrics) == len(lines)
    assert record.problems == [Problem(Trouble.LINE_DAMAGED, str(len(lines) + 1))]


def test_beside_a_damaged_line_steps_after_the_last_are_still_of_another_run(run: Path) -> None:
    """The lines of a trained run, cut short, in the folder of a run that made no step."""
    config = json.loads((run / "config.json").read_text())
    del config["steps"]
    (run / "config.json").write_text(json.dumps(config))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.rindex("{") + 9])
    record = read_run(run)
    assert record.metrics == []
    assert Trouble.FILE_DISOWNED in {problem.trouble for problem in record.problems}


def test_lines_after_the_sealed_ones_do_not_hide_that_those_were_changed(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    seal = LinesDigest(text.splitlines()).seal(_hash(run))
    write_tensors(run / "model" / "model.safetensors", {"w": torch.ones(2)}, seal.texts())
    (run / "metrics.jsonl").write_text(text + '{"step": 99')
    assert len(read_run(run).metrics) == seal.n_lines
    changed = text.replace('"loss": ', '"loss": 1', 1)
    assert changed != text
    (run / "metrics.jsonl").write_text(changed + '{"step": 99')
    assert read_run(run).metrics == []


def test_with_a_sealed_line_damaged_the_others_are_said_to_be_unchecked(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    seal = LinesDigest(lines).seal(_hash(run))
    write_tensors(run / "model" / "model.safetensors", {"w": torch.ones(2)}, seal.texts())
    (run / "metrics.jsonl").write_text("\n".join(["?", *lines[1:]]))
    record = read_run(run)
    assert (
        len(record.metrics) == len(lines) - 1
        and Problem(Trouble.LINES_UNCHECKED) in record.problems
    )
    zeroed = [json.dumps(dict.fromkeys(json.loads(line), 0)) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(["?", *zeroed[1:]]))
    assert read_run(run).metrics == []  # a run's steps go up


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
    assert record.problems == [Problem(Trouble.LINE_DAMAGED, "1")]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([1], Problem(Trouble.MADE_UNREADABLE)),
        ({"stages": 3}, Problem(Trouble.ENTRY_DAMAGED, "stages")),
        ({"stages": {"train": "long"}}, Problem(Trouble.ENTRY_DAMAGED, "stages")),
        ({"versions": [1]}, Problem(Trouble.ENTRY_DAMAGED, "versions")),
        ({"command": 3}, Problem(Trouble.ENTRY_DAMAGED, "command")),
    ],
)
def test_what_is_of_another_type_in_made_json_is_left_out(
    run: Path, made: object, problem: Problem
) -> None:
    sealed = made | {"run": _hash(run)} if isinstance(made, dict) else made
    (run / "made.json").write_text(json.dumps(sealed))
    record = read_run(run)
    render_report(dataclasses.replace(record, results={}))
    assert record.made == {}
    assert record.problems == [problem]


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
    assert (problem.trouble, problem.name) == (Trouble.RESULT_UNREADABLE, "attention.safetensors")


def test_what_was_said_before_a_study_could_no_longer_say_it_is_not_shown(run: Path) -> None:
    before = read_run(run)
    name = next(iter(before.results))
    record_how_it_was_made(run, skipped={name: "the model makes one loop"})
    assert set(read_run(run).results) == set(before.results) - {name}
    record_how_it_was_made(run, seconds={name: 1.0})  # it was made again
    assert set(read_run(run).results) == set(before.results)


@pytest.mark.parametrize("trouble", Trouble)
@pytest.mark.parametrize("detail", ["ValueError", *Mismatch])
def test_every_problem_is_a_sentence(trouble: Trouble, detail: str | Mismatch) -> None:
    sentence = spell_problem(Problem(trouble, "part", detail))
    assert sentence and "{" not in sentence
    assert ("part" in sentence) == ("{name" in trouble.value)
