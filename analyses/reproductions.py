"""Our numbers beside the sources': writes the tables of docs/results/reproductions.md from files.

    python -m analyses.reproductions
    python -m analyses.reproductions --keep baselines_copy=runs/copy/sweep.csv \\
        --keep notebook=runs/notebook/notebook_models.csv \\
        --keep abacus-plain=runs/abacus/results/grid.safetensors

Recipes are read from the package (analyses/measure_recipes.py measures them); all else from
analyses/results, where long_addition writes by itself and --keep puts what a sweep, published_loss,
the notebook's script or `loopinterp grid` has found. A name is that of the file there.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from analyses.long_addition import FILE as LONG_ADDITION
from analyses.notebook_models import SOURCE as NOTEBOOK
from analyses.published_loss import LIMIT
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table, with_error
from loopinterp.core.errors import InputError
from loopinterp.tasks import get_task
from loopinterp.training import Measurement, OperandGrid, Sweep, get_recipe, list_recipes

PAGE = "results/reproductions.md"
SWEEPS = Path(__file__).parent / "sweeps"
SIX = {
    "parity": (20, 50),
    "copy": (19, 30),
    "token_addition": (19, 30),
    "multiplication": (11, 15),
    "binary_sum": (19, 24),
    "unique_set": (19, 30),
}
"""arXiv 2409.15647: greatest length in training, and up to which it reports."""

RECIPE_OF = {"multiplication": "multiplication-two-bits"}
"""The recipe of a task that has none of its name, as none does well on all its distributions."""

ABACUS = {1: 0.000, 2: 0.320, 4: None, 8: 0.611, 16: 0.613, 32: 0.613}
"""The post's mean over its grid of 40 x 40, by loops."""


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Write the tables of docs/{PAGE}.")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    for kept in args.keep:
        name, equals, file = kept.partition("=")
        if not equals:
            parser.error(f"--keep {kept}: write NAME=FILE")
        print(keep(name, Path(file), args.results))
    changed = rewrite(args.page, tables(args.results))
    print(args.page, "" if changed else "(as it was)")


def keep(name: str, file: Path, results: Path) -> Path:
    """Keep what was found: a CSV as it is, a grid by operand lengths as its means."""
    kinds = ("notebook", "contrast_", "baselines_", "ablations_", "published_loss_", "abacus-")
    if not name.startswith(kinds):
        fix = "Name it after the table that it is for."
        expected = "notebook, {}TASK, {}TASK, {}TASK, {}TASK or {}SETTING".format(*kinds[1:])
        raise InputError("--keep", expected=expected, given=repr(name), fix=fix)
    results.mkdir(parents=True, exist_ok=True)
    kept = results / f"{name}.csv"
    if name.startswith("abacus-"):
        means_of(OperandGrid.load(file)).to_csv(kept, index=False, float_format="%.4f")
    else:
        shutil.copyfile(file, kept)
    return kept


def means_of(grid: OperandGrid) -> pd.DataFrame:
    """Mean exact match over the whole grid, and over the lengths of training, by loops."""
    exact = grid.data["exact_match"].sel(estimate="value")
    to, cutoff = int(exact["n_a"].max()), grid.trained_up_to or 0
    within = exact.sel(n_a=slice(1, cutoff), n_b=slice(1, cutoff)).mean(["n_a", "n_b"])
    return pd.DataFrame(
        {
            "loop": exact["loop"].values,
            "within": within.values,
            "whole": exact.mean(["n_a", "n_b"]).values,
            "trained_up_to": cutoff,
            "to": to,
            "n_samples": grid.n_samples,
        }
    )


def tables(results: Path) -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        "notebook": notebook(results / "notebook.csv"),
        "six-tasks": six_tasks(),
        "published-loss": published_loss(sorted(results.glob("published_loss_*.csv"))),
        "long-addition": long_addition(results / LONG_ADDITION),
        "contrast": contrast(sorted(results.glob("contrast_*.csv"))),
        "baselines": sweeps(sorted(results.glob("baselines_*.csv")), "baselines_"),
        **{
            name: sweeps([*results.glob(f"{name}.csv")], "ablations_")
            for name in ("ablations_parity", "ablations_addition")
        },
        "abacus": abacus(sorted(results.glob("abacus-*.csv"))),
    }


