"""Everything that needs a GPU, in slices of under ten minutes, of which a lost one is no loss.

    python -m analyses.gpu --list
    python -m analyses.gpu                       # or: make gpu
    python -m analyses.gpu --slice paper-parity  # one slice only
    python -m analyses.gpu --scores 1x16         # an abacus model as far as it is trained

Each slice is a command with a time limit. It is done once its result file is there, and is then
left out; what its limit stops is gone on with by the next call: a training from its checkpoint, a
grid or a sweep from its last cell; a file of tests and a benchmark, which take a minute, begin
anew. The settings are in ``published_settings``: those of system B train five seeds in one batch,
those of C one; in bfloat16. Sweeps are those files of ``analyses/sweeps`` that have a paper scale.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from analyses.published_settings import ABACUS, DEPTHS, PAPER, SHAPES, abacus_config, paper_config

if TYPE_CHECKING:
    from loopinterp.models import LoopedTransformer
    from loopinterp.tasks import AbacusAddition
    from loopinterp.training import Run, TrainingConfig

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = (
    "forward",
    "training_step",
    "seeds_together",
    "finished_examples",
    "generation",
    "adapters",
)
SWEEPS = ROOT / "analyses" / "sweeps"
SEEDS = range(5)
LIMIT = 540
"""Seconds of a slice, so that it ends within ten minutes with all that it starts."""


@dataclass(frozen=True)
class Slice:
    """A part of the whole.

    Attributes:
        name: Its name.
        command: What Python runs; ``{result}`` is the file that it writes at its very end.
        limit: Seconds that one call may take.
        resumes: Whether the next call goes on where the limit stopped this one.
        suffix: Of the name of its result's file.
    """

    name: str
    command: tuple[str, ...]
    limit: float = LIMIT
    resumes: bool = False
    suffix: str = ".json"

    def result(self, out: Path) -> Path:
        return out / f"{self.name}{self.suffix}"


def slices() -> list[Slice]:
    """All of them, in the order in which they are run."""
    made = []
    for file in marked_tests():
        name = "-".join(["tests", *file.relative_to(ROOT / "tests").with_suffix("").parts])
        command = ("-m", "pytest", "-m", "gpu", "-q", "--junit-xml={result}", str(file))
        made.append(Slice(name.replace("_", "-"), command, suffix=".xml"))
    for name in BENCHMARKS:
        command = ("-m", f"analyses.benchmarks.{name}", "--device", "cuda", "--json", "{result}")
        made.append(Slice(f"benchmark-{name.replace('_', '-')}", command))
    for name in SHAPES:
        command = (
            "-m",
            "analyses.benchmarks.published_scale",
            "--device",
            "cuda",
            "--models",
            name,
        )
        made.append(Slice(f"published-{name}", (*command, "--json", "{result}")))
    for system, settings in (("paper", PAPER), ("abacus", ABACUS)):
        for name in settings:
            command = ("-m", "analyses.gpu", "--train", name, "--result", "{result}")
            made.append(Slice(f"{system}-{name.replace('_', '-')}", command, resumes=True))
    for name in paper_sweeps():
        command = ("-m", "analyses.gpu", "--sweep", name, "--result", "{result}")
        slice_ = Slice(f"sweep-{name.replace('_', '-')}", command, resumes=True, suffix=".csv")
        made.append(slice_)
    return made


def marked_tests() -> list[Path]:
    """Files of tests of which some need a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [f for f in files if re.search(r"^ *@pytest\.mark\.gpu\b", f.read_text(), re.MULTILINE)]


def paper_sweeps() -> list[str]:
    """Sweeps that can be had at the published scale."""
    files = sorted(SWEEPS.glob("*.json"))
    return [f.stem for f in files if "paper" in json.loads(f.read_text()).get("scales", ())]


