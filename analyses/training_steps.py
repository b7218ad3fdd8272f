"""When accuracy, fixed point, wavefront and automaton appear in training.

    python -m analyses.training_steps            # some half an hour on one core
    python -m analyses.training_steps --page     # the page alone, from the results

Trains three recipes with two seeds each, and measures every snapshot. Runs go into ``--runs``, one
that is there already is measured; results are kept in analyses/results/training_steps.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.app import Milestone, TrainingDynamics, training_dynamics_study
from loopinterp.tasks import IGNORE
from loopinterp.training import RECIPES, apply_settings, train

EVERY = {"parity": 100, "addition": 50, "prefix_sum-finite": 50}
"""Recipes, with the steps from one snapshot to the next."""
SEEDS, SAMPLES = (0, 1), 256
FILES = ("training_milestones.csv", "training_steps.csv")
PAGE, PICTURE = "results/training-steps.md", "training-steps.png"
SHOWN = {  # of the table: title -> milestone
    "converges": Milestone.CONVERGES,
    "converges right": Milestone.CONVERGES_RIGHT,
    "variable readable": Milestone.READABLE,
    "right, length 12": Milestone.RIGHT,
    "right, length 24": Milestone.GENERALISES,
    "closest program": Milestone.PROGRAM,
    "final table": Milestone.AUTOMATON,
}


def running_parity(inputs: Tensor) -> Tensor:
    """Whether the bits up to a position have an odd sum; bits are tokens 0 and 1."""
    is_bit = inputs < 2
    return ((inputs * is_bit).cumsum(1) % 2).masked_fill(~is_bit, IGNORE)


VARIABLES: dict[str, Callable[[Tensor], Tensor]] = {"parity": running_parity}
"""Parity answers at its end alone; other tasks have an answer or a carry at every position."""


def studied(runs: Path, name: str, seed: int) -> TrainingDynamics:
    """A recipe's run, trained if it is not there, and all its snapshots."""
    if (saved := runs / f"results/{name}-{seed}.safetensors").exists():
        return TrainingDynamics.load(saved)
    changes = [f"seed={seed}", "snapshots.kind=even", f"snapshots.every={EVERY[name]}"]
    run = train(apply_settings(RECIPES[name], [*changes, 'device="cpu"']), runs / f"{name}-{seed}")
    result = training_dynamics_study(run, variable=VARIABLES.get(name), n_samples=SAMPLES)
    result.save(saved.parent, saved.stem)
    return result


def rows_of(result: TrainingDynamics, name: str, seed: int) -> pd.DataFrame:
    """A row for each snapshot: accuracies, convergence, front, program, table."""
    data, closest = result.data.sel(estimate="value"), result.closest_program
    columns = {
        "recipe": name, "seed": seed, "step": data["step"].values, "program": closest or "",
        **{f"exact_{n}": data["exact_match"].sel(length=n) for n in data["length"].values},
        **{key: data[key].isel(loop=-1) for key in ("converged", "converged_right", "residual")},
        "readable": result.readable.isel(loop=-1),
        "readable_random": (data["probe_random"] >= result.threshold).mean("distance").max("loop"),
        "speed": result.speed,
    }  # fmt: skip
    if closest:
        columns["whole_run"] = data["whole_run"].sel(program=closest)
    columns |= {key: data[key] for key in ("cells", "final_table") if key in data}
    return pd.DataFrame(columns)


def milestones(result: TrainingDynamics) -> dict[str, str]:
    """The step of each milestone in words: ``-`` if it was not measured, ``never`` if not had."""
    words = {}
    for title, milestone in SHOWN.items():
        step = result.step_of(milestone)
        none = "-" if result.reached(milestone) is None else "never"
        words[title] = none if step is None else str(step)
    return words


def as_tables(when: pd.DataFrame, rows: pd.DataFrame) -> dict[str, str]:
    """The steps of the milestones; the speed of the front, and the program's share."""
    fronts = []
    for record in when.to_dict("records"):
        name, seed, right = record["recipe"], record["seed"], str(record["right, length 12"])
        of_run = rows[(rows["recipe"] == name) & (rows["seed"] == seed)].set_index("step")
        known = of_run["speed"].dropna()
        moves = f"{known.iloc[0]:.2f} (step {known.index[0]})" if len(known) else "never"
        then = f"{of_run['speed'][int(right)]:.2f}" if right.isdecimal() else "-"
        first, last = of_run.iloc[0], of_run.iloc[-1]
        program = f"{first['whole_run']:.2f} → {last['whole_run']:.2f} ({last['program']})"
        fronts.append([f"{name}, seed {seed}", moves, then, f"{last['speed']:.2f}", program])
    runs = when["recipe"] + ", seed " + when["seed"].astype(str)
    steps = [[run, *row] for run, row in zip(runs, when[list(SHOWN)].to_numpy().tolist())]
    header = ["run", "first speed", "when right", "at the end", "program: untrained → trained"]
    return {
        "training-milestones": table(["run", *SHOWN], steps),
        "training-fronts": table(header, fronts),
    }


def picture(results: dict[tuple[str, int], TrainingDynamics]) -> bytes:
    """Loops by steps of one run: accuracy, convergence, the probe."""
    with StillPictures() as pictures:
        return pictures.draw(results["addition", 0].figures()[0].plot, width=980, height=620)


def main() -> None:
    parser = argparse.ArgumentParser(description="What appears when in training.")
    parser.add_argument("--runs", type=Path, default=Path("runs/training-steps"))
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.page:
        results = {(name, seed): studied(args.runs, name, seed) for name in EVERY for seed in SEEDS}
        rows = pd.concat(rows_of(result, *pair) for pair, result in results.items())
        when = pd.DataFrame(
            {"recipe": name, "seed": seed, **milestones(result)}
            for (name, seed), result in results.items()
        )
        for file, measured in zip(FILES, (when, rows)):
            measured.to_csv(RESULTS / file, index=False, float_format="%.4f")
        for pair, result in results.items():
            print(*pair, *(f"\n- {finding.text}" for finding in result.findings()))
        (PAGES / "pictures" / PICTURE).write_bytes(picture(results))
    rewrite(PAGES / PAGE, as_tables(*(pd.read_csv(RESULTS / file) for file in FILES)))


if __name__ == "__main__":
    main()
