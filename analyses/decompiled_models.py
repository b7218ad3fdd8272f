"""The decompiler on models whose program is known, and on trained ones.

    python -m analyses.decompiled_models --jobs 2
    python -m analyses.decompiled_models --only ripple --only addition

Known: the models of the benchmark, every stock program bare and in disguises; then bare ones that
are long enough for problems of 12 digits, with evidence at that length; then near misses of one,
which answer as it does and work differently. What is read off is compared with the program that was
compiled (:func:`~loopinterp.programs.equivalence`). What is not equivalent is *nearly* it, or
*wrong* if it was claimed to be exact.
Trained: models of the zoo, and what their tables leave unexplained, cell by cell. A row for each
model goes to
``analyses/results/decompiled_models.csv``, cells to ``decompiled_models_unexplained.csv``, and the
tables into the documentation; what is there already is not done again, but for those given with
--only, or with --again, as after a change of the decompiler.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed

import loopinterp
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.benchmark import TRAINED as TO_CIRCUIT
from loopinterp.benchmark import benchmark_models
from loopinterp.benchmark.known_models import DISGUISES
from loopinterp.compiler import compile_program, near_misses
from loopinterp.decompiler import EXACT, Decompiled, decompile
from loopinterp.decompiler.evidence import INJECTED
from loopinterp.programs import LoopProgram, equivalence, get_program
from loopinterp.tasks import get_task

FILE, PAGE = "decompiled_models.csv", "results/programs.md"
UNEXPLAINED = "decompiled_models_unexplained.csv"
NEAR_MISSES_OF = "ripple"
N = 6
READ_AT, JUDGED_AT, FARTHER = (8, 12), (7, 8, 10, 12), (16,)
"""Lengths that trained models are read at, those that decide, and those that are looked at too."""

EXCHANGES = 20_000

ZOO = (
    "addition",
    "addition-seed-1",
    "addition-seed-2",
    "addition-seed-3",
    "addition-seed-4",
    "parity",
    "parity-no-window",
    "prefix_sum",
)
TO_IT = "trained to it"
"""Kind of the benchmark's models whose weights were learnt."""

LONGER, LONG = "known, longer", 12
"""Kind of models that are judged at a greater length than they are read at, and that length."""

LONG_DISGUISES = ("bare", "rotated, permuted", "distracted, rotated")
LONG_PROGRAMS = (
    "carry_save",
    "latched_chain",
    "latched_ripple",
    "late_ripple",
    "parity",
    "prefix_mod_5",
    "prefix_xor",
    "ripple",
    "ripple_held_2",
    "ripple_held_3",
    "ripple_held_by_token",
    "ripple_held_until_kill",
    "ripple_held_where_propagating",
    "sticky_ripple",
)