def run(part: Slice, out: Path) -> bool:
    """Run a slice unless it is done; returns whether it is now."""
    result = part.result(out)
    if result.exists():
        return _say(part, "is done already", True)
    unfinished = result.with_suffix(".unfinished")
    command = [sys.executable, *(word.format(result=unfinished) for word in part.command)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOOPINTERP_PROGRESS": "0"}
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        with open(out / f"{part.name}.txt", "a") as said:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=part.limit, stdout=said, stderr=said
            ).returncode
    except subprocess.TimeoutExpired:
        again = "the next call goes on with it" if part.resumes else "it begins anew"
        return _say(part, f"was stopped after {part.limit:.0f} s; {again}", False)
    if code or not unfinished.exists():
        return _say(part, f"failed with status {code}; see {out / part.name}.txt", False)
    unfinished.replace(result)
    return _say(part, f"took {time.monotonic() - started:.0f} s", True)


def _say(part: Slice, what: str, done: bool) -> bool:
    print(f"{part.name} {what}", flush=True)
    return done


def train_slice(what: str, result: Path, *, device: str, small: bool) -> None:
    """Train a task of B, five seeds together, or a block of C; or go on with it.

    At the end it is said how right and how fast that is.
    """
    from loopinterp.training import train_seeds

    abacus = what in ABACUS
    config = (abacus_config if abacus else paper_config)(what, device=device, small=small)
    seeds = SEEDS[:1] if abacus else SEEDS
    runs = train_seeds(config, seeds, runs_of(what, result.parent), progress=False)
    scores = abacus_scores(runs[0], device, small) if abacus else exact_matches(runs, device, small)
    said = {"setting": what, **scores, **_speed(config, runs, small)}
    result.write_text(json.dumps(said, indent=1) + "\n")


def sweep_slice(name: str, result: Path, *, device: str, settings: Sequence[str] = ()) -> None:
    """Train and evaluate a sweep at the published scale, or go on with it; the result is its table.

    Raises:
        SystemExit: If some cells failed, which are named; the next call tries them again.
    """
    from loopinterp.training import Sweep, run_sweep

    sweep = Sweep.read(SWEEPS / f"{name}.json").at("paper")
    changes = [*sweep.set, f"device={device}", *settings]
    sweep = Sweep.from_dict({**sweep.to_dict(), "set": changes})
    done = run_sweep(sweep, runs_of(name, result.parent), progress=False)
    if done.failed:
        raise SystemExit("\n".join(f"{cell}: {why}" for cell, why in done.failed.items()))
    done.table().to_csv(result, index=False)


def runs_of(what: str, out: Path) -> Path:
    """Where a setting is trained, each seed in a folder."""
    return out / f"{what}-runs"


def exact_matches(runs: Sequence[Run], device: str, small: bool) -> dict[str, Any]:
    """Of each seed, by length: the training cutoff, and what the paper reports."""
    from loopinterp.training import evaluate

    longest, n_samples = runs[0].cutoff, 16 if small else 6400
    lengths = [longest] if small else [longest, PAPER[runs[0].task.name]["test_n"]]
    exact: dict[int, list[float]] = {}
    for seed, one in zip(SEEDS, runs):
        options = {"distributions": ["uniform"], "n_samples": n_samples}
        found = evaluate(one.model(device), one.task, lengths, **options)
        cells = found.data["exact_match"].sel(estimate="value")
        exact[seed] = cells.values.reshape(-1).tolist()
    return {"lengths": lengths, "exact_match": exact}


