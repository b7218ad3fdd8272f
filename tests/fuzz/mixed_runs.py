"""``python -m tests.fuzz.mixed_runs --cases 500``: folders with files of two runs, and damage.

A folder is the run that its ``config.json`` describes. Whatever else lies in it, a command ends
with a message and status 2, or with status 0 and the numbers of that run as it was made, or says
beside other numbers that something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopinterp.core.results import config_hash
from loopinterp.core.run_files import Owner, record_how_it_was_made
from loopinterp.pages import read_run
from loopinterp.pages.run_record import Problem, Trouble
from loopinterp.training.run import CHECKPOINT, METRICS, WEIGHTS
from tests.fuzz.damaged_runs import damage
from tests.fuzz.harness import EVALUATE, Answer, _said_well, call

PARTS = ("config.json", "model/config.json", WEIGHTS, METRICS, CHECKPOINT, "made.json",
         "results/generalisation.safetensors", "results/attention.safetensors",
         "report.html")  # fmt: skip
COMMANDS = ("evaluate", "report", "report", "analyze", "lens", "train")
_TINY = ("model.d_model=8", "model.n_heads=1", "curriculum.max_n=4", "checkpoint_every=1",
         "log_every=1", "batch_size=4")  # fmt: skip
_TRAINED = {
    "plain": ("addition", "seed=0", "steps=4"),
    "other seed": ("addition", "seed=1", "steps=4"),
    "more steps": ("addition", "seed=0", "steps=6"),
    "other task": ("parity", "seed=0", "steps=4"),
}


@dataclass(frozen=True)
class Whole:
    """A run as it was made, with all that is ever to be seen of it.

    Attributes:
        folder: The run.
        cells: What ``evaluate`` measures.
        lens: What ``lens`` finds of a prompt.
        owner: Its configuration and weights.
        record: What its report shows.
    """

    folder: Path
    cells: Any
    lens: Any
    owner: Owner
    record: Any


class MixedBench:
    """Runs of one architecture with other seeds and steps, of another task, and compiled ones.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wholes: dict[str, Whole] = {}
        for name, (task, *settings) in _TRAINED.items():
            words = [part for setting in (*_TINY, *settings) for part in ("--set", setting)]
            self._make(name, ["train", "--task", task, *words])
        for seed in ("0", "1"):
            words = ["compile", "ripple", "--max-length", "6", "--disguise", "rotate"]
            self._make(f"compiled {seed}", [*words, "--seed", seed])
        self.by_hash = {whole.owner.config: whole for whole in self.wholes.values()}

    def _make(self, name: str, words: list[str]) -> None:
        run = self.folder / "whole" / name
        _done([*words, "--out", str(run)])
        cells = json.loads(_done(["evaluate", str(run), *EVALUATE]).out)["cells"]
        _done(["analyze", str(run), "--study", "attention", "--no-progress"])
        record_how_it_was_made(run, command=f"make {name}", skipped={"wavefront": f"of {name}"})
        _done(["report", str(run)])
        lens = json.loads(_done(_lens_of(run, run / "lens.html")).out)["findings"]
        record = read_run(run)
        assert not record.problems
        self.wholes[name] = Whole(run, cells, lens, Owner.of_run(run), record)

    def case(self, seed: int, number: int) -> tuple[str, str, str]:
        """What was done, how it ended, and what did not hold ("" where all did)."""
        rng = random.Random(f"{seed}:{number}")
        base, other = rng.sample(sorted(self.wholes), 2)
        run = self.folder / "case" / "run"
        shutil.rmtree(run.parent, ignore_errors=True)
        shutil.copytree(self.wholes[base].folder, run)
        done = [f"{base} with {other}:"]
        for part in rng.sample(PARTS, rng.choice([0, 1, 1, 1, 2, 3, 5])):
            done.append(part)
            _put(self.wholes[other].folder / part, run / part)
        if rng.random() < 0.25 and (run / METRICS).is_file():
            done.append(_other_lines(rng, run / METRICS))
        if rng.random() < 0.25:
            done.append(damage(rng, run))
        command = rng.choice(COMMANDS)
        try:
            ended, fault = self._try(command, run)
        except BaseException:  # whatever it is, it is a finding and not the end of the fuzz
            ended, fault = "crash", traceback.format_exc(limit=-3)
        return " ".join([*done, ";", command]), f"{command}: {ended}", fault

    def _try(self, command: str, run: Path) -> tuple[str, str]:
        words = {
            "evaluate": ["evaluate", str(run), *EVALUATE],
            "report": ["report", str(run), "--out", str(run.parent / "page.html")],
            "analyze": ["analyze", str(run), "--study", "attention", "--no-progress"],
            "lens": _lens_of(run, run.parent / "lens.html"),
            "train": ["train", "--config", str(run / "config.json"), "--out", str(run)],
        }[command]
        answer = call(words)
        ended = f"exit {answer.status}"
        noticed = "Warning: " in answer.err
        if answer.status:
            return ended, _said_well(answer)
        whole = self._described(run)
        if whole is None:  # an odd value in it: then its weights are none of this configuration's
            harmless = command == "report" and 'class="notice"' in _page(run)
            return ended, "" if noticed or harmless else "a configuration of no run, and no notice"
        fault = self._other_numbers(command, run, whole, answer)
        return f"{ended}{', notice' if noticed else ''}", "" if noticed else fault

    def _described(self, run: Path) -> Whole | None:
        """The run that a folder's configuration is of."""
        try:
            config = json.loads((run / "config.json").read_bytes())
        except ValueError:
            return None
        return self.by_hash.get(config_hash(config))

    def _other_numbers(self, command: str, run: Path, whole: Whole, answer: Answer) -> str:
        if command == "evaluate":
            return "" if json.loads(answer.out)["cells"] == whole.cells else "other cells"
        if command == "lens":
            same = json.loads(answer.out)["findings"] == whole.lens
            return "" if same else "the lens says otherwise"
        if command == "train":
            whole_metrics = (whole.folder / METRICS).read_bytes()
            same = Owner.of_run(run) == whole.owner and (run / METRICS).read_bytes()
            return "" if same == whole_metrics else "other weights or metrics after training"
        record = read_run(run)
        if command == "analyze":
            name = "attention"
            again = record.results.get(name)
            same = again is not None and again.data.identical(whole.record.results[name].data)
            return "" if same else "another result"
        return _shown_of_others(record, whole.record, _page(run))