KEY = ["kind", "model", "disguise"]
WHAT = ("undisturbed", "1 loop later", "2 loops later", "at the end", "whole trajectory", "surely")
TRAINED = (*WHAT, INJECTED, "farther")
HEADINGS = {
    "undisturbed": "clean runs",
    "surely": "low end",
    INJECTED: "whole trajectory, injected values",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="Programs or models.")
    kinds = ["known", TO_IT, LONGER, "near miss", "trained"]
    parser.add_argument("--kinds", nargs="+", choices=kinds)
    parser.add_argument("--again", action="store_true", help="Remake rows that are there.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    path = args.results / FILE
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    done = {tuple(row[name] for name in KEY) for row in rows}
    wanted = [
        cell
        for cell in cells()
        if (not args.kinds or cell[0] in args.kinds)
        and (cell[1] in args.only if args.only else args.again or cell not in done)
    ]
    found: Any = Parallel(n_jobs=args.jobs, return_as="generator_unordered")(
        delayed(measured)(*cell) for cell in wanted
    )
    args.results.mkdir(parents=True, exist_ok=True)
    left = args.results / UNEXPLAINED
    for row, unexplained in found:
        if len(unexplained):
            others: list[Any] = [pd.read_csv(left)] if left.exists() else []
            others = [of[of["model"] != row["model"]] for of in others]
            anew = pd.concat([*others, unexplained.assign(model=row["model"])])
            anew.to_csv(left, index=False, float_format="%.4g")
        rows = [r for r in rows if any(r[name] != row[name] for name in KEY)] + [row]
        order = {cell: k for k, cell in enumerate(cells())}
        rows.sort(key=lambda r: order[tuple(r[name] for name in KEY)])
        pd.DataFrame(rows).to_csv(path, index=False, float_format="%.4g")
        print({name: row[name] for name in (*KEY, "outcome", "reason", "seconds")}, flush=True)
    known = pd.read_csv(left) if left.exists() else pd.DataFrame(columns=["model"])
    rewrite(args.page, tables(pd.read_csv(path)) | {"decompiled-unexplained": cells_left(known)})


def cells() -> list[tuple[str, str, str]]:
    """Kind, model and disguise of all rows."""
    return [
        *(
            (TO_IT if of.disguise == TO_CIRCUIT else "known", of.program_name, of.disguise)
            for of in benchmark_models()
        ),
        *((LONGER, name, disguise) for name in LONG_PROGRAMS for disguise in LONG_DISGUISES),
        *(("near miss", p.name, "bare") for p in near_misses(NEAR_MISSES_OF)),
        *(("trained", name, "bare") for name in ZOO),
    ]


def measured(kind: str, name: str, disguise: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """What the decompiler says of one model, and what of it is unexplained."""
    torch.set_num_threads(1)
    row: dict[str, Any] = dict(zip(KEY, (kind, name, disguise)))
    started = time.process_time()
    if kind == "trained":
        run = loopinterp.zoo.pretrained_run(name)
        found = decompile(
            run.model(), run.task, n=READ_AT, lengths=JUDGED_AT, farther=FARTHER,
            sharp=False, n_exchanges=EXCHANGES,
        )  # fmt: skip
        outcome = "program" if found.program else "not decompiled"
    elif kind in ("known", TO_IT):
        about = next(m for m in benchmark_models([name]) if m.disguise == disguise)
        learnt = kind == TO_IT
        found = decompile(
            about.compiled.model, about.task, n=about.n, sharp=not learnt, across_loops=learnt
        )
        outcome = compared(found, about.program)
    elif kind == LONGER:
        program = get_program(name)
        task = get_task(program.task, **program.task_settings)
        made = DISGUISES[disguise](compile_program(program, max_length=task.n_positions(LONG)))
        found = decompile(made.model, task, n=N, lengths=(N, LONG))
        outcome = compared(found, program)
    else:
        program = next(p for p in near_misses(NEAR_MISSES_OF) if p.name == name)
        task = get_task(program.task, **program.task_settings)
        made = compile_program(program, max_length=task.n_positions(N))
        found = decompile(made.model, task, n=N)
        outcome = compared(found, program)
    row |= {
        "outcome": outcome,
        "claim": found.claim.grade,
        "at_most": found.claim.at_most,
        "checked_to": found.claim.checked_to,
        "reason": found.reason,
        "tolerance": found.tolerance,
        "cells": float("nan") if found.automaton is None else len(found.automaton.cells),
        **evidence_of(found),
        "seconds": time.process_time() - started,
        "code": "" if found.closest is None else str(found.closest),
    }
    return row, found.unexplained if kind == "trained" else pd.DataFrame()


def compared(found: Decompiled, program: LoopProgram) -> str:
    """Whether what was read off is the program that was compiled."""
    if found.program is None:
        return "not decompiled"
    if equivalence(found.program, program).equivalent:
        return "equivalent"
    return "wrong" if found.claim.grade == EXACT else "nearly"


def evidence_of(found: Decompiled) -> dict[str, float]:
    """The lowest share of what was agreed on over the lengths, of each kind, and its lower end."""
    if not len(found.evidence):
        return {}
    beyond = found.evidence["n"].isin(FARTHER)
    worst: dict[str, float] = {}
    near: pd.DataFrame = found.evidence.loc[~beyond]
    for row in near.to_dict("records"):
        worst[row["what"]] = min(worst.get(row["what"], 1.0), row["value"])
    whole = found.evidence["what"] == "whole trajectory"
    return worst | {
        "surely": float(found.evidence.loc[whole & ~beyond, "low"].min()),
        "farther": float(found.evidence.loc[whole & beyond, "value"].min()),
    }


def shown(x: float | None, digits: int = 2) -> str:
    """A number as the table has it."""
    return "-" if x is None or np.isnan(x) else f"{x:.{digits}f}"


def tables(found: pd.DataFrame) -> dict[str, str]:
    """Those of the page."""
    known = found[found["kind"] != "trained"]
    rows = []
    for names, of in known.groupby(["kind", "model"], sort=False):
        kind, model = str(names[0]), str(names[1])  # type: ignore[index]
        counts = Counter(of["outcome"])
        said = "; ".join(sorted({reason for reason in of["reason"] if isinstance(reason, str)}))
        outcomes = ", ".join(f"{n} {what}" for what, n in counts.most_common())
        given = of.loc[of["outcome"] != "not decompiled", "claim"].fillna("not asked")
        claims = ", ".join(f"{n} {what}" for what, n in Counter(given).most_common())
        rows.append([kind, model, outcomes, claims, f"{np.median(of['seconds']):.0f}", said])
    trained = [
        [
            of["model"], of["outcome"], shown(of.get("cells"), 0),
            *(shown(of.get(what)) for what in TRAINED), f"{of['seconds']:.0f}",
            of["reason"] if isinstance(of["reason"], str) else "",
        ]
        for of in found.loc[found["kind"] == "trained"].to_dict("records")
    ]  # fmt: skip
    return {
        "decompiled-known": table(
            ["kind", "program", "models", "claimed", "seconds of one core", "why not"], rows
        ),
        "decompiled-trained": table(
            ["model", "outcome", "cells", *(HEADINGS.get(what, what) for what in TRAINED),
             "seconds of one core", "why not"],
            trained,
        ),
    }  # fmt: skip


def cells_left(found: pd.DataFrame) -> str:
    """Of each model, how many kinds of steps runs leave its table at, and the most frequent."""
    rows = []
    for model, of in found.groupby("model", sort=False):
        exits, steps = of["exits"].sum(), of["steps"].sum()
        first = of.iloc[0]
        left = "the edge" if first["left"] < 0 else f"{first['left']}:{first['left_value']}"
        share = float((of["otherwise"] * of["steps"]).sum() / steps)
        ten = of["exits"].iloc[:10].sum() / exits
        said = f"{first['token']}:{first['value']} beside {left} ({first['otherwise']:.2f})"
        rows.append([model, len(of), exits, f"{share:.2f}", f"{ten:.2f}", said])
    head = ["model", "kinds of step", "deviating runs", "share of steps that deviate"]
    return table([*head, "in the ten commonest", "the commonest, and how often it deviates"], rows)


if __name__ == "__main__":
    main()
