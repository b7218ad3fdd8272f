"""One case: what is done, and whether everything held that must hold whatever is done.

- It ends: in at most :data:`LIMIT` seconds.
- Nothing but success, or one message with what was expected, what was given, and the fix.
- No file changes but those that the command is there to write.
- A damaged run is refused, or its numbers are those of the run as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loopinterp import cli
from loopinterp.core.errors import InputError
from tests.fuzz.command_lines import command_line
from tests.fuzz.damaged_runs import damage
from tests.fuzz.odd_calls import odd_call

LIMIT = 20
"""Seconds after which a case hangs."""

WRITTEN = re.compile(r"(made\.json|report\.html|results/.*|metrics\.jsonl|state/.*|model/.*)")
"""Files of a run that commands write again."""

EVALUATE = ("--length", "2", "--length", "4", "--samples", "6", "--no-progress", "--json")


KINDS = ("words", "damaged", "damaged", "call")
"""What a case may be: an odd command line, a damaged run, an odd call."""


class Hang(BaseException):
    """The case did not end; no ``except Exception`` catches it."""


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Outcome:
    """What a case did, and what did not hold ("" where all did)."""

    kind: str
    what: str
    ended: str
    fault: str = ""


class Bench:
    """Two tiny runs to be spoilt, one compiled and one trained, and files of a user's.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder, folder / "whole"
        compiled, trained = self.whole / "compiled", self.whole / "trained"
        self._make(["compile", "ripple", "--max-length", "6", "--out", str(compiled)])
        tiny = ["model.d_model=8", "model.n_heads=1", "curriculum.max_n=4", "checkpoint_every=1",
                "log_every=1", "steps=2", "batch_size=4"]  # fmt: skip
        words = [part for setting in tiny for part in ("--set", setting)]
        self._make(["train", "--task", "addition", *words, "--out", str(trained)])
        self.cells: dict[str, Any] = {}
        for run in (compiled, trained):
            self.cells[run.name] = json.loads(self._make(["evaluate", str(run), *EVALUATE]).out)
            self._make(["analyze", str(run), "--study", "attention"])

    @cached_property
    def reports(self) -> dict[str, str]:
        """The pages of both runs."""
        page = self.folder / "page.html"
        return {name: _report_of(self.whole / name, page) for name in self.cells}

    def _make(self, words: list[str]) -> Answer:
        answer = call(words)
        assert answer.status == 0, answer.err
        return answer

    def case(self, seed: int, number: int, kinds: Sequence[str] = KINDS) -> Outcome:
        """Make one case; the same seed, number and kinds make the same one."""
        rng = random.Random(f"{seed}:{number}")
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        name = rng.choice(["compiled", "trained"])
        run = Path(shutil.copytree(self.whole / name, place / name))
        mine = _users_files(place / "mine", rng)
        kind = getattr(self, f"_{rng.choice(kinds)}")
        self._what = ""
        try:
            with _at_home(mine), _watched():
                ended, fault = kind(rng, run, mine)
        except Hang:
            ended, fault = "hang", f"no end within {LIMIT} s"
        except BaseException:  # whatever it is, it is a finding and not the end of the fuzz
            ended, fault = "crash", traceback.format_exc(limit=-3)
        finally:
            torch.set_num_threads(1)
        return Outcome(kind.__name__.strip("_"), self._what, ended, fault)

    def _words(self, rng: random.Random, run: Path, mine: Path) -> tuple[str, str]:
        words = command_line(rng, run, mine)
        self._what = " ".join(word[:60] for word in map(repr, words))
        before = _contents(run.parent)
        answer = call(words)
        if not words:  # help, and the status of wrong usage
            return f"exit {answer.status}", ""
        fault = _said_well(answer) or _kept(before, _contents(run.parent), run, answer.status)
        return f"exit {answer.status}", fault

    def _damaged(self, rng: random.Random, run: Path, mine: Path) -> tuple[str, str]:
        what = damage(rng, run)
        command = rng.choice(["evaluate", "evaluate", "report", "analyze", "train"])
        words = {
            "evaluate": ["evaluate", str(run), *EVALUATE],
            "report": ["report", str(run), "--out", str(mine / "page.html")],
            "analyze": ["analyze", str(run), "--study", "heads", "--no-progress"],
            "train": ["train", "--config", str(run / "config.json"), "--out", str(run)],
        }[command]
        self._what = f"{run.name}/{what}; {command}"
        before = _contents(run.parent)
        answer = call(words)
        fault = _said_well(answer) or _kept(before, _contents(run.parent), run, answer.status)
        if not fault and answer.status == 0:
            fault = self._same(command, run, mine, answer, damaged=what)
        return f"exit {answer.status}", fault

    def _same(self, command: str, run: Path, mine: Path, answer: Answer, *, damaged: str) -> str:
        """What a damaged run says must be what it said whole, or say that something is wrong."""
        if command == "evaluate":
            found = json.loads(answer.out)["cells"]
            return "" if found == self.cells[run.name]["cells"] else "other numbers, and no word"
        if command == "report" and ".safetensors" in damaged.split(":")[0]:
            page = (mine / "page.html").read_text()
            told = 'class="notice"' in page or page == self.reports[run.name]
            return "" if told else "another report, and no word in it"
        return ""

    def _call(self, rng: random.Random, run: Path, mine: Path) -> tuple[str, str]:
        self._what, made = odd_call(rng, run, mine)
        before = _contents(run.parent)
        try:
            made()
            ended, fault = "done", ""
        except InputError as error:
            ended, fault = "refused", _well_put(str(error))
        except Exception:
            return "crash", traceback.format_exc(limit=-3)
        return ended, fault or _kept(before, _contents(run.parent), run, 0)