def abacus_scores(run: Run, device: str, small: bool) -> dict[str, Any]:
    """Answers that are generated until ``$``, by digits, and the grid by operand lengths.

    A grid that was stopped is gone on with, unless the model was trained on meanwhile.
    """
    from loopinterp.training import operand_grid

    model, task = run.model(device), cast("AbacusAddition", run.task)
    digits = [1, run.cutoff] if small else [run.cutoff // 2, run.cutoff, 2 * run.cutoff]
    to, n_samples = (2, 4) if small else (40, 100)
    right = {n: _generated(model, task, n, n_samples) for n in digits}
    unfinished = run.folder / "grid.unfinished"
    loops = sorted({max(1, depth // model.config.n_layers) for depth in DEPTHS})
    options = {"n_samples": n_samples, "trained_up_to": run.cutoff, "unfinished": unfinished}
    grid = operand_grid(model, task, to, loops=loops, **options)
    grid.save(run.folder / "results")
    unfinished.unlink(missing_ok=True)
    means = grid.data["exact_match"].sel(estimate="value").mean(["n_a", "n_b"])
    of_grid = dict(zip(loops, means.values.tolist()))
    return {"steps": run.steps_done, "generated": right, "grid_to": to, "grid_mean": of_grid}


def _generated(model: LoopedTransformer, task: AbacusAddition, n: int, n_samples: int) -> float:
    """Share of sums of n digits each that are wholly right as the model itself writes them."""
    import torch

    from loopinterp.models import generate

    drawn = task.sample_operands(
        n, n, batch_size=n_samples, generator=torch.Generator().manual_seed(n)
    )
    prompts, mask = task.prompt_of(drawn.inputs.to(model.device))
    said = generate(
        model,
        prompts,
        n_loops=model.config.n_loops,
        max_new_tokens=task.answer_length(n) + 1,
        stop_token=task.end,
        attention_mask=mask,
    )
    return float(task.is_right(drawn, said.cpu()).double().mean())


def _speed(config: TrainingConfig, runs: Sequence[Run], small: bool) -> dict[str, Any]:
    """Of all seeds together, over the whole training; and the share of the peak at its end."""
    from analyses.benchmarks.timing import compare
    from loopinterp.training import CurriculumConfig, Trainer
    from loopinterp.training.seeds import advance_together

    steps = config.steps / math.fsum(one.seconds for one in runs)
    if config.curriculum.kind != "none":
        longest = config.curriculum.max_n
        config = config.replace(curriculum=CurriculumConfig(kind="none", max_n=longest))
    trainers = [Trainer(config.replace(seed=seed)) for seed, _ in zip(SEEDS, runs)]

    def step() -> None:
        advance_together(trainers)
        for trainer in trainers:
            trainer.read()

    row = compare({"step": step}, rounds=2 if small else 5, device=config.device)["step"]
    return {"steps_per_second": steps, "at_full_length": row}


def show_scores(block: str, out: Path, *, device: str, small: bool) -> None:
    """Print and keep the scores of a block of C after the steps that its checkpoint has."""
    from loopinterp.training import Run

    run = Run.load(runs_of(block, out) / "seed-0")
    scores = abacus_scores(run, device, small)
    path = out / f"abacus-{block}-step-{scores['steps']}.json"
    path.write_text(json.dumps(scores, indent=1) + "\n")
    print(f"{path.read_text()}{path}")


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--list", action="store_true", help="say what there is, and what is done")
    cli.add_argument("--slice", action="append", help="run this one only; may be given again")
    cli.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs/gpu"))
    cli.add_argument("--scores", choices=list(ABACUS), help="score a model that is being trained")
    cli.add_argument("--train", choices=[*PAPER, *ABACUS], help=argparse.SUPPRESS)
    cli.add_argument("--sweep", choices=paper_sweeps(), help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.train:
        return train_slice(options.train, options.result, device="cuda", small=False)
    if options.sweep:
        return sweep_slice(options.sweep, options.result, device="cuda")
    known = {part.name: part for part in slices()}
    if unknown := [name for name in options.slice or () if name not in known]:
        cli.error(f"--slice: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    chosen = [known[name] for name in options.slice or known]
    if options.list:
        for part in chosen:
            done = "done" if part.result(options.out).exists() else "to do"
            print(f"{part.name:28} {done:6} {part.limit:4.0f} s at most")
        return None
    from analyses.benchmarks.timing import need_gpu

    need_gpu("make gpu")
    if options.scores:
        return show_scores(options.scores, options.out, device="cuda", small=False)
    done = [run(part, options.out) for part in chosen]  # what fails does not keep others from it
    raise SystemExit(not all(done))


if __name__ == "__main__":
    main()
