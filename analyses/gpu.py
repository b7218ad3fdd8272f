"""Everything that needs a GPU, in slices of under ten minutes, of which a lost one is no loss.

    python analyses/gpu.py --list
    python analyses/gpu.py                       # or: make gpu
    python analyses/gpu.py --slice paper-parity  # one slice only

Each slice is a command with a time limit. It is done once its result file is there, and is then
left out; what its limit stops is gone on with by the next call: a training from its checkpoint, all
else from the start. Slices of system B train five seeds in one batch at the published scale (arXiv
2409.15647: width 256, batch 64, AdamW 1e-4, 100,000 steps), in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("forward", "training_step", "seeds_together", "decoding")
SEEDS = range(5)
LIMIT = 540
"""Seconds of a slice, so that it ends within ten minutes with all that it starts."""

PAPER: dict[str, dict[str, Any]] = {
    "parity": {"layers": 1, "heads": 64, "grows_every": 500, "max_n": 20, "test_n": 50},
    "copy": {"layers": 2, "heads": 8, "grows_every": 1000, "max_n": 19, "test_n": 30},
    "token_addition": {"layers": 3, "heads": 8, "grows_every": 1600, "max_n": 19, "test_n": 30},
    "multiplication": {"layers": 4, "heads": 8, "grows_every": 500, "max_n": 11, "test_n": 15},
    "binary_sum": {"layers": 2, "heads": 16, "grows_every": 500, "max_n": 19, "test_n": 24},
    "unique_set": {"layers": 3, "heads": 8, "grows_every": 1000, "max_n": 19, "test_n": 30},
}
"""arXiv 2409.15647: block, curriculum, and the length up to which it reports."""

AVERAGED = ("parity", "binary_sum")
"""Tasks whose weights the paper averages."""


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
    marked = ("-m", "pytest", "-m", "gpu", "-q", "--junit-xml={result}")
    made = [Slice("tests", marked, suffix=".xml")]
    for name in BENCHMARKS:
        command = ("-m", f"analyses.benchmarks.{name}", "--device", "cuda", "--json", "{result}")
        made.append(Slice(f"benchmark-{name.replace('_', '-')}", command))
    for task in PAPER:
        command = ("-m", "analyses.gpu", "--train", task, "--result", "{result}")
        made.append(Slice(f"paper-{task.replace('_', '-')}", command, resumes=True))
    return made


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


def paper_config(task: str, *, device: str = "cuda", small: bool = False) -> Any:
    """The published setting of a task; ``small`` is one of seconds, to try the rest on.

    What was not published is as PyTorch has it: AdamW's averages and weight decay.
    """
    from loopinterp.tasks import get_task
    from loopinterp.training import TrainingConfig

    known, asked = PAPER[task], get_task(task)
    model = {
        "d_model": 16 if small else 256,
        "n_heads": 2 if small else known["heads"],
        "n_layers": known["layers"],
        "d_vocab": asked.d_vocab,
        "d_vocab_out": asked.d_vocab_out,
        "act_fn": "gelu_new",
        "injection": "input",
        "initial_state": "zeros",
        "loop_norm": True,
        "final_norm": False,
    }
    values = {
        "task": task,
        "distribution": "uniform",
        "model": model,
        "curriculum": {
            "kind": "interval",
            "interval": 2 if small else known["grows_every"],
            "max_n": 3 if small else known["max_n"],
        },
        "optimiser": {
            "lr": 1e-4,
            "betas": [0.9, 0.999],
            "warmup_steps": 0,
            "schedule": "cosine",
        },
        "steps": 12 if small else 100_000,
        "batch_size": 4 if small else 64,
        "ema": 0.9999 if task in AVERAGED else 0.0,
        "log_every": 4 if small else 100,
        "checkpoint_every": 4 if small else 500,
        "precision": "fp32" if device == "cpu" else "bf16",
        "device": device,
    }
    return TrainingConfig.from_dict(values)


def train_slice(task: str, result: Path, *, device: str, small: bool) -> None:
    """Train five seeds together, or go on with them; at the end say how right and how fast."""
    from loopinterp.training import evaluate, train_seeds

    config = paper_config(task, device=device, small=small)
    runs = train_seeds(config, SEEDS, result.parent / f"{task}-runs", progress=False)
    longest, n_samples = config.curriculum.max_n, 16 if small else 6400
    lengths = [longest] if small else [longest, PAPER[task]["test_n"]]
    exact: dict[int, list[float]] = {}
    for one in runs:
        options = {"distributions": ["uniform"], "n_samples": n_samples}
        found = evaluate(one.model(device), one.task(), lengths, **options)
        cells = found.data["exact_match"].sel(estimate="value")
        exact[int(one.folder.name.removeprefix("seed-"))] = cells.values.reshape(-1).tolist()
    said = {"task": task, "lengths": lengths, "exact_match": exact, **_speed(config, runs)}
    result.write_text(json.dumps(said, indent=1) + "\n")


def _speed(config: Any, runs: Sequence[Any]) -> dict[str, Any]:
    """Of all seeds together, over the whole training; and the share of the peak at its end."""
    from analyses.benchmarks.timing import compare
    from loopinterp.training import CurriculumConfig, Trainer
    from loopinterp.training.seed_ensemble import advance_together

    steps = config.steps / math.fsum(one.seconds for one in runs)
    last = config.replace(curriculum=CurriculumConfig(kind="none", max_n=config.curriculum.max_n))
    trainers = [Trainer(last.replace(seed=seed)) for seed in SEEDS]

    def step() -> None:
        advance_together(trainers)
        for trainer in trainers:
            trainer.read()

    row = compare({"step": step}, rounds=5, device=config.device)["step"]
    return {"steps_per_second": steps, "at_full_length": row}


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--list", action="store_true", help="say what there is, and what is done")
    cli.add_argument("--slice", action="append", help="run this one only; may be given again")
    cli.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs/gpu"))
    cli.add_argument("--train", choices=list(PAPER), help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.train:
        return train_slice(options.train, options.result, device="cuda", small=False)
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
    done = [run(part, options.out) for part in chosen]  # what fails does not keep others from it
    raise SystemExit(not all(done))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