def call(words: list[str]) -> Answer:
    """Call the command line in this process."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            cli.main(words)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    said = "".join(f"Warning: {one.message}\n" for one in warned if _ours(one))
    return Answer(status, out.getvalue(), err.getvalue() + said)


def _ours(warned: warnings.WarningMessage) -> bool:
    return "loopinterp" in warned.filename


def _said_well(answer: Answer) -> str:
    if answer.status == 0:
        return "a warning: " + answer.err[-300:] if "Warning: " in answer.err else ""
    if answer.status != 2:
        return f"exit {answer.status}: {answer.err[-300:]}"
    found = [line for line in answer.err.splitlines() if line.startswith("Error: ")]
    if len(found) != 1:
        return f"{len(found)} messages: {answer.err[-300:]}"
    # The parser of command lines has its own words.
    usage = answer.err.startswith(("Usage: ", "Error: Option "))
    return "" if usage else _well_put(answer.err[answer.err.index("Error: ") :])


def _well_put(message: str) -> str:
    if re.search(r": expected .*, got:? .*\. [A-Z]", message, re.DOTALL):
        return "" if len(message) < 6000 else f"{len(message)} characters: {message[:200]}"
    return f"what was expected, given, and the fix are not all in: {message[:400]}"


def _report_of(run: Path, page: Path) -> str:
    assert call(["report", str(run), "--out", str(page)]).status == 0
    return page.read_text()


def _users_files(mine: Path, rng: random.Random) -> Path:
    (mine / "folder").mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    (mine / "empty").write_text("")
    (mine / "folder" / "data.csv").write_text("a,b\n1,2\n")
    (mine / "link").symlink_to(mine / "notes.txt")
    (mine / "dangling").symlink_to(mine / "nowhere")
    os.mkfifo(mine / "pipe")
    return mine


def _contents(folder: Path) -> dict[str, str]:
    """Every file by its content, every other thing by its kind."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            plain = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = (
                hashlib.sha256(path.read_bytes()).hexdigest()
                if plain
                else oct(path.lstat().st_mode)
            )
    return found


def _kept(before: dict[str, str], after: dict[str, str], run: Path, status: int) -> str:
    """What is there is as it was, but for what a command that succeeds writes again."""
    changed = [name for name, content in before.items() if after.get(name) != content]
    if status == 0:
        changed = [name for name in changed if not WRITTEN.fullmatch(name.partition("/")[2])]
    else:  # studies that were done before the one that is refused
        done = ("results/", "made.json")
        changed = [name for name in changed if not name.partition("/")[2].startswith(done)]
    litter = [name for name in after.keys() - before.keys() if Path(name).name.startswith(".")]
    return "; ".join([f"changed: {name}" for name in changed] + [f"left: {n}" for n in litter])


@contextlib.contextmanager
def _at_home(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
