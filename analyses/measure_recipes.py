"""What the recipes are worth: train each with several seeds, measure it far out, write it down.

    python -m analyses.measure_recipes --out runs/recipes
    python -m analyses.measure_recipes --out runs/recipes parity copy --jobs 2
    python -m analyses.measure_recipes --add unique_set --times 1 1.5 2 --samples 200

What is found goes into ``measured`` of each recipe's file, which else stays as it is: exact match
of every seed at some multiples of the training cutoff, and at more lengths between the last where
the mean over the seeds is .9 and the first where it is not, so that the file says how far the
recipe reaches. What is done is kept in --out: stopped at any moment, the same command goes on. A
recipe that has changed since is refused there, and needs another folder.

--add trains nothing: it measures the distributions that a file lacks, with those of its seeds that
are in the zoo; the other seeds have no share there.
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed

from loopinterp.core.errors import InputError
from loopinterp.core.storage import read_json_object, write_json
from loopinterp.models.protocol import shifted_loops
from loopinterp.tasks import Task
from loopinterp.training import (
    EvaluationResult,
    Measurement,
    Recipe,
    Run,
    Sweep,
    SweepEvaluation,
    SweepResult,
    TrainingConfig,
    evaluate,
    recipes,
    run_sweep,
)
from loopinterp.zoo import get_card, list_pretrained, pretrained_run

FOLDER = Path(recipes.__file__).with_suffix("")
TIMES = (1, 1.5, 2, 3, 4, 8)
Shares = dict[str, dict[int, tuple[float | None, ...]]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train and measure recipes, and write it down.")
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="Default: all.")
    parser.add_argument("--recipes", type=Path, default=FOLDER, help="Folder of their files.")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="Where to train.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=1000, help="Of each distribution, length.")
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="The cutoff.")
    parser.add_argument(
        "--most",
        type=float,
        default=6e7,
        help="Leave out lengths at which the samples make more steps of one position through one "
        "layer than this; a core makes some 100,000 a second at width 64.",
    )
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    parser.add_argument("--on", help="Words for the machine.")
    parser.add_argument("--add", action="store_true", help="Distributions that a file lacks.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = {file.stem: file for file in sorted(args.recipes.glob("*.json"))}
    if unknown := {*args.names} - {*files}:
        parser.error(f"no such recipe in {args.recipes}: {', '.join(sorted(unknown))}")
    failed = False
    for name in args.names or files:
        try:
            if args.add:
                measured = with_missing(name, files[name], args)
            else:
                measured = measure(name, config_of(files[name]), args)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        write(files[name], measured, args.out / f"{name}.json")
        print(f"{name}: {in_words(measured)}", flush=True)
    return int(failed)


def config_of(file: Path) -> TrainingConfig:
    """The configuration of a recipe's file, which may have no ``measured`` yet."""
    return TrainingConfig.from_dict(read_json_object(file)["config"])


