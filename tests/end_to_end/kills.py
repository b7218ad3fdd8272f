"""Kill training, evaluation, analyses and reports at random moments, and look at what is left.

From the command line, one line of counts::

    python -m tests.end_to_end.kills --kills 100
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import re
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loopinterp.app.runs import train_run
from loopinterp.app.workflow import analyze_run, evaluate_run
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result, result_files
from loopinterp.core.run_files import Owner
from loopinterp.core.storage import digest_tensors, read_json_object, read_tensors
from loopinterp.pages import read_run, write_report
from loopinterp.training import Run
from loopinterp.training.run import CHECKPOINT, CONFIG, METRICS, WEIGHTS
from loopinterp.training.trainer import Trainer
from tests.training.tiny_run import TINY

STUDIES = ["stabilisation", "attention"]
RESULTS = {"generalisation", *STUDIES}

CONFIGURATION = TINY.replace(steps=80, log_every=1, checkpoint_every=2)


def _evaluate(folder: Path) -> object:
    return evaluate_run(folder, lengths=[2, 4], samples=8, progress=False)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "train": lambda folder: train_run(CONFIGURATION, folder, progress=False),
    "evaluate": _evaluate,
    "analyze": lambda folder: analyze_run(folder, studies=STUDIES, progress=False),
    "report": write_report,
}


def _run(command: str, folder: Path) -> None:
    # Before there is a model, there is nothing to be evaluated; that is no fault.
    too_early = command != "train" and not (folder / WEIGHTS).exists()
    with contextlib.suppress(*[InputError] if too_early else []):
        COMMANDS[command](folder)


def weights_at_checkpoints() -> set[str]:
    """Digests of all weights that a run of the configuration may ever have on disk."""
    trainer, digests = Trainer(CONFIGURATION), set()
    for step in range(1, CONFIGURATION.steps + 1):
        trainer.step()
        if step % CONFIGURATION.checkpoint_every == 0:
            digests.add(digest_tensors(dict(trainer.averaged_model().named_parameters())))
    return digests


@dataclass
class Harness:
    """Runs that are killed again and again, beside one that is not.

    Attributes:
        folder: Where they lie.
        kills: Kills by command so far.
        in_the_middle: Kills that a training had made progress before.
    """

    folder: Path
    moments: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    in_the_middle: int = 0
    runs: list[Path] = field(default_factory=list)
    kept_steps: int = 0
    kept_results: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reference, self.longest = self.folder / "whole", {}
        for name, command in COMMANDS.items():
            command(self.reference)  # the first time imports, and is slow
            start = time.perf_counter()
            command(self.reference)
            self.longest[name] = 1.1 * (time.perf_counter() - start) + 0.05
        # Long enough to start and make some steps, short enough not to finish most of the time.
        self.longest["train"] = 0.2 * Run.load(self.reference).seconds + 0.1
        self.known = weights_at_checkpoints()
        self._new_run()

    def _new_run(self) -> None:
        self.runs.append(self.folder / f"run{len(self.runs)}")
        self.kept_steps, self.kept_results = 0, set()

    def kill(self) -> None:
        """Start one or two commands at once, kill them, and look at what is left."""
        # A fork has everything imported, so that kills hit the work and not the start.
        processes, run = multiprocessing.get_context("fork"), self.runs[-1]
        names = self.moments.sample(list(COMMANDS), k=self.moments.choice([1, 1, 2]))
        names = ["train"] if not run.exists() else names
        children = {name: processes.Process(target=_run, args=(name, run)) for name in names}
        for child in children.values():
            child.start()
        time.sleep(self.moments.uniform(0.0, max(self.longest[name] for name in names)))
        for name, child in children.items():
            child.kill()
            child.join()
            assert child.exitcode in (0, -signal.SIGKILL), f"{name} failed: {child.exitcode}"
            self.kills[name] += child.exitcode == -signal.SIGKILL
        if (run / CONFIG).exists():
            self._check(run)
            if Run.load(run).finished and self.kept_results == RESULTS:
                self._new_run()

    def _check(self, folder: Path) -> None:
        """Everything that is there is whole, of this run, and no less than before."""
        run, owner = Run.load(folder), Owner.of_run(folder)
        if (folder / METRICS).exists():
            run.metrics()
        assert self.kept_steps <= run.steps_done, "steps were lost"
        self.in_the_middle += self.kept_steps < run.steps_done < CONFIGURATION.steps
        self.kept_steps = run.steps_done
        assert owner.weights in ({""} if run.steps_done == 0 else self.known | {""})
        if owner.weights:
            run.model()
        results = {path.stem: load_result(path) for path in result_files(folder / "results")}
        assert self.kept_results <= set(results) <= RESULTS, "results were lost"
        self.kept_results = set(results)
        for name, result in results.items():
            (digest,) = result.provenance.weights
            assert digest in self.known and result.provenance.run == owner.config, f"{name} mixes"
        shown = set(read_run(folder).results)
        assert shown == {n for n, r in results.items() if owner.weights in r.provenance.weights}
        if (folder / "made.json").exists():
            read_json_object(folder / "made.json")
        if (folder / "report.html").exists():
            self._check_report((folder / "report.html").read_text())

    def _check_report(self, page: str) -> None:
        """A report is whole, and all its studies are of the same weights."""
        assert page.rstrip().endswith("</html>"), "half a report"
        of_run = re.findall(r"<code>([0-9a-f]{64})</code>", page)
        of_studies = re.findall(r"</code></td><td><code>([0-9a-f]{12})</code> </td>", page)
        assert set(of_run) <= self.known and (len(of_run) == 1 or not of_studies)
        assert {digest[:12] for digest in of_run} >= set(of_studies), "a report that mixes"

    def finish(self) -> None:
        """Run what was killed to its end: it ends like what was never touched."""
        for folder in self.runs:
            for command in COMMANDS.values():
                command(folder)
            self.kept_steps, self.kept_results = 0, set()
            self._check(folder)
            assert self.kept_results == set(read_run(folder).results) == RESULTS
            assert not list(folder.rglob(".part-*")), "leftovers"
            for name in (CONFIG, METRICS, WEIGHTS):
                assert (folder / name).read_bytes() == (self.reference / name).read_bytes(), name
            ours, theirs = (read_tensors(f / CHECKPOINT) for f in (folder, self.reference))
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            for path in result_files(self.reference / "results"):
                saved = load_result(folder / "results" / path.name)
                assert saved.data.identical(load_result(path).data), path.name


def kill_at_random(folder: Path, kills: int, *, in_the_middle: int = 0, seed: int = 0) -> Harness:
    """Kill so many processes, then let what they did come to its end.

    Until so many kills were in the middle of a training, there are more, up to four times as many.

    Raises:
        AssertionError: If anything was lost, left in parts, or mixes two runs.
    """
    harness = Harness(folder, random.Random(seed))
    while (done := sum(harness.kills.values())) < 4 * kills and (
        done < kills or harness.in_the_middle < in_the_middle
    ):
        harness.kill()
    harness.finish()
    return harness


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        done = kill_at_random(Path(folder), arguments.kills, seed=arguments.seed)
    print(
        f"{sum(done.kills.values())} kills ({dict(done.kills)}), {done.in_the_middle} in the "
        f"middle of training, {len(done.runs)} runs: nothing lost, no result that mixes runs"
    )


if __name__ == "__main__":
    main()
