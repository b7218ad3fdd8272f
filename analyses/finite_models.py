"""Which programs training finds: finite-state models of several seeds, read whole.

    python -m analyses.finite_models --out runs/finite
    python -m analyses.finite_models --out runs/finite addition-finite --seeds 0 1 2 --jobs 2

Each seed is trained on answers alone with a code of sign bits between its loops, bits are dropped
as long as every answer stays right, and all transitions of the smallest model are tried. Models
whose automata are one up to the first guess are one algorithm, and get one letter. A row a seed is
kept in analyses/results/finite_models.csv, and its automaton and program in
analyses/results/finite_programs; a row a recipe goes into docs/results/programs.md. Runs that are
in --out are gone on with, and seeds that are not given stay as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.decompiler import Decompiled, decompile
from loopinterp.decompiler.evidence import INTERCHANGED
from loopinterp.decompiler.exact_reading import Surroundings, same_algorithm
from loopinterp.decompiler.transition_table import TransitionTable
from loopinterp.training import RECIPES, evaluate, list_recipes, smallest_stage, train_finite

FILE, PROGRAMS = "finite_models.csv", "finite_programs"
PAGE, NAME = "results/programs.md", "finite-models"
SAMPLES = 1000


def main() -> None:
    finite = [name for name in list_recipes() if name.endswith("-finite")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help=f"Default: {', '.join(finite)}.")
    parser.add_argument("--out", type=Path, default=Path("runs/finite"))
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    path = args.results / FILE
    known: Any = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["recipe", "seed"])
    (args.results / PROGRAMS).mkdir(parents=True, exist_ok=True)
    for name in args.names or finite:
        made = Parallel(n_jobs=args.jobs)(
            delayed(measure)(name, seed, args.out / name / f"seed-{seed}") for seed in args.seeds
        )
        read = dict(zip(args.seeds, (found for _, found in made)))
        automata = keep(args.results / PROGRAMS / f"{name}.json", read)
        before = known[(known["recipe"] == name) & ~known["seed"].isin([*args.seeds])]
        rows = pd.concat([before, pd.DataFrame([row for row, _ in made])]).sort_values("seed")
        of_seed = letters(name, [automata.get(seed) for seed in rows["seed"]])
        rows = rows.assign(algorithm=of_seed)
        known = pd.concat([known[known["recipe"] != name], rows], ignore_index=True)
        known.to_csv(path, index=False, float_format="%.6g")
        print(rows.to_string(index=False), flush=True)
    rewrite(args.page, {NAME: as_table(pd.read_csv(path))})


def measure(name: str, seed: int, out: Path) -> tuple[dict[str, Any], Decompiled | None]:
    """Train one seed, and read its smallest model; None where no stage is right."""
    torch.set_num_threads(1)
    stages = train_finite(RECIPES[name].replace(seed=seed), out, progress=False)
    minutes = sum(stage.run.seconds for stage in stages) / 60
    row: dict[str, Any] = {"recipe": name, "seed": seed, "minutes": minutes}
    smallest = smallest_stage(stages)
    if smallest is None:
        return row, None
    run, cutoff = smallest.run, smallest.run.cutoff
    lengths = [cutoff * k for k in (1, 2, 4)]
    right = evaluate(run.model(), run.task, lengths, n_samples=SAMPLES)
    near = (cutoff - 1, cutoff, 2 * cutoff - 1, 2 * cutoff)
    found = decompile(run.model(), run.task, n=cutoff, lengths=near)
    tried = found.evidence[found.evidence["what"].isin(INTERCHANGED)]
    assert found.table is not None and found.automaton is not None
    return row | {
        "bits": smallest.n_bits,
        "from_anywhere": smallest.from_anywhere,
        "right": min(right.lowest(n).share for n in lengths),
        "transitions": found.table.transitions,
        "sure": found.table.sure,
        "cells": len(found.automaton.cells),
        "agree": int(tried["agree"].sum()),
        "of": int(tried["of"].sum()),
        "claim": found.claim.grade,
        "same_as": found.same_as.program.name if found.same_as else "",
        "program": found.program.name if found.program and found.same_as else "",
    }, found


def letters(name: str, automata: Sequence[TransitionTable | None]) -> list[str]:
    """A letter for each algorithm, the first met first; "" where there is none."""
    run_of: list[tuple[str, TransitionTable]] = []
    asked = Surroundings.of(RECIPES[name].make_task(), (1, 2, 3)).asked
    found = []
    for automaton in automata:
        if automaton is None:
            found.append("")
            continue
        known = (x for x, other in run_of if same_algorithm(automaton, other, asked))
        letter = next(known, None) or ascii_uppercase[len(run_of)]
        run_of += [(letter, automaton)] * (letter not in dict(run_of))
        found.append(letter)
    return found


def keep(path: Path, read: Mapping[int, Decompiled | None]) -> dict[int, TransitionTable]:
    """Write what was read off each seed beside what the file has of others; all automata."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for seed, found in read.items():
        kept.pop(str(seed), None)
        if found is not None and found.automaton is not None:
            table = found.automaton
            kept[str(seed)] = {
                "program": str(found.program).splitlines(),
                "sizes": [*table.sizes.items()],
                "start": [*table.starts.items()],
                "step": [*table.steps.items()],
                "answers": [*table.answer_of.items()],
            }
    lines = (f'"{seed}": {json.dumps(kept[seed])}' for seed in sorted(kept, key=int))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return {int(seed): automaton_of(each) for seed, each in kept.items()}


def automaton_of(kept: Mapping[str, Any]) -> TransitionTable:
    """An automaton out of its entry in a file."""
    return TransitionTable.from_entries(
        dict(kept["sizes"]),
        start={tuple(pair): value for pair, value in kept["start"]},
        step={(tuple(left), tuple(own)): value for (left, own), value in kept["step"]},
        answers={tuple(cell): answer for cell, answer in kept["answers"]},
    )


def as_table(known: pd.DataFrame) -> str:
    """A row a recipe."""
    header = ["recipe", "seeds", "learnt", "right, to 4 times", "bits", "cells", "trajectories"]
    rows = []
    for name, each in known.groupby("recipe", sort=False):
        learnt: Any = each.dropna(subset="bits")
        which = learnt["same_as"].fillna("").mask(lambda x: x == "", learnt["algorithm"])
        rows.append([
            name, len(each), len(learnt), f"{learnt['right'].min():.3f}",
            *(with_range(learnt[column]) for column in ("bits", "cells")),
            f"{learnt['agree'].sum():.0f} of {learnt['of'].sum():.0f}",
            ", ".join(f"{one} {n}" for one, n in which.value_counts(sort=False).items()),
        ])  # fmt: skip
    return table([*header, "algorithms"], rows)


def with_range(values: pd.Series) -> str:
    """The median, with the least and the greatest where they differ."""
    low, high = values.min(), values.max()
    return f"{values.median():g}" + (f" ({low:g} to {high:g})" if low < high else "")


if __name__ == "__main__":
    main()