def measure(name: str, config: TrainingConfig, args: argparse.Namespace) -> Measurement:
    """Train the seeds, measure them at multiples of the cutoff, and where they begin to fail."""
    sweep = Sweep(
        about=f"What is the recipe {name} worth?",
        config=config,
        seeds=tuple(args.seeds),
        evaluation=SweepEvaluation(
            lengths=lengths(config, times=args.times, samples=args.samples, most=args.most),
            samples=args.samples,
        ),
    )
    out = args.out / name
    done = run_sweep(sweep, out, jobs=args.jobs)
    if done.failed:
        said = "; ".join(f"{cell}: {why}" for cell, why in done.failed.items())
        raise InputError(name, expected="all seeds to end", given=said, fix="See what went wrong.")
    folders = [out / "cells" / "base" / f"seed-{seed}" for seed in args.seeds]
    found = [EvaluationResult.load(f / "results" / "generalisation.safetensors") for f in folders]
    measured = as_measured(shares(found), done, args)
    near = max(config.curriculum.max_n // 6, 1)
    while (n := between(measured, near)) is not None:
        more: Any = Parallel(n_jobs=args.jobs)(
            delayed(evaluated)(folder, n, args.samples, out / "between" / folder.name)
            for folder in folders
        )
        both = {d: {**of, **shares(more)[d]} for d, of in measured.exact_match.items()}
        measured = as_measured(both, done, args)
    return measured


def with_missing(name: str, file: Path, args: argparse.Namespace) -> Measurement:
    """What a file has, and beside it the distributions that it lacks, of seeds in the zoo."""
    measured = Measurement.from_dict(read_json_object(file)["measured"])
    config = config_of(file)
    task, samples = config.make_task(), min(measured.samples, args.samples)
    asked = lengths(config, times=args.times, samples=samples, most=args.most)
    lacking = [d for d in task.distributions if d not in measured.exact_match]
    runs = of_the_zoo(name)
    if not lacking:
        return measured
    if not {*runs} & {*measured.seeds}:
        fix = "Train it: leave --add out."
        raise InputError(name, expected="one of its seeds in the zoo", given="none", fix=fix)
    found = {
        seed: evaluate(
            runs[seed].model(),
            task,
            asked,
            distributions=lacking,
            n_samples=samples,
        )
        for seed in measured.seeds
        if seed in runs
    }
    by_seed = {seed: shares([of]) for seed, of in found.items()}
    added = {
        d: {
            n: tuple(by_seed[seed][d][n][0] if seed in by_seed else None for seed in measured.seeds)
            for n in asked
        }
        for d in lacking
    }
    every = {**measured.exact_match, **added}
    exact = {d: every[d] for d in task.distributions}
    return measured.replace(exact_match=exact, samples=samples)


def of_the_zoo(recipe: str) -> dict[int, Run]:
    """The models of the zoo that were trained by a recipe and nothing else, by seed."""
    cards = {name: get_card(name) for name in list_pretrained().index}
    runs = [
        pretrained_run(name)
        for name, card in cards.items()
        if card.recipe == recipe and {*card.changes} <= {"seed"}
    ]
    return {int(run.config.to_dict()["seed"]): run for run in runs}


def lengths(
    config: TrainingConfig, *, times: list[float], samples: int, most: float
) -> tuple[int, ...]:
    """Multiples of the training cutoff that are affordable, the cutoff in any case."""
    task, cutoff = config.make_task(), config.curriculum.max_n
    wanted = {math.ceil(cutoff * k) for k in times}
    room = config.model.n_ctx or math.inf
    fits = {
        n
        for n in wanted
        if samples * steps(config, task, n) <= most and task.n_positions(n) <= room
    }
    return tuple(sorted(fits | {cutoff}))


def steps(config: TrainingConfig, task: Task, n: int) -> int:
    """Steps of one position through one layer that an example of a length takes."""
    about = config.objective
    shift = {"scale": about.loop_scale, "extra": about.extra_loops}
    loops = about.n_loops or int(shifted_loops(torch.tensor(task.n_loops(n)), **shift))
    return task.n_positions(n) * config.model.n_layers * max(loops, 1)


def between(measured: Measurement, near: int) -> int | None:
    """The next length to measure: halfway between right and wrong, if they are not near."""
    well, wrong = measured.reach()
    return None if wrong is None or wrong - well <= near else (well + wrong) // 2


def evaluated(folder: Path, n: int, samples: int, kept: Path) -> EvaluationResult:
    """A run at one more length, from the file if it is there and of these weights."""
    torch.set_num_threads(1)
    run = Run.load(folder)
    first = EvaluationResult.load(folder / "results" / "generalisation.safetensors")
    file = kept / f"length-{n}.safetensors"
    if file.exists():
        found = EvaluationResult.load(file)
        if (found.n_samples, found.provenance.weights) == (samples, first.provenance.weights):
            return found
    task = run.task
    found = evaluate(run.model(), task, [n], n_samples=samples)
    found.save(kept, file.stem)
    return found


def shares(found: list[EvaluationResult]) -> Shares:
    """Exact match of each seed, by distribution and length."""
    exact = [of.data["exact_match"].sel(extra_loop=0, estimate="value") for of in found]
    return {
        str(d): {
            int(n): tuple(round(float(of.sel(distribution=d, length=n)), 4) for of in exact)
            for n in exact[0]["length"].values
        }
        for d in exact[0]["distribution"].values
    }


def as_measured(found: Shares, done: SweepResult, args: argparse.Namespace) -> Measurement:
    minutes = float(done.data["seconds"].sel(setting="base")) / 60
    return Measurement(
        seeds=tuple(args.seeds),
        samples=args.samples,
        exact_match={d: dict(sorted(of.items())) for d, of in found.items()},
        minutes=max(round(minutes, 1), 0.1),
        on=args.on or f"one core of a shared {platform.machine()} machine",
    )


def write(file: Path, measured: Measurement, made: Path) -> None:
    """Put what was measured into a recipe's file, all else as it was."""
    document = read_json_object(file)
    order = ("about", "config", "measured", "tried")
    document = {"tried": []} | document | {"measured": measured.to_dict()}
    Recipe.from_dict(document)  # refused before the file is touched
    # The library writes nothing into the package, so the file is made elsewhere and moved.
    write_json(made, {name: document[name] for name in order})
    shutil.copyfile(made, file)


def in_words(measured: Measurement) -> str:
    """The lowest distribution's mean by length, and how far it is .9 or more."""
    lowest = {n: measured.lowest(n) for n in measured.lengths}
    said = ", ".join(
        f"{of.share:.3f} at {n} ({'/'.join(of.distributions)})" for n, of in lowest.items()
    )
    well, wrong = measured.reach()
    far = f"beyond {well}" if wrong is None else f"up to {well}, not at {wrong}"
    return f"exact match {said}; .9 {far}; {measured.minutes} min a seed"


if __name__ == "__main__":
    sys.exit(main())
