from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loopinterp
from loopinterp import cli, pages
from loopinterp.app import runs, workflow
from loopinterp.app.catalogue import STUDIES
from loopinterp.app.session import Session
from loopinterp.cli.shared import print_document
from loopinterp.core import storage
from loopinterp.core.errors import InputError
from loopinterp.core.results import Result, study
from loopinterp.tasks import Addition
from loopinterp.tasks.task import Batch
from loopinterp.training import RECIPES, Run, TrainingConfig, get_recipe
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parent.parent.parent

COMMANDS = ("demo", "train", "compile", "evaluate", "grid", "analyze", "report", "tasks")

COMMANDS += ("benchmark", "lens", "programs", "recipes", "studies", "sweep", "zoo")


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""

    def run(*arguments: str | Path) -> Answer:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = stop.value.code
        return Answer(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture
def run(barely_trained: Path, tmp_path: Path) -> Path:
    """A trained run that a test may change."""
    return Path(shutil.copytree(barely_trained, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# What it prints


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(command: Command, name: str) -> None:
    answer = command(name, "--help")
    assert answer.status == 0
    assert f"  loopinterp {name}" in answer.out.split("Examples:")[1]


def test_help_lists_every_command(command: Command) -> None:
    answer = command("--help")
    assert answer.status == 0
    assert all(f"\n  {name} " in answer.out for name in COMMANDS)


def test_the_version_is_that_of_the_package(command: Command) -> None:
    assert command("--version").out == f"loopinterp {loopinterp.__version__}\n"


def test_tasks_and_recipes_are_listed_in_words_and_as_json(command: Command) -> None:
    assert "running XOR" in command("tasks").out.replace("Running", "running")
    listed = {facts["task"]: facts for facts in command("tasks", "--json").json}
    assert listed["addition"]["loops T(n)"]["n=8"] == 9
    recipes = {facts["recipe"]: facts for facts in command("recipes", "--json").json}
    assert set(recipes) == set(RECIPES)
    assert 40_000 < recipes["addition"]["weights"] < 60_000
    assert recipes["parity-no-window"]["trained to"] == 20
    whole = command("recipes", "addition", "--json").json
    assert TrainingConfig.from_dict(whole["config"]) == RECIPES["addition"]
    said = command("recipes", "addition").out
    parts = (line.strip().partition(": ") for line in said.splitlines())
    settings = {name: value for name, _, value in parts}
    assert settings["config.state_noise"] == "0.3" and settings["measured.seeds"] == "0, 1, 2"
    assert "lr" not in said  # a default


def test_a_prompt_is_shown_on_a_page_of_its_own(command: Command, tmp_path: Path) -> None:
    run, page = tmp_path / "mine", tmp_path / "lens.html"
    loopinterp.zoo.pretrained_run("addition", run)
    answer = command("lens", run, "--prompt", "5 + 3", "--out", page, "--json").json
    assert answer["tokens"] == ["BOS", "1+1", "0+1", "1+0", "0+0"]
    assert answer["page"] == str(page) and page.stat().st_size < 200_000
    said = command("lens", run, "--prompt", "1+1 0+1", "--loops", "2").out
    assert "has all 2 symbols correct" in said and said.endswith(f"{run / 'lens.html'}\n")
    (tmp_path / "notes.html").write_text("mine")
    refused = command("lens", run, "--prompt", "1+1", "--out", tmp_path / "notes.html")
    assert_refused(refused, "output file")
    assert_refused(command("lens", run, "--prompt", "one"), "expected words of the task")


def test_the_zoo_is_listed_shown_and_copied(command: Command, tmp_path: Path) -> None:
    listed = {row["name"]: row for row in command("zoo", "--json").json}
    assert set(listed) == set(loopinterp.list_pretrained().index)
    assert all(name in command("zoo").out for name in listed)
    card = command("zoo", "parity-no-window", "--json").json
    assert card["recipe"] == "parity-no-window" and card["fails_at"]
    assert "beyond T(n)" in command("zoo", "parity-no-window").out
    out = tmp_path / "mine"
    assert f"Next: loopinterp analyze {out}" in command("zoo", "parity", "--out", out).out
    answer = command("evaluate", out, "--length", 4, "--samples", 8, "--json", "--no-progress")
    assert answer.json["cells"][0]["exact_match"] == 1.0
    assert_refused(command("zoo", "--out", out), "NAME: expected the model to copy")
    assert_refused(command("zoo", "additon"), "pretrained model", "Did you mean 'addition'?")


def test_the_benchmark_is_written_and_said_by_its_digest(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "known"
    listed = command("benchmark", out, "--only", "prefix_xor", "--json").json
    assert {"prefix_xor.bare", "prefix_xor.trained"} <= set(listed["models"])
    assert all((out / name / "card.json").exists() for name in listed["models"])
    assert listed["digest"] in command("benchmark", out, "--only", "prefix_xor.bare").out
    assert_refused(command("benchmark", out, "--only", "prefix_xro"), "Did you mean")
    assert_refused(command("benchmark", tmp_path), "folder: expected a new folder")


def test_a_task_without_a_recipe_is_refused_with_what_there_is(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopinterp.training, "list_recipes", lambda: ("addition", "parity"))
    arguments = ("train", "--task", "prefix_sum", "--out", tmp_path / "out")
    assert_refused(
        command(*arguments), "recipe for prefix_sum", "(addition, parity)", "add --without-recipe"
    )
    assert not (tmp_path / "out").exists()
    twice = ("--without-recipe", "--recipe", "parity")
    assert_refused(command(*arguments, *twice), "--recipe and --without-recipe")
    small = ("--steps", 1, "--set", "model.d_model=16", "--set", "model.n_heads=2")
    answer = command(*arguments, "--without-recipe", *small, "--no-progress")
    assert answer.status == 0
    assert "No recipe" in answer.err and "prefix_sum" in answer.err


def test_a_recipe_that_does_not_reach_far_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = get_recipe("parity").measured.replace(
        seeds=(0,), exact_match={"uniform": {12: (1.0,)}, "biased": {12: (1.0,)}}
    )
    near = get_recipe("parity").replace(measured=measured)
    known = {"addition": get_recipe("addition"), "parity": near}
    monkeypatch.setattr(loopinterp.training, "list_recipes", lambda: tuple(known))
    monkeypatch.setattr(loopinterp.training, "get_recipe", known.__getitem__)
    with pytest.raises(InputError, match=r"^recipe.*--recipe parity"):
        runs.configure(task="parity")
    assert runs.configure(recipe="parity") == near.config


def test_a_run_is_trained_evaluated_analysed_and_reported(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = ("model.d_model=32", "model.n_heads=2", "curriculum.max_n=3")
    arguments = [part for value in sets for part in ("--set", value)]
    answer = command(
        "train", "--task", "addition", "--steps", "30", "--seed", "5", *arguments,
        "--no-progress", "--json", "--out", out,
    )  # fmt: skip
    assert (answer.status, answer.err) == (0, "")
    assert answer.json["steps"] == 30
    config = Run.load(out).config
    assert isinstance(config, TrainingConfig)
    assert (config.seed, config.steps, config.model.d_model) == (5, 30, 32)

    answer = command("evaluate", out, "--length", 2, "--length", 3, "--samples", 8, "--json")
    assert "generalisation:" in answer.err
    cells = answer.json["cells"]
    assert sorted({cell["length"] for cell in cells}) == [2, 3]
    assert all(0 <= cell["exact_match"] <= 1 for cell in cells)

    answer = command("analyze", out, "--study", "attention", "--json", "--no-progress")
    assert answer.err == ""
    assert Path(answer.json["results"]["attention"]["file"]).is_file()

    answer = command("report", out, "--json")
    assert answer.json["report"] == str(out / "report.html")
    assert "<html" in (out / "report.html").read_text()[:200]


def test_several_runs_are_put_side_by_side_and_opened(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    other, page = shutil.copytree(run, tmp_path / "other"), tmp_path / "both.html"
    answer = command("report", run, other, "--out", page, "--open", "--json")
    assert answer.json == {"runs": [str(run), str(other)], "report": str(page)}
    assert opened == [page.resolve().as_uri()]
    assert "2 runs" in page.read_text()
    assert_refused(command("report", run, other), "--out", "the file to write")
    assert_refused(command("report", run, run, "--out", page), "two or more, each once")


def test_stopping_rules_are_compared_with_reading_at_T_n(command: Command, run: Path) -> None:
    arguments = ("--stop", "residual=0.1", "--stop", "max-confidence", "--samples", 8)
    answer = command("evaluate", run, *arguments, "--length", 2, "--json", "--no-progress")
    stopped = {row["rule"]: row["stopped_at"] for row in answer.json["stopped"]}
    assert stopped["oracle T(n)"] == 3
    hindsight = {"best loop in hindsight", "any loop right"}
    assert set(stopped) == {"oracle T(n)", "residual < 0.1", "max confidence"} | hindsight
    every = command(
        "evaluate",
        run,
        "--stopping",
        "--loops",
        "1,3",
        "--samples",
        8,
        "--length",
        2,
        "--json",
        "--no-progress",
    ).json
    assert len({row["rule"] for row in every["stopped"]}) == 12
    assert {row["loop"] for row in every["by_loop"]} >= {1, 3}
    assert "oracle T(n)" in command("evaluate", run, *arguments, "--length", 2).out


def test_a_grid_is_made_of_a_task_that_draws_operands_of_given_lengths(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("grid", run, "--to", 2, "--loops", "1,3", "--samples", 4, "--no-progress")
    assert_refused(command(*arguments), "sample_operands", "'addition'")

    def draw(self: Addition, n_a: int, n_b: int, **options: Any) -> Batch:
        return self.sample(max(n_a, n_b), **options)

    monkeypatch.setattr(Addition, "sample_operands", draw, raising=False)
    answer = command(*arguments, "--json").json
    cells = {(cell["loop"], cell["n_a"], cell["n_b"]) for cell in answer["cells"]}
    assert cells == set(itertools.product((1, 3), (1, 2), (1, 2)))
    assert Path(answer["file"]).is_file()
    assert not (run / "grid.unfinished.safetensors").exists()
    assert_refused(command("grid", run, "--to", 2, "--loops", "3,1"), "increasing")


def test_a_program_is_compiled_into_a_run_that_answers_right(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "hidden"
    hide = ("--disguise", "permute", "--disguise", "rotate", "--seed", 3)
    answer = command("compile", "parity", "--max-length", 6, *hide, "--out", out, "--json")
    assert (answer.json["task"], answer.json["program"]) == ("parity", "parity")
    run = Run.load(out)
    assert (run.cutoff, run.is_trained, run.finished) == (6, False, True)
    assert run.config.to_dict()["origin"].endswith("rotated (seed 3)")
    cells = command("evaluate", out, "--samples", 16, "--json", "--no-progress").json["cells"]
    assert {cell["length"]: cell["exact_match"] for cell in cells} == {1: 1.0, 3: 1.0, 6: 1.0}
    made = json.loads((out / "made.json").read_text())["command"]
    wanted = "--max-length 6 --disguise permute --disguise rotate --seed 3"
    assert made == f"loopinterp compile parity {wanted} --out NEW"
    again = command("compile", "parity", "--max-length", 6, "--out", out)
    assert_refused(again, "a folder without a run")
    trained = command("train", "--task", "parity", "--out", out, "--no-progress")
    assert_refused(trained, "as the run in")


def test_a_compilation_that_was_killed_at_any_write_is_made_anew(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(out: Path) -> dict[str, bytes]:
        paths = [path for path in out.rglob("*") if path.is_file()]
        return {str(path.relative_to(out)): path.read_bytes() for path in paths}

    def stop_at(name: str) -> Callable[[Path, bytes], None]:
        def write(path: Path, data: bytes) -> None:
            if path.relative_to(out).as_posix() == name:
                raise KeyboardInterrupt
            write_bytes(path, data)

        return write

    ask, write_bytes = ("compile", "parity", "--max-length", 4, "--out"), storage.write_bytes
    command(*ask, tmp_path / "whole")
    whole = files(tmp_path / "whole")
    for number, name in enumerate(whole):
        out = tmp_path / f"killed-{number}"
        monkeypatch.setattr(storage, "write_bytes", stop_at(name))
        with pytest.raises(KeyboardInterrupt):
            runs.compile_run("parity", out, max_length=4)
        assert name not in files(out)
        monkeypatch.setattr(storage, "write_bytes", write_bytes)
        assert command(*ask, out).status == 0
        assert files(out) == whole


def test_what_was_left_out_and_what_comes_next_is_said(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a run"
    said = command("compile", "parity", "--max-length", 6, "--out", out).out
    analyze, report = f"loopinterp analyze '{out}'\n", f"loopinterp report '{out}'\n"
    assert said.endswith(f"Next: {analyze}")
    kept = tuple(one for one in STUDIES if one.name in ("wavefront", "attention"))
    monkeypatch.setattr(workflow, "STUDIES", kept)
    said = command("analyze", out, "--no-progress").out
    assert f"Next: {report.strip()} --open" in said and len(said.splitlines()) <= 12
    assert all(len(line.replace(str(out), "")) <= 100 for line in said.splitlines())
    assert said.endswith(f"All findings: {report.strip()} --text\n")
    assert set(command("analyze", out, "--json").json["left_out"]) == {"wavefront"}
    one = command("analyze", out, "--study", "attention", "--no-progress").out
    assert one.endswith(f"Next: {report}") and one.startswith("- ")
    said = command("evaluate", out, "--samples", 4, "--length", 2, "--no-progress").out
    assert said.endswith(f"Next: {analyze}")


def test_words_come_by_default_and_name_the_report(command: Command, run: Path) -> None:
    text = command("evaluate", run, "--samples", 8, "--length", 2, "--no-progress").out
    assert "exact_match" in text
    assert command("report", run).out.strip() == str(run / "report.html")


def test_the_same_train_command_goes_on_or_says_that_all_is_done(
    command: Command, run: Path
) -> None:
    before = contents(run)
    answer = command("train", "--config", run / "config.json", "--out", run, "--no-progress")
    assert answer.status == 0
    after = contents(run)
    after.pop("made.json")
    assert after == before


def test_the_recorded_command_trains_the_same_run_again(command: Command, run: Path) -> None:
    again = run.parent / "again"
    command("train", "--config", run / "config.json", "--out", again, "--no-progress")
    for name in ("config.json", "metrics.jsonl", "model/model.safetensors"):
        assert contents(again)[name] == contents(run)[name]


def _strict(text: str) -> Any:
    """A document as other parsers than Python's read it: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


TINY = ["--set", "model.d_model=8", "--set", "model.n_heads=1"]

TINY += ["--set", "batch_size=4", "--set", "steps=2"]

AS_JSON: dict[str, list[str]] = {
    "analyze": ["RUN", "--study", "attention", "--no-progress"],
    "benchmark": ["NEW", "--only", "parity", "--no-progress"],
    "compile": ["parity", "--max-length", "3", "--out", "NEW"],
    "demo": ["--out", "RUN"],
    "evaluate": ["RUN", "--length", "2", "--samples", "2", "--stop", "residual", "--loops", "0,1"],
    "grid": ["RUN", "--to", "1", "--samples", "2", "--loops", "0,1", "--no-progress"],
    "lens": ["RUN", "--prompt", "1+1", "--loops", "2", "--out", "NEW", "--no-progress"],
    "programs": [],
    "recipes": ["addition"],
    "report": ["RUN", "--out", "NEW"],
    "studies": [],
    "sweep": ["SWEEP", "--out", "NEW", "--only", "steps=2", "--no-progress"],
    "tasks": [],
    "train": ["--task", "addition", *TINY, "--out", "NEW", "--no-progress"],
    "zoo": [],
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_is_printed_as_json_is_read_by_any_parser(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    smoke = json.loads((ROOT / "analyses" / "sweeps" / "smoke.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps(smoke | {"grid": {"steps": [2]}}))
    if name == "demo":
        page = run / "report.html"
        pages = workflow.DemoPages(report=page, finite=page, comparison=page)
        monkeypatch.setattr(workflow, "demo", lambda out, **_: pages)
    if name == "grid":
        command("train", "--task", "abacus_addition", "--without-recipe", *TINY, "--out", run / "g")
    places = {"RUN": run / "g" if name == "grid" else run, "NEW": tmp_path / "new"}
    places["SWEEP"] = tmp_path / "sweep.json"
    answer = command(name, *(places.get(word, word) for word in AS_JSON[name]), "--json")
    assert answer.status == 0, answer.err
    assert _strict(answer.out)


def test_a_number_that_is_none_is_null_wherever_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = [float("nan"), np.float32("inf"), np.array([1, -np.inf]), {"x": (np.nan,)}, Path("a")]
    print_document({"odd": odd}, "", as_json=True)
    assert _strict(capsys.readouterr().out) == {"odd": [None, None, [1, None], {"x": [None]}, "a"]}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--task", "addition", "--out", "--json"],
        ["evaluate", "RUN", "--stop", "--no-progress"],
        ["lens", "RUN", "--prompt", "--lens", "tuned"],
        ["benchmark", "NEW", "--only", "-h"],
    ],
)
def test_an_option_is_no_value_of_another_one(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    answer = command(*({"RUN": run}.get(word, word) for word in words))
    assert_refused(answer, words[-3] if words[-1] == "tuned" else words[-2])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_value_that_looks_like_an_option_can_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("compile", "parity", "--max-length", "3", "--out=--json").status == 0
    assert (tmp_path / "--json" / "config.json").is_file()


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(loopinterp.__file__).parent.parent)} | more


IN_TURN = """
import json, sys
import loopinterp.cli
statuses = []
for words in json.loads(sys.argv[1]):
    try:
        loopinterp.cli.main(words)
    except SystemExit as stop:
        statuses.append(stop.code or 0)
print(statuses)
"""
"""Runs commands one after another, and prints their statuses."""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_a_terminal_cannot_write_does_not_change_the_status(
    warm_python: WarmPython, run: Path, encoding: str
) -> None:
    odd = run.parent / os.fsdecode(b"r\xff \xe2\x80\x94")  # no UTF-8, and a dash that ASCII lacks
    shutil.copytree(run, odd)
    commands = [["evaluate", odd, "--length", "2", "--samples", "4"], ["report", odd], ["tasks"]]
    commands = [list(map(str, words)) for words in [*commands, ["report", odd / "absent"]]]
    done = warm_python.run(
        "-c", IN_TURN, json.dumps(commands), env=_environment(PYTHONIOENCODING=encoding)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2]" and "Traceback" not in done.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt arrives, also where a shell that ran the tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5])
def test_an_interrupt_is_one_line_and_status_130(tmp_path: Path, seconds: float) -> None:
    # The moment at which the package has been found, whatever Python's own start takes.
    script = (
        "import sys, loopinterp.cli\n"
        "print('started', flush=True)\n"
        "loopinterp.cli.main(sys.argv[1:])"
    )
    words = ["train", "--task", "addition", "--out", str(tmp_path / "run"), "--no-progress"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(0.02 + seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1 and "Traceback" not in err


def test_so_it_is_in_the_middle_of_a_training(warm_python: WarmPython, tmp_path: Path) -> None:
    script = (
        "import signal, sys, loopinterp.cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "loopinterp.cli.main(sys.argv[1:])"
    )
    out, err = tmp_path / "run", tmp_path / "err"
    words = ["train", "--task", "addition", "--out", str(out), "--no-progress"]
    words += ["--set", "log_every=1", "--set", "checkpoint_every=2"]
    process = warm_python.start(["-c", script, *words], [os.devnull, err], env=_environment())
    while not (out / "state" / "checkpoint.safetensors").exists():
        assert process.poll() is None, err.read_text()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, err.read_text()
    [line] = err.read_text().splitlines()
    assert "Traceback" not in line


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_a_library_turns_into_its_own_error_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy was interrupted") from None

    monkeypatch.setattr("loopinterp.cli.shared.run", run)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 130 and len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_python_m_is_the_same_command(warm_python: WarmPython, tmp_path: Path) -> None:
    command = ["-m", "loopinterp", "report", str(tmp_path / "absent")]
    done = warm_python.run(*command, env=_environment())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: run ")
    assert "Traceback" not in done.stderr


# What can go wrong


def test_a_sweep_is_a_table_and_a_page_and_its_status_says_what_failed(
    command: Command, tmp_path: Path
) -> None:
    file, out = ROOT / "analyses" / "sweeps" / "smoke.json", tmp_path / "out"
    one = ("sweep", file, "--out", out, "--only", "loop_norm=true, state_noise=0")
    answer = command(*one, "--set", "steps=2", "--no-progress", "--json")
    assert answer.status == 0 and not answer.json["failed"] and len(answer.json["missing"]) == 6
    assert sum(cell["n_seeds"] == 2 for cell in answer.json["cells"]) == 2 * 3
    assert "Plotly" in Path(answer.json["page"]).read_text()
    assert Path(answer.json["table"]).read_text().startswith("setting,extra_loop,distribution")
    failing = json.loads(file.read_text()) | {"grid": {"model.n_heads": [3, 4], "steps": [2]}}
    (tmp_path / "failing.json").write_text(json.dumps(failing))
    answer = command("sweep", tmp_path / "failing.json", "--out", tmp_path / "two", "--no-progress")
    failed = "n_heads=3, steps=2, seed 0"
    assert answer.status == 1 and re.search(rf"\b2 of 4\b.*: {failed}", answer.out)
    assert "n_heads=4, steps=2" in answer.out
    assert_refused(command("sweep", file, "--out", out, "--scale", "paper"), "scale", "'paper'")
    assert_refused(command("sweep", file, "--out", out, "--cluster-set", "x"), "KEY=VALUE")
    assert_refused(command(*one, "--set", "steps=3"), "steps: expected 2, as the run in")


def assert_refused(answer: Answer, *words: str) -> None:
    assert answer.status == 2, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    (message,) = (line for line in answer.err.splitlines() if line.startswith("Error: "))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["expected --task NAME, --recipe NAME or --config FILE"]),
        (["--task", "additon"], ["Did you mean 'addition'?"]),
        (["--recipe", "additon"], ["recipe", "Did you mean "]),
        (["--task", "parity", "--recipe", "addition"], ["'addition', as the recipe has it"]),
        (["--recipe", "addition", "--config", "x.json"], ["a recipe or a file"]),
        (["--config", "absent.json"], ["absent.json", "No such file"]),
        (["--task", "addition", "--set", "steps"], ["key=value"]),
        (["--task", "addition", "--set", "stepz=3"], ["stepz", "Did you mean 'steps'?"]),
        (["--task", "addition", "--set", "steps=many"], ["steps", "an integer"]),
        (["--task", "addition", "--set", "model.positions=polar"], ["positions", "polar"]),
        (["--task", "addition", "--set", "model.d_vocab=9"], ["model.d_vocab", "6"]),
        (["--task", "addition", "--set", "task_settings.format=pears"], ["Did you mean 'pairs'?"]),
        (["--task", "addition", "--set", "distribution=chains"], ["Did you mean 'chain'?"]),
        (["--task", "addition", "--steps", "0"], ["steps", "an integer >= 1"]),
        (["--task", "addition", "--steps", "x"], ["--steps"]),
        (["--task", "addition", "--seed", "-1"], ["seed"]),
        (["--task", "addition", "--precision", "fp8"], ["precision", "bf16"]),
        (["--task", "addition", "--device", "tpu"], ["device", "tpu"]),
        (["--task", "addition", "--device", "cuda:99"], ["cuda:99", "expected a GPU"]),
        (["--task", "addition", "--device", "cuda:²"], ["device", "auto, cpu, cuda"]),
        (["--task", "addition", "--seed", str(2**63)], ["seed", "9223372036854775807"]),
        (["--task", "addition", "--set", f"seed={2**63}"], ["seed", "0..9223372036854775807"]),
        (["--task", "addition", "--threads", "100000"], ["--threads", "256"]),
        (["--task", "addition", "--set", "threads=100000"], ["threads", "1..256"]),
        (["--task", "addition", "--set", "model.n_layers=1e20"], ["n_layers", "1..1000"]),
        (["--task", "addition", "--set", f"model.n_layers={10**20}"], ["n_layers", "1..1000"]),
        (["--task", "addition", "--set", f"model.d_model={10**9}"], ["d_model", "weights"]),
        (["--task", "addition", "--set", f"steps={'9' * 5000}"], ["steps", "an integer"]),
        (["--task", "addition", "--set", f"batch_size={10**9}"], ["batch_size", "positions"]),
        (
            ["--task", "addition", "--set", f"curriculum.max_n={10**9}"],
            ["positions together", "length 1,000,000,000"],
        ),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    answer = command("train", *arguments, "--out", tmp_path / "out", "--no-progress")
    assert_refused(answer, *words)
    assert not (tmp_path / "out").exists()


def test_cuda_without_a_gpu_is_refused_by_every_command_that_takes_a_device(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = contents(run)
    for name in ("evaluate", "analyze"):
        answer = command(name, run, "--device", "cuda")
        assert_refused(answer, "device 'cuda'", "expected a GPU", "cpu")
    assert contents(run) == before


def test_the_out_folder_must_be_writable(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    arguments = ("train", "--task", "addition", "--out", tmp_path / "file" / "run")
    assert_refused(command(*arguments), "output folder", "can be written")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_run_is_never_overwritten_by_another(command: Command, run: Path) -> None:
    before = contents(run)
    other = command("train", "--task", "addition", "--out", run, "--no-progress")
    assert_refused(other, "train into a new folder")
    again = command("train", "--config", run / "config.json", "--no-resume", "--out", run)
    assert_refused(again, "a folder without a run")
    assert contents(run) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--task", "addition", "--out", ""],
        ["compile", "ripple", "--max-length", "4", "--out", " "],
        ["demo", "--out", ""],
        ["evaluate", ""],
        ["train", "--config", "", "--out", "x"],
        ["report", "a\0b"],
    ],
)
def test_an_empty_path_is_not_the_folder_one_happens_to_be_in(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(command(*arguments), "expected a path, got")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["config.json", "model/config.json"])
@pytest.mark.parametrize("value", [None, 10**20, 1e300, "x", [], {}, -1])
def test_a_setting_of_a_runs_model_that_is_wrong_is_refused(
    command: Command, run: Path, name: str, value: object
) -> None:
    document = json.loads((run / name).read_text())
    model = document["model"] if name == "config.json" else document
    keys = ("d_model", "norm", "causal", "n_layers", "n_heads", "d_vocab_out", "n_loops")
    # Both files come to one check of a model's settings: of the second, a key of each type.
    for key in keys if name == "config.json" else keys[:3]:
        changed = dict(model) | {key: value}
        whole = document | {"model": changed} if name == "config.json" else changed
        (run / name).write_text(json.dumps(whole))
        assert_refused(command("evaluate", run, "--no-progress"), key)


def test_a_job_too_large_for_the_memory_is_one_message(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(workflow, "evaluate_run", too_large)
    assert_refused(command("evaluate", run), "memory: expected a job that fits", "Take fewer")


def test_the_demo_refuses_the_place_of_its_report_before_it_trains(
    command: Command, demo_calls: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("mine")
    assert_refused(command("demo", "--out", tmp_path), "report.html", "Delete it yourself")
    assert demo_calls == {}
    assert (tmp_path / "report.html").read_text() == "mine"


@pytest.mark.parametrize("name", ["evaluate", "analyze", "report"])
def test_a_folder_that_is_no_run_is_refused(command: Command, tmp_path: Path, name: str) -> None:
    assert_refused(command(name, tmp_path / "absent"), "absent", "no such folder")
    assert_refused(command(name, tmp_path), "without", "config.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "--distribution", "chains"], ["Did you mean 'chain'?"]),
        (["evaluate", "--length", "0"], ["--length"]),
        (["evaluate", "--samples", "0"], ["--samples"]),
        (["evaluate", "--length", "100000000"], ["lengths, n_samples", "Take shorter ones"]),
        (["evaluate", "--samples", "99999999999"], ["lengths, n_samples", "or fewer"]),
        (["evaluate", "--device", "cuda:²"], ["device", "'cuda:²'"]),
        (["evaluate", "--seed", "-1"], ["--seed", "0"]),
        (["analyze", "--seed", str(2**63)], ["seed", "9223372036854775807"]),
        (["analyze", "--threads", "100000"], ["--threads", "256"]),
        (["report", "--out", ""], ["--out", "expected a path, got ''"]),
        (["evaluate", "--stop", "residua"], ["Did you mean 'residual'?"]),
        (["evaluate", "--stop", "residual=low"], ["residual=0.03"]),
        (
            ["evaluate", "--stop", "max-confidence=1"],
            ["max-confidence, max-confidence-batch, residual=TOLERANCE"],
        ),
        (["evaluate", "--stop", "answer-held=2.5"], ["answer-held=LOOPS"]),
        (["evaluate", "--loops", "1,x"], ["--loops", "1,2,4,8"]),
        (["analyze", "--study", "convergense"], ["Did you mean 'convergence'?"]),
        (["analyze", "--device", "gpu"], ["device", "gpu"]),
        (["recipes"], ["recipe: expected one of"]),
    ],
)
def test_wrong_options_leave_the_run_as_it_was(
    command: Command, run: Path, arguments: list[str], words: list[str]
) -> None:
    before = contents(run)
    name, *rest = arguments
    assert_refused(command(name, run, *rest), *words)
    assert contents(run) == before


@pytest.mark.parametrize("damage", ["truncate", "pickle", "mismatch", "missing", "config"])
@pytest.mark.parametrize("name", ["evaluate", "analyze"])
def test_a_damaged_model_is_refused_with_what_to_do(
    command: Command, run: Path, damage: str, name: str
) -> None:
    weights = run / "model" / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "pickle":
        torch.save({"w": torch.ones(1)}, weights)
    elif damage == "mismatch":
        document = json.loads((run / "model" / "config.json").read_text())
        (run / "model" / "config.json").write_text(json.dumps(document | {"n_heads": 4}))
    elif damage == "missing":
        weights.unlink()
    else:
        (run / "config.json").write_text('{"task": ')
    before = contents(run)
    assert_refused(command(name, run, "--no-progress"), str(run))
    assert contents(run) == before


def test_a_damaged_checkpoint_stops_the_resumed_training(command: Command, run: Path) -> None:
    checkpoint = run / "state" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    before = contents(run)
    answer = command("train", "--config", run / "config.json", "--out", run, "--no-progress")
    assert_refused(answer, "checkpoint.safetensors", "damaged")
    assert contents(run) == before


def test_a_study_of_another_task_is_refused(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = [part for s in ("model.d_model=16", "model.n_heads=2") for part in ("--set", s)]
    arguments = ("train", "--task", "prefix_sum", "--steps", 2, *small, "--no-progress")
    assert command(*arguments, "--out", out).status == 0
    refused = command("analyze", out, "--study", "wavefront")
    assert_refused(refused, "because it asks about addition and not about prefix_sum")
    assert refused.err.startswith("Error: ")


def test_a_study_without_room_is_refused_when_asked_for_and_else_left_out_with_the_reason(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "short"
    command("compile", "ripple", "--max-length", 6, "--out", out)
    refused = command("analyze", out, "--study", "wavefront")
    assert_refused(refused, "carries need 16 bits to be followed")
    kept = tuple(one for one in STUDIES if one.name in ("wavefront", "stabilisation", "heads"))
    monkeypatch.setattr(workflow, "STUDIES", kept)
    answer = command("analyze", out, "--json")
    assert set(answer.json["results"]) == {"stabilisation", "heads"}
    assert set(answer.json["skipped"]) == {"wavefront"}
    reason = answer.json["skipped"]["wavefront"]
    assert "16 bits" in reason
    assert "Skipped: wavefront" in command("analyze", out, "--no-progress").out
    for said in (answer.err, command("report", out, "--text").out):
        assert re.search(f"wavefront: .*{reason}", said)
    assert command("report", out, "--text", "--json").json["skipped"] == {"wavefront": reason}
    both = command("report", out, out, "--text", "--json").json
    assert [one["run"] for one in both] == [str(out)] * 2
    command("report", out)
    said = command("analyze", out, "--study", "heads", "--no-progress").out
    assert said.endswith(f"Next: loopinterp report {out}\n")
    assert re.search(f"Wavefront: .*{reason}", (out / "report.html").read_text())


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("riple", [], ["Did you mean 'ripple'?"]),
        ("ripple", ["--disguise", "rotat"], ["Did you mean 'rotate'?"]),
        ("ripple", ["--max-length", "0"], ["--max-length"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, program: str, arguments: list[str], words: list[str]
) -> None:
    options = ["--max-length", "4", *arguments, "--out", tmp_path / "out"]
    assert_refused(command("compile", program, *options), *words)
    assert not (tmp_path / "out").exists()


def test_a_wrong_distribution_is_refused_before_a_stage_is_said_to_begin(
    command: Command, run: Path
) -> None:
    answer = command("evaluate", run, "--distribution", "foo")
    assert_refused(answer, "distribution", "'foo'")
    assert answer.err.startswith("Error: ")


def test_a_study_without_the_result_it_starts_from_is_refused(command: Command, run: Path) -> None:
    answer = command("analyze", run, "--study", "convergence", "--study", "subspaces")
    assert_refused(answer, "'subspaces'", "'programs'", "Add --study programs.")
    assert answer.err.startswith("Error: ")


def test_what_decides_of_a_study_is_looked_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def looked_at(name: str) -> Callable[[Session], None]:
        return lambda _: asked.append(name)

    with study(0) as watch:
        made = Result.of(watch)
    replaced = tuple(
        dataclasses.replace(one, run=lambda _: made, skips=looked_at(one.name)) for one in STUDIES
    )
    monkeypatch.setattr(workflow, "STUDIES", replaced)
    monkeypatch.setattr(Session, "own_file", lambda *_: None)
    (run / "results").mkdir(exist_ok=True)
    (run / "results" / "programs.safetensors").touch()
    workflow.analyze_run(run, studies=["subspaces", "heads"], progress=False)
    assert asked == ["subspaces", "heads"]
    asked.clear()  # where it starts from a result that is made now, it is asked again after that
    workflow.analyze_run(run, studies=["programs", "subspaces"], progress=False)
    assert asked == ["programs", "subspaces", "subspaces"]
    asked.clear()
    workflow.analyze_run(run, progress=False)
    assert len(asked) == len(set(asked)) > 5


def test_a_script_of_ones_own_goes_on_with_itself(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["my tasks.py"])
    said = command("compile", "parity", "--max-length", 4, "--out", tmp_path / "a").out
    script = "python 'my tasks.py' analyze"
    assert said.endswith(f"Next: {script} {tmp_path / 'a'}\n")
    monkeypatch.setattr(sys, "argv", ["/somewhere/loopinterp/__main__.py"])
    said = command("compile", "parity", "--max-length", 4, "--out", tmp_path / "b").out
    assert said.endswith(f"Next: loopinterp analyze {tmp_path / 'b'}\n")


def test_the_next_command_can_be_given_where_the_environment_is_not_active(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/loopinterp"])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    said = command("zoo", "parity", "--out", tmp_path / "a").out
    assert said.endswith(f"Next: .venv/bin/loopinterp analyze {tmp_path / 'a'}\n")
    active = tmp_path / "bin" / "loopinterp"
    active.parent.mkdir()
    active.touch(0o755)
    said = command("zoo", "parity", "--out", tmp_path / "b").out
    assert said.endswith(f"Next: loopinterp analyze {tmp_path / 'b'}\n")


def test_studies_are_run_in_their_own_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def told(name: str) -> Callable[[Session], Result]:
        def run(model: Session) -> Result:
            order.append(name)
            with study(model.seed) as watch:
                return Result.of(watch)

        return run

    replaced = tuple(
        dataclasses.replace(one, run=told(one.name), skips=lambda _: None) for one in STUDIES
    )
    monkeypatch.setattr(workflow, "STUDIES", replaced)
    asked = ["attention", "subspaces", "programs", "convergence", "programs"]
    workflow.analyze_run(run, studies=asked, progress=False)
    assert order == ["convergence", "programs", "subspaces", "attention"]


def test_a_study_that_fails_is_named_and_stops_no_other(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Session) -> Result:
        raise RuntimeError("boom")

    def works(model: Session) -> Result:
        with study(model.seed) as watch:
            return Result.of(watch)

    bad, good = (
        dataclasses.replace(one, run=does, skips=lambda _: None)
        for one, does in zip([one for one in STUDIES if not one.tasks], (fails, works))
    )
    monkeypatch.setattr(workflow, "STUDIES", (bad, good))
    answer = command("analyze", run, "--json", "--no-progress")
    assert answer.status == 1
    assert answer.json["failed"] == {bad.name: "RuntimeError: boom"}
    assert answer.json["results"].keys() == {good.name}
    assert "failed" in pages.read_run(run).skipped[bad.name]
    assert bad.name in command("analyze", run, "--no-progress").out
    with pytest.raises(RuntimeError, match="boom"):  # one that was asked for
        workflow.analyze_run(run, studies=[bad.name], progress=False)


def test_without_a_recipe_it_is_said_which_model_is_trained(
    command: Command, tmp_path: Path
) -> None:
    small = [part for s in ("model.d_model=8", "model.n_heads=1") for part in ("--set", s)]
    arguments = (
        "train",
        "--task",
        "copy",
        "--without-recipe",
        "--steps",
        1,
        *small,
        "--no-progress",
    )
    other = command(*arguments, "--set", "model.attention_window=none", "--out", tmp_path / "wide")
    assert "No recipe" in other.err and "without a window" in other.err
    answer = command(*arguments, "--out", tmp_path / "run")
    assert answer.status == 0
    assert "No recipe" in answer.err and "window of 1" in answer.err


@pytest.mark.parametrize("arguments", [["nosuch"], ["train"], ["evaluate"], ["tasks", "--what"]])
def test_wrong_usage_has_status_2_and_no_traceback(command: Command, arguments: list[str]) -> None:
    answer = command(*arguments)
    assert answer.status == 2
    assert answer.out == ""
    assert "Error: " in answer.err
    assert "Traceback" not in answer.err


def test_an_error_of_the_system_is_one_message(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "runs/x")

    monkeypatch.setattr(pages, "write_report", no_space)
    assert_refused(
        command("report", "runs/x"), "runs/x: expected it to work, got: No space left on device"
    )


# How a configuration is put together


def test_flags_and_settings_win_over_the_recipe() -> None:
    config = runs.configure(task="addition", settings=["seed=3"], flags={"steps": 9, "seed": None})
    assert (config.steps, config.seed) == (9, 3)
    assert config.model == RECIPES["addition"].model


@pytest.mark.parametrize("name", ["demo", "train", "evaluate", "analyze"])
def test_bars_are_shown_unless_declined_and_one_thread_is_taken_unless_more_are_asked_for(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[tuple[bool, int]] = []

    def stopped(*_: Any, progress: bool, **__: Any) -> None:
        seen.append((progress, torch.get_num_threads()))
        raise InputError("it", expected="this", given="that", fix="Stop here.")

    for part in ("demo", "evaluate_run", "analyze_run"):
        monkeypatch.setattr(workflow, part, stopped)
    monkeypatch.setattr(runs, "train_run", stopped)
    studied = name in ("evaluate", "analyze")
    where: list[str | Path] = [run] if studied else ["--out", run]
    where += ["--task", "addition"] if name == "train" else []
    try:
        for options in ([], ["--no-progress", "--threads", 2]):
            assert_refused(command(name, *where, *options), "Stop here.")
        # Training takes its threads from the configuration.
        assert seen == [(True, 1), (False, 2 if studied else 1)]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("arguments", [["train", "--task", "addition"], ["demo"]])
def test_one_setting_given_twice_is_refused(
    command: Command, tmp_path: Path, arguments: list[str]
) -> None:
    twice = ("--seed", 3, "--set", "seed=4", "--out", tmp_path / "out")
    assert_refused(command(*arguments, *twice), "seed", "--set seed=4", "Leave one of them out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def demo_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the demo asks of its parts, none of which is run."""
    calls: dict[str, Any] = {}

    def train(config: TrainingConfig, out: Path, **_: Any) -> Run:
        calls["config"] = config
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(config.to_dict()))
        return Run(out, config)

    def seed_of(name: str) -> Callable[..., None]:
        def part(folder: Path, *, seed: int, **_: Any) -> None:
            calls[name] = (seed, torch.get_num_threads())

        return part

    class Here(workflow._SecondProcess):
        """Calls in this process, when they are waited for."""

        _code = "raise SystemExit(1)"

    monkeypatch.setattr(workflow, "_SecondProcess", Here)
    for name in ("_share", "open_run", "_lengths"):  # which read what no training has made
        monkeypatch.setattr(workflow, name, lambda *_, **__: None)
    monkeypatch.setattr(workflow, "train_run", train)
    monkeypatch.setattr(workflow, "evaluate_run", seed_of("evaluate"))
    monkeypatch.setattr(workflow, "analyze_run", seed_of("analyze"))
    monkeypatch.setattr(pages, "write_report", lambda folder: folder / "report.html")
    return calls


@pytest.mark.parametrize(
    ("arguments", "seed", "threads"),
    [
        ([], 0, 1),
        (["--seed", "3"], 3, 1),
        (["--set", "seed=3"], 3, 1),
        (["--threads", "2"], 0, 2),
        (["--set", "threads=2"], 0, 2),
    ],
)
def test_the_demo_trains_and_studies_with_the_seed_and_threads_asked_for(
    command: Command,
    demo_calls: dict[str, Any],
    tmp_path: Path,
    arguments: list[str],
    seed: int,
    threads: int,
) -> None:
    assert command("demo", "--out", tmp_path, "--no-progress", *arguments).status == 0
    assert (demo_calls["config"].seed, demo_calls["config"].threads) == (seed, threads)
    assert demo_calls["evaluate"] == demo_calls["analyze"] == (seed, threads)
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["command"] == " ".join(["loopinterp demo --out", str(tmp_path), *arguments])


def test_an_error_of_the_demo_is_said_although_its_second_process_has_died(tmp_path: Path) -> None:
    def fail() -> None:
        with workflow._SecondProcess() as second:
            second.call(fail, tmp_path)  # of no module's public names: the process ends at once
            second._process.wait()
            second.call(fail, tmp_path)
            raise InputError("mine", expected="a", given="b", fix="c")

    with pytest.raises(InputError, match="mine"):
        fail()


def test_the_demo_goes_into_runs_where_no_folder_is_named(
    command: Command, demo_calls: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("demo", "--no-progress").status == 0
    assert demo_calls and (tmp_path / "runs" / "demo" / "made.json").exists()


def test_a_configuration_comes_back_from_its_file(tmp_path: Path) -> None:
    config = RECIPES["addition"].replace(seed=11)
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
    assert runs.configure(file=tmp_path / "c.json") == config


def test_without_its_recipe_a_task_gets_a_model_that_fits_it() -> None:
    config = runs.configure(task="parity", without_recipe=True)
    assert isinstance(config, TrainingConfig)
    assert (config.model.d_vocab, config.model.d_vocab_out) == (5, 3)


def test_bits_are_dropped_and_each_stage_is_said(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    small = RECIPES["addition-finite"].to_dict()
    small["model"] |= {"d_model": 16, "n_heads": 2, "state_code": 2}
    small["curriculum"] |= {"max_n": 4}
    config.write_text(json.dumps({**small, "steps": 2, "batch_size": 8}))
    out = tmp_path / "finite"
    again = ("train", "--config", config, "--drop-bits", "--out", out, "--no-progress")
    answer = command(*again, "--json")
    assert answer.status == 0
    [stage] = answer.json["stages"]  # two steps teach nothing
    assert (stage["bits"], stage["learnt"], answer.json["smallest"]) == (2, False, None)
    assert Path(stage["run"]) == out / "bits-2"
    assert command(*again).out.rstrip().splitlines()[-1].startswith("No stage")
    refused = command("train", "--task", "addition", "--drop-bits", "--out", tmp_path / "other")
    assert_refused(refused, "state_code", "Set model.state_code=4")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_type_of_python_is_in_the_help(command: Command, name: str) -> None:
    said = command(name, "--help").out
    assert not re.search(r"<\w+|\{\w+\.\.\.|922337|list\[", said)


def test_what_is_wrong_is_said_before_what_is_missing(command: Command, tmp_path: Path) -> None:
    refused = command("compile", "rippel")
    assert refused.status == 2 and "'ripple'" in refused.err and "max-length" not in refused.err
    refused = command("sweep", tmp_path / "x.toml")
    assert_refused(refused, "x.toml")


def test_a_page_is_replaced_only_if_it_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for page in ("lens.html", "lens-2.html"):
        assert command("lens", "parity", "--prompt", "1 0", "--json").json["page"] == page
    before = Path("lens.html").read_bytes()
    command("lens", "parity", "--prompt", "1 1 1", "--out", "lens.html")
    assert Path("lens.html").read_bytes() != before


def test_what_is_made_without_a_folder_is_in_runs(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("compile", "parity", "--max-length", "3").status == 0
    assert Run.load("runs/parity").config.task == "parity"
    assert (
        command("train", "--config", run / "config.json", "--json").json["run"] == "runs/addition"
    )
    assert Run.load("runs/addition").config == Run.load(run).config
    before = contents(tmp_path / "runs")
    assert_refused(command("train", "--task", "parity"), "runs/parity")  # taken
    assert contents(tmp_path / "runs") == before