def notebook(file: Path) -> str:
    """Bit accuracy / exact match by length: the notebook's code, and ours."""
    lengths, rows = [*NOTEBOOK["looped"]], []
    for name, said in NOTEBOOK.items():
        shown = ("{:.2f} / {:.2f}".format(*said[n]) for n in lengths)
        rows.append([f"{name}: the notebook's code", "random", *shown])
    if not file.exists():
        rows.append(["ours", "not measured yet", *[""] * len(lengths)])
        return table(["model", "digits", *map(str, lengths)], rows)
    found = pd.read_csv(file)
    for name, d in found[["model", "distribution"]].drop_duplicates().values.tolist():
        at = found.query("model == @name and distribution == @d").set_index("length")
        shown = (
            f"{at.bit_accuracy[n]:.2f} / {with_error(at.exact_match[n], at.exact_match_se[n], 2)}"
            for n in lengths
        )
        rows.append([f"{name}: ours", {"uniform": "random", "chain": "chains"}[d], *shown])
    return table(["model", "digits", *map(str, lengths)], rows)


def six_tasks() -> str:
    """The tasks of arXiv 2409.15647: what it trains on and reports, and what our recipes reach."""
    rows = []
    for name, (cutoff, test) in SIX.items():
        recipe_name = RECIPE_OF.get(name, name)
        if recipe_name not in list_recipes():
            rows.append([name, cutoff, test, *["no recipe yet"], *[""] * 6])
            continue
        recipe = get_recipe(recipe_name)
        measured, ours = recipe.measured, recipe.config.curriculum.max_n
        far = -(-3 * ours // 2)
        well, wrong = measured.reach()
        reach = f"{well} at least" if wrong is None else f"{well or 'nothing'} (not at {wrong})"
        shown = [lowest(measured, n) for n in (ours, far)]
        where = measured.lowest(far if far in measured.lengths else ours).distributions
        on = "all alike" if len(where) == len(measured.exact_match) else ", ".join(where)
        n_seeds = min(measured.mean(d, ours).n_seeds for d in measured.exact_match)
        seeds = len(measured.seeds)
        seeds = str(seeds) if n_seeds == seeds else f"{seeds}; {n_seeds} on some distributions"
        rows.append([name, cutoff, test, ours, *shown, on, reach, seeds, measured.samples])
    header = ["task", "paper: trained to", "shown to", "ours: trained to", "there", "1.5 times"]
    return table([*header, "lowest on", "at least .9 up to", "seeds", "samples"], rows)


def published_loss(files: list[Path]) -> str:
    """Our loss beside plain PyTorch's at the published setting, by stretches of steps."""
    rows = []
    for file in files:
        task = file.stem.removeprefix("published_loss_")
        for of in pd.read_csv(file).to_dict("records"):
            losses = (f"{of['ours']:.3g}", f"{of['plain']:.3g}", f"{of['loss_most_off']:.1e}")
            steps = f"{of['from_step']}-{of['to_step']}"
            rows.append([task, steps, of["longest_n"], *losses, of["steps_over"]])
    if not files:
        rows.append(["not measured yet", *[""] * 6])
    header = ["task", "steps", "longest n", "ours", "plain PyTorch", "most apart, relative"]
    return table([*header, f"steps over {LIMIT:g}"], rows)


def long_addition(file: Path) -> str:
    """Exact match far beyond training, of each seed, with what it took."""
    rows = []
    for of in pd.read_csv(file).to_dict("records") if file.exists() else []:
        digits = {"uniform": "random", "chain": "full chains"}[of["digits"]]
        right = f"{round(of['exact_match'] * of['samples'])} of {of['samples']}"
        cost = f"{of['minutes']:.1f}", round(of["megabytes"])
        rows.append([of["length"], f"seed {of['seed']}", digits, right, *cost])
    if not rows:
        rows.append(["not measured yet", *[""] * 5])
    header = ["bits", "recipe addition", "digits", "wholly right", "minutes of one core"]
    return table([*header, "peak memory, MB"], rows)


def lowest(measured: Measurement, n: int) -> str:
    """Mean and standard error over seeds at a length, of the distribution where it is lowest."""
    if n not in measured.lengths:
        return "-"
    mean = measured.mean(measured.lowest(n).distributions[0], n)
    return with_error(mean.value, mean.error, 3)


def contrast(files: list[Path]) -> str:
    """Exact match of each task's recipe, and of the settings that were compared with it."""
    rows = []
    for file in files:
        task, of = file.stem.removeprefix("contrast_"), pd.read_csv(file)
        sweep, names = Sweep.read(SWEEPS / f"{file.stem}.json"), [*of["distribution"].unique()]
        recipe, lengths = get_recipe(str(sweep.recipe)), sorted({*of["length"].tolist()})
        ours = [min(recipe.measured.mean(d, n) for d in names) for n in lengths]
        on = ", ".join(names)
        shown = [with_error(mean.value, mean.error, 3) for mean in ours]
        seeds = min(mean.n_seeds for mean in ours)
        rows.append([task, "recipe", recipe.config.steps, *shown, on, seeds])
        for setting, shown, seeds in by_setting(of, lengths):
            steps = sweep.config_of(setting, sweep.seeds[0]).steps
            rows.append(["", setting, steps, *shown, on, seeds])
    times = ("1 times", "1.5 times", "2 times")
    return table(["task", "setting", "steps", *times, "measured on", "seeds"], rows)


def sweeps(files: list[Path], kind: str) -> str:
    """Exact match of each setting of each task by length: the lowest of what was measured."""
    found = {file.stem.removeprefix(kind): pd.read_csv(file) for file in files}
    rows, lengths = [], sorted({n for of in found.values() for n in of["length"]})
    for task, of in found.items():
        measured = [*of["distribution"].drop_duplicates()]
        left = {*get_task(task).distributions} - {*measured}
        on = ", ".join(measured) + " alone" * bool(left)
        for setting, shown, seeds in by_setting(of, lengths):
            rows.append([task, setting, *shown, on, seeds])
    return table(["task", "setting", *map(str, lengths), "measured on", "seeds"], rows)


def by_setting(of: pd.DataFrame, lengths: Iterable[int]) -> Iterator[tuple[str, list[str], int]]:
    """Each trained setting, its exact match by length (on the distribution where it is lowest),
    and its number of seeds."""
    for setting in of.query("n_seeds > 0")["setting"].drop_duplicates():
        cells = of.query("setting == @setting").sort_values("exact_match", kind="stable")
        at = cells.drop_duplicates("length").set_index("length")
        shown = [
            with_error(at.exact_match[n], at.exact_match_se[n], 3) if n in at.index else "-"
            for n in lengths
        ]
        yield setting, shown, int(at["n_seeds"].max())


def abacus(files: list[Path]) -> str:
    """Mean exact match over the grid of operand lengths, by loops."""
    said = ["-" if share is None else f"{share:.3f}" for share in ABACUS.values()]
    rows = [["the post, 40 x 40", "20", *said]]
    for file in files:
        of = pd.read_csv(file).set_index("loop")
        name = file.stem.removeprefix("abacus-")
        to, cutoff = (int(of[column].max()) for column in ("to", "trained_up_to"))
        for column, size in (("within", cutoff), ("whole", to)):
            shown = [f"{of[column][loop]:.3f}" if loop in of.index else "-" for loop in ABACUS]
            rows.append([f"ours, {name}, {size} x {size}", str(cutoff), *shown])
    if not files:
        rows.append(["ours", "not measured yet", *[""] * len(ABACUS)])
    loops = (f"{loop} loop{'s' if loop > 1 else ''}" for loop in ABACUS)
    return table(["grid", "trained to", *loops], rows)


if __name__ == "__main__":
    main()