def _shown_of_others(record: Any, whole: Any, page: str) -> str:
    """What a report shows that is not of its run, and whether what is missing is noticed."""
    unchecked = Problem(Trouble.LINES_UNCHECKED) in record.problems
    if any(row not in whole.metrics for row in record.metrics) and not unchecked:
        return "metrics of another run"
    for name, result in record.results.items():
        if name not in whole.results or not result.data.identical(whole.results[name].data):
            return f"{name} of another run"
    if not set(record.skipped.items()) <= set(whole.skipped.items()):
        return "reasons of another run"
    if record.made.get("command", whole.made["command"]) != whole.made["command"]:
        return "the command of another run"
    if record.problems and 'class="notice"' not in page:
        return "no notice"
    removed = len(record.metrics) < len(whole.metrics) and not record.problems
    return "fewer metrics, and no notice" if removed else ""


def _page(run: Path) -> str:
    return (run.parent / "page.html").read_text()


def _lens_of(run: Path, page: Path) -> list[str]:
    task = json.loads((run / "config.json").read_bytes()).get("task") if _is_json(run) else ""
    prompt = "101" if task == "parity" else "1 + 2"
    return ["lens", str(run), "--prompt", prompt, "--out", str(page), "--no-progress", "--json"]


def _is_json(run: Path) -> bool:
    path = run / "config.json"
    try:  # a pipe in its place would be waited for
        return path.is_file() and isinstance(json.loads(path.read_bytes()), dict)
    except (ValueError, OSError, RecursionError):
        return False


def _put(source: Path, target: Path) -> None:
    """Replace a file of a run by another run's, or take it away where that has none."""
    target.unlink(missing_ok=True)
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _other_lines(rng: random.Random, path: Path) -> str:
    lines = path.read_text().splitlines()
    kinds = {
        "reversed": lines[::-1],
        "doubled": lines * 2,
        "zeroed": [json.dumps(dict.fromkeys(json.loads(line), 0)) for line in lines],
        "truncated": lines[: len(lines) // 2],
        "a value": [lines[0].replace("0.", "1.", 1), *lines[1:]],
    }
    kind = rng.choice(sorted(kinds))
    path.write_text("".join(f"{line}\n" for line in kinds[kind]))
    return f"metrics {kind}"


def _done(words: list[str]) -> Answer:
    answer = call(words)
    assert answer.status == 0, answer.err
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="Make this case alone.")
    chosen = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    ends: Counter[str] = Counter()
    faults, start = 0, time.perf_counter()
    numbers = range(chosen.cases) if chosen.only is None else [chosen.only]
    with tempfile.TemporaryDirectory() as folder:
        bench = MixedBench(Path(folder))
        for number in numbers:
            what, ended, fault = bench.case(chosen.seed, number)
            ends[ended] += 1
            if fault:
                faults += 1
                print(f"--- case {number}: {what}\n{ended} {fault.strip()}", flush=True)
    print(*(f"{count:6} {ended}" for ended, count in sorted(ends.items())), sep="\n")
    print(f"{len(numbers)} folders in {time.perf_counter() - start:.0f} s, {faults} findings")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
