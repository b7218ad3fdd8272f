"""Models trained to a circuit: do they run their program, and is it where it was put?

    python -m analyses.trained_circuits --jobs 2
    python -m analyses.trained_circuits --only ripple

Trains a model for each program that reads its left neighbour at most, and looks whether exchanges
of its variables, and of whole states, do what they do to the program: a row each in
``analyses/results/trained_circuits.csv``, and a table in the documentation. Those that follow in 99
of 100 runs, after every loop and at every horizon, are put with the benchmark's models.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.benchmark import TRAINED_MODELS, train_to_circuit
from loopinterp.comparison import interchange_study
from loopinterp.compiler import Compiled
from loopinterp.decompiler.evidence import TRAJECTORY, agreement
from loopinterp.interventions.pairs import drawn_pairs
from loopinterp.tasks import get_task

FILE, PAGE = "trained_circuits.csv", "results/benchmark.md"
LENGTH, EXAMPLES, EXCHANGES, NEEDED = 6, 512, 4000, 0.99
STEPS = 3000

PROGRAMS = (
    *("carry_save", "latched_chain", "latched_ripple", "late_ripple", "parity", "prefix_mod_5"),
    *("prefix_xor", "ripple", "ripple_held_2", "ripple_held_3", "ripple_held_by_token"),
    *("ripple_held_until_kill", "ripple_held_where_propagating", "sticky_ripple"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="Default: all.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", type=Path, default=TRAINED_MODELS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    path = args.results / FILE
    args.results.mkdir(parents=True, exist_ok=True)
    rows: Any = Parallel(n_jobs=args.jobs, return_as="generator_unordered")(
        delayed(trained)(name, args.steps, args.models) for name in args.only or PROGRAMS
    )
    for row in rows:
        known = [pd.read_csv(path)] if path.exists() else []
        found = pd.concat([*known, pd.DataFrame([row])]).drop_duplicates("program", keep="last")
        found.sort_values("program").to_csv(path, index=False, float_format="%.4g")
        print(row, flush=True)
    rewrite(args.page, tables(pd.read_csv(path)))


def trained(name: str, steps: int, models: Path) -> dict[str, Any]:
    """Train one model, keep it if it is good enough, and say what it is."""
    torch.set_num_threads(1)
    started = time.process_time()
    made = train_to_circuit(name, steps=steps, n=LENGTH)
    row = {"program": name, "steps": steps, "seconds": time.process_time() - started}
    row |= measured(made)
    if row["kept"]:
        with tempfile.TemporaryDirectory() as folder:
            made.save(folder)
            shutil.copytree(folder, models / name, dirs_exist_ok=True)
    return row


def measured(made: Compiled) -> dict[str, Any]:
    """How the model follows interchanges of its variables in the places where they were put."""
    program, circuit = made.program, made.circuit
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(1)
    batch = task.sample(torch.full((EXAMPLES,), LENGTH), generator=generator)
    found = interchange_study(
        made.model,
        batch,
        program,
        subspaces={name: circuit.subspace(name) for name in circuit.variables},
        n_loops=program.n_loops(LENGTH),
        seed=1,
    )
    whole, low, _, n_runs = found.pooled()
    lowest = float(found.iia.min())
    pairs = drawn_pairs(batch, program.n_loops(LENGTH), EXCHANGES, generator)
    states = agreement(made.model, program, pairs).set_index("what")
    of_states = float(states.loc[TRAJECTORY, "value"])
    return {
        "variables": len(circuit.variables),
        "weights": sum(p.numel() for p in made.model.parameters()),
        "lowest": lowest,
        "whole": whole,
        "low": low,
        "runs": n_runs,
        "states": of_states,
        "states_low": float(states.loc[TRAJECTORY, "low"]),
        "states_runs": int(states.loc[TRAJECTORY, "of"]),
        "kept": min(lowest, whole, of_states) >= NEEDED,
    }


def tables(found: pd.DataFrame) -> dict[str, str]:
    """The table of the documentation."""
    rows = [
        [of["program"], of["variables"], of["steps"], f"{of['lowest']:.3f}", f"{of['whole']:.3f}",
         f"{of['states']:.3f}", "yes" if of["kept"] else "no", round(of["seconds"])]
        for of in found.to_dict("records")
    ]  # fmt: skip
    head = ["program", "variables", "steps", "lowest IIA", "whole runs", "whole states", "kept"]
    return {"trained-circuits": table([*head, "seconds"], rows)}


if __name__ == "__main__":
    main()
